"""Lays out Markdown as rows of a terminal: by the library rich, but without hiding or padding.

Line breaks stay; what `markdown_rules.py` takes for text is shown as written; links have their
addresses, headings are on the left, code has no box or background, items keep their marks.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from copy import copy
from typing import ClassVar, Literal, cast

from markdown_it.token import Token
from rich import markdown
from rich.console import COLOR_SYSTEMS, Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme as Styles

from sirchat.ui.markdown_rules import markdown_parser
from sirchat.ui.text import displayable

_ELEMENT_STYLES = {
    **dict.fromkeys(("h1", "table.header"), "bold underline"),
    **dict.fromkeys(("h2", "h3", "h4", "h5", "h6", "strong"), "bold"),
    **dict.fromkeys(("code", "code_block"), "cyan"),
    **dict.fromkeys(("block_quote", "item"), "none"),
    **dict.fromkeys(("link_url", "hr"), "dim"),
    "em": "italic",
    "link": "underline",
    "s": "strike",
}
_UNWRAPPED_COLUMNS = 100_000  # columns, more than a table has

_COLOURLESS_STYLES = {"code": "none", "code_block": "none"}
_CODE_COLOURS = {
    ("Keyword",): "magenta",
    ("Operator", "Word"): "magenta",
    ("Literal", "String"): "green",
    ("Literal", "Number"): "cyan",
    ("Comment",): "dim",
    ("Name", "Tag"): "magenta",
}


class MarkdownLayout:
    """Turns Markdown into rows of a terminal.

    Args:
        colours: whether to use colours; if not, only bold, underline and similar styles are used.
        color_system: rich's name for the terminal's colours; None if it has none.
    """

    def __init__(self, *, colours: bool, color_system: str | None) -> None:
        styles = _ELEMENT_STYLES if colours else _ELEMENT_STYLES | _COLOURLESS_STYLES
        self._console = Console(
            file=io.StringIO(),
            theme=Styles({f"markdown.{name}": style for name, style in styles.items()}),
            force_terminal=True,
            width=80,
            height=25,
            color_system=cast(
                'Literal["standard", "256", "truecolor"] | None', color_system or "standard"
            ),
        )
        self._drawing = _Blocks([], ANSISyntaxTheme(_code_styles(colours)))
        self._color_system = COLOR_SYSTEMS[color_system or "standard"]

    def rows(self, text: str, width: int, *, is_final: bool) -> list[str]:
        """The rows in a window of `width` columns; a long line of final code is one row."""
        rows: list[str] = []
        lines = text.split("\n")
        drawing = copy(self._drawing)  # a new one would make a parser of its own
        drawing.wraps_code = not is_final
        options = self._console.options.update(width=width - 1, height=None)
        for block in parse_blocks(text):
            start = (block[0].map or [0])[0]
            if start and not lines[start - 1].strip():
                rows.append("")
            drawing.parsed = _as_written(block)
            drawn = list(self._console.render(drawing, options))
            block_rows = [self._ansi_row(line) for line in Segment.split_lines(drawn)]
            rows += "\n".join(block_rows).strip("\n").split("\n")
        return rows

    def finished_length(self, text: str) -> int:
        """The number of characters in all blocks but the last, of the text's whole lines."""
        lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)
        blocks = parse_blocks("".join(lines))
        end = (blocks[-1][0].map or [0])[0] if len(blocks) > 1 else 0
        while end and not lines[end - 1].strip():
            end -= 1
        return sum(map(len, lines[:end]))

    def _ansi_row(self, line: list[Segment]) -> str:
        """A line with escape sequences for its styles, and without blanks at its end."""
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        return "".join(
            (style or Style.null()).render(displayable(text), color_system=self._color_system)
            for text, style, control in line
            if not control
        )


def parse_blocks(text: str) -> list[list[Token]]:
    """The blocks (paragraphs, lists, tables) of a Markdown text, each a list of tokens.

    The attribute `map` of a block's first token has the range of the block's lines.
    """
    blocks: list[list[Token]] = []
    for token in markdown_parser().parse(text):
        if token.level == 0 and token.nesting >= 0:
            blocks.append([])
        blocks[-1].append(token)
    return blocks


def _as_written(tokens: Sequence[Token]) -> list[Token]:
    """Copies of tokens of which rich hides nothing: line breaks and whole addresses stay."""
    shown = []
    for token in tokens:
        if token.type == "softbreak":
            token = Token("hardbreak", "br", 0)
        elif token.type == "link_open":
            token = token.copy(attrs={"href": token.meta["address"]})
        elif token.children:
            token = token.copy(children=_as_written(token.children))
        shown.append(token)
    return shown


def _code_styles(colours: bool) -> dict[tuple[str, ...], Style]:
    if colours:
        return {kind: Style.parse(style) for kind, style in _CODE_COLOURS.items()}
    return {("Keyword",): Style(bold=True), ("Comment",): Style(dim=True)}


class _Paragraph(markdown.TextElement):
    style_name = "markdown.paragraph"

    @classmethod
    def create(cls, markdown: markdown.Markdown, token: Token) -> _Paragraph:
        return cls()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _Code(markdown.TextElement):
    style_name = "markdown.code_block"

    def __init__(self, info: str, theme: ANSISyntaxTheme, *, wraps: bool) -> None:
        self._wraps = wraps
        self._syntax = Syntax("", info.split()[0], theme=theme) if info else None
        is_language = self._syntax is not None and self._syntax.lexer is not None
        self._info = "" if is_language and " " not in info else info

    @classmethod
    def create(cls, markdown: markdown.Markdown, token: Token) -> _Code:
        blocks = cast(_Blocks, markdown)
        return cls(token.info.strip(), blocks.theme, wraps=blocks.wraps_code or token.level > 0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._info:  # a file's name, or a text that is no language
            yield Text(self._info, style="markdown.link_url")
        code = self.text.plain.removesuffix("\n")
        if self._syntax is not None and self._syntax.lexer is not None:
            text = self._syntax.highlight(code)
            text.rstrip()
        else:
            text = Text(code, style=self.style)
        text.no_wrap, text.overflow = not self._wraps, "fold" if self._wraps else "ignore"
        if code or not self._info:
            yield text


class _Heading(markdown.Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text.copy()
        text.justify = "left"
        yield text


class _Quote(markdown.BlockQuote):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.update(width=max(1, options.max_width - 2))
        for line in console.render_lines(self.elements, inner, style=self.style, pad=False):
            yield Segment("▌ ")
            yield from line
            yield Segment.line()


class _Rule(markdown.HorizontalRule):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("────────", style="markdown.hr")


class _Item(markdown.ListItem):
    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    @classmethod
    def create(cls, markdown: markdown.Markdown, token: Token) -> _Item:
        return cls(f"{token.info}{token.markup} ")


class _List(markdown.ListElement):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for item in self.items:
            mark = cast(_Item, item).mark
            inner = options.update(width=max(1, options.max_width - len(mark)))
            lines = console.render_lines(item.elements, inner, style=item.style, pad=False)
            for index, line in enumerate(lines or [[]]):
                yield Segment(mark if index == 0 else " " * len(mark))
                yield from line
                yield Segment.line()


class _Table(markdown.TableElement):
    """A table; if it is too wide, its text, because wrapped cells are hard to read."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    @classmethod
    def create(cls, markdown: markdown.Markdown, token: Token) -> _Table:
        return cls(token.content)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(
            box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="markdown.table.header"
        )
        for cell in self.header.row.cells if self.header and self.header.row else ():
            side = cell.justify if cell.justify in ("center", "right") else "left"
            table.add_column(cell.content, justify=side, overflow="fold")
        for row in self.body.rows if self.body else ():
            table.add_row(*(cell.content for cell in row.cells))
        wide = options.update(width=_UNWRAPPED_COLUMNS)
        if console.measure(table, options=wide).maximum > options.max_width:
            yield Text(self._source, no_wrap=True, overflow="ignore")
        else:
            yield table


class _Blocks(markdown.Markdown):
    """Variant of rich's `Markdown` that draws parsed tokens by this module's element classes."""

    elements: ClassVar[dict[str, type[markdown.MarkdownElement]]] = {
        **markdown.Markdown.elements,
        "paragraph_open": _Paragraph,
        "blockquote_open": _Quote,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
        "hr": _Rule,
        "bullet_list_open": _List,
        "ordered_list_open": _List,
        "list_item_open": _Item,
        "table_open": _Table,
    }

    def __init__(self, tokens: list[Token], theme: ANSISyntaxTheme) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = tokens
        self.theme = theme
        self.wraps_code = False
