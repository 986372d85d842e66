"""What `/help` shows: the commands in groups, a short line each; and one command's own help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

GROUPS: Final[dict[str, dict[str, str]]] = {
    "Talk": {
        "/edit": "change your last message",
        "/retry": "draw another reply to it",
        "/undo": "take it back, and the reply",
        "/read FILE": "send a file's text, as @FILE",
        "/copy": "put a reply on the clipboard",
        "/thinking": "show the reply's reasoning",
    },
    "Memory": {
        "/forgotten": "list what is forgotten",
        '/recall "WORDS"': "bring words back",
        "/pin, /unpin": "keep words; let them go again",
        "/summarize": "keep the model's own summary",
        "/forget": "erase words or turns for good",
        "/reset": "forget the whole conversation",
    },
    "Look": {
        "/panel": "draw all that is held",
        "/tokens": "list the tokens that are held",
        "/why WORDS": "why words are held, or not",
        "/stats": "counts and speed",
        "/clear": "clear the screen, nothing else",
    },
    "Chats": {
        "/save NAME": "save this chat under a name",
        "/load NAME": "go on with a saved chat",
        "/branch NAME": "go on in a copy of this chat",
        "/branches": "list the copies",
        "/switch NAME": "go on with another copy",
        "/export": "write chat or panel to a file",
    },
    "Settings": {
        "/model NAME": "let another model go on",
        "/policy NAME": "what decides which tokens stay",
        "/budget N": "how many tokens are held",
        "/decay": "how fast surprise fades",
        "/sinks, /recent": "first and last ones that stay",
        "/system TEXT": "the system prompt",
        "/profile NAME": "many settings at once",
        "/set, /show": "any setting; all of them",
    },
    "Help": {
        "/help COMMAND": "all about one command",
        "/exit": "leave, as Ctrl-D does",
    },
}
"""Commands, some with what follows them, by group. A row may name several."""

KEYS: Final = (
    "Alt-Enter or Ctrl-J begins a new line, and so does Enter after \\; "
    '""" opens and closes a block; // sends a text that begins with a slash. '
    "Esc or Ctrl-C stops a reply; Ctrl-D leaves."
)

_NAMES, _COLUMN = 16, 50  # cells of the commands; of a column of groups, with the gap
_MOST = 3  # columns


def draw_help(width: int) -> RenderableType:
    """All groups, in as many columns as fit into `width` cells."""
    count = max(1, min(_MOST, (width + 2) // _COLUMN))
    names = list(GROUPS)
    share = -(-len(names) // count)
    columns = [names[start : start + share] for start in range(0, len(names), share)]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row(*(Group(*map(_group, column)) for column in columns))
    return table


def _group(name: str) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=_NAMES)
    for commands, meaning in GROUPS[name].items():
        table.add_row(Text(f" {commands}", no_wrap=True), Text(meaning))
    return Group(Text(name, style="bold"), table)


def draw_command(
    name: str, arguments: str, description: str, others: Sequence[str]
) -> RenderableType:
    """One command: how it is typed, `others` that are the same, and what it does."""
    aliases = f" (also {', '.join(f'/{one}' for one in others)})" if others else ""
    usage = Text.assemble((f"/{name} {arguments}".rstrip(), "bold"), aliases)
    return Group(usage, Text(description))
