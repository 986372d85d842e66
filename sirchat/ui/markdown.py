"""Lays out finished Markdown as rows of a terminal, by `rich.markdown`; nothing is padded."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Literal, cast

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, blockquote
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from rich.console import COLOR_SYSTEMS, Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, TableElement
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from sirchat.ui.text import displayable

_MAX_LEVEL = 16  # of the deepest list, quote or emphasis; what is deeper stays as written
# Marks that are text, as in `2*3*4` and `__init__.py`
_TEXT_MARKS = re.compile(r"(?<=[A-Za-z0-9])\*+(?=[A-Za-z0-9])|__+")
_COMPARISON = re.compile(r">=|>[-$]?\d")  # at the beginning of a line: no quotation
_UNWRAPPED_COLUMNS = 100_000  # more than a line of code has
_STYLES = Theme(
    {
        "markdown.code": "cyan",
        "markdown.h1": "bold underline",
        **dict.fromkeys(("markdown.h2", "markdown.h3", "markdown.h4"), "bold"),
        **dict.fromkeys(("markdown.item.bullet", "markdown.item.number"), ""),
        "markdown.block_quote": "",
        "markdown.table.border": "dim",
        "markdown.table.header": "bold",
        "markdown.link": "underline",
        "markdown.link_url": "dim",
    }
)


class _LeftHeading(Heading):
    LEVEL_ALIGN = {}  # noqa: RUF012  (rich's table of headings that are centred)


class _BareCode(CodeBlock):
    """Code without box and padding."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = _highlighted(str(self.text), self.lexer_name, self.theme)
        code.no_wrap, code.overflow = False, "fold"
        yield code


class _FoldedTable(TableElement):
    """A table in which no word is cut."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            for column in cast(Table, table).columns:
                column.overflow = "fold"
            yield table


class _Document(Markdown):
    elements = Markdown.elements | {
        "heading_open": _LeftHeading,
        "table_open": _FoldedTable,
        **dict.fromkeys(("fence", "code_block"), _BareCode),
    }


class MarkdownLayout:
    """Turns Markdown into rows of a terminal.

    Args:
        theme: name of the screen's theme; "none" has only bold, underline and similar styles.
        color_system: rich's name for the terminal's colours; None if it has none.
    """

    def __init__(self, theme: str, color_system: str | None) -> None:
        self._has_colours = theme != "none" and color_system is not None
        system = cast('Literal["standard", "256", "truecolor"]', color_system or "standard")
        self._console = Console(
            file=io.StringIO(), force_terminal=True, color_system=system, theme=_STYLES
        )
        self._color_system = COLOR_SYSTEMS[system]
        self._code_theme = "ansi_light" if theme == "light" else "ansi_dark"

    def rows(self, text: str, width: int) -> list[str]:
        """The rows in a window of `width` columns; a long line of code is one row."""
        document = _Document("", code_theme=self._code_theme, hyperlinks=False)
        rows, lines = list[str](), text.split("\n")
        for block in _blocks(text):
            first = block[0]
            start, end = first.map or (0, len(lines))
            if start and not lines[start - 1].strip():
                rows.append("")
            if first.type in ("fence", "code_block"):
                language = first.info.partition(" ")[0]
                code = _highlighted(first.content, language, self._code_theme)
                drawn = self._draw(code, _UNWRAPPED_COLUMNS)
            elif max(token.level for token in _with_children(block)) > _MAX_LEVEL:
                drawn = self._draw(Text("\n".join(lines[start:end])), width - 1)
            else:
                document.parsed = block
                drawn = self._draw(document, width - 1)
            rows += "\n".join(drawn).strip("\n").split("\n")
        return rows

    def finished_length(self, text: str) -> int:
        """The number of characters in all blocks but the last, of the text's whole lines."""
        lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)
        blocks = _blocks("".join(lines))
        end = (blocks[-1][0].map or (0,))[0] if len(blocks) > 1 else 0
        while end and not lines[end - 1].strip():
            end -= 1
        return sum(map(len, lines[:end]))

    def _draw(self, drawing: RenderableType, width: int) -> list[str]:
        options = self._console.options.update(width=width)
        return [
            self._ansi_row(line) for line in self._console.render_lines(drawing, options, pad=False)
        ]

    def _ansi_row(self, row: list[Segment]) -> str:
        """A row with escape sequences for its styles, and without blanks at its end."""
        while row and not row[-1].text.strip():
            row.pop()
        if row:
            row[-1] = Segment(row[-1].text.rstrip(), row[-1].style)
        return "".join(
            (style or Style.null()).render(displayable(text), color_system=self._color_system)
            for text, style, _ in (row if self._has_colours else Segment.remove_color(row))
        )


@cache
def _parser() -> MarkdownIt:
    # HTML, character references and definitions of links are text: else hidden, or decoded.
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 1000})
    parser.enable(["strikethrough", "table"])
    parser.disable(["entity", "autolink", "image", "reference", "lheading"])
    parser.inline.ruler.before("emphasis", "text_marks", _text_marks)
    ended_by_it = ["paragraph", "reference", "blockquote", "list"]  # as in markdown_it
    parser.block.ruler.at("blockquote", _quotation, {"alt": ended_by_it})
    return parser


def _quotation(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Take a quotation, up to a comparison such as `>= 3`, whose sign would be hidden."""

    def begins(line: int) -> int:
        return state.bMarks[line] + state.tShift[line]

    if not state.src.startswith(">", begins(start)):
        return False
    comparisons = (n for n in range(start, end) if _COMPARISON.match(state.src, begins(n)))
    stop, last = next(comparisons, end), state.lineMax
    state.lineMax = min(stop, last)
    is_quotation = stop > start and blockquote(state, start, stop, silent)
    state.lineMax = last
    return is_quotation


def _text_marks(state: StateInline, silent: bool) -> bool:
    """Take marks within words for text, where they would be hidden."""
    marks = _TEXT_MARKS.match(state.src, state.pos)
    if marks is None:
        return False
    if not silent:
        state.pending += marks[0]
    state.pos = marks.end()
    return True


def code_blocks(text: str) -> list[str]:
    """The code in a Markdown text, by blocks."""
    tokens = _parser().parse(text)
    return [token.content for token in tokens if token.type in ("fence", "code_block")]


def _blocks(text: str) -> list[list[Token]]:
    """The tokens of each block: paragraph, list, table; `map` of the first is its lines' range."""
    blocks, tokens = list[list[Token]](), _parser().parse(text)
    for token in _with_children(tokens):
        if token.type == "softbreak":  # which rich would draw as a blank
            token.type = "hardbreak"
    for token in tokens:
        if token.level == 0 and token.nesting >= 0:
            blocks.append([])
        blocks[-1].append(token)
    return blocks


def _with_children(tokens: Iterable[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from token.children or ()


def _highlighted(code: str, language: str, theme: str) -> Text:
    syntax = Syntax("", language, theme=theme)
    text = syntax.highlight(code.removesuffix("\n"))
    text.rstrip()
    return text
