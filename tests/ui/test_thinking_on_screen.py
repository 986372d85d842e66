"""Reasoning between `<think>` tags on the screen: in full, folded to a line, or hidden."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fake_terminal import FakeTerminal, show_reply
from markdown_documents import pieces
from saved_chats import Chat, refusal
from terminal import lines_of

pytestmark = pytest.mark.usefixtures("every_frame")

TEXT = "<think>\nIs it *so*?\n- yes, for long\n</think>\n\nIt is *so*.\n\n- one\n"


def _lines(terminal: FakeTerminal) -> list[str]:
    return "\n".join(lines_of(terminal.screen)).strip("\n").split("\n")


@pytest.mark.slow
@pytest.mark.parametrize(("panel", "columns"), [("off", 160), ("live", 60), ("turn", 60)])
@pytest.mark.parametrize("size", [1, 5, 400])
def test_folded_it_is_one_line(terminal: FakeTerminal, panel: str, columns: int, size: int) -> None:
    terminal.resize(30, columns)
    chunks = pieces(TEXT, 3, size) if size < 400 else [TEXT]
    show_reply(terminal, chunks, panel, thinking="fold")
    first, *rest = _lines(terminal)
    match = re.fullmatch(r"thought for (\d+) tokens? \(/thinking shows it\)", first)
    assert match
    written = len("".join(chunks[: int(match[1])]))
    assert TEXT.index("</think>") < written <= TEXT.index("It is") + size
    assert rest == ["", "It is so.", "", "- one"]


@pytest.mark.slow
@pytest.mark.parametrize("panel", ["off", "live"])
@pytest.mark.parametrize("thinking", ["fold", "hide"])
def test_while_it_comes_one_line_counts(terminal: FakeTerminal, panel: str, thinking: str) -> None:
    chunks = pieces("<think>" + "on and on, " * 60 + "on", 2, 6)
    seen: set[str] = set()
    write = terminal.write

    def look(text: str) -> int:
        count = write(text)
        seen.add(lines_of(terminal.screen)[0])
        return count

    terminal.write = look  # type: ignore[method-assign]
    show_reply(terminal, chunks, panel, thinking=thinking)
    assert "thinking, 40 tokens" in seen
    if panel == "off":
        assert all(re.fullmatch(r"(thinking, [\d,]+ tokens?|thought for .*)?", x) for x in seen)
    ended = f"thought for {len(chunks):,} tokens (/thinking shows it)"
    assert lines_of(terminal.screen)[0] == (ended if thinking == "fold" else "")


@pytest.mark.parametrize("panel", ["off", "live"])
@pytest.mark.parametrize("thinking", ["fold", "hide"])
@pytest.mark.parametrize("markdown", [True, False])
def test_what_stays_is_the_answer_below_one_line_or_nothing(
    terminal: FakeTerminal, panel: str, thinking: str, markdown: bool
) -> None:
    show_reply(terminal, pieces(TEXT, 1, 4), panel, thinking=thinking, markdown=markdown)
    lines = _lines(terminal)
    if thinking == "fold":
        assert lines[0].startswith("thought for ")
        assert lines[1] == ""
        lines = lines[2:]
    assert lines == ["It is so." if markdown else "It is *so*.", "", "- one"]


def test_empty_reasoning_leaves_no_line_and_what_the_template_opened_is_known(
    terminal: FakeTerminal,
) -> None:
    show_reply(terminal, ["<think>\n", "\n</think>", "\n\nYes."], "off", thinking="fold")
    assert _lines(terminal) == ["Yes."]
    terminal.clear()
    parts = pieces("So it is.</think>\n\nYes.", 1, 3)
    show_reply(terminal, parts, "off", thinking="fold", opens_reasoning=True)
    first, *rest = _lines(terminal)
    assert first.startswith("thought for ")
    assert rest == ["", "Yes."]


@pytest.mark.parametrize("setting", ["fold", "hide"])
def test_a_pipe_gets_all_of_it(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    show_reply(terminal, pieces(TEXT, 1), "off", thinking=setting)
    assert terminal.getvalue() == TEXT + "\n"


def test_the_last_reasoning_is_shown_on_demand(own_home: Path) -> None:
    chat = Chat(save=False)
    assert chat.do("/thinking") == "no reply so far contains reasoning\n"
    list(chat.session.read_user("Is it?"))
    list(chat.session.read_reply(TEXT))
    assert chat.do("/thinking").strip() == "Is it *so*?\n- yes, for long"
    assert chat.do("/thinking fold") == "thinking: show -> fold\n"
    assert "show, fold, hide" in refusal(chat, "/thinking loud")


@pytest.mark.parametrize("panel", ["off", "live"])
def test_a_reply_without_reasoning_is_shown_as_ever(terminal: FakeTerminal, panel: str) -> None:
    for markdown, shown in ((True, "so <think>"), (False, "*so* <think>")):
        terminal.screen.reset()
        terminal.screen.set_mode(20)
        show_reply(terminal, ["*so*", " <think>"], panel, thinking="fold", markdown=markdown)
        assert lines_of(terminal.screen)[0] == shown
