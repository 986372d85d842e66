"""Text in terminal cells: every character has a known width, so that columns line up.

Terminals disagree about the width of joined emoji, flags, skin tones and the spacing marks of Indic
scripts, so these are replaced by characters that have the same width on all terminals.
Right-to-left text stays in logical order.
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
"""Drawn under a combining mark without a letter before it, and instead of a spacing mark."""

NEWLINE: Final = "⏎"
TAB: Final = "→"

_UNKNOWN = "\ufffd"
_NON_JOINER = "\u200c"
_VIRAMA = 9  # its combining class
_LONGEST_WORD = 24
"""Maximum cells of a word that moves to the next line unbroken; longer words are broken."""

_ASCII_PARTS = re.compile("[^ ]* +|[^ ]+")


class StyledRun(NamedTuple):
    """A piece of text in one style, as it is drawn; if `whole`, it is not broken across lines."""

    text: str
    style: Style
    whole: bool = False


def shown(text: str) -> str:
    """A token's text as it is drawn: one line of known width, without control characters.

    No text is cached, so that nothing keeps a text that was erased from a chat.
    """
    if text.isascii() and text.isprintable():
        return text
    return grid_safe(displayable(text))


def shown_line(text: str) -> str:
    """A name as it is drawn in a title: like `shown`, but with single spaces."""
    return shown(" ".join(displayable(text).split()))


def significant(score: float) -> str:
    """A score as text with three significant digits, such as 0.0123, 12,300 or 1.23e+09."""
    text = f"{score:#.3g}".removesuffix(".")
    return f"{float(text):,.0f}" if "e+" in text and abs(score) < 1e9 else text


def quoted(text: str) -> str:
    """A token's text between quotes, so that its spaces show."""
    return f'"{shown(text)}"'


def grid_safe(text: str) -> str:
    """The text, with characters of uncertain width replaced by characters of known width.

    A combining mark that follows no letter is drawn over `BASE`.
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
    """Drop the texts that rich has cached with their widths; called when something was erased."""
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
    """Whether the character changes the previous one: a variation selector or a skin tone."""
    return (
        0xFE00 <= code <= 0xFE0F
        or 0xE0100 <= code <= 0xE01EF
        or 0x180B <= code <= 0x180F
        or 0x1F3FB <= code <= 0x1F3FF
    )


def cut(text: str, width: int) -> str:
    """A text made by `shown`, cut to `width` cells; an ellipsis replaces the rest."""
    if cell_len(text) <= width:
        return text
    return _split(text, max(0, width - 1))[0] + "…"[:width]


def line_of(runs: Iterable[StyledRun]) -> Text:
    """The runs as one line; neighbouring runs of the same style are joined, which saves bytes."""
    line = Text(no_wrap=True, overflow="ignore")
    for style, parts in groupby(runs, key=lambda part: part.style):
        line.append("".join(part.text for part in parts), style or None)
    return line


def lay_out(runs: Iterable[StyledRun], width: int) -> list[Text]:
    """Break runs into lines of at most `width` cells: after spaces, or within very long words."""
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
    """Append a run to the last line; what does not fit into `room` cells goes into new lines.

    A line has `width` cells. Returns the number of free cells in the line that is now the last.
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
    """Split a text after at most `width` cells; a combining mark stays with its letter."""
    used = 0
    for index, char in enumerate(text):
        used += get_character_cell_size(char)
        if used > width:
            return text[:index], text[index:]
    return text, ""


def _words(runs: Iterable[StyledRun]) -> Iterator[tuple[list[StyledRun], int]]:
    """Yield the runs in groups, each with its width in cells; a line may break after each group."""
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
    """The parts of a text, each with a flag: whether a line may break after the part."""
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
