"""Reasoning between `<think>` tags on the screen: in full, folded to a line, or hidden."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fake_terminal import FakeTerminal, show_reply, stub_session
from markdown_documents import pieces
from saved_chats import Chat, refusal
from sirchat.chat.events import Delta
from sirchat.text.reply_parts import Part
from sirchat.ui.live import LiveView
from sirchat.ui.screen import Screen
from terminal import everything_on, lines_of

pytestmark = pytest.mark.usefixtures("every_frame")

TEXT = "<think>\nIs it *so*?\n- yes, for long\n</think>\n\nIt is *so*.\n\n- one\n"


def _lines(terminal: FakeTerminal) -> list[str]:
    return "\n".join(lines_of(terminal.screen)).strip("\n").split("\n")


@pytest.mark.parametrize(("panel", "columns"), [("off", 160), ("live", 60), ("turn", 60)])
@pytest.mark.parametrize("markdown", [True, False])
@pytest.mark.parametrize("size", [1, 5, 400])
def test_folded_it_is_one_line_and_hidden_it_is_none(
    terminal: FakeTerminal, panel: str, columns: int, markdown: bool, size: int
) -> None:
    answer = ["It is so.", "", " • one"] if markdown else ["It is *so*.", "", "- one"]
    chunks = pieces(TEXT, 3, size) if size < 400 else [TEXT]
    for thinking in ("fold", "hide"):
        terminal.resize(30, columns)
        terminal.clear()
        show_reply(terminal, chunks, panel, thinking=thinking, markdown=markdown)
        if thinking == "hide":
            assert _lines(terminal) == answer
            continue
        first, *rest = _lines(terminal)
        match = re.fullmatch(r"thought for (\d+) tokens? \(/thinking shows it\)", first)
        assert match
        written = len("".join(chunks[: int(match[1])]))
        assert TEXT.index("</think>") < written <= TEXT.index("It is") + size
        assert rest == ["", *answer]


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


_AGAIN: list[tuple[Part, str]] = [
    ("thinking", "Hm?"),
    ("answer", "Let me look. *It* is 5."),
    ("thinking", "\n\nhmm wait"),
    ("answer", "\n\nSo it is."),
    ("thinking", "\n\nno more"),
]


def _show_again(
    terminal: FakeTerminal, thinking: str, panel: str, *, size: int = 1, small_at: int = -1
) -> list[str]:
    """Show the reply above in pieces; the window becomes too small at one of them.

    Returns what the screen has after each.
    """
    seen = []
    chat = stub_session(panel, thinking=thinking)
    deltas = [
        Delta(text[at : at + size], part)
        for part, text in _AGAIN
        for at in range(0, len(text), size)
    ]
    with LiveView(chat, Screen(terminal, terminal)) as view:
        for number, delta in enumerate(deltas):
            if number == small_at:
                terminal.resize(8, 60)
            chat.state.last_reply_stats.tokens_out += 1
            view.show(delta)
            seen.append("\n".join(lines_of(terminal.screen)))
    return seen


@pytest.mark.parametrize("panel", ["off", "live"])
@pytest.mark.parametrize("size", [1, 99])
@pytest.mark.parametrize("is_due", [True, False])
def test_of_a_reply_that_thinks_again_nothing_is_lost_and_all_stays_in_its_order(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, panel: str, size: int, is_due: bool
) -> None:
    monkeypatch.setattr("sirchat.ui.live.FramePacer.is_due", lambda pace: is_due)
    _show_again(terminal, "show", panel, size=size)
    assert _lines(terminal) == [
        *("Hm?", "", "Let me look. It is 5.", "", "hmm wait"),
        *("", "So it is.", "", "no more"),
    ]
    terminal.clear()
    _show_again(terminal, "hide", panel, size=size)
    assert _lines(terminal) == ["Let me look. It is 5.", "", "So it is."]
    terminal.clear()
    _show_again(terminal, "fold", panel, size=size)
    counts = [3, 10, 9] if size == 1 else [1, 1, 1]  # each of its own tokens
    thoughts = [f"thought for {n} token{'s' * (n > 1)} (/thinking shows it)" for n in counts]
    assert _lines(terminal) == [
        *(thoughts[0], "", "Let me look. It is 5.", "", thoughts[1]),
        *("", "So it is.", "", thoughts[2]),
    ]


@pytest.mark.parametrize("thinking", ["show", "fold", "hide"])
def test_an_answer_stays_on_the_screen_while_the_model_thinks_again(
    terminal: FakeTerminal, thinking: str
) -> None:
    seen = _show_again(terminal, thinking, "off")
    begun = next(i for i, shown in enumerate(seen) if "It is 5." in shown)
    assert all("It is 5." in shown for shown in seen[begun:])


@pytest.mark.parametrize("thinking", ["show", "fold", "hide"])
@pytest.mark.parametrize("small_at", [1, 5, 35])
def test_in_a_window_that_becomes_too_small_hidden_reasoning_stays_hidden(
    terminal: FakeTerminal, thinking: str, small_at: int
) -> None:
    _show_again(terminal, thinking, "live", small_at=small_at)
    shown = " ".join(everything_on(terminal.screen).split())
    for part, text in _AGAIN[2:] if small_at > 3 else _AGAIN:
        is_shown = part == "answer" or thinking == "show"
        assert (text.strip().replace("*", "") in shown.replace("*", "")) is is_shown
    assert "think>" not in shown


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
    assert "'show', 'fold' or 'hide'" in refusal(chat, "/thinking loud")
