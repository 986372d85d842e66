"""Text in the cells of a terminal: characters of known width, and lines as wide as the window.

Terminals disagree about the width of joined emoji, flags, skin tones and the spacing marks of Indic
scripts. The panel replaces them; a reply stays as it is written.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

from rich.cells import cached_cell_len, cell_len, get_character_cell_size
from rich.style import Style
from rich.text import Text

from sirchat.ui.text import displayable

# Drawn under a combining mark that follows no letter, and in place of a spacing mark.
BASE: Final = "◌"
NEWLINE: Final = "⏎"
TAB: Final = "→"

_UNKNOWN = "\ufffd"
_NON_JOINER = "\u200c"
_VIRAMA = 9  # its combining class
_LONGEST_WORD = 24  # cells: a longer word is broken instead of moved to the next line
_ASCII_PARTS = re.compile("[^ ]* +|[^ ]+")


class StyledRun(NamedTuple):
    """A piece of text to draw in one style; if `whole`, it stays in one line where possible."""

    text: str
    style: Style
    whole: bool = False


def known_width_line(text: str) -> str:
    """A token's text as one line of known width. Nothing is cached: erased text leaves memory."""
    if text.isascii() and text.isprintable():
        return text
    return grid_safe(displayable(text))


def quoted(text: str) -> str:
    """A token's text between double quotes, so that the user sees its spaces."""
    return f'"{known_width_line(text)}"'


def grid_safe(text: str) -> str:
    """Replace each character whose width differs between terminals."""
    safe: list[str] = []
    for char in map(_safe, text):
        bare = not safe or safe[-1][-1] in f" {NEWLINE}"
        if char and bare and not get_character_cell_size(char[0]):
            safe.append(BASE)
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


def line_of(runs: Iterable[StyledRun]) -> Text:
    """Join runs to one line; those of the same style become one piece, which takes fewer bytes."""
    line = Text(no_wrap=True, overflow="ignore")
    for style, parts in groupby(runs, key=lambda part: part.style):
        line.append("".join(part.text for part in parts), style or None)
    return line


def lay_out(runs: Iterable[StyledRun], width: int) -> list[Text]:
    """Break runs into lines of at most `width` cells.

    A line is broken after a space, beside a character two cells wide, or within a very long word.
    """
    lines: list[list[StyledRun]] = [[]]
    room = width = max(width, 2)  # else a wide character would fit nowhere
    for word, word_width in _words(runs):
        if word_width > room and word_width <= min(_LONGEST_WORD, width):
            lines.append([])
            room = width
        for run in word:
            text = run.text
            while (size := cell_len(text)) > room:
                head, text = _split(text, room)
                if head:
                    lines[-1].append(run._replace(text=head))
                lines.append([])
                room = width
            lines[-1].append(run._replace(text=text))
            room -= size
    return [line_of(line) for line in lines if line]


@lru_cache(maxsize=8192)
def _safe(char: str) -> str:
    """What is drawn for one character: itself, a replacement of known width, or "" (nothing)."""
    code, category = ord(char), unicodedata.category(char)
    if char in "\n\u2028\u2029":
        return NEWLINE
    if char == "\t":
        return TAB
    if 0x1F1E6 <= code <= 0x1F1FF:  # half of a flag, shown as its letter
        return chr(code - 0x1F1E6 + ord("A"))
    if category in ("Cc", "Cf") or _modifies(code):
        return ""
    if category in ("Cn", "Cs"):
        return _UNKNOWN
    if category == "Mc" or code == 0x1171E:
        return BASE
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


def _words(runs: Iterable[StyledRun]) -> Iterator[tuple[list[StyledRun], int]]:
    """The words between which a line may be broken: the runs of each, and its width in cells."""
    word: list[StyledRun] = []
    size = 0
    for run in runs:
        if run.whole and word:
            yield word, size
            word, size = [], 0
        for part, ends in [(run.text, True)] if run.whole else _parts(run.text):
            word.append(run._replace(text=part))
            size += cell_len(part)
            if ends:
                yield word, size
                word, size = [], 0
    if word:
        yield word, size


def _parts(text: str) -> list[tuple[str, bool]]:
    """The parts of a text, each with whether a line may be broken after it."""
    if text.isascii():
        return [(part, part[-1] == " ") for part in _ASCII_PARTS.findall(text)]
    parts: list[tuple[str, bool]] = []
    start, before = 0, False
    for index, char in enumerate(text):
        size = get_character_cell_size(char)
        if not size:  # a mark stays with its letter
            continue
        if index > start and (size == 2 or (before and char != " ")):
            parts.append((text[start:index], True))
            start = index
        before = size == 2 or char in f" {NEWLINE}"
    return [*parts, (text[start:], before)] if text else parts
