"""Shows a reply as Markdown while it is generated: says what to write to the terminal as it grows.

Finished blocks, such as paragraphs, are laid out once and not changed again. The unfinished block
is shown below the finished ones. Signs at its end that may be markup are not shown yet, so that
little changes later. Emphasis shows from its first word on. A table is shown as the number of its
rows. Rows that have left the window never change: if later text would change one of these rows, the
remaining text of the block is shown as it was written.
"""

from __future__ import annotations

import re
from typing import Literal

from sirchat.chat.reasoning import CLOSE, OPEN
from sirchat.ui.markdown import MarkdownLayout
from sirchat.ui.painter import Painter
from sirchat.ui.styled_rows import StyledRow, cut_line, plain_rows

_UNDECIDED = re.compile(
    r"(?:\A|\n)[ \t>#*+\-=_~`|:.)\d]*\Z"
    r"|<(?:[A-Za-z]{1,9}(?::[^<>\s]{0,200})?)?\Z"
    r"|!?\[[^\[\]\n]{0,60}(?:\](?:\([^()\n]{0,200})?)?\Z|[\s*_~`!\[\\&]+\Z"
    r"|(?:\A|\n)[ \t>*+\-.)\d]*\|(?=[^\n]*[^\s>|:\-])[^\n]*(?:\n[ \t>|:\-]*)?\Z"
)
"""Matches signs at the end of an unfinished text that may be the beginning of markup."""
_DECORATION = re.compile(r"[\s▌•─]")
_DIM = "2"


class MarkdownReply:
    """The text of one reply, and what the terminal shows of it.

    Args:
        layout: turns Markdown into rows.
        below: whether something is drawn in the rows below the reply. If so, the reply ends with a
            line break; if not, the terminal wraps its paragraphs.
        fold: how the reasoning at the reply's beginning is shown: "show", "fold" or "hide".
        is_open: whether the reply begins within reasoning, because the chat template has written
            `<think>`.
        only_reasoning: whether only the reasoning is shown; the caller then shows the text in
            `rest`.
    """

    def __init__(
        self,
        layout: MarkdownLayout,
        *,
        below: bool,
        fold: Literal["show", "fold", "hide"] = "show",
        is_open: bool = False,
        only_reasoning: bool = False,
    ) -> None:
        self._layout = layout
        self._fold, self._only_reasoning = fold, only_reasoning
        self._tokens = 0  # of the reply up to the end of its reasoning
        self._soft = not below
        self._painter = Painter(below=below)
        self._source = ""  # text from the first block on that is not final
        self._shown = 0  # number of its characters that the terminal shows
        self._plain_from: int | None = None  # from here on, the first block stays as written
        self._lead: list[StyledRow] = []  # the empty row after the final rows, if any
        self._thinks: bool | None = is_open or None  # None: not known yet
        self._width = 0

    @property
    def is_above_panel(self) -> bool:
        """Whether the cursor is left in the row below the reply, where a panel is drawn."""
        return not self._soft

    @property
    def rest(self) -> str:
        """The text of the reply that the terminal does not show yet."""
        return self._source[self._shown :]

    @property
    def has_gap(self) -> bool:
        """Whether an empty row belongs between the text that is shown and the text in `rest`."""
        return bool(self._lead)

    @property
    def is_past_reasoning(self) -> bool:
        """Whether the reply's reasoning has ended, or the reply has no reasoning."""
        return self._thinks is False

    def push(self, text: str, tokens: int = 0) -> None:
        """Add `text`, without control sequences, at the end of the reply.

        `tokens` is the number of the reply's tokens up to the end of `text`.
        """
        if self._thinks is not False and CLOSE not in self._source:
            self._tokens = tokens
        self._source += text

    def frame(self, width: int, height: int, *, is_end: bool = False) -> str:
        """The text to write so that the terminal shows all of the reply that was added by `push`.

        The window has `width` columns and, free for the reply, `height` rows. Signs at the end that
        may be markup are not shown yet, unless `is_end` says that the reply is complete.
        """
        written = ""
        if width != self._width:
            written = self._painter.begin_anew() if self._width else ""
            self._width = width
        self._painter.width = width
        self._painter.scroll(height)
        if self._thinks is None:
            self._thinks = self._begins_with_reasoning(is_end=is_end)
        if self._thinks:
            written += self._reasoning(is_end=is_end)
        if self._thinks is False and not self._only_reasoning:
            written += self._blocks(is_end=is_end)
        self._painter.scroll(height)
        return written + (self.end_style() if is_end else "")

    def end_style(self) -> str:
        """The escape sequence that switches off the text style that is on; "" if none is on.

        Before any text that does not come from `frame`, write this sequence.
        """
        return self._painter.end_style()

    def _begins_with_reasoning(self, *, is_end: bool) -> bool | None:
        """Whether the reply begins with reasoning; None if its text is still too short to tell."""
        start = self._source.lstrip()
        if start.startswith(OPEN):
            self._source = start
            return True
        return None if OPEN.startswith(start) and not is_end else False

    def _reasoning(self, *, is_end: bool) -> str:
        """The text to write so that the terminal shows all reasoning that `push` has added, dimmed.

        Unless `fold` is "show", the terminal shows one line instead of the reasoning.
        """
        end = self._source.find(CLOSE)
        stop = end + len(CLOSE) if end >= 0 else len(self._source)
        text = self._source[:stop].rstrip()
        if self._fold != "show":
            inner = text.removeprefix(OPEN).removesuffix(CLOSE)
            text = self._folded(is_over=end >= 0 or is_end) if inner.strip() else ""
        rows = plain_rows(text, self._width, soft=self._soft, style=_DIM) if text else []
        written = self._painter.paint(self._kept(rows) or rows)
        self._shown = stop
        if end >= 0:
            self._thinks = False
            self._flush(stop, len(self._painter.rows))
            self._lead = [StyledRow()] * bool(rows)
        return written

    def _folded(self, *, is_over: bool) -> str:
        """The line that is shown instead of the reasoning, with the number of its tokens.

        Returns "" if the reasoning is over (`is_over`) and `fold` is "hide".
        """
        tokens = f"{self._tokens:,} token{'s' * (self._tokens != 1)}"
        if not is_over:
            return f"thinking, {tokens}"
        return f"thought for {tokens} (/thinking shows it)" if self._fold == "fold" else ""

    def _blocks(self, *, is_end: bool) -> str:
        """The text to write so that the terminal shows the finished blocks and the unfinished one.

        If `is_end` is true, the reply is complete, and all of its text is shown.
        """
        stop = len(self._source) if is_end else _settled(self._source)
        lines = self._layout.finished_lines(self._source[:stop] + "\n" * is_end)
        length = sum(len(line) + 1 for line in self._source.split("\n")[:lines])
        finished, rest = self._target(length, stop, is_draft=not is_end)
        kept = self._kept(finished + rest)
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
        """Two lists of rows: those of the finished blocks, and those of the text after the blocks.

        The finished blocks are the first `length` characters of the source (the reply's text that
        is not final); the text after the blocks ends at index `stop`. `is_draft` says that the text
        will grow.
        """
        finished = self._rows(0, length, is_draft=False) if length else []
        rest = self._rows(length, stop, is_draft=is_draft)
        if not length:
            return [], self._lead + rest if rest else []
        is_new = self._plain_from is None or self._plain_from <= length
        return self._lead + finished, [StyledRow()] * is_new + rest if rest else []

    def _rows(self, start: int, stop: int, *, is_draft: bool) -> list[StyledRow]:
        """Lay out the part of the source from index `start` to `stop` in rows.

        The part is laid out as Markdown; from the index `_plain_from` on, it is shown as it is
        written.
        """
        plain = self._plain_from
        if plain is not None and (start == 0 or plain > start):
            text = self._source[plain:stop].rstrip("\n")
            return plain_rows(text, self._width, soft=self._soft) if text.strip() else []
        text = self._source[start:stop]
        return self._layout.rows(text, self._width, soft=self._soft, is_draft=is_draft)

    def _kept(self, target: list[StyledRow]) -> list[StyledRow] | None:
        """The rows to paint: those that can't change any more, then the later rows of `target`.

        Returns None if `target` does not begin with the text of the rows that can't change.
        `target` may break its lines at other places than these rows, for example for a wider
        window; then the text after these rows begins a new row.
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
        """The rows of `target`, from its row `y` and the cell `x` of this row on.

        The cell `x` may be within a line of text that takes several rows. The remaining part of
        this line is broken into rows anew. The rows of later lines are not changed.
        """
        line = list(target[y].cells[x:])
        y += 1
        while y < len(target) and target[y].continues:
            line += target[y].cells
            y += 1
        return [*cut_line(line, self._width, soft=self._soft), *target[y:]]

    def _flush(self, length: int, rows: int) -> None:
        """Make the first `length` characters of the source and the first `rows` rows final.

        Final text and final rows never change again.
        """
        self._painter.commit(rows)
        self._source = self._source[length:]
        self._shown = max(0, self._shown - length)
        plain = self._plain_from
        self._plain_from = plain - length if plain is not None and plain > length else None
        self._lead = [StyledRow()] if self._plain_from is None else []


def _settled(source: str) -> int:
    """Number of characters at the beginning of an unfinished text that can be shown as Markdown.

    Characters after these may be the beginning of markup.
    """
    undecided = _UNDECIDED.search(source)
    return undecided.start() if undecided else len(source)


def _word_start(text: str, position: int) -> int:
    """Index at which the word at index `position` begins; `position` itself if a space is there."""
    if text[position : position + 1].isspace():
        return position
    while position and not text[position - 1].isspace():
        position -= 1
    return position
