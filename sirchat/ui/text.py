"""The display filter: all displayed text passes it, so that no text can control the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from sirchat.errors import SirchatError

_BIDI_CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
# C0 but newline and tab, DEL, C1, and the controls of bidirectional text.
_CONTROLS = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI_CONTROLS}]")
# An escape sequence; `end` is missing if it is open. A line break, or the next sequence, ends any,
# so that it can't hide the text after it.
_SEQUENCE = re.compile(
    r"""(?: (?:\x1b\[|\x9b)[ -?]*  # CSI
    | (?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x9c\x18\x1a\n\x1b]*  # a control string, such as OSC
    | \x1b[ -/]* )  # ESC and a character, such as ESC ( B
    (?P<end>\x1b\\|[^\n\x1b])?""",
    re.VERBOSE,
)


class DisplayFilter:
    """Drops control characters, bidi controls and whole escape sequences from a stream of text.

    A sequence that is split between two chunks is dropped, too.
    """

    def __init__(self) -> None:
        self._open = ""  # how a sequence begins that has not ended

    def push(self, text: str) -> str:
        """Return what may be shown of the stream's next chunk."""
        if not self._open and not _CONTROLS.search(text):
            return text
        text, self._open = self._open + text, ""

        def drop(sequence: re.Match[str]) -> str:
            if sequence.end() == len(text) and not sequence["end"]:
                self._open = sequence[0][:2]
            return ""

        return _CONTROLS.sub("", _SEQUENCE.sub(drop, text))


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
