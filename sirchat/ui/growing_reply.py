"""A reply while it is generated: rows that are final, and those of the block that still grows.

A block, such as a list, is final once another follows; one that grows too tall for the window is
cut where the rows of both parts are those of the whole.
"""

from __future__ import annotations

import io
import re
from typing import Literal, Protocol

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from sirchat.ui.text import counted

_TRIES = 40  # most lines, and words, behind which a block that is too tall is tried to be cut
_FEW = 5  # blanks
_OPEN_CODE = re.compile(r"[ ]{0,3}(?:```+|~~~+)\w*")
_FENCES = "```", "~~~"
# A word, or a sign that stands alone: a blank, or one of a script without blanks between words.
_WORDS = re.compile(r"[^\s\u2e80-\U0003ffff]+|.", re.DOTALL)


class Layout(Protocol):
    """Turns text into rows of a terminal, with its escape sequences for styles."""

    def rows(self, text: str, width: int, *, is_final: bool) -> list[str]:
        """The rows in a window of `width` columns; of final ones the terminal may wrap code."""
        ...

    def finished(self, text: str) -> int:
        """How many characters belong to finished blocks, which no later text changes."""
        ...


class WrittenLayout:
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

    def finished(self, text: str) -> int:
        """The number of characters of all whole lines."""
        return text.rfind("\n") + 1


class GrowingReply:
    """One reply: its reasoning, which is dimmed or counted in a line, and its answer.

    Args:
        layout: turns the answer into rows.
        fold: how reasoning is shown: "show", "fold" or "hide".
    """

    def __init__(self, layout: Layout, *, fold: Literal["show", "fold", "hide"] = "show") -> None:
        self._thought = _Growing(WrittenLayout("dim"))
        self._answer = _Growing(layout)
        self._fold = fold
        self._thinks = self._has_gap = False
        self._tokens = 0  # of the reply up to the end of its reasoning

    @property
    def rest(self) -> str:
        """The text of the reply that is not final yet."""
        return self._thought.text + self._answer.text

    def push(self, text: str, tokens: int = 0, *, thinks: bool = False) -> None:
        """Add text of reasoning or answer, which is without control sequences.

        The reply has `tokens` tokens up to its end.
        """
        if thinks:
            self._thinks, self._has_gap = True, self._fold != "hide"
            self._thought.text += text
            self._tokens = tokens
        elif text:
            if self._thinks:  # marks came between
                self._tokens = max(self._tokens, tokens - 1)
            self._thinks = False
            self._answer.text += text

    def take(self, width: int, height: int, *, is_end: bool = False) -> tuple[list[str], list[str]]:
        """Take the rows that are final now; also returns those below them, at most `height`."""
        final, below = list[str](), list[str]()
        if self._thought.text:
            is_over = is_end or not self._thinks
            if self._fold == "show":
                final, below = self._thought.take(width, height, is_end=is_over)
            elif is_over:
                self._thought.text = ""
                told = f"thought for {counted(self._tokens, 'token')} (/thinking shows it)"
                final = [told] if self._fold == "fold" else []
            else:
                below = [f"thinking, {counted(self._tokens, 'token')}"]
        if not self._thinks:
            more, below = self._answer.take(width, height, is_end=is_end)
            if self._has_gap and self._answer.has_begun:
                final.append("")
                self._has_gap = False
            final += more
        return final, below


class _Growing:
    """A text that grows, and is taken away from its beginning."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.text = ""
        self.has_begun = False

    def take(self, width: int, height: int, *, is_end: bool) -> tuple[list[str], list[str]]:
        """Take the rows of finished blocks, of all at the end; and those below, which may grow."""
        if not self.has_begun:
            self.text = self.text.lstrip("\n")
            self.has_begun = bool(self.text)
        stop = len(self.text) if is_end else self._layout.finished(self.text)
        final = self._layout.rows(self.text[:stop], width, is_final=True)
        self.text = self.text[stop:]
        below = self._layout.rows(self.text, width, is_final=False)
        while len(below) > height and (parts := self._cut(below, width)):
            final += self._layout.rows(parts[0], width, is_final=True)
            self.text = parts[1]
            below = self._layout.rows(self.text, width, is_final=False)
        return final, below[-height:]

    def _cut(self, rows: list[str], width: int) -> tuple[str, str] | None:
        """The text in two parts whose rows are `rows` together, cut before its middle."""
        text, first_half = self.text, self.text[: len(self.text) // 2]
        if text.lstrip().startswith("|"):  # the columns of a table depend on all rows
            return None
        lines = [match.span() for match in re.finditer(r"\n+", first_half)]
        words = [match.span() for match in re.finditer(r" +", first_half)]
        if len(words) < _FEW:  # as in Chinese
            words = [(at, at) for at in range(1, len(first_half))]
        opener = _OPEN_CODE.match(text)  # what is cut within code goes on as code
        again = f"{opener[0]}\n" if opener else ""
        for end, start in [*reversed(lines[-_TRIES:]), *reversed(words[-_TRIES:])]:
            parts = text[:end], again + text[start:]
            head = self._layout.rows(parts[0], width, is_final=False)
            if not head or head != rows[: len(head)]:
                continue
            if self._layout.rows(parts[1], width, is_final=False) == rows[len(head) :]:
                return parts
        return None


class WordBreaker:
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
