"""Text in the cells of a terminal: characters of known width, lines and rows as wide as the window.

Terminals disagree about the width of joined emoji, flags, skin tones and the spacing marks of Indic
scripts. The panel replaces them; a reply stays as it is written, in rows that fit where they are
drawn widest.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

from rich.cells import cached_cell_len, cell_len, get_character_cell_size
from rich.style import Style
from rich.text import Text
from wcwidth import wcwidth

from sirchat.ui.text import displayable

# Drawn under a combining mark that follows no letter, and in place of a spacing mark.
BASE: Final = "◌"
NEWLINE: Final = "⏎"
TAB: Final = "→"

_UNKNOWN = "\ufffd"
_NON_JOINER = "\u200c"
_VIRAMA = 9  # its combining class
_LONGEST_WORD = 24  # cells: a longer word is broken instead of moved to the next line
_LONGEST_CELL = 16  # characters; more marks than that don't fit into a row, either
_ASCII_PARTS = re.compile("[^ ]* +|[^ ]+")

# A character with the combining characters after it; and its style, such as "1;36" (SGR).
Cell = tuple[str, str]


class StyledRun(NamedTuple):
    """A piece of text to draw in one style; if `whole`, it stays in one line where possible."""

    text: str
    style: Style
    whole: bool = False


class StyledRow(NamedTuple):
    """One row of the window, without the spaces at its end."""

    cells: tuple[Cell, ...] = ()
    continues: bool = False  # the terminal wraps the row above into this row

    @property
    def text(self) -> str:
        """The row's characters, without their styles."""
        return "".join(char for char, _ in self.cells)


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


def cells_of(text: str, style: str = "") -> list[Cell]:
    """Split a text without line breaks into cells of one style."""
    if text.isascii():
        return [(char, style) for char in text]
    cells: list[Cell] = []
    for char in text:
        if cells and _joins(char, cells[-1][0]):
            cells[-1] = (cells[-1][0] + char, style)
        else:
            cells.append((char, style))
    return cells


def plain_rows(text: str, width: int, *, soft: bool, style: str = "") -> list[StyledRow]:
    """Cut a text into rows as it is written, not as Markdown; `soft` as for `cut_line`."""
    lines = text.removesuffix("\n").expandtabs().split("\n")
    return [row for line in lines for row in cut_line(cells_of(line, style), width, soft=soft)]


def cut_line(line: Sequence[Cell], width: int, *, soft: bool) -> list[StyledRow]:
    """Cut one line into rows for a window `width` columns wide.

    If `soft`, the terminal wraps the line, so that it is copied as one; but lines with characters
    of uncertain width, and all if not `soft`, are broken between words, at `width` - 1 columns.
    """
    cells = _without_end(line)
    if cells_width(cells) < width:
        return [StyledRow(tuple(cells))]
    if soft and has_known_widths(cells):
        return _wrapped(cells, width)
    full, rest = take_rows("".join(char for char, _ in cells), width - 1)
    rows, start = [], 0
    for row in [*full, rest]:
        end, left = start, len(row)
        while left > 0:
            left -= len(cells[end][0])
            end += 1
        rows.append(StyledRow(tuple(_without_end(cells[start:end]))))
        start = end
    return rows


def cells_width(cells: Iterable[Cell]) -> int:
    """Number of columns that the cells take on the terminal, or the most if that is uncertain."""
    text = "".join([char for char, _ in cells])
    return len(text) if text.isascii() else sum(map(_most_columns, text))


def has_known_widths(cells: Iterable[Cell]) -> bool:
    """Whether each of the characters in `cells` has the same width on all terminals."""
    return all(char.isascii() or _has_known_width(char) for char, _ in cells)


def take_rows(text: str, width: int) -> tuple[list[str], str]:
    """Split a text into its full rows of at most `width` cells, and the text after these rows.

    A row is broken after its last space, if it has one; its line break stays at its end.
    """
    *finished, rest = text.split("\n")
    rows: list[str] = []
    for line in finished:
        full, last = _full_rows(line, width)
        rows += [*full, last + "\n"]
    full, rest = _full_rows(rest, width)
    return [*rows, *full], rest


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


def _without_end(line: Sequence[Cell]) -> list[Cell]:
    """The line without the spaces at its end; each other space has the style of the cell before.

    This makes fewer changes of style, so that less is written to the terminal.
    """
    length = len(line)
    while length and line[length - 1][0] == " ":
        length -= 1
    cells = list(line[:length])
    if len({style for _, style in cells}) < 2:
        return cells
    for at, (char, style) in enumerate(cells):
        before = cells[at - 1][1] if at else style
        if char == " " and before != style and not _shows_on_space(before):
            cells[at] = (" ", before)
    return cells


def _shows_on_space(style: str) -> bool:
    return not {"4", "7", "9", "21"}.isdisjoint(style.split(";"))  # underlined, reversed, struck


def _wrapped(cells: list[Cell], width: int) -> list[StyledRow]:
    """Wrap one line into rows of `width` columns, as a terminal does.

    Where a character two columns wide does not fit into the last column, a new line begins.
    """
    rows: list[StyledRow] = []
    row: list[Cell] = []
    used, continues = 0, False
    for cell in cells:
        size = _most_columns(cell[0])
        if used + size > width:
            rows.append(StyledRow(tuple(row), continues))
            row, continues, used = [], used == width, 0
        row.append(cell)
        used += size
    return [*rows, StyledRow(tuple(row), continues)]


@lru_cache(4096)
def _most_columns(char: str) -> int:
    """The most columns that a terminal takes for a character, alone or joined to others."""
    if char == "\ufe0f" or unicodedata.category(char) == "Mc":  # one more for what is before it
        return 1
    return max(0, wcwidth(char))


@lru_cache(4096)
def _has_known_width(char: str) -> bool:
    is_new = unicodedata.category(char[0]) == "Cn"  # such as an emoji of this year
    return len(char) == 1 and not is_new and not _has_no_width(char)


def _joins(char: str, cell: str) -> bool:
    """Whether a character belongs to the cell before it; halves of flags do in pairs."""
    if not _has_no_width(char) or cell == " " or len(cell) >= _LONGEST_CELL:
        return False
    return not _is_half_of_flag(char) or (len(cell) == 1 and _is_half_of_flag(cell))


def _is_half_of_flag(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


@lru_cache(4096)
def _has_no_width(char: str) -> bool:
    """Whether a terminal may draw the character in the same cell as the character before it."""
    return char > "\u02ff" and (
        unicodedata.category(char) in ("Mn", "Me", "Mc", "Cf")
        or "\U0001f3fb" <= char <= "\U0001f3ff"
        or _is_half_of_flag(char)
    )


def _full_rows(text: str, width: int) -> tuple[list[str], str]:
    rows = []
    while (end := _fitting(text, width)) < len(text):
        space = text.rfind(" ", 0, end + 1) + 1  # a space may hang over the edge
        end = space or end
        rows.append(text[:end])
        text = text[end:]
    return rows, text


def _fitting(text: str, width: int) -> int:
    """Number of characters, at least one, that surely fit into a row; joined ones stay together."""
    if text.isascii():
        return max(1, min(len(text), width))
    used = end = 0
    for char, _ in cells_of(text[: 4 * width]):
        used += sum(map(_most_columns, char))
        if used > width and end:
            break
        end += len(char)
    return end
