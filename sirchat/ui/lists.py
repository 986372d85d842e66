"""Saved chats, models and settings as tables; nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.config.profile import FIXED, Profile
from sirchat.config.values import as_typed
from sirchat.models.listing import FoundModel
from sirchat.saved.session_list import SavedSession
from sirchat.ui.text import displayable_line, shorten
from sirchat.ui.theme import Theme


def draw_settings(profile: Profile, theme: Theme) -> RenderableType:
    """A table of all settings; star: the value is not the default; dot: the setting is fixed."""
    table = Table.grid(padding=(0, 2))
    for name, field in Profile.model_fields.items():
        value = getattr(profile, name)
        mark = "·" if name in FIXED else " "
        mark = "*" if value != field.default else mark
        shown = shorten(as_typed(value), 60)
        cells = ((mark, ""), (name, "bold"), (shown, ""), (field.description or "", theme.quiet))
        table.add_row(*(Text(displayable_line(text), style) for text, style in cells))
    legend = "*: not the default; ·: fixed for this conversation; /set NAME VALUE changes a setting"
    table.add_row("", "", "", Text(legend, theme.quiet))
    return table


def draw_sessions(sessions: Iterable[SavedSession], present: str = "") -> RenderableType:
    """A table with a row per saved session, in the given order; a star marks the id `present`."""
    rows = [_session_cells(one, one.id == present) for one in sessions]
    table = Table(box=None)
    for number, title in enumerate(("id", "name", "changed", "model", "turns", "begins")):
        # In a narrow terminal only the model and the text are cut; an id is there to be copied.
        widest = max((cell_len(row[number]) for row in rows), default=0)
        least = 0 if title in ("model", "begins") else max(widest, len(title))
        table.add_column(title, no_wrap=True, min_width=least)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _session_cells(one: SavedSession, is_present: bool) -> list[str]:
    whose = "(this chat) " if is_present else "(open) " if one.in_use else ""
    changed, begins = f"{one.updated:%Y-%m-%d %H:%M}", f"{whose}{one.first}"
    ident = f"{one.id} *" if is_present else one.id
    cells = (ident, one.name, changed, one.model, str(one.turns), begins)
    return [displayable_line(cell) for cell in cells]


_TITLES = ("model", "kind", "on disk", "context", "budget", "KV cache")


_GAP = "  "


@dataclass(frozen=True)
class ListedModel:
    """A model on this machine, and the budget (tokens) and KV cache (bytes) of a chat with it."""

    found: FoundModel
    budget: int | None
    cache: int | None


def print_models(models: Iterable[ListedModel], console: Console) -> None:
    """Print the models that can be used, then the others, each with its problem."""
    models = list(models)
    rows = [_model_cells(one) for one in models if not one.found.problem]
    wide = [max(cell_len(row[n]) for row in [_TITLES, *rows]) for n in range(len(_TITLES))]
    fits = sum(wide) + len(_GAP) * (len(wide) - 1) <= console.width
    if fits:
        for number, row in enumerate([_TITLES, *rows]):
            _print(console, _aligned(row, wide), "bold" if number == 0 else "")
    else:
        for name, kind, size, context, budget, cache in rows:
            _print(console, name, "bold")
            _print(console, f"  {kind}, {size}, context {context}")
            _print(console, f"  KV cache {cache} at budget {budget}")
    for one in models:
        if one.found.problem:
            line = f"{one.found.name}: {one.found.problem}"
            _print(console, displayable_line(line), "dim")


def in_bytes(size: int | None) -> str:
    """A size in bytes as text with a unit, such as `98 MB`; `?` for None."""
    if size is None:
        return "?"
    for unit, of in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= 0.995 * of:
            number = size / of
            return f"{number:.1f} {unit}" if number < 9.95 else f"{number:,.0f} {unit}"
    return f"{size} B"


def _model_cells(one: ListedModel) -> list[str]:
    shape = one.found.shape
    cells = (
        one.found.name,
        shape.kind if shape is not None else "?",
        in_bytes(one.found.size),
        _count(shape.context_length if shape is not None else None),
        _count(one.budget),
        in_bytes(one.cache),
    )
    return [displayable_line(cell) for cell in cells]


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _aligned(row: Sequence[str], wide: Sequence[int]) -> str:
    """A line of the table: names and kinds are aligned at the left, numbers at the right."""
    cells = []
    for number, (cell, width) in enumerate(zip(row, wide, strict=True)):
        room = " " * (width - cell_len(cell))
        cells.append(f"{cell}{room}" if number < 2 else f"{room}{cell}")
    return _GAP.join(cells).rstrip()


def _print(console: Console, line: str, style: str = "") -> None:
    # The terminal breaks a long name itself, so that it can be copied as a whole.
    console.print(Text(line, style=style), soft_wrap=True)
