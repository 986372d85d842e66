"""Redraws rows of a terminal with few bytes; never changes rows that have left the window.

`Painter` remembers the rows that it wrote and that may still change. It writes only cells that
differ: where only the end of the text grows, as in a paragraph, it writes only the new text.
`Region` draws what stands below these rows, such as a panel, as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, RenderableType

from sirchat.ui.styled_rows import Cell, StyledRow, cells_width, has_known_widths

_BLANK = (" ", "")
_GAP = 5  # a gap of at least this number of blanks is skipped, not written
_BACK = 5  # most columns that the cursor goes back by backspaces


class Painter:
    """Paints rows of a terminal; the first is the row where the cursor stood at the beginning.

    Attributes:
        rows: the rows that are shown, without the rows that `commit` made final.
        gone: number of rows at the beginning of `rows` that can't change any more.
        width: width of the window, in columns.

    Args:
        below: whether something else is drawn below the rows. If true, `paint` leaves the cursor in
            the row below the last row; if false, behind the last character, whose style stays on.
            When the next rows are painted, cursor and style must be as `paint` left them.
    """

    def __init__(self, *, below: bool) -> None:
        self.rows: list[StyledRow] = []
        self.gone = 0
        self.width = 0
        self._below = below
        self._y, self._x = 0, 0
        self._existing = 1  # number of rows, from the first on, that the cursor can reach
        self._out: list[str] = []
        self._style = ""

    def can_paint(self, target: Sequence[StyledRow]) -> bool:
        """Whether the rows `target` begin with exactly the rows that can't change any more."""
        return list(target[: self.gone]) == self.rows[: self.gone]

    def paint(self, target: Sequence[StyledRow]) -> str:
        """The text to write so that the terminal shows the rows `target`.

        These take the place of the rows in the attribute `rows`, and become its new value.
        """
        if list(target) == self.rows:
            return ""
        old, self._out = self.rows, []
        for y, row in enumerate(target):
            if y >= len(old) or row != old[y]:
                self._write_row(y, row, old[y] if y < len(old) else None, target)
        if len(old) > len(target):
            self._go(len(target), 0)
            self._out.append("\x1b[J")
        self.rows = list(target)
        if self._below:
            self._go(len(target), 0)
            self._set_style("")
        elif target and self._y != len(target) - 1:
            self._go(len(target) - 1, cells_width(target[-1].cells[:-1]))
        return "".join(self._out)

    def commit(self, count: int) -> None:
        """Make the first `count` rows final: remove them from `rows`, so that they never change."""
        self.rows = self.rows[count:]
        self.gone = max(0, self.gone - count)
        self._y -= count
        self._existing -= count

    def scroll(self, reachable: int) -> None:
        """Allow changes only in the last `reachable` rows, which are surely still in the window."""
        self.gone = max(self.gone, len(self.rows) - reachable)

    def begin_anew(self) -> str:
        """After a change of the window's width, forbid changes in all rows, and go on below them.

        Returns the text to write to the terminal.
        """
        self.gone = len(self.rows)
        if self._below or not self.rows:
            return ""
        self._y, self._x = len(self.rows), 0
        self._existing = len(self.rows) + 1
        return self.end_style() + "\n"

    def end_style(self) -> str:
        """The escape sequence that switches off the text style that is on; "" if none is on.

        Before any text that does not come from `paint`, write this sequence.
        """
        self._out = []
        self._set_style("")
        return "".join(self._out)

    def _write_row(
        self, y: int, new: StyledRow, old: StyledRow | None, target: Sequence[StyledRow]
    ) -> None:
        """Replace the row `old`, which has index `y`, by `new`, from the first changed cell on."""
        cells = new.cells
        before = old.cells if old is not None else ()
        old_width, new_width = cells_width(before), cells_width(cells)
        start, end = _common(before, cells), len(cells)
        if old is not None and start == len(before) and self._is_at(y, before):
            self._write(cells[start:])
        elif has_known_widths(before) and has_known_widths(cells):
            if old_width == new_width:
                end -= _common(before[:start:-1], cells[:start:-1])
            self._reach(y, cells_width(cells[:start]), new, target)
            written = max(start, min(len(before), end))
            self._write(cells[start:written])
            self._write_on_blank(cells[written:end], old_width)
            if old_width > new_width:
                self._out.append("\x1b[K")
        else:  # columns can't be counted
            self._reach(y, 0, new, target)
            self._out.append("\x1b[K" * bool(before))
            self._write(cells)

    def _reach(self, y: int, x: int, new: StyledRow, target: Sequence[StyledRow]) -> None:
        """Move the cursor to column `x` of row `y`.

        If the terminal has not wrapped into row `y` yet, the last character of the row above is
        written, so that the terminal wraps the next character into row `y`.
        """
        if new.continues and x == 0 and y >= self._existing:
            above = target[y - 1].cells
            if not self._is_at(y - 1, above):
                self._go(y - 1, cells_width(above[:-1]))
                self._write(above[-1:])
            self._existing, self._y, self._x = y + 1, y, 0  # the next character wraps into this row
        else:
            self._go(y, x)

    def _write(self, cells: Sequence[Cell]) -> None:
        for char, style in cells:
            self._set_style(style)
            self._out.append(char)
        self._x += cells_width(cells)

    def _write_on_blank(self, cells: Sequence[Cell], start: int) -> None:
        """Write cells into the current row, which is blank from column `start` on.

        A long run of blanks is not written; the cursor moves over it.
        """
        at = 0
        while at < len(cells):
            end = at
            while end < len(cells) and cells[end] == _BLANK:
                end += 1
            is_inside = self._x > 0 and end < len(cells)  # indented code is copied with its spaces
            if end - at >= _GAP and is_inside and self._x >= start:
                self._go(self._y, self._x + end - at)
            else:
                end = max(end, at + 1)
                self._write(cells[at:end])
            at = end

    def _is_at(self, y: int, cells: Sequence[Cell]) -> bool:
        """Whether the cursor stands in row `y` right behind `cells`, the row's first cells."""
        return self._y == y and self._x == cells_width(cells)

    def _go(self, y: int, x: int) -> None:
        if (y, x) == (self._y, self._x):
            return
        if y > self._y:
            self._out.append("\n" * (y - self._y))
            self._existing = max(self._existing, y + 1)
            self._x = 0
        elif y < self._y:
            self._out.append(f"\x1b[{_count(self._y - y)}A")
        if x < self._x:
            back = self._x - x
            self._out.append("\b" * back if back <= _BACK and self._x < self.width else "\r")
            self._x = x if self._out[-1] != "\r" else 0
        if x > self._x:
            self._out.append(f"\x1b[{_count(x - self._x)}C")
        self._y, self._x = y, x

    def _set_style(self, style: str) -> None:
        if style == self._style:
            return
        old, new = self._style.split(";"), style.split(";")
        if self._style and set(old) <= set(new) and "38" not in new and "48" not in new:
            added = ";".join(code for code in new if code not in old)
            self._out.append(f"\x1b[{added}m")
        else:
            self._out.append(f"\x1b[;{style}m" if self._style and style else f"\x1b[{style}m")
        self._style = style


def _common(one: Sequence[Cell], other: Sequence[Cell]) -> int:
    """The number of equal cells at the beginning of two rows."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _count(number: int) -> str:
    return "" if number == 1 else str(number)


class Region:
    """The last rows of the screen, which are drawn anew with each frame and removed at the end.

    The cursor stays in the first of these rows. So erasing everything from the cursor on removes
    all of them. This works even after a change of the window, when terminals cut rows, wrap them
    anew, or move them.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.is_shown = False

    def draw(self, content: RenderableType, above: str = "") -> None:
        """Write `above`, a text of whole rows, and draw `content` below it as the new region.

        All of this is sent to the terminal in one write.
        """
        with self._console.capture() as captured:
            self._console.print(content, soft_wrap=False)
        rows = captured.get().split("\n")[:-1][: self._console.size.height]
        up = f"\x1b[{_count(len(rows) - 1)}A" if len(rows) > 1 else ""
        # The terminal wraps no row, even if the window has just become narrower.
        drawn = "\x1b[?7l" + "\n".join(rows) + f"{up}\r\x1b[?7h"
        begin = _ERASE if self.is_shown else _HIDE_CURSOR
        self._write(f"{_FRAME}{begin}{above}{drawn}{_FRAME_END}")
        self.is_shown = True

    def remove(self) -> bool:
        """Erase the region from the screen; return whether it was shown."""
        was_shown, self.is_shown = self.is_shown, False
        if was_shown:
            self._write(_ERASE + _SHOW_CURSOR)
        return was_shown

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


_ERASE = "\r\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_FRAME, _FRAME_END = "\x1b[?2026h", "\x1b[?2026l"
"""Escape sequences that begin and end a frame (a redrawing of the screen).

Most new terminals show a frame, and a new window size, only when the frame is complete.
"""

FRAME_SECONDS = 1 / 8
TEXT_SECONDS = 1 / 30
"""Least number of seconds between two frames while no panel is drawn, only text."""
BYTES_PER_SECOND = 12_000
"""Maximum number of bytes per second for drawing, besides the text of the reply itself."""
TIME_SHARE = 1 / 50
"""Largest share of the time that may be spent on drawing."""


class Pace:
    """Decides when a frame, that is, a redrawing of the screen, may be drawn.

    Frames are drawn less often if a frame takes many bytes or much time.

    Args:
        seconds: minimum time between two frames.
    """

    def __init__(self, seconds: float = FRAME_SECONDS) -> None:
        self._seconds = seconds
        self._due = 0.0

    def is_due(self) -> bool:
        """Whether enough time has passed since the last frame to draw another."""
        return time.monotonic() >= self._due

    def drew(self, seconds: float, size: int) -> None:
        """Record that a frame was drawn: `seconds` is the time that it took, `size` its bytes."""
        wait = max(self._seconds, size / BYTES_PER_SECOND, seconds / TIME_SHARE)
        self._due = time.monotonic() + wait
