"""The display filter: all displayed text passes it, so that no text can control the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum

from sirchat.errors import SirchatError

# A word, or a sign that stands alone: a blank, or one of a script without blanks between words.
WORD_OR_SIGN = re.compile(r"[^\s\u2e80-\U0003ffff]+|.", re.DOTALL)
_BIDI_CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
# C0 but newline and tab, DEL, C1, and the controls of bidirectional text.
_CONTROLS = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI_CONTROLS}]")
_STRING_OPENERS = "]PX^_"  # after ESC: OSC, DCS, SOS, PM, APC


class _State(Enum):
    TEXT = 0
    ESCAPE = 1  # after ESC
    CSI = 2  # inside CSI, until its final byte
    STRING = 3  # inside OSC, DCS, ..., until BEL or ST
    STRING_ESCAPE = 4  # after ESC inside a string
    CHARSET = 5  # after ESC and an intermediate byte, such as ESC ( B


_OPENERS = {
    "\x1b": _State.ESCAPE,
    "\x9b": _State.CSI,
    **dict.fromkeys("\x9d\x90\x98\x9e\x9f", _State.STRING),
}


class DisplayFilter:
    """Drops control characters, bidi controls and whole escape sequences from a stream of text.

    A sequence that is split between two chunks is dropped, too.
    """

    def __init__(self) -> None:
        self._state = _State.TEXT

    def push(self, text: str) -> str:
        """Return what may be shown of the stream's next chunk."""
        if self._state is _State.TEXT and not _CONTROLS.search(text):
            return text
        return "".join(char for char in text if self._take_char(char))

    def _take_char(self, char: str) -> bool:
        """Update the state; return whether the character is shown."""
        if char == "\n":  # ends any sequence, so that an open one can't hide the text after it
            self._state = _State.TEXT
            return True
        if self._state is _State.TEXT:
            self._state = _OPENERS.get(char, _State.TEXT)
            return not _CONTROLS.match(char)
        self._state = self._next_state(char)
        return False

    def _next_state(self, char: str) -> _State:
        state = self._state
        if char == "\x1b":
            return _State.STRING_ESCAPE if state is _State.STRING else _State.ESCAPE
        if char in "\x18\x1a":  # CAN and SUB abort a sequence
            return _State.TEXT
        if state is _State.CSI:
            return state if " " <= char <= "?" else _State.TEXT
        if state is _State.CHARSET:
            return state if " " <= char <= "/" else _State.TEXT
        if state is _State.STRING:
            return _State.TEXT if char in "\x07\x9c" else state
        if state is _State.STRING_ESCAPE and char == "\\":
            return _State.TEXT
        if char == "[":
            return _State.CSI
        if char in _STRING_OPENERS:
            return _State.STRING
        return _State.CHARSET if " " <= char <= "/" else _State.TEXT


def displayable(text: str) -> str:
    return DisplayFilter().push(text)


def displayable_line(text: str) -> str:
    """The text on one line, without control characters; blanks become single spaces."""
    return " ".join(displayable(text).split())


def pluralize(number: int, noun: str) -> str:
    """A number and a noun, such as "1 token" or "1,040 tokens"."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def restored_from_bits(bits: int) -> str:
    """The remark ` (restored from 8 bits)`; "" for 0 bits, which means exact keys and values."""
    return f" (restored from {bits} bits)" if bits else ""


def messages_ago(turn: int, turns: Sequence[object]) -> str:
    """How long ago the turn with this index was, such as "3 messages ago"; `turns` are all."""
    return f"{pluralize(len(turns) - turn, 'message')} ago"


def shorten(text: str, max_chars: int) -> str:
    """The text on one line of at most `max_chars` characters; a cut text ends with "…"."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def class_summary(find_class: Callable[[str], object], name: str) -> str:
    """The first paragraph of the docstring of `find_class(name)`, or the text of its error."""
    try:
        text = find_class(name).__doc__ or ""
    except SirchatError as error:
        text = str(error)
    return displayable_line(text.strip().split("\n\n")[0])
