"""Shows a reply as Markdown while it is generated: says what to write to the terminal as it grows.

Finished blocks are laid out once; the unfinished one grows below them. Rows that have left the
window never change: where later text would change them, the block goes on as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from sirchat.ui.cells import Cell, StyledRow, cells_width, cut_line, has_known_widths, plain_rows
from sirchat.ui.text import counted

if TYPE_CHECKING:  # loads a parser, which a reply that is shown as written does not need
    from sirchat.ui.markdown import MarkdownLayout

# Signs at the end of an unfinished text that may be the beginning of markup; not shown yet.
_UNDECIDED = re.compile(
    r"(?:\A|\n)[ \t>#*+\-_~`|:.)\d]*\Z"
    r"|(?:\A|\n)[ \t>*+\-.)\d]*(?:```[^`\n]*|~~~[^\n]*)\Z"
    r"|!?\[[^\[\]\n]{0,60}(?:\](?:\([^()\n]{0,200})?)?\Z|[\s*_~`!\[]+\Z"
    r"|(?:\A|\n)[ \t>*+\-.)\d]*\|(?=[^\n]*[^\s>|:\-])[^\n]*(?:\n[ \t>|:\-]*)?\Z"
)
_DECORATION = re.compile(r"[\s▌─]")
_DIM = "2"

_BLANK = (" ", "")
_GAP = 5  # a gap of at least this number of blanks is skipped, not written
_BACK = 5  # most columns that the cursor goes back by backspaces


class MarkdownReply:
    """The text of one reply, and what the terminal shows of it.

    Args:
        layout: turns Markdown into rows.
        below: whether a panel is drawn below the reply; if not, the terminal wraps its paragraphs.
        fold: how reasoning is shown: "show", "fold" or "hide".
        only_reasoning: whether the caller shows what follows the reasoning; it is in `rest`.
    """

    def __init__(
        self,
        layout: MarkdownLayout,
        *,
        below: bool,
        fold: Literal["show", "fold", "hide"] = "show",
        only_reasoning: bool = False,
    ) -> None:
        self._layout = layout
        self._fold, self._only_reasoning = fold, only_reasoning
        self._tokens = 0  # of the reply up to the end of its reasoning
        self.is_above_panel = below
        self._soft = not below
        self._painter = Painter(below=below)
        self._source = ""  # text from the first block on that is not final
        self._shown = 0  # number of its characters that the terminal shows
        self._plain_from: int | None = None  # from here on, the first block stays as written
        self._lead: list[StyledRow] = []  # the empty row after the final rows, if any
        self._thought, self._thought_shown = "", 0  # reasoning that is not final
        self._width = 0

    @property
    def rest(self) -> str:
        """The text of the reply that the terminal does not show yet."""
        return self._thought[self._thought_shown :] + self._source[self._shown :]

    @property
    def has_gap(self) -> bool:
        """Whether an empty row belongs between the text that is shown and the text in `rest`."""
        return bool(self._lead)

    @property
    def is_past_reasoning(self) -> bool:
        """Whether the reply's reasoning has ended, or the reply has no reasoning."""
        return not self._thought

    def push(self, text: str, tokens: int = 0, *, thinks: bool = False) -> None:
        """Add text of reasoning or answer, which is without control sequences.

        The reply has `tokens` tokens up to its end.
        """
        if thinks:
            self._thought += text
            self._tokens = tokens
        else:
            if self._thought and not self._source:  # marks came between
                self._tokens = max(self._tokens, tokens - 1)
            self._source += text

    def frame(self, width: int, height: int, *, is_end: bool = False) -> str:
        """What to write so that the terminal shows the reply, with `height` rows free for it.

        Signs at the end that may be markup are not shown until `is_end`: the reply is complete.
        """
        written = ""
        if width != self._width:
            written = self._painter.begin_anew() if self._width else ""
            self._width = self._painter.width = width
        self._painter.freeze_rows_above(height)
        if self._thought:
            written += self._reasoning(is_over=is_end or bool(self._source))
        if not self._thought and not self._only_reasoning:
            written += self._blocks(is_end=is_end)
        self._painter.freeze_rows_above(height)
        return written + (self.closing_escape() if is_end else "")

    def closing_escape(self) -> str:
        """What to write before any text that does not come from `frame`: the style ends."""
        return self._painter.closing_escape()

    def _reasoning(self, *, is_over: bool) -> str:
        """What to write so that the reasoning is shown, dimmed, or one line instead of it."""
        text = self._thought if self._fold == "show" else self._folded(is_over=is_over)
        rows = plain_rows(text, self._width, soft=False, style=_DIM) if text else []
        written = self._painter.paint(self._keep_final_rows(rows) or rows)
        self._thought_shown = len(self._thought)
        if self._source:
            self._thought, self._thought_shown = "", 0
            self._painter.commit(len(self._painter.rows))
            self._lead = [StyledRow()] if rows else []
        return written

    def _folded(self, *, is_over: bool) -> str:
        tokens = counted(self._tokens, "token")
        if not is_over:
            return f"thinking, {tokens}"
        return f"thought for {tokens} (/thinking shows it)" if self._fold == "fold" else ""

    def _blocks(self, *, is_end: bool) -> str:
        """What to write so that the finished blocks and the unfinished one are shown."""
        undecided = None if is_end else _UNDECIDED.search(self._source)
        stop = undecided.start() if undecided else len(self._source)
        lines = self._layout.finished_lines(self._source[:stop] + ("\n" if is_end else ""))
        length = sum(len(line) + 1 for line in self._source.split("\n")[:lines])
        finished, rest = self._target(length, stop, is_draft=not is_end)
        kept = self._keep_final_rows(finished + rest)
        if kept is None:
            self._painter.commit(len(self._painter.rows))
            self._plain_from = _word_start(self._source, self._shown)
            self._lead = []
            finished, rest = self._target(length, stop, is_draft=not is_end)
            kept = finished + rest
        written = self._painter.paint(kept)
        self._shown = stop
        if length and len(kept) - len(rest) >= self._painter.gone:
            self._flush(length, len(kept) - len(rest))
        return written

    def _target(
        self, length: int, stop: int, *, is_draft: bool
    ) -> tuple[list[StyledRow], list[StyledRow]]:
        """The rows of the finished blocks (`length` characters), and of the text up to `stop`."""
        finished = self._rows(0, length, is_draft=False) if length else []
        rest = self._rows(length, stop, is_draft=is_draft)
        if not length:
            return [], self._lead + rest if rest else []
        is_new = self._plain_from is None or self._plain_from <= length
        return self._lead + finished, ([StyledRow()] if is_new else []) + rest if rest else []

    def _rows(self, start: int, stop: int, *, is_draft: bool) -> list[StyledRow]:
        plain = self._plain_from
        if plain is not None and (start == 0 or plain > start):
            text = self._source[plain:stop].rstrip("\n")
            return plain_rows(text, self._width, soft=False) if text.strip() else []
        text = self._source[start:stop]
        return self._layout.rows(text, self._width, soft=self._soft, is_draft=is_draft)

    def _keep_final_rows(self, target: list[StyledRow]) -> list[StyledRow] | None:
        """The final rows (they can't change any more), and then the part of `target` after them.

        None if `target` does not begin with the text of the final rows. If it breaks lines at other
        places, as for a wider window, the text after the final rows begins a new row.
        """
        if self._painter.can_paint(target):
            return target
        stays = self._painter.rows[: self._painter.gone]
        text = "".join(_DECORATION.sub("", row.text) for row in stays)
        left = len(text)
        for y, row in enumerate(target):
            for x, (char, _) in enumerate(row.cells):
                if left <= 0:
                    return stays + self._from(target, y, x)
                if bare := _DECORATION.sub("", char):
                    if not text.startswith(bare, len(text) - left):
                        return None
                    left -= len(bare)
        return stays if left <= 0 else None

    def _from(self, target: list[StyledRow], y: int, x: int) -> list[StyledRow]:
        """The rows of `target` from cell `x` of row `y` on; the rest of that line is cut anew."""
        line = list(target[y].cells[x:])
        y += 1
        is_soft = y < len(target) and target[y].continues
        while y < len(target) and target[y].continues:
            line += target[y].cells
            y += 1
        return [*cut_line(line, self._width, soft=is_soft), *target[y:]]

    def _flush(self, length: int, rows: int) -> None:
        """Make the first `length` characters of the source and the first `rows` rows final."""
        self._painter.commit(rows)
        self._source = self._source[length:]
        self._shown = max(0, self._shown - length)
        plain = self._plain_from
        self._plain_from = plain - length if plain is not None and plain > length else None
        self._lead = [StyledRow()] if self._plain_from is None else []


class WrittenReply:
    """A reply as it is written, broken at blanks, but code between fences by the terminal.

    A word is shown as it grows; once it is too long for the end of a row, it moves to the next.
    """

    def __init__(self) -> None:
        self._line, self._is_code, self._painter = "", False, Painter(below=False)

    def push(self, text: str, width: int) -> str:
        """What to write so that a terminal `width` columns wide shows the next part, too."""
        written = ""
        if self._painter.width not in (0, width) and not self._is_code:
            text = f"\n{text}"  # rows in a window of another width can't be changed
        for number, part in enumerate(text.split("\n")):
            if number:
                self._is_code ^= self._line.lstrip(" >").startswith(("```", "~~~"))
                self._line, self._painter = "", Painter(below=False)
                written += "\n"
            self._line, self._painter.width = self._line + part, width
            shown = plain_rows(self._line, width, soft=False)
            written += part if self._is_code else self._painter.paint(shown)
        return written


class Painter:
    """Paints rows of a terminal: only cells that differ, and no row that has left the window.

    The first row is the one where the cursor stood. If something else is drawn `below`, `paint`
    leaves the cursor in the row below the last one; if not, behind the last character, whose style
    stays on. There it must be when the next rows are painted.
    """

    def __init__(self, *, below: bool) -> None:
        self.rows: list[StyledRow] = []  # shown, without those that `commit` made final
        self.gone = 0  # number of rows at their beginning that can't change any more
        self.width = 0  # of the window, in columns
        self._below = below
        self._y, self._x = 0, 0
        self._existing = 1  # number of rows, from the first on, that the cursor can reach
        self._out: list[str] = []
        self._style = ""

    def can_paint(self, target: Sequence[StyledRow]) -> bool:
        """Whether the rows `target` begin with exactly the rows that can't change any more."""
        return list(target[: self.gone]) == self.rows[: self.gone]

    def paint(self, target: Sequence[StyledRow]) -> str:
        """What to write so that the terminal shows the rows `target` in place of `rows`."""
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

    def freeze_rows_above(self, reachable: int) -> None:
        """Allow changes only in the last `reachable` rows, which are surely still in the window."""
        self.gone = max(self.gone, len(self.rows) - reachable)

    def begin_anew(self) -> str:
        """What to write after a change of the width: no row changes any more, a new one begins."""
        self.gone = len(self.rows)
        if self._below or not self.rows:
            return ""
        self._y, self._x = len(self.rows), 0
        self._existing = len(self.rows) + 1
        return self.closing_escape() + "\n"

    def closing_escape(self) -> str:
        """What to write before any text that does not come from `paint`: the style ends."""
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
            self._out.append("\x1b[K" if before else "")
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
            self._existing, self._y, self._x = y + 1, y, 0
        else:
            self._go(y, x)

    def _write(self, cells: Sequence[Cell]) -> None:
        for char, style in cells:
            self._set_style(style)
            self._out.append(char)
        self._x += cells_width(cells)

    def _write_on_blank(self, cells: Sequence[Cell], start: int) -> None:
        """Write cells into the row, which is blank from column `start` on; skip long gaps there."""
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
            is_short = x and back <= _BACK and self._x < self.width  # column 0 is surely met by CR
            self._out.append("\b" * back if is_short else "\r")
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


def _word_start(text: str, position: int) -> int:
    """Index at which the word at `position` begins; `position` itself if a space is there."""
    if text[position : position + 1].isspace():
        return position
    before = re.search(r"\S*\Z", text[:position])
    return before.start() if before else position


def _common(left: Sequence[Cell], right: Sequence[Cell]) -> int:
    """The number of equal cells at the beginning of two rows."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def _count(number: int) -> str:
    return "" if number == 1 else str(number)
