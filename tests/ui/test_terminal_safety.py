"""Shown text cannot control the terminal: escape sequences are filtered out everywhere."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attacking import MANY
from chatting import babbler
from command import run
from fake_terminal import FakeTerminal, show_reply, stub_session
from sirchat.chat.events import Evicted, Reading
from sirchat.ui.live import LiveView
from sirchat.ui.panel import draw_full_panel
from sirchat.ui.screen import Screen
from sirchat.ui.tables import draw_tokens
from sirchat.ui.text import DisplayFilter, displayable, displayable_line
from terminal import PASTE_OFF, PASTE_ON, everything_on
from typed_chat import TypedChat

_SINGLE = {
    **{f"C0 {i:02x}": chr(i) for i in range(32) if chr(i) not in "\t\n"},
    "DEL": "\x7f",
    **{f"C1 {i:02x}": chr(i) for i in range(0x80, 0xA0)},
    **{f"bidi {ord(c):04x}": c for c in "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e"},
    **{f"bidi {ord(c):04x}": c for c in "\u2066\u2067\u2068\u2069"},
}
_SEQUENCES = {
    "colour": "\x1b[31m",
    "clear": "\x1b[2J",
    "cursor": "\x1b[10A",
    "private mode": "\x1b[?1049h",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://example.com\x1b\\",
    "clipboard": "\x1b]52;c;b3duZWQ=\x07",
    "device control": "\x1bP1$r0m\x1b\\",
    "privacy message": "\x1b^owned\x1b\\",
    "application command": "\x1b_owned\x1b\\",
    "start of string": "\x1bXowned\x1b\\",
    "charset": "\x1b(0",
    "reset": "\x1bc",
    "8-bit CSI": "\x9b2J",
    "8-bit OSC": "\x9d0;owned\x9c",
    "8-bit DCS": "\x90owned\x9c",
    "broken off": "\x1b]0;owned\x1b[2J",
}
_CONTROLS = _SINGLE | _SEQUENCES

# What the chat itself writes: styles, cursor shown, hidden or moved, rows erased.
_OURS = re.compile(r"\x1b\[(?:[\d;]*m|\?(?:25|7|2026)[lh]|\d*[AC]|2?K|J)|\r")

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_HARM = re.compile(f"{_CONTROL.pattern}|owned|b3duZWQ|example")


def _harm(written: str) -> list[str]:
    """Control characters in the output that the chat itself did not write."""
    return _HARM.findall(_OURS.sub("", written))


def test_a_sequence_is_dropped_wherever_it_is_split() -> None:
    for sequence in _CONTROLS.values():
        text = f"before{sequence}\nafter"
        for cut in range(len(text) + 1):
            stream = DisplayFilter()
            assert stream.push(text[:cut]) + stream.push(text[cut:]) == "before\nafter", sequence
        stream = DisplayFilter()
        assert "".join(stream.push(char) for char in text) == "before\nafter", sequence


@pytest.mark.slow
@given(st.lists(st.text(st.characters(codec="utf-8") | st.sampled_from("\x1b[]8;P\\\x07m"))))
def test_no_control_passes_and_chunks_do_not_matter(chunks: list[str]) -> None:
    stream = DisplayFilter()
    shown = "".join(stream.push(chunk) for chunk in chunks)
    assert not _CONTROL.search(shown)
    assert shown == displayable("".join(chunks))


@given(st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs"))))
def test_ordinary_text_passes_unchanged(text: str) -> None:
    assert displayable(text + "\n\tx") == text + "\n\tx"
    assert displayable("a\x1b]0;never ended\nb") == "a\nb", "an open sequence ends with the line"
    assert displayable_line("a\nb\x1b[2Jc.yaml") == "a bc.yaml"


def test_notices_and_errors_cannot_control_the_terminal(terminal: FakeTerminal) -> None:
    screen = Screen(terminal, terminal)
    for control in _CONTROLS.values():
        screen.note(f"before{control}")
        screen.error(f"before{control}")
    assert not _harm(terminal.getvalue())


# The filter itself is tested with each single character, above.
_SHOWN = [*(_SINGLE if MANY else [*_SINGLE][::7]), *_SEQUENCES]


@pytest.mark.slow
@pytest.mark.parametrize("name", _SHOWN)
def test_a_reply_cannot_control_the_terminal_wherever_it_is_split(
    terminal: FakeTerminal, name: str
) -> None:
    text = f"before{_CONTROLS[name]}\nafter"
    panels = ("live", "off")
    for cut in range(len(text) + 1):
        show_reply(terminal, [text[:cut], text[cut:]], panels[cut % 2])
    for panel in panels:
        show_reply(terminal, list(text), panel)
    screen = Screen(terminal, terminal)
    for char in text:
        screen.stream(char)
    assert not _harm(terminal.getvalue())
    assert everything_on(terminal.screen).count("after") >= len(text) + 4


@pytest.mark.slow
@pytest.mark.usefixtures("every_frame")
def test_held_text_cannot_control_the_terminal(terminal: FakeTerminal) -> None:
    for name in _SHOWN:
        text = f"before{_CONTROLS[name]}after"
        talk, screen = stub_session(text=text), Screen(terminal, terminal)
        with LiveView(talk, screen) as view:
            view.show(Reading(1, 2))
            view.show(Evicted(turn=0, positions=(0,), resident=1, seen=1))
        snapshot = replace(talk.snapshot(), model=text, policy=text)
        screen.show(draw_full_panel(snapshot, screen.theme, 80))
        screen.show(draw_tokens(snapshot.rows, screen.theme))
    written = re.sub("owned|b3duZWQ|example", "", terminal.getvalue())  # as text they may be shown
    assert not _harm(written)


_EVIL = "evil\x1b]0;owned\x07\x1b[2J\u202e\x9b2J"


@pytest.fixture
def evil_home(own_home: Path) -> Path:
    """With a profile whose description would control a terminal."""
    folder = own_home / "config" / "profiles"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"description: {json.dumps(_EVIL)}\n", encoding="utf-8")
    return own_home


def test_names_in_errors_and_lists_cannot_control_the_terminal(evil_home: Path) -> None:
    variables = {"SIRCHAT_HOME": str(evil_home), "NO_COLOR": "1"}
    for arguments in (
        ["replay", _EVIL],
        ["--model", _EVIL],
        ["--policy", _EVIL],
        ["--budget", _EVIL],
        ["--profile", _EVIL],
        [f"--{_EVIL}"],
        [_EVIL],
        ["profiles", "list"],
        ["profiles", "show", "mine"],
        ["policies", "check", _EVIL],
    ):
        done = run(*arguments, **variables)
        assert "evil" in done.stdout + done.stderr, arguments
        written = (done.stdout + done.stderr).replace("owned", "")  # as text it may be shown
        assert not _harm(written), arguments


def test_a_transcript_cannot_control_the_terminal(tmp_path: Path, endless: str) -> None:
    file, controls = tmp_path / "talk.jsonl", [*_CONTROLS.values()]
    texts = ["\n".join(f"before{one}after" for one in controls[n::6]) for n in range(6)]
    turns = [{"role": role, "content": text} for text in texts for role in ("user", "assistant")]
    file.write_text("".join(json.dumps(turn) + "\n" for turn in turns), encoding="utf-8")
    done = run("replay", "--feed", str(file), "--model", endless)
    assert done.stdout.count("before") == 2 * len(controls)
    assert not _harm(done.stdout + done.stderr)


def test_a_model_name_and_a_paste_cannot_control_a_chat(
    terminal: FakeTerminal, evil_home: Path
) -> None:
    with TypedChat(terminal, replace(babbler(), name=_EVIL), max_new_tokens=2) as chat:
        chat.chat.greet(())
        written = terminal.getvalue()
        assert "evil" in written
        for keys in ("Hello.", PASTE_ON + _EVIL + PASTE_OFF):
            chat.press(keys, "\r")
            written += terminal.getvalue()
    for harm in ("\x1b]", "\x07", "\x1b[2J", "\u202e", "\x9b"):
        assert harm not in written
