"""Cut a growing line into rows of the window's width."""

from __future__ import annotations

from rich.cells import cell_len


def take_rows(line: str, width: int) -> tuple[list[str], str]:
    """The full rows of a line, and the rest; concatenated, they are the line.

    Rows end after a space if they contain one. A line that ends with a line break is all rows, the
    last with the break.
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
    """How many characters fit into `width` cells."""
    low, high = 0, min(len(text), 2 * width)
    while low < high:
        middle = (low + high + 1) // 2
        if cell_len(text[:middle]) <= width:
            low = middle
        else:
            high = middle - 1
    return low
