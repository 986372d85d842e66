"""What a terminal sends becomes key presses: chords, keys in newer forms, pastes without an end."""

from __future__ import annotations

import random

import pytest
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

from sirchat.ui import keys as keys_of
from sirchat.ui.keys import ChordEscape, KeyParser
from terminal import PASTE_OFF, PASTE_ON


class Clock:
    """Replaces the clock that the parser reads."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(keys_of, "time", clock)
    return clock


def pressed(clock: Clock, *sent: str | float) -> list[str]:
    """The keys that come of what is sent; a number is a pause in seconds, in which they are read.

    Esc before another key of a chord is `Alt`.
    """
    presses: list[KeyPress] = []
    parser = KeyParser(presses.append)
    for data in (*sent, 0.06):
        if isinstance(data, str):
            parser.feed(data)
            continue
        clock.now += data
        parser.feed("")
        parser.flush()
    return [
        "Alt" if isinstance(press, ChordEscape) else
        f"paste {press.data}" if press.key == Keys.BracketedPaste else
        "Esc" if press.key == Keys.Escape else str(getattr(press.key, "value", press.key))
        for press in presses
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        (["\x1b"], ["Esc"]),
        (["\x1b", 0.06, "a"], ["Esc", "a"]),
        (["\x1b\x1b"], ["Esc", "Esc"]),
        (["\x1b\r"], ["Alt", "c-m"]),
        (["\x1b", "\r"], ["Alt", "c-m"]),
        (["\x1b\x7f"], ["Alt", "c-h"]),
        (["\x1bb"], ["Alt", "b"]),
        (["\x1b["], ["Alt", "["]),
        (["\x1bO"], ["Alt", "O"]),
        (["\x1b[A\x1bOB\x1b[1;5C\x1b[3~"], ["up", "down", "c-right", "delete"]),
        (["\x1b", "[", "1", ";5", "D"], ["c-left"]),
        (["\x1b[13;2u"], ["c-j"]),
        (["\x1b[13;", 0.2, "2u"], ["c-j"]),
        (["\x1b[27;2;13~"], ["c-j"]),
        (["\x1b[13;5u\x1b[13u"], ["c-j"]),
        (["\x1b[13;3u"], ["Alt", "c-m"]),
        (["\x1b[27u"], ["Esc"]),
        (["\x1b[99;5u\x1b[9;2u"], ["c-c", "s-tab"]),
        (["\x1b[57441;2u\x1b[99999999999u"], []),
        (["\x1b[1;99Zx\x1b[?62;c"], ["x"]),
        (["\x1b[1;", 1.1, "x"], ["x"]),
        (["a\x1b]11;rgb:1111/2222/3333\x07b\x1bP>|xterm(390)\x1b\\c"], ["a", "b", "c"]),
        (["\x1b]11;rgb:11", "11/2222", 0.2, "/3333", "\x07x"], ["x"]),
        (["\x1b", "P>|xterm(390)\x1b", "\\x"], ["x"]),
        (["\x1b_Gi=1;OK\x1b\\\x1b^é\x07\x1b]\x07x"], ["x"]),
        (["\x1b]11;rgb:", 1.1, "x"], ["x"]),
        (["\x1b]"], ["Alt", "]"]),
        (["\x1bPlease"], ["Alt", *"Please"]),
        (["\x1b^", "a"], ["Alt", "^", "a"]),
        (["\x1b_", 0.06, "x"], ["Alt", "_", "x"]),
        (["\x1bPa\r"], ["Alt", "P", "a", "c-m"]),
        (["a\udcffb"], ["a", "\ufffd", "b"]),
        ([PASTE_ON + "/a\n\x1b[13;2u" + PASTE_OFF + "b"], ["paste /a\n\x1b[13;2u", "b"]),
        ([PASTE_ON + "ab", "c\x1b[2", "01~d"], ["paste abc", "d"]),
        ([PASTE_ON + "abc", 0.5, "d", 1.1, "e"], ["paste abcd", "e"]),
        ([PASTE_ON + "abc", "\x03", "e"], ["paste abc", "e"]),
        ([PASTE_ON + "a\x03bc", PASTE_OFF], ["paste a\x03bc"]),
        ([PASTE_ON, 1.1, "\n/exit\n and more", PASTE_OFF], ["paste ", "paste \n/exit\n and more"]),
    ],
)
def test_keys(clock: Clock, sent: list[str | float], keys: list[str]) -> None:
    assert pressed(clock, *sent) == keys


def test_after_any_keys_a_key_works_within_a_second(clock: Clock) -> None:
    parts = ["\x1b", "\x1b[", "\x1b[2", "\x1bO", PASTE_ON, PASTE_OFF, "\x1b[1;", "\x1b[M", "u", "~"]
    parts += [*"0;: ?<a\x7f\r\n\x03", "\x1b[13;2u", "\x1b[[", "é", "\x9b", "\udc80", "\x1b]"]
    parts += ["\x1bP>|", "\x1b\\", "\x07"]
    for seed in range(300):
        draw = random.Random(seed)
        sent: list[str | float] = []
        for _ in range(draw.randint(1, 12)):
            sent.append("".join(draw.choices(parts, k=draw.randint(1, 4))))
            sent += draw.choices([0.01, 0.1, 1.2], k=draw.randint(0, 1))
        assert pressed(clock, *sent, 1.1, 0.1, "x")[-1:] == ["x"], (seed, sent)
