"""Lays out Markdown as rows of a terminal: by the library rich, but with nothing hidden or padded.

Line breaks stay, what `markdown_rules.py` takes for text is shown as written, links and images with
their addresses, headings on the left, code without box or background, items with their own marks.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cache
from typing import ClassVar, Literal, cast

from markdown_it.token import Token
from rich import markdown
from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme as Styles

from sirchat.ui.cells import Cell, StyledRow, cells_of, cut_line
from sirchat.ui.markdown_rules import parser
from sirchat.ui.text import displayable

_STYLES = {
    **dict.fromkeys(("h1", "table.header"), "bold underline"),
    **dict.fromkeys(("h2", "h3", "h4", "h5", "h6", "strong"), "bold"),
    **dict.fromkeys(("code", "code_block"), "cyan"),
    **dict.fromkeys(("block_quote", "item"), "none"),
    **dict.fromkeys(("link_url", "hr"), "dim"),
    "em": "italic",
    "link": "underline",
    "s": "strike",
}
_UNWRAPPED = 100_000  # columns, more than a table has

_COLOURLESS = {"code": "none", "code_block": "none"}
_CODE = {
    ("Keyword",): "magenta",
    ("Operator", "Word"): "magenta",
    ("Literal", "String"): "green",
    ("Literal", "Number"): "cyan",
    ("Comment",): "dim",
    ("Name", "Tag"): "magenta",
}


class MarkdownLayout:
    """Turns Markdown into rows for a terminal.

    Args:
        colours: whether to use colours; if false, only bold, underline and similar styles are used.
        color_system: rich's name for the colours that the terminal has; None if it has none.
    """

    def __init__(self, *, colours: bool, color_system: str | None) -> None:
        styles = _STYLES if colours else _STYLES | _COLOURLESS
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
        self._empty = _Blocks([], ANSISyntaxTheme(_code_styles(colours)))
        self._colors = COLOR_SYSTEMS[color_system or "standard"]
        self._parsed: tuple[str, list[list[Token]]] = ("", [])  # the latest text, and its blocks

    def rows(
        self, source: str, width: int, *, soft: bool, is_draft: bool = False
    ) -> list[StyledRow]:
        """Lay out a Markdown text in rows for a window of `width` columns; `soft` as `cut_line`.

        If it will grow (`is_draft`), emphasis that is open at its end is closed, and a table at its
        end is shown as the number of its rows.
        """
        blocks = self._parse(source)
        if is_draft and blocks and (closer := _open_emphasis(blocks[-1])):
            blocks = parse(source.rstrip() + closer)
        rows: list[StyledRow] = []
        for block in blocks:
            if rows:
                rows.append(StyledRow())
            is_open = is_draft and block is blocks[-1]
            rows += self._block(block, width, soft=soft, is_open=is_open)
        return rows

    def finished_lines(self, source: str) -> int:
        """Number of lines of finished blocks: of all but the last, which may still grow.

        The last line of `source` must not consist only of signs that may be markup.
        """
        last = source.rfind("\n") + 1
        if source[last:].lstrip().startswith("```"):  # code, unless there is another ` in the line
            source = source[:last]
        blocks = self._parse(source)
        return (blocks[-1][0].map or [0])[0] if len(blocks) > 1 else 0

    def _parse(self, source: str) -> list[list[Token]]:
        if source != self._parsed[0]:
            self._parsed = (source, parse(source))
        return self._parsed[1]

    def _block(
        self, block: list[Token], width: int, *, soft: bool, is_open: bool
    ) -> list[StyledRow]:
        soft = soft and block[0].type in ("fence", "code_block")  # prose is broken between words
        if is_open:
            block = _open_table_counted(block)
        drawing = copy(self._empty)  # a new one would make a parser of its own
        drawing.parsed = _with_addresses(block)
        options = self._console.options.update(width=width - 1, height=None)
        drawn = list(self._console.render(drawing, options))
        rows: list[StyledRow] = []
        for line in Segment.split_lines(drawn):
            rows += cut_line(self._cells(line), width, soft=soft)
        while rows and not rows[-1].cells:
            rows.pop()
        while rows and not rows[0].cells:
            rows.pop(0)
        return rows

    def _cells(self, line: list[Segment]) -> list[Cell]:
        cells: list[Cell] = []
        for segment in line:
            if segment.text and not segment.control:
                style = _sgr_codes(segment.style, self._colors) if segment.style else ""
                cells += cells_of(displayable(segment.text), style)
        return cells


def parse(source: str) -> list[list[Token]]:
    """The blocks (paragraphs, lists, tables) of a Markdown text, each a list of tokens.

    The attribute `map` of a block's first token has the range of the block's lines. Lists with
    other marks that follow each other without an empty line, as the lines of a patch, are one.
    """
    blocks: list[list[Token]] = []
    ends = 0  # the line after the latest list
    for token in parser().parse(source):
        if token.level == 0 and token.nesting >= 0:
            is_list = token.type.endswith("list_open")
            start, end = token.map or (0, 0)
            goes_on = is_list and 0 < ends == start
            ends = _end_of_text(source, end) if is_list else 0
            if goes_on:
                blocks[-1].pop()  # the mark of each item is its own
                continue
            blocks.append([])
        blocks[-1].append(token)
    return blocks


def _end_of_text(source: str, line: int) -> int:
    """The number of lines up to `line`, without the empty ones at their end."""
    lines = source.split("\n")[:line]
    while lines and not lines[-1].strip():
        lines.pop()
    return len(lines)


def _open_emphasis(block: list[Token]) -> str:
    """The mark that closes emphasis, code or a link that is open at the end of a block, or ""."""
    last = next((token for token in reversed(block) if token.nesting == 0), None)
    if last is None or last.type != "inline":
        return ""
    line = last.content.rpartition("\n")[2]  # emphasis over several lines is mostly a mistake
    closers: list[tuple[int, str]] = []  # with the number of marks that they leave open
    for mark in ("`", "``", "**", "***", "*", "__", "_", "~~", ")"):
        if (mark if mark != ")" else "](") in line:
            (inline,) = parser().parseInline(line + mark)
            children = [c for c in inline.children or [] if c.type != "text" or c.content]
            last = children[-1] if children else None
            if last and (last.nesting < 0 or last.type in ("code_inline", "image")):
                rest = "".join(token.content for token in children if token.type == "text")
                closers.append((sum(rest.count(char) for char in "*_~`("), mark))
    return min(closers, key=lambda closer: closer[0])[1] if closers else ""


def _open_table_counted(block: list[Token]) -> list[Token]:
    """A block, with the number of rows in place of a table at its end, whose columns may change."""
    ends = [i for i, token in enumerate(block) if token.nesting >= 0]
    opens = [i for i, token in enumerate(block) if token.type == "table_open"]
    closes = [i for i, token in enumerate(block) if token.type == "table_close"]
    if not opens or closes[-1] < ends[-1]:
        return block
    level, rows = block[opens[-1]].level, block[opens[-1] :]
    count = sum(token.type == "tr_open" for token in rows)
    paragraph = [
        Token("paragraph_open", "p", 1, level=level),
        Token("inline", "", 0, children=_styled("link_url", f"table, rows: {count:,}")),
        Token("paragraph_close", "p", -1, level=level),
    ]
    return [*block[: opens[-1]], *paragraph, *block[closes[-1] + 1 :]]


def _with_addresses(tokens: Sequence[Token]) -> list[Token]:
    """Copies of tokens of which rich hides nothing: addresses become text, line breaks stay."""
    shown = []
    for token in tokens:
        if token.type == "inline":
            token = token.copy(children=list(_inline_with_addresses(token.children or [])))
        shown.append(token)
    return shown


def _inline_with_addresses(tokens: Sequence[Token]) -> Iterator[Token]:
    addresses: list[str] = []
    text = ""
    for token in tokens:
        if token.type == "softbreak":
            yield Token("hardbreak", "br", 0)
        elif token.type == "link_open":
            addresses.append(token.meta["address"])
            text = ""
            yield Token("address_open", "link", 1)
        elif token.type == "link_close":
            yield Token("address_close", "link", -1)
            yield from _address(addresses.pop(), text)
        elif token.type == "image":
            yield from _styled("link", token.content or "image")
            yield from _address(token.meta["address"], token.content)
        else:
            text += token.content
            yield token


def _address(address: str, text: str) -> Iterator[Token]:
    """Tokens that show the address of a link or image in brackets, unless `text` is the same."""
    if address == text:
        return
    yield Token("text", "", 0, content=" (")
    yield from _styled("link_url", address)
    yield Token("text", "", 0, content=")")


def _styled(style: str, text: str) -> list[Token]:
    return [
        Token("address_open", style, 1),
        Token("text", "", 0, content=text),
        Token("address_close", style, -1),
    ]


def _code_styles(colours: bool) -> dict[tuple[str, ...], Style]:
    if colours:
        return {kind: Style.parse(style) for kind, style in _CODE.items()}
    return {("Keyword",): Style(bold=True), ("Comment",): Style(dim=True)}


@cache
def _sgr_codes(style: Style, colors: ColorSystem) -> str:
    """The numbers of the escape sequence (SGR) that switches `style` on, such as `1;36`."""
    rendered = style.render("x", color_system=colors)
    return rendered.partition("m")[0].removeprefix("\x1b[").rstrip("x")


class _Flow(markdown.TextElement):
    """A paragraph; if it `flows`, that is, stands in no list or quote, rich wraps no line."""

    style_name = "markdown.paragraph"

    def __init__(self, *, flows: bool) -> None:
        self.flows = flows

    @classmethod
    def create(cls, markdown: markdown.Markdown, token: Token) -> _Flow:
        return cls(flows=token.level == 0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._expand_tabs(self.text)

    def _expand_tabs(self, text: Text) -> Text:
        """A copy with spaces for tabs, which is not wrapped if it `flows`, and else folded."""
        text = text.copy()
        text.expand_tabs(8)
        text.no_wrap = self.flows
        text.overflow = "ignore" if self.flows else "fold"
        return text


class _Code(_Flow):
    style_name = "markdown.code_block"

    def __init__(self, info: str, theme: ANSISyntaxTheme, *, flows: bool) -> None:
        super().__init__(flows=flows)
        self._syntax = Syntax("", info.split()[0], theme=theme) if info else None
        is_language = self._syntax is not None and self._syntax.lexer is not None
        self._info = "" if is_language and " " not in info else info

    @classmethod
    def create(cls, markdown: markdown.Markdown, token: Token) -> _Code:
        return cls(token.info.strip(), cast(_Blocks, markdown).theme, flows=token.level == 0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._info:  # a file's name, or a text that is no language
            yield self._expand_tabs(Text(self._info, style="markdown.link_url"))
        code = self.text.plain.removesuffix("\n")
        if self._syntax is not None and self._syntax.lexer is not None:
            text = self._syntax.highlight(code)
            text.rstrip()
        else:
            text = Text(code, style=self.style)
        if code or not self._info:
            yield self._expand_tabs(text)


class _Heading(markdown.Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text.copy()
        text.no_wrap, text.overflow = True, "ignore"
        yield text


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
    """A table; if it is too wide, its text, as a cell that is wrapped is hard to read."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self._written = written

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
        wide = options.update(width=_UNWRAPPED)
        if console.measure(table, options=wide).maximum > options.max_width:
            yield Text(self._written, no_wrap=True, overflow="ignore")
        else:
            yield table


class _Blocks(markdown.Markdown):
    """Variant of rich's `Markdown` that draws parsed tokens by this module's element classes."""

    elements: ClassVar[dict[str, type[markdown.MarkdownElement]]] = {
        **markdown.Markdown.elements,
        "paragraph_open": _Flow,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
        "hr": _Rule,
        "bullet_list_open": _List,
        "ordered_list_open": _List,
        "list_item_open": _Item,
        "table_open": _Table,
    }
    inlines = markdown.Markdown.inlines | {"link", "link_url"}

    def __init__(self, tokens: list[Token], theme: ANSISyntaxTheme) -> None:
        super().__init__("")
        self.parsed = tokens
        self.theme = theme
