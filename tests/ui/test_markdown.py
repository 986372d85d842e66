"""Replies as Markdown while they are generated: what is final is the whole, and no word is lost.

`SIRCHAT_ATTACK=100` shows as many documents of each kind.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attacking import MANY
from chatting import babbler
from fake_terminal import FakeTerminal, show_reply
from markdown_documents import documents, pieces
from sirchat.engine.sampling import Sampler
from sirchat.ui.growing_reply import GrowingReply
from sirchat.ui.markdown import MarkdownLayout
from speaking import saying
from terminal import everything_on, lines_of
from typed_chat import TypedChat

pytestmark = pytest.mark.usefixtures("every_frame")

DOCUMENTS = MANY or 6


_LAYOUT = MarkdownLayout("dark", "256")


def _anew(terminal: FakeTerminal, rows: int, columns: int) -> None:
    terminal.screen.resize(rows, columns)
    terminal.clear()


def _cells(terminal: FakeTerminal) -> list[tuple[object, ...]]:
    """Every cell of the screen that isn't blank, with its place and its style."""
    return [
        (y, x, c.data, c.fg, c.bold, c.italics, c.underscore, c.strikethrough)
        for y, row in sorted(terminal.screen.buffer.items())
        for x, c in sorted(row.items())
        if c.data.strip()
    ]


def _shown(
    terminal: FakeTerminal, chunks: list[str], panel: str, columns: int, markdown: bool = True
) -> int:
    """Show a reply in a tall window; returns the bytes written."""
    _anew(terminal, 250, columns)
    show_reply(terminal, chunks, panel, markdown=markdown)
    return len(terminal.getvalue().encode())


@pytest.mark.parametrize("panel", ["off", "live"])
def test_what_was_streamed_is_the_document_rendered_at_once(
    terminal: FakeTerminal, panel: str
) -> None:
    for number, document in enumerate(documents(MANY or 3)):
        _shown(terminal, [document], panel, 100)
        at_once = _cells(terminal)
        _shown(terminal, pieces(document, number), panel, 100)
        assert _cells(terminal) == at_once, number


def test_final_rows_are_those_of_the_whole_also_of_a_block_taller_than_the_window() -> None:
    code = "```\n" + "".join(f"line {n}\n" for n in range(40)) + "```\nso"
    for number, text in enumerate([code, *documents(DOCUMENTS)]):
        reply, rows = GrowingReply(_LAYOUT), list[str]()
        for part in pieces(text, number):
            reply.push(part)
            final, below = reply.take_rows(60, 12)
            assert len(below) <= 12
            rows += final
        rows += reply.take_rows(60, 12, is_end=True)[0]
        assert rows == _LAYOUT.rows(text.lstrip("\n"), 60), number


@pytest.mark.parametrize("panel", ["off", "live", "turn"])
def test_without_markdown_and_on_a_plain_terminal_a_reply_is_the_text_itself(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, panel: str
) -> None:
    document = "# One\n\n- *two*\n- `three`\n\n\n| a |\n|---|\n| b |\n"
    for name, value in {"TERM": "dumb", "NO_COLOR": "1"}.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            _shown(terminal, pieces(document, 1), panel, 100)
        assert terminal.getvalue() == document + "\n"
    _shown(terminal, pieces(document, 1), "off", 100, markdown=False)
    assert terminal.getvalue() == document + "\n"


@pytest.mark.parametrize("text", ["".join(f"{i}👍🏽 " for i in range(40)), "🇩🇪🇫🇷 " * 20])
def test_a_row_of_joined_emoji_appears_once(terminal: FakeTerminal, text: str) -> None:
    _anew(terminal, 30, 60)
    show_reply(terminal, [text[i : i + 3] for i in range(0, len(text), 3)], "live")
    shown = "".join(everything_on(terminal.screen).split())
    assert shown.startswith("".join(text.split()))
    assert shown.count(text[:3]) == text.count(text[:3])


@pytest.mark.parametrize("panel", ["off", "turn"])
def test_prose_is_broken_at_blanks_and_code_by_the_terminal(
    terminal: FakeTerminal, panel: str
) -> None:
    words = [f"word{n:03}" for n in range(40)]
    text = " ".join(words) + "\n\n```\n" + "x" * 100 + "\n```"
    _anew(terminal, 30, 61)
    show_reply(terminal, pieces(text, 3), panel)
    rows = lines_of(terminal.screen)
    assert " ".join(rows[:6]).split() == words
    assert rows[7:9] == ["x" * 61, "x" * 39]


# --- what is shown


def _rows(text: str, columns: int = 60) -> list[str]:
    return [re.sub(r"\x1b\[[\d;]*m", "", row) for row in _LAYOUT.rows(text, columns)]


def test_no_word_is_lost() -> None:
    for number, text in enumerate(documents(MANY or 40)):
        shown = "".join(_rows(text, (60, 100)[number % 2])).replace(" ", "")
        said = re.sub(r"(```|~~~)\w*|\| one more|back\\\*slash|^ *\| .*\|$", "", text, flags=re.M)
        missing = [word for word in re.findall(r"[^\W_]{3,}", said) if word not in shown]
        assert not missing, (number, missing, text)


def test_what_no_terminal_may_get_stays_out() -> None:
    for text in ("&#27;]0;x&#7;", "<https://a.example/%1b]0;x>", "[a](%1b%5d)", "&#x202e;"):
        assert not re.search("[\x1b\x07\u202e]", "".join(_rows(text)))


def test_nothing_is_padded_and_code_has_no_box() -> None:
    text = "# Head\n\n| a | b |\n|--|--|\n| c | d |\n\n```sh\nls -l\n\ncd /\n```\n> quoted\n"
    rows = _rows(text)
    assert rows[0] == "Head"
    assert not [row for row in rows if row.endswith(" ")]
    assert rows[6:] == ["ls -l", "", "cd /", "▌ quoted"]
    long = "x" * 100
    assert _rows(f"```\n{long}\n```") == [long]
    assert "".join(_rows(f"- a\n  ```\n  {long}\n  ```")).count("x") == 100


def test_a_link_shows_where_it_leads_and_is_no_terminal_hyperlink(terminal: FakeTerminal) -> None:
    assert _rows("![a boat](boat.png)") == ["!a boat (boat.png)"]
    for panel in ("off", "live"):
        _shown(terminal, pieces("See [here](https://a.example/b).", 0), panel, 80)
        assert "\x1b]" not in terminal.getvalue()
        assert lines_of(terminal.screen)[0] == "See here (https://a.example/b)."


def test_html_references_and_lines_are_shown_as_written() -> None:
    assert _rows("<b>x</b>\n\n<div>\ny\n</div>") == ["<b>x</b>", "", "<div>", "y", "</div>"]
    assert _rows("[1]\n\n[1]: https://a.example") == ["[1]", "", "[1]: https://a.example"]
    assert _rows("&lt;\nsnake_case_name\nA\n===\n") == ["&lt;", "snake_case_name", "A", "==="]
    for deep in ("*" * 900 + "a" + "*" * 900, "> " * 40 + "a"):
        assert "".join(_rows(deep)).replace(" ", "") == deep.replace(" ", "")


def test_a_comparison_at_the_beginning_of_a_line_is_no_quotation() -> None:
    for line in (">= 3 cups", ">5", ">-1.5 degrees", ">$5", ">=", ">10%"):
        assert _rows(line) == [line]
        assert _rows(f"> quoted\n{line}") == ["▌ quoted", line]
        assert _rows(f"- item\n\n  > quoted\n  {line}")[-1].strip() == line
        assert _rows(f"> > in\n> {line}\n> on") == ["▌ ▌ in", f"▌ {line}", "▌ on"]
    assert _rows("> 5 is quoted\n>so is this") == ["▌ 5 is quoted", "▌ so is this"]


def test_in_a_cell_a_backslash_before_a_bar_is_no_sign_of_the_text() -> None:
    cells = "| x \\| y | `a \\| b` |\n| **c \\| d** | \\d |"
    rows = [row.split() for row in _rows(f"| a | b |\n|---|---|\n{cells}")[2:]]
    assert rows == [["x", "|", "y", "a", "|", "b"], ["c", "|", "d", "\\d"]]


def test_a_table_that_is_too_wide_is_folded_and_readable() -> None:
    cells = [f"text {i}" for i in range(8)]
    row = f"|{'|'.join(cells)}|"
    shown = _rows("\n".join([row, "|" + "---|" * 8, row]), 40)
    assert max(map(len, shown)) < 40
    words = " ".join(shown).split()
    assert [words.count(str(i)) for i in range(8)] == [2] * 8


def test_numbers_and_nesting_of_lists_stay() -> None:
    text = "9. nine\n10. ten\n    - *inner*\n\n      ```\n      code\n      ```\n11. eleven"
    assert _rows(text) == ["  9 nine", " 10 ten", "     • inner", "       code", " 11 eleven"]


def test_reasoning_is_dimmed_and_no_markdown(terminal: FakeTerminal) -> None:
    text = "<think>\nIs it *so*?\n- yes\n</think>\n\nIt is *so*."
    for size in (1, 7, 100):
        _anew(terminal, 30, 80)
        show_reply(terminal, [text[i : i + size] for i in range(0, len(text), size)], "off")
        lines = [line for line in lines_of(terminal.screen) if line]
        assert lines == ["Is it *so*?", "- yes", "It is so."]
        assert "\x1b[2mIs it *so*?" in terminal.getvalue()


# --- a real chat

_SAID = """# A plan

Take **two** boats and `rope`; see [map](https://example.org).

1. Row to the *island*
   - with lanterns
   - without noise
2. Wait for the captain

| Who | When |
|-----|-----:|
| Rex | 7:30 |
| Una | 8 |

```python
def row(boat):
    return boat + 1
```

> Mind the tide.
"""

_PLAN = """A plan

Take two boats and rope; see map (https://example.org).

 1 Row to the island
    • with lanterns
    • without noise
 2 Wait for the captain

 Who  When
 ─────────
 Rex  7:30
 Una     8

def row(boat):
    return boat + 1

▌ Mind the tide."""


@pytest.mark.slow
def test_a_chat_shows_markdown(
    terminal: FakeTerminal, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "pick", saying(_SAID))
    with TypedChat(terminal, babbler(), max_new_tokens=600) as chat:
        terminal.resize(60, 60)
        chat.ask("/set panel turn")
        shown = chat.ask("Go on.")
        assert shown.startswith(_PLAN)
        assert re.match(r"\n\d+ tokens read, ", shown.removeprefix(_PLAN))
        chat.ask("/panel off")
        assert chat.ask("/set markdown off") == "markdown: on -> off"
        chat.ask("Go on.")
        assert _SAID in terminal.getvalue()


@pytest.mark.parametrize(
    "text", ["2*3*4 = 24", "a**b**c", "__init__.py", "&amp; <b>", "x_1 and y_1"]
)
def test_signs_that_are_no_formatting_are_shown(text: str) -> None:
    assert MarkdownLayout("none", None).rows(text, 80) == [text]
