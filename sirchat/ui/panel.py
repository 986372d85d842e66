"""The panel: a snapshot of the memory, drawn. Pure: it never touches the engine.

High surprisal is shown by colour and by weight or underline, so that it reads without colour too.
"""

from __future__ import annotations

from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sirchat.events import TokenRow
from sirchat.snapshot import Snapshot
from sirchat.ui.text import displayable

_BUCKETS: tuple[tuple[float, str], ...] = (
    (0.5, "dim"),
    (2.0, ""),
    (4.0, "cyan"),
    (7.0, "bold yellow"),
    (float("inf"), "bold underline red"),
)
"""Surprisal in nats up to which a style is used."""

_MAX_TEXT = 1200
"""Characters of held text that the panel shows; the middle is left out of longer memories."""


def draw_panel(snapshot: Snapshot) -> RenderableType:
    """Gauge, counts, and the held text in stream order, coloured by surprisal."""
    forgotten = snapshot.seen - snapshot.resident
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True)
    counts = f"{snapshot.resident:,}/{snapshot.budget:,} held  {snapshot.seen:,} seen  "
    counts += f"{forgotten:,} forgotten"
    total = max(1, snapshot.budget)
    head.add_row(ProgressBar(total=total, completed=snapshot.resident), Text(counts))
    title = f"memory: {snapshot.policy}, decay {snapshot.decay:g}, {snapshot.model}"
    body = Group(head, held_text(snapshot.rows), _legend())
    return Panel(body, title=Text(displayable(title)), title_align="left", border_style="dim")


def held_text(rows: tuple[TokenRow, ...]) -> Text:
    """The held tokens; a gap of n forgotten tokens shows as ⋯n."""
    text = Text()
    previous = -1
    for row in rows:
        if row.position > previous + 1:
            text.append(f"⋯{row.position - previous - 1}", style="dim italic")
        shown = displayable(row.text).replace("\n", "⏎").replace("\t", " ")
        text.append(shown, style=_style(row))
        previous = row.position
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    left_out = f" … {len(text) - 2 * half:,} characters of held text … "
    return Text.assemble(text[:half], (left_out, "dim italic"), text[-half:])


def _style(row: TokenRow) -> str:
    if row.role == "template":
        return "dim italic"
    return next(style for limit, style in _BUCKETS if (row.surprisal or 0.0) < limit)


def _legend() -> Text:
    legend = Text("surprisal in nats: ", style="dim")
    limits = [0.0, *(limit for limit, _ in _BUCKETS)]
    for (low, high), (_, style) in zip(pairwise(limits), _BUCKETS, strict=True):
        name = f"{low:g}+" if high == float("inf") else f"{low:g}-{high:g}"
        legend.append(name, style=style)
        legend.append("  ")
    legend.append("template", style="dim italic")
    legend.append("  ⋯n forgotten", style="dim italic")
    return legend
