"""The saved chats, as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.saved.session_list import SavedSession
from sirchat.ui.text import displayable_line


def draw_sessions(sessions: Iterable[SavedSession], present: str = "") -> RenderableType:
    """One row per session, in the given order, with a star at the chat whose id is `present`."""
    rows = [_cells(one, one.id == present) for one in sessions]
    table = Table(box=None)
    for number, title in enumerate(("id", "name", "changed", "model", "turns", "begins")):
        # In a narrow terminal only the model and the text are cut; an id is there to be copied.
        widest = max((cell_len(row[number]) for row in rows), default=0)
        least = 0 if title in ("model", "begins") else max(widest, len(title))
        table.add_column(title, no_wrap=True, min_width=least)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _cells(one: SavedSession, is_present: bool) -> list[str]:
    whose = "(this chat) " if is_present else "(open) " if one.in_use else ""
    changed, begins = f"{one.updated:%Y-%m-%d %H:%M}", f"{whose}{one.first}"
    ident = f"{one.id} *" if is_present else one.id
    cells = (ident, one.name, changed, one.model, str(one.turns), begins)
    return [displayable_line(cell) for cell in cells]
