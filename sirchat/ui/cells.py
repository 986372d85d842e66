"""Fits text into terminal cells: every character gets a known width, so that columns line up.

Terminals disagree about the width of joined emoji, flags, skin tones and the spacing marks of Indic
scripts. These characters are replaced by others that have the same width on all terminals.
Right-to-left text stays in logical order, the order in which it is read.
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

BASE: Final = "◌"
"""A sign drawn under a combining mark that follows no letter, and in place of a spacing mark."""

NEWLINE: Final = "⏎"
TAB: Final = "→"

_UNKNOWN = "\ufffd"
_NON_JOINER = "\u200c"
_VIRAMA = 9  # its combining class
_LONGEST_WORD = 24
"""Maximum width, in cells, of a word that moves to the next line; a longer word is broken."""

_ASCII_PARTS = re.compile("[^ ]* +|[^ ]+")


class StyledRun(NamedTuple):
    """A piece of text to draw in one style; if `whole`, it stays in one line where possible."""

    text: str
    style: Style
    whole: bool = False


def shown(text: str) -> str:
    """A token's text ready to be drawn: one line of known width, without control characters.

    This function caches no text, so that text erased from a chat does not stay in memory.
    """
    if text.isascii() and text.isprintable():
        return text
    return grid_safe(displayable(text))


def shown_line(text: str) -> str:
    """A name ready to be drawn in a title: one line, single spaces, no control characters."""
    return shown(" ".join(displayable(text).split()))


def significant(score: float) -> str:
    """A score as text with three significant digits, such as 0.0123, 12,300 or 1.23e+09."""
    text = f"{score:#.3g}".removesuffix(".")
    return f"{float(text):,.0f}" if "e+" in text and abs(score) < 1e9 else text


def quoted(text: str) -> str:
    """A token's text between double quotes, so that the user sees its spaces."""
    return f'"{shown(text)}"'


def grid_safe(text: str) -> str:
    """Replace each character of uncertain width in `text` by characters of known width.

    A combining mark that follows no letter is drawn over the sign `BASE`.
    """
    safe: list[str] = []
    for char in map(_safe, text):
        bare = not safe or safe[-1][-1] in f" {NEWLINE}"
        if char and bare and not get_character_cell_size(char[0]):
            safe.append(BASE)
        if char:
            safe.append(char)
    return "".join(safe)


def drop_measured() -> None:
    """Empty the cache in which the library rich keeps texts with their widths.

    The command `/erase` calls this, so that erased text does not stay in memory.
    """
    cached_cell_len.cache_clear()


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
    """Whether a character only changes how the character before it looks; `code` is its code point.

    Such characters are variation selectors, and the skin tones of emoji.
    """
    return (
        0xFE00 <= code <= 0xFE0F
        or 0xE0100 <= code <= 0xE01EF
        or 0x180B <= code <= 0x180F
        or 0x1F3FB <= code <= 0x1F3FF
    )


def cut(text: str, width: int) -> str:
    """Cut `text`, a result of `shown`, to `width` cells; an ellipsis replaces the part cut off."""
    if cell_len(text) <= width:
        return text
    return _split(text, max(0, width - 1))[0] + "…"[:width]


def line_of(runs: Iterable[StyledRun]) -> Text:
    """Join runs (pieces of text in one style) to one line for rich.

    Neighbouring runs of the same style become one piece, which takes fewer bytes on the terminal.
    """
    line = Text(no_wrap=True, overflow="ignore")
    for style, parts in groupby(runs, key=lambda part: part.style):
        line.append("".join(part.text for part in parts), style or None)
    return line


def lay_out(runs: Iterable[StyledRun], width: int) -> list[Text]:
    """Break runs (pieces of text in one style) into lines of at most `width` cells.

    A line is broken after a space, beside a character two cells wide, or within a very long word.
    """
    lines: list[list[StyledRun]] = [[]]
    room = width = max(width, 2)  # else a wide character would fit nowhere
    for word, size in _words(runs):
        if size > room and size <= min(_LONGEST_WORD, width):
            lines.append([])
            room = width
        for part in word:
            room = _append(part, lines, room, width)
    return [line_of(line) for line in lines if line]


def _append(run: StyledRun, lines: list[list[StyledRun]], room: int, width: int) -> int:
    """Append a run (text in one style) to the last of `lines`; add lines for what does not fit.

    `room` is the number of free cells in the last line, and `width` the number of cells of a line.
    Returns the number of free cells in the line that is the last one afterwards.
    """
    text = run.text
    while (size := cell_len(text)) > room:
        head, text = _split(text, room)
        if head:
            lines[-1].append(run._replace(text=head))
        lines.append([])
        room = width
    lines[-1].append(run._replace(text=text))
    return room - size


def _split(text: str, width: int) -> tuple[str, str]:
    """Split a text after at most `width` cells; return both parts.

    A combining mark stays with its letter.
    """
    used = 0
    for index, char in enumerate(text):
        used += get_character_cell_size(char)
        if used > width:
            return text[:index], text[index:]
    return text, ""


def _words(runs: Iterable[StyledRun]) -> Iterator[tuple[list[StyledRun], int]]:
    """Divide runs (pieces of text in one style) into words between which a line may be broken.

    Yields pairs: the runs of a word, and the word's width in cells.
    """
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
    """Split a text into parts; return pairs: a part, and whether a line may be broken after it."""
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
