"""Text in columns: every character takes a known number of cells, so that rows line up.

Terminals disagree about joined emoji, flags, skin tones and the spacing marks of Indic scripts, so
these are shown in a form that all of them measure alike. Text of right-to-left scripts stays in the
order in which it was said.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

from rich.cells import cell_len, get_character_cell_size
from rich.style import Style
from rich.text import Text

from sirchat.ui.text import displayable

BASE: Final = "◌"
"""Carries a combining mark that has nothing to stand on; stands in for a spacing mark."""

NEWLINE: Final = "⏎"
TAB: Final = "→"

_UNKNOWN = "\ufffd"
_NON_JOINER = "\u200c"
_VIRAMA = 9  # the combining class
_LONGEST_WORD = 24
"""Cells of the longest word that moves to the next line; longer ones are cut at the edge."""

_ASCII_PARTS = re.compile("[^ ]* +|[^ ]+")


class StyledRun(NamedTuple):
    """A styled run of shown text; a `whole` one is not broken across lines."""

    text: str
    style: Style
    whole: bool = False


@lru_cache(maxsize=32768)
def shown(text: str) -> str:
    """A token's text as it is drawn: filtered, on one line, and of determinate width."""
    if text.isascii() and text.isprintable():
        return text
    return grid_safe(displayable(text))


def shown_line(text: str) -> str:
    """A name, for a title: as `shown`, with single spaces for any white space."""
    return shown(" ".join(displayable(text).split()))


def significant(score: float) -> str:
    """A score with three significant digits."""
    return f"{score:#.3g}".removesuffix(".")


def quoted(text: str) -> str:
    """A token's text between quotes, so that its spaces are seen."""
    return f'"{shown(text)}"'


def grid_safe(text: str) -> str:
    """The text with every character's width known; a mark without a letter gets a `BASE`."""
    safe: list[str] = []
    for char in map(_safe, text):
        bare = not safe or safe[-1][-1] in f" {NEWLINE}"
        if char and bare and not get_character_cell_size(char[0]):
            safe.append(BASE)
        if char:
            safe.append(char)
    return "".join(safe)


@lru_cache(maxsize=8192)
def _safe(char: str) -> str:
    """What is drawn for one character; nothing for those that have no agreed width."""
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
    if unicodedata.combining(char) == _VIRAMA:  # it would join its neighbours into one shape
        return char + _NON_JOINER
    return char


def _modifies(code: int) -> bool:
    """Variation selectors and skin tones, which change the character before them."""
    return (
        0xFE00 <= code <= 0xFE0F
        or 0xE0100 <= code <= 0xE01EF
        or 0x180B <= code <= 0x180F
        or 0x1F3FB <= code <= 0x1F3FF
    )


def cut(text: str, width: int) -> str:
    """Shown text, at most `width` cells of it, with an ellipsis where it was cut."""
    if cell_len(text) <= width:
        return text
    return _split(text, max(0, width - 1))[0] + "…"[:width]


def line_of(runs: Iterable[StyledRun]) -> Text:
    """One line; neighbours of the same style are joined, which keeps a frame small."""
    line = Text(no_wrap=True, overflow="ignore")
    for style, run in groupby(runs, key=lambda piece: piece.style):
        line.append("".join(piece.text for piece in run), style or None)
    return line


def lay_out(runs: Iterable[StyledRun], width: int) -> list[Text]:
    """Lines of at most `width` cells, broken after spaces where that leaves no large hole."""
    lines: list[list[StyledRun]] = [[]]
    room = width = max(width, 2)  # or a wide character would fit nowhere
    for word, size in _words(runs):
        if size > room and size <= min(_LONGEST_WORD, width):
            lines.append([])
            room = width
        for piece in word:
            room = _place(piece, lines, room, width)
    return [line_of(line) for line in lines if line]


def _place(piece: StyledRun, lines: list[list[StyledRun]], room: int, width: int) -> int:
    """Put a piece on the last line, cut where it must be; returns the cells left on it."""
    text = piece.text
    while (size := cell_len(text)) > room:
        head, text = _split(text, room)
        if head:
            lines[-1].append(piece._replace(text=head))
        lines.append([])
        room = width
    lines[-1].append(piece._replace(text=text))
    return room - size


def _split(text: str, width: int) -> tuple[str, str]:
    """The text up to `width` cells, marks with their letters, and the rest."""
    used = 0
    for index, char in enumerate(text):
        used += get_character_cell_size(char)
        if used > width:
            return text[:index], text[index:]
    return text, ""


def _words(runs: Iterable[StyledRun]) -> Iterator[tuple[list[StyledRun], int]]:
    """The pieces in groups after which a line may break, and the cells of each group."""
    word: list[StyledRun] = []
    size = 0
    for piece in runs:
        if piece.whole and word:
            yield word, size
            word, size = [], 0
        for part, ends in [(piece.text, True)] if piece.whole else _parts(piece.text):
            word.append(piece._replace(text=part))
            size += cell_len(part)
            if ends:
                yield word, size
                word, size = [], 0
    if word:
        yield word, size


def _parts(text: str) -> list[tuple[str, bool]]:
    """The text cut where a line may break, and whether one may break after the part."""
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
