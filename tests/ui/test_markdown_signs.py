"""Of a reply in Markdown, every letter and sign that is written is shown, but for formatting.

`SIRCHAT_ATTACK=10000` tries as many random texts, and prints how many signs were lost.
"""

from __future__ import annotations

import random
import re

from attacking import FIRST, MANY
from sirchat.ui.markdown import MarkdownLayout

_LAYOUT = MarkdownLayout(colours=True, color_system="256")

_BEGINNINGS = (
    *[""] * 4, "# ", "### ", "#", "- ", "+ ", "* ", "-", "1. ", "7) ", "> ", ">> ", ">>> ", ">",
    "    ", "```", "```python", "```python title=app.py", "~~~ what is it", "````", "---", "***",
    "___", "===", "| ", "|---|---|", "\\[", "\\]", "$$", "- - - 1. ", "12 ", "\t", ">= ",
)  # fmt: skip
_PARTS = (
    "word", "of", "seven", "1,024", "3.14", "2*3*4", "x*y", "pkg/__init__.py", "__init__", "_id_",
    "snake_case", "**/src/**", "*.py", "**kwargs", "C:\\dir\\_x", "\\d+\\.", "\\*", "\\", "\\\\",
    "**bold**",
    "*slanted*", "_slanted_", "***both***", "~~gone~~", "~", "~~", "~~~", "*", "**", "_",
    "__", "`code`", "``a`b``", "`", "``", "[text](https://a.example/b)", "[a](b 'c')", "[1]", "[x",
    "names[0](event)",
    "![boat](boat.png)", "[a](a)", "](", ")", "(", "<b>", "</b>", "<https://c.ex>",
    "&nbsp;", "&lt;", "&#27;", "\\(x_1\\)", "$a_1*b$", "$5", "| ", " | ", "|", "\\|", "#", "C#",
    ">", "<", "+", "-", "=", "!",
    "。", "海は", "**広い**", "👍", "“q”", "_**a**_", "a**b**c", "**a**:", "5%",
)  # fmt: skip

# What stands before a line's own text: quotes, lists, and the indent within them.
_OUTER = r"(?:[ \t]|>|[-+*](?=[ \t])|\d{1,9}[.)](?=[ \t]))*"


def random_markdown(draw: random.Random) -> str:
    """A few lines, most of whose signs look as if they were formatting."""
    lines = []
    for _ in range(draw.randint(1, 7)):
        parts = draw.choices(_PARTS, k=draw.randint(0, 6))
        glue = draw.choice([" ", " ", "", ", "])
        lines.append(draw.choice(_BEGINNINGS) + glue.join(parts))
    return draw.choice(["\n", "\n", "\n\n"]).join(lines)


def formatting(text: str) -> set[int]:
    """Indices of the signs that may vanish, by rules that look at the signs beside them only.

    They are: marks that no word, number or path encloses and that occur twice, but not behind a
    backslash; backticks that occur twice; brackets of links; signs of headings and quotes; lines
    of dashes; fences and the language behind them; bars and rules of tables; an address that its
    link's text repeats.
    """
    may: set[int] = set()

    def add(pattern: str, group: int = 0) -> None:
        for match in re.finditer(pattern, text, re.M):
            may.update(range(*match.span(group)))

    add(rf"^{_OUTER}(#{{1,6}})(?=[ \t]+\S)", 1)
    add(rf"^{_OUTER}((?:[-*_][ \t]*){{3,}})$", 1)
    add(r"^[ \t>]*((?:[-*_][ \t]*){3,})$", 1)
    add(rf"^{_OUTER}(```+|~~~+)([ \t]*(?:python|C#)[ \t]*$)?")
    add(rf"^{_OUTER}(?=>)(?!>>>)")
    for match in re.finditer(rf"^{_OUTER}", text, re.M):
        may.update(i for i in range(*match.span()) if text[i] == ">")
    if re.search(r"^[\s>|:0-9.)*+-]*-[\s|:-]*$", text, re.M):
        add(r"\\?\|")
        add(rf"^{_OUTER}([|:\- \t]+)$", 1)
    spans = [match.span() for match in re.finditer(r"\*+|_+|~+|`+", text)]
    ends = [(start + 1, end) for start, end in spans if _is_escaped(text, start)]
    code = [span for span in spans if text[span[0]] == "`"]  # in which no sign is escaped
    spans = [*(span for span in spans if (span[0] + 1, span[1]) not in ends), *code, *ends]
    for start, end in spans:
        run = text[start:end]
        twins = [text[a:b] for a, b in spans if b != end and text[a:b][:1] == run[:1]]
        is_code = run[:1] == "`"
        if is_code:
            twins = [other for other in twins if other == run]
        if twins and (is_code or not _is_enclosed(text, start, end)):
            may.update(range(start, end))
    for match in re.finditer(r"!?\[(?=.*\]\()|\](?=\()", text):
        may.update(range(*match.span()))
    for match in re.finditer(r"\[([^\]]*)\](\(\1\))", text):  # the address is the text
        may.update(range(*match.span(2)))
    return may


def _is_escaped(text: str, at: int) -> bool:
    return (len(text[:at]) - len(text[:at].rstrip("\\"))) % 2 == 1


def _is_enclosed(text: str, start: int, end: int) -> bool:
    """Whether these marks stand within a word, a number or a path, or between blanks."""
    while start and text[start - 1] in "*_~":
        start -= 1
    while end < len(text) and text[end] in "*_~":
        end += 1
    sides = (text[:start] or " ")[-1], (text[end:] or " ")[0]
    if "/" in sides or "\\" in sides:
        return True
    return all(side.isascii() and side.isalnum() for side in sides) or all(
        side.isspace() for side in sides
    )


def lost(text: str, shown: str, may: set[int]) -> list[str]:
    """The signs of `text` that `shown` lacks, or has at another place; those of `may` don't count.

    All ways to leave out formatting are tried at once.
    """
    missing: list[str] = []
    shown = re.sub(r"[\s▌─]", "", shown)
    ends = {0}  # how much of `shown` is explained
    for index, char in enumerate(text):
        if char.isspace():
            continue
        after = {end + 1 for end in ends if shown[end : end + 1] == char}
        if index in may:
            after |= ends
        if not after:
            missing.append(char)
            after = ends
        ends = after
    if len(shown) not in ends:
        missing.append(f"more was shown: {shown[max(ends) :]}")
    return missing


def _shown(text: str, columns: int) -> str:
    rows = "\n".join(_LAYOUT.rows(text, columns, is_final=columns % 2 == 0))
    return re.sub(r"\x1b\[[\d;]*m", "", rows)


def test_no_letter_and_no_sign_is_lost() -> None:
    count, signs, wrong = MANY or 150, 0, list[str]()
    for seed in range(FIRST, FIRST + count):
        draw = random.Random(seed)
        text, columns = random_markdown(draw), draw.randint(30, 100)
        if missing := lost(text, _shown(text, columns), formatting(text)):
            wrong.append(f"seed {seed}: {missing} of {text!r}")
        signs += len(missing)
    if MANY:
        print(f"{count} texts, {signs} signs lost")  # noqa: T201
    assert not wrong, "\n".join(wrong[:20])


def test_marks_within_many_others_stay_as_written() -> None:
    for deep in ("*" * 900 + "a" + "*" * 900, "*a " * 400 + "b" + "*" * 400):
        rows = _LAYOUT.rows(deep, 80, is_final=True)
        assert "a" in "".join(rows)
        assert sum(row.count("*") for row in rows) > 500
