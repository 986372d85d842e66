"""Fenced blocks of Markdown: a text put into one, and the last one of a text."""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(?P<fence>`{3,}(?=[^`]*$)|~{3,})")
_BACKTICKS = re.compile(r"^[ \t]*(`{3,})", re.MULTILINE)


def fenced(name: str, text: str) -> str:
    """A text as a block under its name; the fence is longer than any that the text holds."""
    longest = max((len(run) for run in _BACKTICKS.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{name.replace('`', chr(39))}\n{text.rstrip()}\n{fence}"


def last_fenced(text: str) -> str | None:
    """What the last fenced block of a text holds; None without one.

    A block that is not closed ends with the text, as in Markdown.
    """
    found: str | None = None
    opening, lines = "", list[str]()
    for line in text.split("\n"):
        match = _FENCE.match(line)
        if not opening:
            if match:
                opening, lines = match["fence"], []
        elif match and match["fence"].startswith(opening) and line.strip() == match["fence"]:
            opening, found = "", "\n".join(lines)
        else:
            lines.append(line)
    return "\n".join(lines) if opening else found
