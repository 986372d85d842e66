"""The saved chats, as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.saved.session_list import SavedSession
from sirchat.ui.text import displayable_line


def draw_sessions(sessions: Iterable[SavedSession], present: str = "") -> RenderableType:
    """One row per session, in the given order; `present` is the id of the current chat."""
    table = Table(box=None)
    for title in ("id", "name", "changed", "model", "turns", "begins"):
        # Only the last column is cut in a narrow terminal; an id is there to be copied.
        is_last = title == "begins"
        table.add_column(title, no_wrap=True, overflow="ellipsis" if is_last else "fold")
    for one in sessions:
        whose = "(this chat) " if one.id == present else "(open) " if one.in_use else ""
        changed, begins = f"{one.updated:%Y-%m-%d %H:%M}", f"{whose}{one.first}"
        cells = (one.id, one.name, changed, one.model, str(one.turns), begins)
        table.add_row(*(Text(displayable_line(cell)) for cell in cells))
    return table
