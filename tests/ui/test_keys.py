"""What a terminal sends becomes key presses; its answers, and sequences of no key, are dropped."""

from __future__ import annotations

import pytest
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

from sirchat.ui import keys as keys_of
from sirchat.ui.keys import KeyParser
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
    """The keys that come of what is sent; a number is a pause in seconds, then keys are read."""
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
        f"paste {press.data}" if press.key == Keys.BracketedPaste else
        "Esc" if press.key == Keys.Escape else str(getattr(press.key, "value", press.key))
        for press in presses
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        (["\x1b"], ["Esc"]),
        (["\x1b", 0.06, "a"], ["Esc", "a"]),
        (["\x1b", 0.02, "\r"], ["Esc", "c-m"]),
        (["\x1b\x7f\x1bb"], ["Esc", "c-h", "Esc", "b"]),
        (["\x1b["], ["Esc", "["]),
        (["\x1b[A\x1bOB\x1b[1;5C\x1b[3~"], ["up", "down", "c-right", "delete"]),
        (["\x1b", "[", "1", ";5", "D"], ["c-left"]),
        (["\x1b[13;2u\x1b[27;2;13~\x1b[13;5u"], ["c-j", "c-j", "c-j"]),
        (["\x1b[57441;2u\x1b[99999999999u"], []),
        (["\x1b[1;99Zx\x1b[?62;c\x1b[I"], ["x"]),
        (["\x1b[12;40R"], ["<cursor-position-response>"]),
        (["a\x1b]11;rgb:1111/2222/3333\x07b\x1bP>|xterm(390)\x1b\\c"], ["a", "b", "c"]),
        (["\x1b_Gi=1;OK\x1b\\\x1b^é\x07\x1b]\x07x"], ["x"]),
        (["\x1b]"], ["Esc", "]"]),
        (["\x1bPlease"], ["Esc", *"Please"]),
        (["\x1bPa\r"], ["Esc", "P", "a", "c-m"]),
        (["a\udcffb"], ["a", "\ufffd", "b"]),
        ([PASTE_ON + "/a\n" + PASTE_OFF + "b"], ["paste /a\n", "b"]),
        ([PASTE_ON + "ab", "c\x1b[2", "01~d"], ["paste abc", "d"]),
        ([PASTE_ON + "abc", 5.0, "\x03", "e"], ["paste abc", "e"]),
        ([PASTE_ON + "a\x03bc", PASTE_OFF], ["paste a\x03bc"]),
    ],
)
def test_keys(clock: Clock, sent: list[str | float], keys: list[str]) -> None:
    assert pressed(clock, *sent) == keys
