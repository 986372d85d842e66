"""Text in the cells of a terminal: characters of known width, and lines as wide as the window.

Terminals disagree about the width of joined emoji, flags, skin tones and the spacing marks of Indic
scripts. The panel replaces them; a reply stays as it is written.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

from rich.cells import cached_cell_len, cell_len, get_character_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

from sirchat.ui.text import displayable

# Drawn under a combining mark that follows no letter, and in place of a spacing mark.
COMBINING_BASE: Final = "◌"
NEWLINE_SIGN: Final = "⏎"
TAB_SIGN: Final = "→"

_UNKNOWN = "\ufffd"
_NON_JOINER = "\u200c"
_VIRAMA = 9  # its combining class


class StyledRun(NamedTuple):
    """A piece of text to draw in one style."""

    text: str
    style: Style


def known_width_line(text: str) -> str:
    """A token's text as one line of known width. Nothing is cached: erased text leaves memory."""
    if text.isascii() and text.isprintable():
        return text
    return replace_unsafe_widths(displayable(text))


def quote_token(text: str) -> str:
    """A token's text between double quotes, so that the user sees its spaces."""
    return f'"{known_width_line(text)}"'


def replace_unsafe_widths(text: str) -> str:
    """Replace each character whose width differs between terminals."""
    safe: list[str] = []
    for char in map(_safe, text):
        bare = not safe or safe[-1][-1] in f" {NEWLINE_SIGN}"
        if char and bare and not get_character_cell_size(char[0]):
            safe.append(COMBINING_BASE)
        if char:
            safe.append(char)
    return "".join(safe)


def clear_width_cache() -> None:
    """Empty the cache in which the library rich keeps texts with their widths: after `/erase`."""
    cached_cell_len.cache_clear()


def cut(text: str, width: int) -> str:
    """Cut a text of known width to `width` cells; `…` replaces the part before a closing quote."""
    if cell_len(text) <= width:
        return text
    end = '…"' if text.endswith('"') else "…"
    return _split(text, max(0, width - len(end)))[0] + end[:width]


def join_runs(runs: Iterable[StyledRun]) -> Text:
    """Join runs to one line; those of the same style become one piece, which takes fewer bytes."""
    line = Text(no_wrap=True, overflow="ignore")
    for style, parts in groupby(runs, key=lambda part: part.style):
        line.append("".join(part.text for part in parts), style or None)
    return line


def wrap_runs(runs: Iterable[StyledRun], width: int) -> list[Text]:
    """Break runs into lines of at most `width` cells: after a space, or within a long word."""
    text = join_runs(runs)
    return list(text.wrap(Console(), max(width, 2), overflow="fold", no_wrap=False)) if text else []


@lru_cache(maxsize=8192)
def _safe(char: str) -> str:
    """What is drawn for one character: itself, a replacement of known width, or "" (nothing)."""
    code, category = ord(char), unicodedata.category(char)
    if char in "\n\u2028\u2029":
        return NEWLINE_SIGN
    if char == "\t":
        return TAB_SIGN
    if 0x1F1E6 <= code <= 0x1F1FF:  # half of a flag, shown as its letter
        return chr(code - 0x1F1E6 + ord("A"))
    if category in ("Cc", "Cf") or _modifies(code):
        return ""
    if category in ("Cn", "Cs"):
        return _UNKNOWN
    if category == "Mc" or code == 0x1171E:
        return COMBINING_BASE
    if unicodedata.combining(char) == _VIRAMA:  # would join its neighbours into one glyph
        return char + _NON_JOINER
    return char


def _modifies(code: int) -> bool:
    """Whether it is a variation selector or a skin tone."""
    return (
        0xFE00 <= code <= 0xFE0F
        or 0xE0100 <= code <= 0xE01EF
        or 0x180B <= code <= 0x180F
        or 0x1F3FB <= code <= 0x1F3FF
    )


def _split(text: str, width: int) -> tuple[str, str]:
    """Split a text after at most `width` cells; a combining mark stays with its letter."""
    used = 0
    for index, char in enumerate(text):
        used += get_character_cell_size(char)
        if used > width:
            return text[:index], text[index:]
    return text, ""
