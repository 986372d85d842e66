"""Lays out Markdown as rows of a terminal: nothing is hidden or padded.

Line breaks stay; what `markdown_rules.py` takes for text is shown as written; links have their
addresses, headings are on the left, code has no box or background, items keep their marks.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Literal, cast

from markdown_it.tree import SyntaxTreeNode
from rich.console import COLOR_SYSTEMS, Console
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text

from sirchat.ui.markdown_rules import markdown_parser
from sirchat.ui.text import displayable

Row = list[Segment]

# By the tag of a node; other nodes have the style of their text.
_STYLES = {
    "h1": "bold underline",
    **dict.fromkeys(("h2", "h3", "h4", "h5", "h6", "strong"), "bold"),
    "code": "cyan",
    "em": "italic",
    "a": "underline",
    "s": "strike",
}
_UNWRAPPED_COLUMNS = 100_000  # columns, more than a table has
_CODE_COLOURS = {
    ("Keyword",): "magenta",
    ("Operator", "Word"): "magenta",
    ("Literal", "String"): "green",
    ("Literal", "Number"): "cyan",
    ("Comment",): "dim",
    ("Name", "Tag"): "magenta",
}
_COLOURLESS_CODE = {("Keyword",): "bold", ("Comment",): "dim"}


class MarkdownLayout:
    """Turns Markdown into rows of a terminal.

    Args:
        colours: whether to use colours; if not, only bold, underline and similar styles are used.
        color_system: rich's name for the terminal's colours; None if it has none.
    """

    def __init__(self, *, colours: bool, color_system: str | None) -> None:
        self._styles = _STYLES if colours else _STYLES | {"code": ""}
        code_styles = _CODE_COLOURS if colours else _COLOURLESS_CODE
        self._code_theme = ANSISyntaxTheme({k: Style.parse(v) for k, v in code_styles.items()})
        system = cast('Literal["standard", "256", "truecolor"]', color_system or "standard")
        self._console = Console(file=io.StringIO(), force_terminal=True, color_system=system)
        self._color_system = COLOR_SYSTEMS[system]

    def rows(self, text: str, width: int, *, is_final: bool) -> list[str]:
        """The rows in a window of `width` columns; a long line of final code is one row."""
        rows: list[str] = []
        lines = text.split("\n")
        for block in _blocks(text):
            start = (block.map or (0,))[0]
            if start and not lines[start - 1].strip():
                rows.append("")
            drawn = self._draw(block, width - 1, wraps_code=not is_final)
            rows += "\n".join(map(self._ansi_row, drawn)).strip("\n").split("\n")
        return rows

    def finished_length(self, text: str) -> int:
        """The number of characters in all blocks but the last, of the text's whole lines."""
        lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)
        blocks = _blocks("".join(lines))
        end = (blocks[-1].map or (0,))[0] if len(blocks) > 1 else 0
        while end and not lines[end - 1].strip():
            end -= 1
        return sum(map(len, lines[:end]))

    def _draw(self, node: SyntaxTreeNode, width: int, *, wraps_code: bool = True) -> list[Row]:
        """The rows of a block; only code at the outermost level may be left unwrapped."""
        match node.type:
            case "bullet_list" | "ordered_list":
                marks = ((item, f"{item.info}{item.markup} ") for item in node.children)
                return [row for item, mark in marks for row in self._draw_within(item, mark, width)]
            case "blockquote":
                return self._draw_within(node, "▌ ", width)
            case "fence" | "code_block":
                return self._draw_code(node, width, wraps=wraps_code)
            case "table":
                return self._draw_table(node, width)
            case "hr":
                return self._wrapped(Text.styled("────────", "dim"), width)
        return self._wrapped(self._inline(node), width)

    def _draw_within(self, node: SyntaxTreeNode, mark: str, width: int) -> list[Row]:
        """The rows of an item behind its mark, or those of a quote, each behind the mark."""
        inner = max(1, width - len(mark))
        rows = [row for child in node.children for row in self._draw(child, inner)] or [[]]
        others = mark if node.type == "blockquote" else " " * len(mark)
        return [[Segment(others if at else mark), *row] for at, row in enumerate(rows)]

    def _draw_code(self, node: SyntaxTreeNode, width: int, *, wraps: bool) -> list[Row]:
        info, code = node.info.strip(), node.content.removesuffix("\n")
        syntax = Syntax("", info.split()[0], theme=self._code_theme) if info else None
        rows, text = list[Row](), Text.styled(code, self._styles["code"])
        if syntax is not None and syntax.lexer is not None:
            text = syntax.highlight(code)
            text.rstrip()
            info = info if " " in info else ""
        if info:  # a file's name, or a text that is no language
            rows = self._wrapped(Text.styled(info, "dim"), width)
        return rows if info and not code else rows + self._wrapped(text, width, wraps=wraps)

    def _draw_table(self, node: SyntaxTreeNode, width: int) -> list[Row]:
        """A table; if it is too wide, its text, because wrapped cells are hard to read."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline")
        head, *others = (row for part in node.children for row in part.children)
        for cell in head.children:
            side = str(cell.attrs.get("style", "")).removeprefix("text-align:")
            justify = cast('Literal["left", "center", "right"]', side or "left")
            table.add_column(self._inline(cell), justify=justify, overflow="fold")
        for row in others:
            table.add_row(*map(self._inline, row.children))
        wide = self._console.options.update(width=_UNWRAPPED_COLUMNS)
        if self._console.measure(table, options=wide).maximum > width:
            return self._wrapped(Text(node.content), width, wraps=False)
        return self._console.render_lines(table, self._console.options.update(width=width))

    def _inline(self, node: SyntaxTreeNode) -> Text:
        """The text within a node, with its line breaks, and addresses behind links."""
        text = Text("\n" if node.type.endswith("break") else node.content * (not node.children))
        for child in node.children:
            text.append_text(self._inline(child))
        text.stylize_before(self._styles.get(node.tag, ""))
        if node.type == "link":
            text.append(" (").append(node.meta["address"], "dim").append(")")
        return text

    def _wrapped(self, text: Text, width: int, *, wraps: bool = True) -> list[Row]:
        overflow: Literal["fold", "ignore"] = "fold" if wraps else "ignore"
        lines: Iterable[Text] = text.wrap(
            self._console, width, overflow=overflow, no_wrap=not wraps
        )
        return [list(line.render(self._console)) for line in lines]

    def _ansi_row(self, row: Row) -> str:
        """A row with escape sequences for its styles, and without blanks at its end."""
        while row and not row[-1].text.strip():
            row.pop()
        if row:
            row[-1] = Segment(row[-1].text.rstrip(), row[-1].style)
        return "".join(
            (style or Style.null()).render(displayable(text), color_system=self._color_system)
            for text, style, _ in row
        )


def _blocks(text: str) -> list[SyntaxTreeNode]:
    """The blocks of a Markdown text: paragraphs, lists, tables; `map` is the range of lines."""
    return SyntaxTreeNode(markdown_parser().parse(text)).children
