"""Cuts text into rows as wide as the window; each character of a row has a style."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from rich.cells import cell_len

Cell = tuple[str, str]
"""A character with the combining characters after it; and its style, such as "1;36" (SGR)."""


class StyledRow(NamedTuple):
    """One row of the window.

    Attributes:
        cells: the row's characters with their styles, without the spaces at the end.
        continues: whether the terminal wraps the row above into this row; if false, this row begins
            a new line.
    """

    cells: tuple[Cell, ...] = ()
    continues: bool = False

    @property
    def text(self) -> str:
        """The row's characters, without their styles."""
        return "".join(char for char, _ in self.cells)


def cells_of(text: str, style: str = "") -> list[Cell]:
    """Split a text without line breaks into cells: pairs of a character and `style`."""
    if text.isascii():
        return [(char, style) for char in text]
    cells: list[Cell] = []
    for char in text:
        if cells and _has_no_width(char):
            cells[-1] = (cells[-1][0] + char, style)
        else:
            cells.append((char, style))
    return cells


def plain_rows(text: str, width: int, *, soft: bool, style: str = "") -> list[StyledRow]:
    """Cut a text into rows for a window of `width` columns, as it is written, not as Markdown.

    If `soft` is true, the terminal wraps long lines; see `cut_line`.
    """
    lines = text.removesuffix("\n").expandtabs().split("\n")
    return [row for line in lines for row in cut_line(cells_of(line, style), width, soft=soft)]


def cut_line(line: Sequence[Cell], width: int, *, soft: bool) -> list[StyledRow]:
    """Cut one line into rows for a window `width` columns wide.

    If `soft` is true, the terminal wraps the line, so that the user can copy it as one line. If
    `soft` is false, or if the line has characters whose width differs between terminals, the line
    is broken between words, into rows of at most `width` - 1 columns.
    """
    cells = _ended(line)
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
        rows.append(StyledRow(tuple(_ended(cells[start:end]))))
        start = end
    return rows


def cells_width(cells: Iterable[Cell]) -> int:
    """Number of columns that the cells (characters with styles) take on the terminal."""
    text = "".join([char for char, _ in cells])
    return len(text) if text.isascii() else sum(map(cell_len, text))


def has_known_widths(cells: Iterable[Cell]) -> bool:
    """Whether each of the characters in `cells` has the same width on all terminals."""
    return all(len(char) == 1 and not _has_no_width(char) for char, _ in cells)


def _ended(line: Sequence[Cell]) -> list[Cell]:
    """Remove the spaces at the end of a line, and give other spaces the style of the cell before.

    This makes fewer changes of style, so that less is written to the terminal. Spaces do not get a
    style that shows on a space, such as underline.
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


def _wrapped(cells: list[Cell], width: int) -> list[StyledRow]:
    """Wrap the cells of one line into rows of `width` columns, as a terminal does.

    If a character two columns wide does not fit into a row's last column, the next row begins a new
    line.
    """
    rows: list[StyledRow] = []
    row: list[Cell] = []
    used, continues = 0, False
    for cell in cells:
        size = cell_len(cell[0])
        if used + size > width:
            rows.append(StyledRow(tuple(row), continues))
            row, continues, used = [], used == width, 0
        row.append(cell)
        used += size
    return [*rows, StyledRow(tuple(row), continues)]


def _shows_on_space(style: str) -> bool:
    return not {"4", "7", "9", "21"}.isdisjoint(style.split(";"))  # underlined, reversed, struck


@lru_cache(4096)
def _has_no_width(char: str) -> bool:
    """Whether a terminal may draw the character in the same cell as the character before it."""
    return char > "\u02ff" and (
        unicodedata.category(char) in ("Mn", "Me", "Mc", "Cf")
        or "\U0001f3fb" <= char <= "\U0001f3ff"
        or "\U0001f1e6" <= char <= "\U0001f1ff"
    )


def take_rows(line: str, width: int) -> tuple[list[str], str]:
    """Split a text into its full rows of at most `width` cells, and the text after these rows.

    A row is broken after its last space, if it has one. All text before a line break goes into
    rows, and the line break stays at the end of its row. Nothing of the text is lost.
    """
    *finished, rest = line.split("\n")
    rows: list[str] = []
    for whole in finished:
        full, last = _full_rows(whole, width)
        rows += [*full, last + "\n"]
    full, rest = _full_rows(rest, width)
    return [*rows, *full], rest


def _full_rows(text: str, width: int) -> tuple[list[str], str]:
    rows = []
    while cell_len(text) > width:
        end = _fitting(text, width)
        space = text.rfind(" ", 0, end + 1) + 1  # a space may hang over the edge
        end = space or max(1, end)
        rows.append(text[:end])
        text = text[end:]
    return rows, text


def _fitting(text: str, width: int) -> int:
    """How many characters at the beginning of a text fit into `width` cells."""
    low, high = 0, min(len(text), 2 * width)
    while low < high:
        middle = (low + high + 1) // 2
        if cell_len(text[:middle]) <= width:
            low = middle
        else:
            high = middle - 1
    return low
