"""Draws the tables and bars of the large panel, and other tables of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table
from rich.text import Text

from sirchat.chat.events import RecalledTurn, TokenRow
from sirchat.chat.evicted_text import EvictedText
from sirchat.chat.panel_snapshot import EDGES, HeldShare, Histogram
from sirchat.chat.why import TokenRank
from sirchat.ui.cells import StyledRun, cut, line_of, quoted, significant
from sirchat.ui.compact_panel import share_glyph
from sirchat.ui.text import displayable_line
from sirchat.ui.theme import ROLE_NAMES, Theme

_RANKING_WIDTH = 60
"""Largest width of a table of ranked tokens, in columns of the terminal.

It is small, so that a token is near its numbers.
"""


def draw_tokens(rows: Sequence[TokenRow], theme: Theme, width: int | None = None) -> RenderableType:
    """Draw a table of tokens: id, surprisal, score; attention and flags if any token has them.

    If the flags don't fit into `width` cells, they go into a second table below.
    """
    flagged = [row for row in rows if row.flags]
    table = _token_table(rows, theme, has_flags=bool(flagged))
    if not flagged or width is None or _width(table) <= width:
        return table
    below = _table(theme)
    _columns(below, "position")
    below.add_column("token", no_wrap=True, overflow="ellipsis", min_width=8)
    below.add_column("flags", no_wrap=True, overflow="ellipsis")
    for row in flagged:
        token = Text(quoted(row.text), theme.token(row))
        below.add_row(str(row.position), token, " ".join(row.flags))
    return Group(_token_table(rows, theme, has_flags=False), below)


def _token_table(rows: Sequence[TokenRow], theme: Theme, *, has_flags: bool) -> Table:
    """Draw a table of tokens and their numbers, with a column of flags if `has_flags` is true."""
    tracked = any(row.attention is not None for row in rows)
    table = _table(theme)
    _columns(table, "position", "turn")
    table.add_column("role", no_wrap=True)
    table.add_column("token", no_wrap=True, overflow="ellipsis", min_width=8)
    _columns(table, "id", "surprisal", "score", *["attention"] * tracked)
    if has_flags:
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
            *[significant(row.attention or 0.0)] * tracked,
            *[" ".join(row.flags)] * has_flags,
        )
    for column in table.columns:  # where the window is narrow, words are cut, and no number
        if column.justify == "right":
            column.min_width = max(len(str(cell)) for cell in [column.header, *column.cells])
    return table


def draw_token_ranks(token_ranks: Sequence[TokenRank], theme: Theme, width: int) -> RenderableType:
    """Draw a table of tokens: the score of each, the factors of the score, its rank in the cache.

    Columns that don't fit into `width` cells go into further tables below.
    """
    factors = list(token_ranks[0].factors) if token_ranks else []
    numbers = {
        "surprisal": [nats(one.row.surprisal) for one in token_ranks],
        "faded to": [f"{one.decayed_to:.0%}" for one in token_ranks],
        **{name: [significant(one.factors[name]) for one in token_ranks] for name in factors},
        "score": [score_text(one.row.score) for one in token_ranks],
        "rank": ["-" if x.rank is None else f"{x.rank:,} of {x.held:,}" for x in token_ranks],
    }
    if any(one.threshold is not None for one in token_ranks):
        numbers["needs"] = [score_text(one.threshold) for one in token_ranks]
    tables: list[Table] = []
    shown: list[str] = []
    for name in numbers:  # as many columns as fit, then another table below
        table = _rank_table(
            token_ranks, theme, {key: numbers[key] for key in [*shown, name]}, tables
        )
        if shown and _width(table) > width:
            tables.append(_rank_table(token_ranks, theme, {k: numbers[k] for k in shown}, tables))
            shown = []
        shown.append(name)
    tables.append(_rank_table(token_ranks, theme, {key: numbers[key] for key in shown}, tables))
    return Group(*tables)


def _rank_table(
    token_ranks: Sequence[TokenRank],
    theme: Theme,
    numbers: Mapping[str, Sequence[str]],
    above: Sequence[Table],
) -> Table:
    """Draw a table of ranked tokens.

    `numbers` has more columns: for each title, a text for each token. The table also has
    the turn and the state of each token, unless there already is a table `above`.
    """
    table, short = _table(theme), bool(above)
    _columns(table, "position", *["turn"] * (not short))
    table.add_column("token", no_wrap=True, overflow="ellipsis", min_width=8)
    if not short:
        table.add_column("is", no_wrap=True)
    _columns(table, *numbers)
    for at, one in enumerate(token_ranks):
        flags = [flag for flag in one.row.flags if flag in ("sink", "pinned")]
        token = Text(quoted(one.row.text), theme.token(one.row))
        place = [str(one.row.position), *[str(one.row.turn)] * (not short)]
        state = [", ".join([one.state, *flags])] * (not short)
        table.add_row(*place, token, *state, *(values[at] for values in numbers.values()))
    return table


def _width(table: Table) -> int:
    """Width of a table in cells, if nothing is cut."""
    console = Console(width=1000)
    return Measurement.get(console, console.options, table).maximum


def draw_recalled(rows: Sequence[TokenRow], scores: Mapping[int, float], theme: Theme) -> Table:
    """Draw a table of recalled tokens (restored from the archive), the best recall scores first.

    `scores` has the recall score by stream position: how well the token fits the user's message.
    """
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


def draw_recalled_turns(
    rows: Sequence[TokenRow], turns: Sequence[RecalledTurn], theme: Theme
) -> Table:
    """Draw a table of the turns of which tokens were recalled.

    Each row has the turn's index, the number of its recalled tokens, the words that the turn shares
    with the user's message, and the recalled text, which is taken from `rows`.
    """
    table = _table(theme)
    _columns(table, "turn", "tokens")
    table.add_column("by the words", no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column("recalled text", no_wrap=True, overflow="ellipsis", ratio=1)
    for one in turns:
        text = "".join(row.text for row in rows if row.turn == one.turn)
        words = displayable_line(", ".join(one.words))
        table.add_row(str(one.turn), f"{one.tokens:,}", words, displayable_line(text))
    return table


def draw_ranking(
    rows: Sequence[TokenRow], scores: Mapping[int, str], name: str, theme: Theme, width: int
) -> RenderableType:
    """Draw a table of tokens in the given order: position, turn, text, surprisal, score or rank.

    `scores` has the text for the last column, by position; `name` is the title of that column. If
    `scores` is empty, there is no such column.
    """
    table = _table(theme)
    table.width = min(width, _RANKING_WIDTH)
    _columns(table, "position", "turn")
    table.add_column("token", no_wrap=True, overflow="ellipsis", ratio=1)
    _columns(table, "surprise", *[name] * bool(scores))
    for row in rows:
        text = Text(quoted(row.text), theme.token(row))
        known = [scores.get(row.position, "-")] if scores else []
        table.add_row(str(row.position), str(row.turn), text, nats(row.surprisal), *known)
    return table


def draw_turns(turns: Sequence[HeldShare], theme: Theme) -> RenderableType:
    """Draw a table of all turns: number of tokens, tokens in the cache, mean surprisal in nats."""
    table = _table(theme)
    _columns(table, "turn")
    table.add_column("role", no_wrap=True)
    _columns(table, "tokens", "held", "share", "mean surprise")
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


def draw_evicted(turns: Sequence[EvictedText], theme: Theme, width: int) -> RenderableType:
    """Draw a table with a row per turn: its number of evicted tokens, and its evicted words.

    The row has as many words as fit into the table's `width` in cells.
    """
    table = _table(theme)
    table.width = width
    _columns(table, "turn")
    table.add_column("role", no_wrap=True)
    _columns(table, "evicted")
    table.add_column("words that were evicted", no_wrap=True, overflow="ellipsis", ratio=1)
    for turn in turns:
        words = ", ".join(displayable_line(word) for word in turn.words)
        table.add_row(
            str(turn.index),
            Text(ROLE_NAMES.get(turn.role, turn.role), theme.role(turn.role)),
            f"{turn.tokens - turn.held:,} of {turn.tokens:,}",
            Text(words),
        )
    return table


def draw_histogram(
    histogram: Histogram, threshold: float | None, theme: Theme, width: int
) -> list[Text]:
    """Lines that draw a histogram of surprisal, with a bar for each bin.

    The thick part of a bar counts tokens in the cache, the thin part evicted tokens. A mark shows
    the `threshold`, if it is not None: the score, in nats, from which on tokens are held.
    """
    lines = [line_of([StyledRun(_bin("", "held", "evicted"), theme.quiet)])]
    marks = [_threshold_mark(threshold, low, high) for low, high in pairwise(EDGES)]
    counts = list(zip(histogram.held, histogram.evicted, strict=True))
    room = width - cell_len(lines[0].plain) - 2  # two cells for rounding up
    scale = min(
        (room - len(mark)) / max(1, sum(pair)) for mark, pair in zip(marks, counts, strict=True)
    )
    for (low, high), (held, evicted), mark in zip(pairwise(EDGES), counts, marks, strict=True):
        name = f"{low:g}+" if high == inf else f"{low:g}–{high:g}"
        runs = [
            StyledRun(_bin(name, f"{held:,}", f"{evicted:,}"), Style.null()),
            StyledRun("━" * _length(held * scale), theme.gauge),
            StyledRun("─" * _length(evicted * scale), theme.rest),
            StyledRun(mark, theme.mark),
        ]
        lines.append(line_of(runs))
    return lines


def _bin(name: str, held: str, evicted: str) -> str:
    return f"{name:>5}  {held:>6}  {evicted:>9}  "


def nats(surprisal: float | None) -> str:
    """A surprisal in nats as text with two decimals; `-` for None."""
    return "-" if surprisal is None else f"{surprisal:.2f}"


def score_text(score: float | None) -> str:
    """A score as text with three significant digits; `-` for None."""
    return "-" if score is None else significant(score)


def _threshold_mark(threshold: float | None, low: float, high: float) -> str:
    if threshold is None or not low <= threshold < high:
        return ""
    return f" ◂ held from {threshold:.2f} on"


def _length(cells: float) -> int:
    """Length of a bar in whole cells: `cells` rounded, but at least 1, unless `cells` is 0."""
    return max(1, round(cells)) if cells > 0 else 0


def _table(theme: Theme) -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=theme.quiet)


def _columns(table: Table, *names: str) -> None:
    """Add a column of numbers, aligned at the right, to `table` for each title in `names`."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))


def heading(text: str, theme: Theme, width: int) -> Text:
    """The styled title of a panel's section, cut to `width` cells."""
    return line_of([StyledRun(cut(text, width), theme.heading)])
