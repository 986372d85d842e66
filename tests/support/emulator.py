"""The terminal emulator of the tests: pyte's, without the pages that it can turn back."""

from __future__ import annotations

import pyte
from pyte.charsets import LAT1_MAP
from pyte.modes import DECAWM, DECTCEM, IRM
from pyte.screens import Char

_WRAPS = -1  # a column whose cell marks a row that is wrapped into the next one


class Emulator(pyte.HistoryScreen):  # type: ignore[misc]
    """A screen that keeps the rows that scroll off; it takes a third of the time of pyte's own.

    pyte's looks at every access to an attribute whether the screen shows an older page, and the
    tests never turn pages. What is drawn is the same.
    """

    __getattribute__ = object.__getattribute__

    def draw(self, data: str) -> None:
        """Write text where the cursor is."""
        cursor = self.cursor
        is_plain = (
            data.isascii()
            and data.isprintable()
            and cursor.x + len(data) <= self.columns
            and not self.charset
            and self.g0_charset is LAT1_MAP
            and IRM not in self.mode
        )
        if not is_plain:
            super().draw(data)
            return
        line, (_, *style) = self.buffer[cursor.y], cursor.attrs
        for x, char in enumerate(data, cursor.x):
            line[x] = Char(char, *style)
        cursor.x += len(data)
        self.dirty.add(cursor.y)

    def restore_cursor(self) -> None:
        """Put the cursor back where it was saved; whether it is hidden does not change."""
        super().restore_cursor()
        self.cursor.hidden = DECTCEM not in self.mode


class Reflowing(Emulator):
    """A screen that wraps its rows anew when its width changes, as most terminals do."""

    def draw(self, data: str) -> None:
        """Write text, and mark rows that are wrapped into the next one."""
        for char in data:
            if self.cursor.x == self.columns and DECAWM in self.mode:
                self.buffer[self.cursor.y][_WRAPS] = self.cursor.attrs
            super().draw(char)

    def reflow(self, rows: int, columns: int) -> None:
        """Change the size; the cursor stays at its character, and in the window."""
        shown = [self.buffer[y] for y in range(self.lines)]
        lines: list[list[Char]] = [[]]
        at, begun = (0, 0), len(self.history.top)
        for y, row in enumerate([*self.history.top, *shown]):
            if y - begun == self.cursor.y:
                at = len(lines) - 1, len(lines[-1]) + self.cursor.x
            used = max((x for x in row if x != _WRAPS and row[x].data.strip()), default=-1) + 1
            lines[-1] += [row[x] for x in range(min(used, self.columns))]
            if used < self.columns or _WRAPS not in row:
                lines.append([])
        wrapped: list[dict[int, Char]] = []
        for number, line in enumerate(lines):
            if number == at[0]:
                cursor = len(wrapped) + at[1] // columns, at[1] % columns
            for x in range(0, max(1, len(line)), columns):
                more = {_WRAPS: line[x]} if x + columns < len(line) else {}
                wrapped.append(dict(enumerate(line[x : x + columns])) | more)
        last = max((y for y, row in enumerate(wrapped) if row), default=0)
        last = max(last, cursor[0])
        top = min(max(0, last - rows + 1), cursor[0])
        self.history.top.clear()
        self.history.top.extend(wrapped[:top])
        self.resize(rows, columns)
        self.erase_in_display(2)
        for y, row in enumerate(wrapped[top : top + rows]):
            self.buffer[y].update(row)
        self.cursor.y, self.cursor.x = cursor[0] - top, cursor[1]
