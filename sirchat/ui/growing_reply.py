"""A reply while it is generated: rows that are final, and those of the block that still grows.

A block, such as a list, is final once another follows; one that grows too tall for the window is
cut where the rows of both parts are those of the whole.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Literal, Protocol

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from sirchat.chat.events import Delta
from sirchat.ui.text import pluralize

_LINES = 4  # most of them behind which a block that is too tall is tried to be cut
_NEAR = (0, 1, -1, 2, -2)  # words from where a row seems to begin: marks may be words, too
_FEW = 5  # blanks
_GROWTH = 1.25  # of a block that could not be cut, until that is tried again
_OPEN_CODE = re.compile(r"([ ]{0,3}(?:```+|~~~+))([^\s`]*)")
_FENCES = "```", "~~~"
# A word, or a sign that stands alone: a blank, or one of a script without blanks between words.
_WORDS = re.compile(r"[^\s\u2e80-\U0003ffff]+|.", re.DOTALL)


class RowLayout(Protocol):
    """Turns text into rows of a terminal, with its escape sequences for styles."""

    def rows(self, text: str, width: int, *, is_final: bool) -> list[str]:
        """The rows in a window of `width` columns; of final ones the terminal may wrap code."""
        ...

    def finished_length(self, text: str) -> int:
        """How many characters belong to finished blocks, which no later text changes."""
        ...


class PlainLayout:
    """Shows a text as it is written, in one style, broken at blanks."""

    def __init__(self, style: str = "") -> None:
        self._style = Style.parse(style)
        self._console = Console(file=io.StringIO())

    def rows(self, text: str, width: int, *, is_final: bool) -> list[str]:
        """The rows in a window of `width` columns."""
        if not text:
            return []
        wrapped = Text(text.removesuffix("\n")).wrap(self._console, width - 1)
        return [self._style.render(row.plain.rstrip()) for row in wrapped]

    def finished_length(self, text: str) -> int:
        """The number of characters of all whole lines."""
        return text.rfind("\n") + 1


class GrowingReply:
    """One reply: its reasoning, which is dimmed or counted in a line, and its answer.

    Args:
        layout: turns the answer into rows.
        fold: how reasoning is shown: "show", "fold" or "hide".
    """

    def __init__(
        self, layout: RowLayout, *, thinking: Literal["show", "fold", "hide"] = "show"
    ) -> None:
        self._layout, self._thinking = layout, thinking
        self._parts: list[_Growing] = []  # that are not final yet; the last of them grows
        self._needs_gap = False  # before the next rows, since those above are of another part
        self._tokens = 0  # of the reply so far

    @property
    def unfinished(self) -> list[Delta]:
        """The text that is not final yet, but no reasoning that is not shown."""
        shown = [part for part in self._parts if self._thinking == "show" or not part.is_reasoning]
        return [Delta(part.text, "thinking" if part.is_reasoning else "answer") for part in shown]

    def push(self, text: str, tokens: int = 0, *, is_reasoning: bool = False) -> None:
        """Add text of reasoning or answer, which is without control sequences.

        The reply has `tokens` tokens up to its end.
        """
        last = self._parts[-1] if self._parts else None
        if text and (last is None or last.is_reasoning != is_reasoning):
            if last is not None:  # marks came between
                last.end = max(last.end, tokens - 1)
            layout = PlainLayout("dim") if is_reasoning else self._layout
            last = _Growing(layout, is_reasoning=is_reasoning, start=self._tokens)
            self._parts.append(last)
        if last is not None and last.is_reasoning == is_reasoning:
            last.text += text
            last.end = tokens
        self._tokens = tokens

    def take_rows(
        self, width: int, height: int, *, is_end: bool = False
    ) -> tuple[list[str], list[str]]:
        """Take the rows that are final now; also returns those below them, at most `height`."""
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

    def _reasoning_line(self, thought: _Growing, *, is_over: bool) -> tuple[list[str], list[str]]:
        """The line that stands for reasoning: a final one, or one that counts."""
        tokens = pluralize(thought.end - thought.start, "token")
        if not is_over:
            return [], [f"thinking, {tokens}"]
        told = f"thought for {tokens} (/thinking shows it)"
        return ([told] if self._thinking == "fold" else []), []


class _Growing:
    """A text that grows, and is taken away from its beginning: a part of a reply.

    Args:
        layout: turns it into rows.
        thinks: whether it is reasoning.
        start: number of tokens of the reply before it.
    """

    def __init__(self, layout: RowLayout, *, is_reasoning: bool, start: int) -> None:
        self._layout = layout
        self.is_reasoning = is_reasoning
        self.start = self.end = start  # tokens of the reply up to its beginning and its end
        self.text = ""
        self.has_rows = False  # that are final
        self._has_begun = False
        self._uncut = 0  # characters of its unfinished block when that could not be cut

    def take_rows(self, width: int, height: int, *, is_end: bool) -> tuple[list[str], list[str]]:
        """Take the rows of finished blocks, of all at the end; and those below, which may grow."""
        if not self._has_begun:
            self.text = self.text.lstrip("\n")
            self._has_begun = bool(self.text)
        stop = len(self.text) if is_end else self._layout.finished_length(self.text)
        final = self._layout.rows(self.text[:stop], width, is_final=True)
        if stop:
            self.text, self._uncut = self.text[stop:], 0
        below = self._layout.rows(self.text, width, is_final=False)
        while len(below) > height and len(self.text) >= self._uncut * _GROWTH:
            parts = self._cut(below, width)
            if parts is None:
                self._uncut = len(self.text)
                break
            final += self._layout.rows(parts[0], width, is_final=True)
            self.text, self._uncut = parts[1], 0
            below = self._layout.rows(self.text, width, is_final=False)
        return final, below[-height:]

    def _cut(self, rows: list[str], width: int) -> tuple[str, str] | None:
        """The text in two parts whose rows are `rows` together, cut before its middle."""
        text = self.text
        if text.lstrip().startswith("|"):  # the columns of a table depend on all rows
            return None
        again = ""
        if opener := _OPEN_CODE.match(text):  # what is cut within code goes on as code
            fence, info = opener.groups()
            is_shown = Text.from_ansi(rows[0]).plain == info  # which is no language
            again = f"{fence}\n" if is_shown else f"{fence}{info}\n"
        for end, start in self._places(width, is_code=opener is not None):
            parts = text[:end], again + text[start:]
            head = self._layout.rows(parts[0], width, is_final=False)
            if not head or head != rows[: len(head)]:
                continue
            if self._layout.rows(parts[1], width, is_final=False) == rows[len(head) :]:
                return parts
        return None

    def _places(self, width: int, *, is_code: bool) -> Iterator[tuple[int, int]]:
        """Where it may be cut: behind its first half's last lines, or where the last row begins.

        Each is the end of one part and the start of the other.
        """
        half = self.text[: len(self.text) // 2].rstrip()
        lines = [match.span() for match in re.finditer(r"\n+", half)]
        if not is_code:  # a line that is indented belongs to an item of a list
            lines = [(end, start) for end, start in lines if not half[start].isspace()]
        yield from reversed(lines[-_LINES:])
        if is_code:
            return
        row = Text.from_ansi(self._layout.rows(half, width, is_final=False)[-1]).plain
        words, count = [match.span() for match in re.finditer(r" +", half)], len(row.split())
        if len(words) < _FEW:  # as in Chinese
            words, count = [(at, at) for at in range(1, len(half))], len(row)
        for number in (len(words) - count + near for near in _NEAR):
            if 0 <= number < len(words):
                yield words[number]


class WordWrapper:
    """Breaks prose between words as it comes, but not code between fences.

    A word that has become too long for the end of a row moves to the next.
    """

    def __init__(self) -> None:
        self._line = self._word = ""  # of the text so far: its last line, and that line's last word
        self._column = 0
        self._is_code = False

    def push(self, text: str, width: int) -> str:
        """What to write so that a terminal `width` columns wide shows the next text, too."""
        return "".join([self._placed(part, width) for part in _WORDS.findall(text)])

    def _placed(self, part: str, width: int) -> str:
        """Part of a word, with the word's beginning where both go into the next row."""
        if part == "\n":
            self._is_code ^= self._line.lstrip(" >").startswith(_FENCES)
            self._line, self._word, self._column = "", "", 0
            return part
        self._line += part
        size = 8 - self._column % 8 if part == "\t" else cell_len(part)
        is_full = self._column + size >= width and not self._is_code
        stands_alone = part.isspace() or size > len(part)
        before = "" if stands_alone else self._word
        self._word = "" if stands_alone else before + part
        if is_full and part.isspace():
            return ""
        back = cell_len(before)
        if is_full and self._column > back:
            self._column = back + size
            return (f"\x1b[{back}D\x1b[K" if back else "") + f"\n{before}{part}"
        self._column += size
        return part
