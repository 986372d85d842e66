"""Tables and bars of the large panel, and the table of tokens. Pure, as the panel is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf

from rich.cells import cell_len
from rich.console import RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.snapshot import EDGES, Histogram, TurnShare
from sirchat.chat.standing import Standing
from sirchat.ui.cells import StyledRun, cut, line_of, quoted, significant
from sirchat.ui.compact_panel import share_glyph
from sirchat.ui.theme import ROLE_NAMES, Theme

_RANKING_WIDTH = 60
"""Cells from a token to its numbers are few, so that the eye finds across."""


def draw_tokens(rows: Sequence[TokenRow], theme: Theme) -> RenderableType:
    """Every column of the rows but the arrival key; attention where it is counted."""
    counted = any(row.attention is not None for row in rows)
    table = _table(theme)
    _columns(table, "position", "turn")
    table.add_column("role", no_wrap=True)
    table.add_column("token", no_wrap=True, overflow="ellipsis", min_width=8)
    _columns(table, "id", "surprisal", "score", *["attention"] * counted)
    table.add_column("flags", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(
            str(row.position),
            str(row.turn),
            Text(ROLE_NAMES.get(row.role, row.role), theme.role(row.role)),
            Text(quoted(row.text), theme.token(row)),
            str(row.id),
            nats(row.surprisal),
            score_text(row.score),
            *[significant(row.attention or 0.0)] * counted,
            " ".join(row.flags),
        )
    return table


def draw_standings(standings: Sequence[Standing], theme: Theme) -> RenderableType:
    """The score of each token, what explains it, and its rank among the held tokens."""
    factors = list(standings[0].factors) if standings else []
    table = _table(theme)
    _columns(table, "position", "turn")
    table.add_column("token", no_wrap=True, overflow="ellipsis", min_width=8)
    table.add_column("is", no_wrap=True)
    _columns(table, "surprisal", "faded to", *factors, "score", "rank", "needs")
    for one in standings:
        flags = [flag for flag in one.row.flags if flag in ("sink", "pinned")]
        table.add_row(
            str(one.row.position),
            str(one.row.turn),
            Text(quoted(one.row.text), theme.token(one.row)),
            ", ".join([one.state, *flags]),
            nats(one.row.surprisal),
            f"{one.decayed_to:.0%}",
            *(significant(one.factors[name]) for name in factors),
            score_text(one.row.score),
            "-" if one.rank is None else f"{one.rank:,} of {one.held:,}",
            score_text(one.threshold),
        )
    return table


def draw_recalled(rows: Sequence[TokenRow], scores: Mapping[int, float], theme: Theme) -> Table:
    """What came back for the last round, the best first: how well each token fitted."""
    table = _table(theme)
    _columns(table, "position", "turn")
    table.add_column("token", no_wrap=True, overflow="ellipsis", min_width=8)
    _columns(table, "surprisal", "fits")
    for row in sorted(rows, key=lambda row: -scores[row.position]):
        table.add_row(
            str(row.position),
            str(row.turn),
            Text(quoted(row.text), theme.token(row)),
            nats(row.surprisal),
            f"{scores[row.position]:.3g}",
        )
    return table


def draw_ranking(rows: Sequence[TokenRow], theme: Theme, width: int) -> RenderableType:
    """A few tokens in the given order: where they stand, and what holds them."""
    table = _table(theme)
    table.width = min(width, _RANKING_WIDTH)
    _columns(table, "position", "turn")
    table.add_column("token", no_wrap=True, overflow="ellipsis", ratio=1)
    _columns(table, "nats", "score")
    for row in rows:
        text = Text(quoted(row.text), theme.token(row))
        values = (
            str(row.position),
            str(row.turn),
            text,
            nats(row.surprisal),
            score_text(row.score),
        )
        table.add_row(*values)
    return table


def draw_turns(turns: Sequence[TurnShare], theme: Theme) -> RenderableType:
    """All turns: how much of each is held, and how surprising it was on average."""
    table = _table(theme)
    _columns(table, "turn")
    table.add_column("role", no_wrap=True)
    _columns(table, "tokens", "held", "share", "mean nats")
    for turn in turns:
        share = f"{turn.held / turn.tokens:.0%}" if turn.tokens else "-"
        table.add_row(
            str(turn.index),
            Text(ROLE_NAMES.get(turn.role, turn.role), theme.role(turn.role)),
            f"{turn.tokens:,}",
            f"{turn.held:,}",
            Text.assemble(f"{share} ", (share_glyph(turn), theme.role(turn.role))),
            nats(turn.surprisal),
            style=None if turn.held else theme.quiet,
        )
    return table


def draw_histogram(
    histogram: Histogram, threshold: float | None, theme: Theme, width: int
) -> list[Text]:
    """A row for each bin of surprisal: the held part of the bar heavy, the forgotten part light."""
    lines = [line_of([StyledRun(_bin("nats", "held", "forgotten"), theme.quiet)])]
    marks = [_stays(threshold, low, high) for low, high in pairwise(EDGES)]
    counts = list(zip(histogram.held, histogram.forgotten, strict=True))
    room = width - cell_len(lines[0].plain) - 2  # two for parts that are rounded up
    scale = min(
        (room - len(mark)) / max(1, sum(pair)) for mark, pair in zip(marks, counts, strict=True)
    )
    for (low, high), (held, forgotten), mark in zip(pairwise(EDGES), counts, marks, strict=True):
        name = f"{low:g}+" if high == inf else f"{low:g}–{high:g}"
        runs = [
            StyledRun(_bin(name, f"{held:,}", f"{forgotten:,}"), Style.null()),
            StyledRun("━" * _length(held * scale), theme.gauge),
            StyledRun("─" * _length(forgotten * scale), theme.rest),
            StyledRun(mark, theme.mark),
        ]
        lines.append(line_of(runs))
    return lines


def _bin(name: str, held: str, forgotten: str) -> str:
    return f"{name:>5}  {held:>6}  {forgotten:>9}  "


def nats(surprisal: float | None) -> str:
    """Surprisal with two decimals; `-` where there is none."""
    return "-" if surprisal is None else f"{surprisal:.2f}"


def score_text(score: float | None) -> str:
    """A score with as many digits as matter; `-` where the policy has none."""
    return "-" if score is None else significant(score)


def _stays(threshold: float | None, low: float, high: float) -> str:
    if threshold is None or not low <= threshold < high:
        return ""
    return f" ◂ {threshold:.2f} to stay"


def _length(cells: float) -> int:
    """Cells of a bar; something that is there at all shows."""
    return max(1, round(cells)) if cells > 0 else 0


def _table(theme: Theme) -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=theme.quiet)


def _columns(table: Table, *names: str) -> None:
    """Columns of numbers."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def heading(text: str, theme: Theme, width: int) -> Text:
    """A section's title."""
    return line_of([StyledRun(cut(text, width), theme.heading)])
