"""A Markdown parser that takes fewer signs for formatting, and keeps all others as written.

No emphasis begins or ends within a word, a number or a path. Backslashes, character references and
formulas stay. A table whose rows don't fit its head, an empty heading and an empty quote are text.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import takewhile

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, blockquote, heading, list_block, table
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline, link
from markdown_it.rules_inline.state_inline import Delimiter

_MAX_LEVEL = 16  # level of the deepest list, quote or emphasis; each is drawn by recursion
_MARKS = re.compile(r"\*+|_+|~~+")
_DUNDER = re.compile(r"__\w+__(?!\w)")  # a name in Python, more often than one strong word
_BEFORE_EMPHASIS = "([{<\"'“‘«„‚‹¿¡–—…|"  # emphasis may begin behind these
_JOINING_SIGNS = "/\\@=+&#^`"  # these join what is around them to one word
_NAME_SIGNS = ".,:;!?"  # and these do before a letter: file.txt, 1,000
_FORMULA = re.compile(
    r"\\\(.{1,2000}?\\\)|\\\[.{1,2000}?\\\]|\$\$[^$]+\$\$|\$(?![\s$])[^$\n]*(?<![\s$])\$(?!\d)",
    re.DOTALL,
)
# Python's prompt, or a comparison: >= 3, >5, >-1
_NOT_A_QUOTE = re.compile(r">(?:>>|=|[-+.$€£]?\d)")
_CELL_ENDS = re.compile(r"(?<!\\)\|")
_OUTER_BARS = re.compile(r"\A\||\|\Z")


@cache
def markdown_parser() -> MarkdownIt:
    """Make the parser. An image is a link after a `!`; `meta` of a link has its address."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    parser.disable(
        ["reference", "lheading", "html_block", "html_inline", "entity", "autolink", "image"]
    )
    parser.inline.ruler.at("escape", _backslash)
    parser.inline.ruler.before("escape", "formula", _formula)
    parser.inline.ruler.at("emphasis", _emphasis)
    parser.inline.ruler.disable("strikethrough")  # `_emphasis` finds its marks, too
    parser.inline.ruler.at("link", _link)
    parser.core.ruler.after("inline", "levels", _keep_deep_marks)
    parser.block.ruler.at("table", _table, {"alt": ["paragraph"]})
    parser.block.ruler.at("blockquote", _quote, {"alt": ["paragraph", "blockquote", "list"]})
    parser.block.ruler.at("list", _list, {"alt": ["paragraph", "blockquote"]})
    parser.block.ruler.at("heading", _heading, {"alt": ["paragraph", "blockquote"]})
    return parser


def _backslash(state: StateInline, silent: bool) -> bool:
    """Keep a backslash and the sign after it, which is then no formatting."""
    if state.src[state.pos] != "\\":
        return False
    behind = state.src[state.pos + 1 : min(state.pos + 2, state.posMax)]
    return _keep(state, "\\" + (behind if behind.isprintable() else ""), silent)


def _formula(state: StateInline, silent: bool) -> bool:
    match = _FORMULA.match(state.src, state.pos, state.posMax)
    return match is not None and _keep(state, match[0], silent)


def _keep(state: StateInline, text: str, silent: bool) -> bool:
    if not silent:
        state.append_pending(text)
    state.pos += len(text)
    return True


def _emphasis(state: StateInline, silent: bool) -> bool:
    """Note marks that may begin or end emphasis; the parser pairs them later."""
    match = _MARKS.match(state.src, state.pos, state.posMax)
    if silent or match is None:
        return False
    if name := _DUNDER.match(state.src, state.pos, state.posMax):
        return _keep(state, name[0], silent)
    sign, length = match[0][0], len(match[0])
    opens, closes = _flanks(state.src[: state.posMax], match.start(), match.end())
    step = 2 if sign == "~" else 1
    for _ in range(length // step):
        state.push("text", "", 0).content = sign * step
        run = 0 if sign == "~" else length  # 0: no pair is refused for the lengths of its runs
        mark = Delimiter(ord(sign), run, len(state.tokens) - 1, -1, opens, closes)
        state.delimiters.append(mark)
    if length % step:
        state.push("text", "", 0).content = sign
    state.pos += length
    return True


def _keep_deep_marks(state: StateCore) -> None:
    """Keep the marks of emphasis within `_MAX_LEVEL` others as written."""
    for token in (child for block in state.tokens for child in block.children or ()):
        if token.tag in ("em", "strong", "s") and token.level >= _MAX_LEVEL:
            token.type, token.tag, token.nesting, token.content = "text", "", 0, token.markup


def _flanks(text: str, start: int, end: int) -> tuple[bool, bool]:
    """Whether emphasis can begin, and whether it can end, with the marks `text[start:end]`."""
    # Marks of another kind beside them are skipped.
    while start and text[start - 1] in "*_~":
        start -= 1
    while end < len(text) and text[end] in "*_~":
        end += 1
    before, after = text[start - 1 : start] or " ", text[end : end + 1] or " "
    is_name = after in _NAME_SIGNS and _is_letter(text[end + 1 : end + 2] or " ")  # as *.py
    begins = before.isspace() or before in _BEFORE_EMPHASIS or _is_wide(before)
    opens = begins and not (after.isspace() or after in "/\\" or is_name)
    ends = not (_is_letter(after) or after in _JOINING_SIGNS or is_name)
    return opens, ends and not (before.isspace() or before in "/\\")


def _is_letter(char: str) -> bool:
    """Whether a letter or number belongs to a script that puts blanks between words."""
    return char.isalnum() and not _is_wide(char)


def _is_wide(char: str) -> bool:
    return unicodedata.east_asian_width(char) in "WF"


def _link(state: StateInline, silent: bool) -> bool:
    """Keep the address as written, with its title, in the `meta` of the link."""
    start, last = state.pos, state.posMax
    before = state.src[start - 1] if start else " "
    if _is_letter(before) or before in "_])":  # as in names[0](event)
        return False
    count = len(state.tokens)
    if not link(state, silent):
        return False
    if not silent:
        here, state.pos, state.posMax = state.pos, start, last
        ends = state.md.helpers.parseLinkLabel(state, start, True)
        state.pos = here
        address = state.src[ends + 2 : here - 1].strip()
        next(t for t in state.tokens[count:] if t.type == "link_open").meta["address"] = address
    return True


def _line_text(state: StateBlock, line: int) -> str:
    """A line without the marks of lists and quotes at its beginning."""
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def _table(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    count = len(state.tokens)
    if not table(state, start, end, silent):
        return False
    if silent:
        return True
    rows = [_line_text(state, line).strip() for line in range(start, state.line)]
    cells = [len(_CELL_ENDS.split(_OUTER_BARS.sub("", row))) for row in rows]
    if max(cells) > cells[0]:  # the parser drops cells that have no head
        del state.tokens[count:]
        state.line = start
        return False
    state.tokens[count].content = "\n".join(rows)
    return True


def _quote(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    text = _line_text(state, start)
    if state.level > _MAX_LEVEL or not text.startswith(">") or _NOT_A_QUOTE.match(text):
        return False
    count, last = len(state.tokens), state.lineMax
    lines = takewhile(lambda line: not state.isEmpty(line), range(start + 1, end))
    others = (line for line in lines if _NOT_A_QUOTE.match(_line_text(state, line)))
    state.lineMax = next(others, last)
    is_quote = blockquote(state, start, min(end, state.lineMax), silent)
    state.lineMax = last
    if not is_quote:
        return False
    if not silent and len(state.tokens) == count + 2:  # it is empty, and nothing would be drawn
        del state.tokens[count:]
        state.line = start
        return False
    return True


def _list(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    return state.level <= _MAX_LEVEL and list_block(state, start, end, silent)


def _heading(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    text = _line_text(state, start).lstrip("#").strip()
    if not text or not heading(state, start, end, silent):
        return False
    if not silent:
        state.tokens[-2].content = text  # with signs at its end, as in C #
    return True
