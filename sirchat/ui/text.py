"""The display filter: all text to be shown passes it, so that no text can control the terminal.

The filter drops C0 controls except newline and tab, DEL, C1 controls, whole escape sequences (CSI,
OSC, DCS and similar), and bidirectional controls. A line break ends an open sequence. The filter
keeps its state across chunks, so a sequence that is split between chunks is dropped, too.
"""

from __future__ import annotations

import re
from enum import Enum

_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_STRING_OPENERS = frozenset("]PX^_")  # after ESC: OSC, DCS, SOS, PM, APC
_C1_STRING_OPENERS = frozenset("\x9d\x90\x98\x9e\x9f")


_NOT_ALWAYS_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f" + "".join(_BIDI) + "]")


class _State(Enum):
    TEXT = 0
    ESCAPE = 1  # after ESC
    SEQUENCE = 2  # inside CSI, until its final byte
    STRING = 3  # inside OSC, DCS, ..., until BEL or ST
    STRING_ESCAPE = 4  # after ESC inside a string
    CHARSET = 5  # after ESC and an intermediate byte, such as ESC ( B


class DisplayFilter:
    """Removes from a stream of text, chunk by chunk, all that could control the terminal."""

    def __init__(self) -> None:
        self._state = _State.TEXT

    def push(self, text: str) -> str:
        """Filter the next chunk of the stream; returns the part that may be shown."""
        if self._state is _State.TEXT and not _NOT_ALWAYS_SHOWN.search(text):
            return text
        return "".join(char for char in text if self._shows(char))

    def _shows(self, char: str) -> bool:
        """Update the filter's state for the next character; return whether it is shown."""
        state = self._state
        if char == "\n":  # ends any sequence, so that an open one can't hide the text after it
            self._state = _State.TEXT
            return True
        if state is _State.TEXT:
            return self._text(char)
        if char == "\x1b" and state is not _State.STRING:
            self._state = _State.ESCAPE
        elif char in "\x18\x1a":  # CAN and SUB abort a sequence
            self._state = _State.TEXT
        elif state is _State.ESCAPE:
            self._escape(char)
        elif state is _State.SEQUENCE:
            if not " " <= char <= "?":
                self._state = _State.TEXT
        elif state is _State.CHARSET:
            if not " " <= char <= "/":
                self._state = _State.TEXT
        else:
            self._string(char)
        return False

    def _text(self, char: str) -> bool:
        if char == "\x1b":
            self._state = _State.ESCAPE
        elif char == "\x9b":
            self._state = _State.SEQUENCE
        elif char in _C1_STRING_OPENERS:
            self._state = _State.STRING
        else:
            return char == "\t" or (
                char >= " " and not "\x7f" <= char <= "\x9f" and char not in _BIDI
            )
        return False

    def _escape(self, char: str) -> None:
        if char == "[":
            self._state = _State.SEQUENCE
        elif char in _STRING_OPENERS:
            self._state = _State.STRING
        elif " " <= char <= "/":
            self._state = _State.CHARSET
        else:
            self._state = _State.TEXT

    def _string(self, char: str) -> None:
        if self._state is _State.STRING_ESCAPE:
            if char == "\\":
                self._state = _State.TEXT
            else:
                self._escape(char)
        elif char in "\x07\x9c":
            self._state = _State.TEXT
        elif char == "\x1b":
            self._state = _State.STRING_ESCAPE


def displayable(text: str) -> str:
    """Return a complete text without the characters that the display filter drops."""
    return DisplayFilter().push(text)


def shorten(text: str, length: int) -> str:
    """Return `text` on one line, cut to `length` characters; if it is cut, it ends with "…"."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def displayable_line(text: str) -> str:
    """Return `text` on one line, without control characters; for names, errors and notices."""
    return " ".join(displayable(text).split())
