"""The current settings, as a table."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.config.profile import FIXED, Profile
from sirchat.config.values import as_typed
from sirchat.ui.text import displayable_line, shorten
from sirchat.ui.theme import Theme


def draw_settings(profile: Profile, theme: Theme) -> RenderableType:
    """Name, value and meaning; a star marks a changed default, a dot a setting that is fixed."""
    table = Table.grid(padding=(0, 2))
    for name, field in Profile.model_fields.items():
        value = getattr(profile, name)
        mark = "·" if name in FIXED else " "
        mark = "*" if value != field.default else mark
        shown = shorten(as_typed(value), 60)
        cells = ((mark, ""), (name, "bold"), (shown, ""), (field.description or "", theme.quiet))
        table.add_row(*(Text(displayable_line(text), style) for text, style in cells))
    legend = "* is not as built in; · holds for the whole conversation; /set NAME VALUE changes"
    table.add_row("", "", "", Text(legend, theme.quiet))
    return table
