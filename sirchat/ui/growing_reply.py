"""A reply while it is generated: its final rows, and the rows of the block that still grows.

A block, such as a list, is final once another block follows. A block too tall for the window is cut
behind a line where both parts, laid out alone, have the same rows as the whole.
"""

from __future__ import annotations

import io
import re
from typing import Literal, Protocol

from rich.console import Console
from rich.style import Style
from rich.text import Text

from sirchat.ui.text import pluralize

_MAX_LINE_CUTS = 4  # lines behind which a block that is too tall is tried to be cut
_RETRY_GROWTH = 1.25  # of a block that could not be cut, until that is tried again
_CODE_OPENER = re.compile(r"([ ]{0,3}(?:```+|~~~+))([^\s`]*)")


class RowLayout(Protocol):
    """Turns text into rows of a terminal, with escape sequences for styles."""

    def rows(self, text: str, width: int, *, is_final: bool) -> list[str]:
        """The rows in a window of `width` columns; a final row of code may be longer."""
        ...

    def finished_length(self, text: str) -> int:
        """Number of characters in finished blocks, which later text can't change."""
        ...


class PlainLayout:
    """Shows a text as it is written, in one style, wrapped at blanks."""

    def __init__(self, style: str = "") -> None:
        self._style = Style.parse(style)
        self._console = Console(file=io.StringIO())

    def rows(self, text: str, width: int, *, is_final: bool) -> list[str]:
        if not text:
            return []
        wrapped = Text(text.removesuffix("\n")).wrap(self._console, width - 1)
        return [self._style.render(row.plain.rstrip()) for row in wrapped]

    def finished_length(self, text: str) -> int:
        return text.rfind("\n") + 1


class GrowingReply:
    """One reply: its reasoning, which is dimmed or counted in a line, and its answer.

    Args:
        layout: turns the answer into rows.
        thinking: how reasoning is shown: "show", "fold" or "hide".
    """

    def __init__(
        self, layout: RowLayout, *, thinking: Literal["show", "fold", "hide"] = "show"
    ) -> None:
        self._layout, self._thinking = layout, thinking
        self._parts: list[_GrowingPart] = []  # that are not final yet; the last of them grows
        self._needs_gap = False  # before the next rows, since those above are of another part
        self._tokens = 0  # of the reply so far

    def push(self, text: str, tokens: int = 0, *, is_reasoning: bool = False) -> None:
        """Add text without control sequences; `tokens` counts the reply's tokens up to its end."""
        last = self._parts[-1] if self._parts else None
        if text and (last is None or last.is_reasoning != is_reasoning):
            if last is not None:  # marks came between
                last.end = max(last.end, tokens - 1)
            layout = PlainLayout("dim") if is_reasoning else self._layout
            last = _GrowingPart(layout, is_reasoning=is_reasoning, start=self._tokens)
            self._parts.append(last)
        if last is not None and last.is_reasoning == is_reasoning:
            last.text += text
            last.end = tokens
        self._tokens = tokens

    def take_rows(
        self, width: int, height: int, *, is_end: bool = False
    ) -> tuple[list[str], list[str]]:
        """Take the rows that are final now; return also the last `height` rows below them."""
        final, below = list[str](), list[str]()
        for part in list(self._parts):
            is_over = is_end or part is not self._parts[-1]
            if part.is_reasoning and self._thinking != "show":
                rows, below = self._reasoning_line(part, is_over=is_over)
            else:
                rows, below = part.take_rows(width, height, is_end=is_over)
            if self._needs_gap and (rows or below):
                final.append("")
                self._needs_gap = False
            final += rows
            part.has_rows |= bool(rows)
            if is_over:
                self._needs_gap |= part.has_rows
                self._parts.remove(part)
        return final, below

    def _reasoning_line(
        self, reasoning: _GrowingPart, *, is_over: bool
    ) -> tuple[list[str], list[str]]:
        """The line in place of reasoning: as a final row, or as a row below that still counts."""
        tokens = pluralize(reasoning.end - reasoning.start, "token")
        if not is_over:
            return [], [f"thinking, {tokens}"]
        line = f"thought for {tokens} (/thinking shows it)"
        return [line] if self._thinking == "fold" else [], []


class _GrowingPart:
    """Reasoning or answer: text is added at its end, and taken as rows from its beginning.

    `start` is the number of the reply's tokens before it.
    """

    def __init__(self, layout: RowLayout, *, is_reasoning: bool, start: int) -> None:
        self._layout = layout
        self.is_reasoning = is_reasoning
        self.start = self.end = start  # tokens of the reply up to its beginning and its end
        self.text = ""
        self.has_rows = False  # that are final
        self._has_begun = False
        self._uncut_length = 0  # characters of its unfinished block when that could not be cut

    def take_rows(self, width: int, height: int, *, is_end: bool) -> tuple[list[str], list[str]]:
        """Take the rows of finished blocks, or all at the end; return also the rows below them."""
        if not self._has_begun:
            self.text = self.text.lstrip("\n")
            self._has_begun = bool(self.text)
        stop = len(self.text) if is_end else self._layout.finished_length(self.text)
        final = self._layout.rows(self.text[:stop], width, is_final=True)
        if stop:
            self.text, self._uncut_length = self.text[stop:], 0
        below = self._layout.rows(self.text, width, is_final=False)
        while len(below) > height and len(self.text) >= self._uncut_length * _RETRY_GROWTH:
            parts = self._cut(below, width)
            if parts is None:
                self._uncut_length = len(self.text)
                break
            final += self._layout.rows(parts[0], width, is_final=True)
            self.text, self._uncut_length = parts[1], 0
            below = self._layout.rows(self.text, width, is_final=False)
        return final, below[-height:]

    def _cut(self, rows: list[str], width: int) -> tuple[str, str] | None:
        """Cut the text, before its middle, in parts whose rows together are `rows`; else None."""
        text = self.text
        if text.lstrip().startswith("|"):  # the columns of a table depend on all rows
            return None
        reopening = ""
        if opener := _CODE_OPENER.match(text):  # what is cut within code goes on as code
            fence, info = opener.groups()
            is_shown = Text.from_ansi(rows[0]).plain == info  # which is no language
            reopening = f"{fence}\n" if is_shown else f"{fence}{info}\n"
        # Behind one of the last lines of the text's first half; a line that is indented belongs to
        # an item of a list.
        line_ends = re.finditer(r"\n+", text[: len(text) // 2].rstrip())
        cuts = [cut.span() for cut in line_ends if opener or not text[cut.end()].isspace()]
        for end, start in reversed(cuts[-_MAX_LINE_CUTS:]):
            first, second = text[:end], reopening + text[start:]
            first_rows = self._layout.rows(first, width, is_final=False)
            if not first_rows or first_rows != rows[: len(first_rows)]:
                continue
            if self._layout.rows(second, width, is_final=False) == rows[len(first_rows) :]:
                return first, second
        return None
