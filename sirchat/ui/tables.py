"""Draws tables of tokens and turns, and the histogram of the large panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Final

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.evicted_text import EvictedText
from sirchat.chat.panel_snapshot import EDGES, HeldShare, Histogram
from sirchat.chat.why import TokenRank
from sirchat.recall import RecalledTurn
from sirchat.ui.cells import StyledRun, cut, line_of, quoted
from sirchat.ui.text import displayable_line
from sirchat.ui.theme import ROLE_NAMES, Theme

NOTHING_HELD: Final = "·"  # the sign of a turn of which no word is held

_SHARES: Final = "▁▂▃▄▅▆▇"
_RANKING_WIDTH = 60  # most columns of a ranking, so that a token is near its numbers


def draw_tokens(rows: Sequence[TokenRow], theme: Theme, width: int | None = None) -> RenderableType:
    """Draw a table of tokens: id, surprisal, score; attention and flags if any token has them.

    If the flags don't fit into `width` cells, they go into a second table below.
    """
    flagged = [row for row in rows if row.flags]
    table = _token_table(rows, theme, has_flags=bool(flagged))
    if not flagged or width is None or _width(table) <= width:
        return table
    below = _table(theme, "position", token=8)
    below.add_column("flags", no_wrap=True, overflow="ellipsis")
    for row in flagged:
        below.add_row(str(row.position), _token(row, theme), " ".join(row.flags))
    return Group(_token_table(rows, theme, has_flags=False), below)


def draw_token_ranks(token_ranks: Sequence[TokenRank], theme: Theme, width: int) -> RenderableType:
    """Draw a table of tokens: the score of each, the factors of the score, its rank in the cache.

    Columns that don't fit into `width` cells go into further tables below.
    """
    factors = list(token_ranks[0].factors) if token_ranks else []
    numbers = {
        "surprisal": [nats(rank.row.surprisal) for rank in token_ranks],
        "faded to": [f"{rank.decayed_to:.0%}" for rank in token_ranks],
        **{name: [significant(rank.factors[name]) for rank in token_ranks] for name in factors},
        "score": [score_text(rank.row.score) for rank in token_ranks],
        "rank": ["-" if x.rank is None else f"{x.rank:,} of {x.held:,}" for x in token_ranks],
    }
    if any(rank.threshold is not None for rank in token_ranks):
        numbers["needs"] = [score_text(rank.threshold) for rank in token_ranks]
    tables: list[Table] = []
    columns: dict[str, Sequence[str]] = {}
    for name, texts in numbers.items():
        wider = columns | {name: texts}
        is_first = not tables
        if columns and _width(_rank_table(token_ranks, theme, wider, is_first=is_first)) > width:
            tables.append(_rank_table(token_ranks, theme, columns, is_first=is_first))
            wider = {name: texts}
        columns = wider
    tables.append(_rank_table(token_ranks, theme, columns, is_first=not tables))
    return Group(*tables)


def draw_recalled(rows: Sequence[TokenRow], scores: Mapping[int, float], theme: Theme) -> Table:
    """Draw a table of recalled tokens, those that fit the user's message best first.

    `scores` says how well they fit, by stream position.
    """
    table = _table(theme, "position", "turn", token=8)
    _add_numbers(table, "surprisal", "fits")
    for row in sorted(rows, key=lambda row: -scores[row.position]):
        numbers = nats(row.surprisal), f"{scores[row.position]:.3g}"
        table.add_row(str(row.position), str(row.turn), _token(row, theme), *numbers)
    return table


def draw_recalled_turns(
    rows: Sequence[TokenRow], turns: Sequence[RecalledTurn], theme: Theme
) -> Table:
    """Draw a table of the turns with recalled tokens, the words that found them, and the text."""
    table = _table(theme, "turn", "tokens")
    table.add_column("by the words", no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column("recalled text", no_wrap=True, overflow="ellipsis", ratio=1)
    for turn in turns:
        text = "".join(row.text for row in rows if row.turn == turn.turn)
        words = displayable_line(", ".join(turn.words))
        table.add_row(str(turn.turn), f"{turn.tokens:,}", words, displayable_line(text))
    return table


def draw_ranking(
    rows: Sequence[TokenRow], scores: Mapping[int, str], name: str, theme: Theme, width: int
) -> RenderableType:
    """Draw a table of tokens in the given order; `scores`, by position, is the column `name`.

    If `scores` is empty, there is no such column.
    """
    table = _table(theme, "position", "turn")
    table.width = min(width, _RANKING_WIDTH)
    table.add_column("token", no_wrap=True, overflow="ellipsis", ratio=1)
    _add_numbers(table, "surprise", *[name] * bool(scores))
    for row in rows:
        known = [scores.get(row.position, "-")] if scores else []
        place = str(row.position), str(row.turn)
        table.add_row(*place, _token(row, theme), nats(row.surprisal), *known)
    return table


def draw_turns(turns: Sequence[HeldShare], theme: Theme) -> RenderableType:
    """Draw a table of all turns: number of tokens, tokens in the cache, mean surprisal in nats."""
    table = _table(theme, "turn")
    table.add_column("role", no_wrap=True)
    _add_numbers(table, "tokens", "held", "share", "mean surprise")
    for turn in turns:
        share = f"{turn.held / turn.tokens:.0%}" if turn.tokens else "-"
        table.add_row(
            str(turn.index),
            _role(turn.role, theme),
            f"{turn.tokens:,}",
            f"{turn.held:,}",
            Text.assemble(f"{share} ", (share_glyph(turn), theme.role(turn.role))),
            nats(turn.surprisal),
            style=None if turn.held else theme.quiet,
        )
    return table


def draw_evicted(turns: Sequence[EvictedText], theme: Theme, width: int) -> RenderableType:
    """Draw a table with a row per turn: its number of evicted tokens, and the words that fit."""
    table = _table(theme, "turn")
    table.width = width
    table.add_column("role", no_wrap=True)
    _add_numbers(table, "evicted")
    table.add_column("words that were evicted", no_wrap=True, overflow="ellipsis", ratio=1)
    for turn in turns:
        words = Text(", ".join(displayable_line(word) for word in turn.words))
        count = f"{turn.tokens - turn.held:,} of {turn.tokens:,}"
        table.add_row(str(turn.index), _role(turn.role, theme), count, words)
    return table


def draw_histogram(
    histogram: Histogram, threshold: float | None, theme: Theme, width: int
) -> list[Text]:
    """A bar for each bin of surprisal: thick for held tokens, then thin for evicted ones.

    A mark shows the `threshold`: the score, in nats, from which on tokens are held.
    """
    lines = [line_of([StyledRun(_bin("", "held", "evicted"), theme.quiet)])]
    marks = [
        f" ◂ held from {threshold:.2f} on"
        if threshold is not None and low <= threshold < high
        else ""
        for low, high in pairwise(EDGES)
    ]
    counts = list(zip(histogram.held, histogram.evicted, strict=True))
    room = width - cell_len(lines[0].plain) - 2  # two cells for rounding up
    scale = min(
        (room - len(mark)) / max(1, sum(pair)) for mark, pair in zip(marks, counts, strict=True)
    )
    for (low, high), (held, evicted), mark in zip(pairwise(EDGES), counts, marks, strict=True):
        runs = [
            StyledRun(_bin(bin_name(low, high), f"{held:,}", f"{evicted:,}"), Style.null()),
            StyledRun("━" * _length(held * scale), theme.gauge),
            StyledRun("─" * _length(evicted * scale), theme.rest),
            StyledRun(mark, theme.mark),
        ]
        lines.append(line_of(runs))
    return lines


def share_glyph(turn: HeldShare) -> str:
    """The character that shows how large a share of a turn's tokens is held."""
    if turn.held >= turn.tokens > 0:
        return "█"
    if not turn.held_said:
        return NOTHING_HELD
    return _SHARES[turn.held * len(_SHARES) // turn.tokens]


def heading(text: str, theme: Theme, width: int) -> Text:
    """The styled title of a panel's section, cut to `width` cells."""
    return line_of([StyledRun(cut(text, width), theme.heading)])


def bin_name(low: float, high: float) -> str:
    """The name of a range of surprisal, in nats, such as `2–4` or `7+`."""
    return f"{low:g}+" if high == inf else f"{low:g}–{high:g}"


def nats(surprisal: float | None) -> str:
    """A surprisal in nats as text with two decimals; `-` for None."""
    return "-" if surprisal is None else f"{surprisal:.2f}"


def score_text(score: float | None) -> str:
    """A score as text with three significant digits; `-` for None."""
    return "-" if score is None else significant(score)


def significant(number: float) -> str:
    """A number as text with three significant digits, such as 0.0123, 12,300 or 1.23e+09."""
    text = f"{number:#.3g}".removesuffix(".")
    return f"{float(text):,.0f}" if "e+" in text and abs(number) < 1e9 else text


def _table(theme: Theme, *numbers: str, token: int = 0) -> Table:
    """A table with columns of numbers and, if `token` is not 0, one of tokens, at least as wide."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=theme.quiet)
    _add_numbers(table, *numbers)
    if token:
        table.add_column("token", no_wrap=True, overflow="ellipsis", min_width=token)
    return table


def _add_numbers(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))


def _token(row: TokenRow, theme: Theme) -> Text:
    return Text(quoted(row.text), theme.token(row))


def _role(role: str, theme: Theme) -> Text:
    return Text(ROLE_NAMES.get(role, role), theme.role(role))


def _width(table: Table) -> int:
    """Width of a table in cells, if nothing is cut."""
    console = Console(width=1000)
    return Measurement.get(console, console.options, table).maximum


def _token_table(rows: Sequence[TokenRow], theme: Theme, *, has_flags: bool) -> Table:
    tracked = any(row.attention is not None for row in rows)
    table = _table(theme, "position", "turn")
    table.add_column("role", no_wrap=True)
    table.add_column("token", no_wrap=True, overflow="ellipsis", min_width=8)
    _add_numbers(table, "id", "surprisal", "score", *["attention"] * tracked)
    if has_flags:
        table.add_column("flags", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(
            str(row.position),
            str(row.turn),
            _role(row.role, theme),
            _token(row, theme),
            str(row.id),
            nats(row.surprisal),
            score_text(row.score),
            *[significant(row.attention or 0.0)] * tracked,
            *[" ".join(row.flags)] * has_flags,
        )
    for column in table.columns:  # where the window is narrow, words are cut, and no number
        if column.justify == "right":
            column.min_width = max(len(str(cell)) for cell in [column.header, *column.cells])
    return table


def _rank_table(
    token_ranks: Sequence[TokenRank],
    theme: Theme,
    columns: Mapping[str, Sequence[str]],
    *,
    is_first: bool,
) -> Table:
    """A table of ranked tokens with `columns`; the first table has their turns and states, too."""
    table = _table(theme, "position", *["turn"] * is_first, token=8)
    if is_first:
        table.add_column("is", no_wrap=True)
    _add_numbers(table, *columns)
    for at, rank in enumerate(token_ranks):
        row = rank.row
        flags = [flag for flag in row.flags if flag in ("sink", "pinned")]
        place = [str(row.position), *[str(row.turn)] * is_first]
        state = [", ".join([rank.state, *flags])] * is_first
        numbers = (texts[at] for texts in columns.values())
        table.add_row(*place, _token(row, theme), *state, *numbers)
    return table


def _bin(name: str, held: str, evicted: str) -> str:
    return f"{name:>5}  {held:>6}  {evicted:>9}  "


def _length(cells: float) -> int:
    """Length of a bar in whole cells: rounded, but at least 1, unless `cells` is 0."""
    return max(1, round(cells)) if cells > 0 else 0
