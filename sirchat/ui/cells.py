"""Text in the cells of a terminal: lines that fit the window, in runs of one style."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, groupby
from typing import Final, NamedTuple
from unicodedata import category

from rich.cells import cached_cell_len, cell_len, get_character_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

from sirchat.ui.text import displayable

# For a line feed, the separators of lines and paragraphs, and a tab.
_SIGNS: Final = {0x0A: "⏎", 0x2028: "⏎", 0x2029: "⏎", 0x09: "→"}


class StyledRun(NamedTuple):
    text: str
    style: Style


def token_line(text: str) -> str:
    """A token's text as one line, with signs for line breaks and tabs, and nothing invisible."""
    # Not cached: erased text must leave memory.
    if text.isascii() and text.isprintable():
        return text
    shown = displayable(text).translate(_SIGNS)
    return "".join(char for char in shown if category(char) not in ("Cc", "Cf", "Cs"))


def clear_width_cache() -> None:
    """Empty rich's cache of texts and their widths, which may contain erased text."""
    cached_cell_len.cache_clear()


def cut(text: str, width: int) -> str:
    """Cut a text to `width` cells; `…` is put before a closing quote."""
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
