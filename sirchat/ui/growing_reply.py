"""A reply while it is generated: its final rows, and those below, which still change.

A block of Markdown, such as a list, is final, and laid out, once another block follows; until then
it is shown as it is written.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.style import Style
from rich.text import Text

from sirchat.ui.text import pluralize

if TYPE_CHECKING:  # loads a parser, which some never need
    from sirchat.ui.markdown import MarkdownLayout

_CONSOLE = Console(file=io.StringIO())


class GrowingReply:
    """One reply: its reasoning, which is dimmed or counted in a line, and its answer.

    Args:
        layout: turns the answer into rows; None shows it as it is written.
        thinking: how reasoning is shown: "show", "fold" or "hide".
    """

    def __init__(
        self, layout: MarkdownLayout | None, thinking: Literal["show", "fold", "hide"] = "show"
    ) -> None:
        self._layout, self._thinking = layout, thinking
        self._parts: list[_Part] = []  # that are not final yet; the last of them grows
        self._needs_gap = False  # before the next rows, since those above are of another part
        self._tokens = 0  # of the reply so far

    def push(self, text: str, tokens: int = 0, *, is_reasoning: bool = False) -> None:
        """Add text without control sequences; `tokens` counts the reply's tokens up to its end."""
        last = self._parts[-1] if self._parts else None
        if text and (last is None or last.is_reasoning != is_reasoning):
            if last is not None:  # marks came between
                last.end = max(last.end, tokens - 1)
            last = _Part(is_reasoning, self._tokens, self._tokens)
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
                rows, below = self._take_rows_of(part, width, is_over=is_over)
            if self._needs_gap and (rows or below):
                final.append("")
                self._needs_gap = False
            final += rows
            part.has_rows |= bool(rows)
            if is_over:
                self._needs_gap |= part.has_rows
                self._parts.remove(part)
        return final, below[-height:]

    def _take_rows_of(
        self, part: _Part, width: int, *, is_over: bool
    ) -> tuple[list[str], list[str]]:
        if not part.has_rows:
            part.text = part.text.lstrip("\n")
        style, layout = ("dim", None) if part.is_reasoning else ("", self._layout)
        if layout is None:
            stop = len(part.text) if is_over else part.text.rfind("\n") + 1
            final = _wrapped(part.text[:stop], width, style)
        else:
            stop = len(part.text) if is_over else layout.finished_length(part.text)
            final = layout.rows(part.text[:stop], width)
        part.text = part.text[stop:]
        return final, _wrapped(part.text, width, style)

    def _reasoning_line(self, reasoning: _Part, *, is_over: bool) -> tuple[list[str], list[str]]:
        """The line in place of reasoning: as a final row, or as a row below that still counts."""
        tokens = pluralize(reasoning.end - reasoning.start, "token")
        if not is_over:
            return [], [f"thinking, {tokens}"]
        line = f"thought for {tokens} (/thinking shows it)"
        return [line] if self._thinking == "fold" else [], []


@dataclass
class _Part:
    """Reasoning or answer: text is added at its end, and taken as rows from its beginning."""

    is_reasoning: bool
    start: int  # tokens of the reply before it
    end: int  # and up to its end
    text: str = ""
    has_rows: bool = False  # that are final


def _wrapped(text: str, width: int, style: str) -> list[str]:
    """A text as it is written, in one style, wrapped at blanks."""
    if not text:
        return []
    wrapped = Text(text.removesuffix("\n")).wrap(_CONSOLE, width - 1)
    return [Style.parse(style).render(row.plain.rstrip()) for row in wrapped]
