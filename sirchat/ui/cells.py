"""Text in the cells of a terminal: characters of known width, and lines that fit the window.

Terminals disagree about the width of joined emoji, flags, skin tones and the spacing marks of Indic
scripts. The panel replaces these characters; a reply keeps them.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from rich.cells import cached_cell_len, cell_len, get_character_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

from sirchat.ui.text import displayable

COMBINING_BASE: Final = "◌"  # drawn under a mark that follows no letter, and for a spacing mark
_NEWLINE_SIGN: Final = "⏎"
_TAB_SIGN: Final = "→"

_REPLACEMENT_CHARACTER = "\ufffd"
_ZERO_WIDTH_NON_JOINER = "\u200c"
_VIRAMA_CLASS = 9  # the combining class of a virama


class StyledRun(NamedTuple):
    text: str
    style: Style


def known_width_line(text: str) -> str:
    """A token's text as one line whose width is the same in all terminals."""
    # Not cached: erased text must leave memory.
    if text.isascii() and text.isprintable():
        return text
    return with_known_widths(displayable(text))


def quote_token(text: str) -> str:
    return f'"{known_width_line(text)}"'


def with_known_widths(text: str) -> str:
    """Replace each character whose width differs between terminals."""
    glyphs: list[str] = []
    for glyph in map(_known_width_glyph, text):
        has_base = bool(glyphs) and glyphs[-1][-1] not in f" {_NEWLINE_SIGN}"
        if glyph and not has_base and not get_character_cell_size(glyph[0]):
            glyphs.append(COMBINING_BASE)
        if glyph:
            glyphs.append(glyph)
    return "".join(glyphs)


def clear_width_cache() -> None:
    """Empty rich's cache of texts and their widths, which may contain erased text."""
    cached_cell_len.cache_clear()


def cut(text: str, width: int) -> str:
    """Cut a text of known width to `width` cells; `…` is put before a closing quote."""
    if cell_len(text) <= width:
        return text
    end = '…"' if text.endswith('"') else "…"
    widths = list(accumulate(map(get_character_cell_size, text)))
    # A combining mark, which takes no cell, stays with its letter.
    return text[: bisect_right(widths, max(0, width - len(end)))] + end[:width]


def join_runs(runs: Iterable[StyledRun]) -> Text:
    """Join runs to one line; adjacent runs of one style become one, which takes fewer bytes."""
    line = Text(no_wrap=True, overflow="ignore")
    for style, same_style in groupby(runs, key=lambda run: run.style):
        line.append("".join(run.text for run in same_style), style or None)
    return line


def wrap_runs(runs: Iterable[StyledRun], width: int) -> list[Text]:
    """Wrap runs to lines of at most `width` cells, after a space or within a long word."""
    text = join_runs(runs)
    return list(text.wrap(Console(), max(width, 2), overflow="fold", no_wrap=False)) if text else []


@lru_cache(maxsize=8192)
def _known_width_glyph(char: str) -> str:
    """What is drawn for a character: itself, a replacement of known width, or "" (nothing)."""
    code, category = ord(char), unicodedata.category(char)
    if char in "\n\u2028\u2029":
        return _NEWLINE_SIGN
    if char == "\t":
        return _TAB_SIGN
    if 0x1F1E6 <= code <= 0x1F1FF:  # half of a flag, shown as its letter
        return chr(code - 0x1F1E6 + ord("A"))
    if category in ("Cc", "Cf") or _is_modifier(code):
        return ""
    if category in ("Cn", "Cs"):
        return _REPLACEMENT_CHARACTER
    if category == "Mc" or code == 0x1171E:
        return COMBINING_BASE
    if unicodedata.combining(char) == _VIRAMA_CLASS:  # would join its neighbours into one glyph
        return char + _ZERO_WIDTH_NON_JOINER
    return char


def _is_modifier(code: int) -> bool:
    """Whether a code is a variation selector or a skin tone."""
    return (
        0xFE00 <= code <= 0xFE0F
        or 0xE0100 <= code <= 0xE01EF
        or 0x180B <= code <= 0x180F
        or 0x1F3FB <= code <= 0x1F3FF
    )
