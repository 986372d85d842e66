"""Draws the large panel, which shows every token in the cache, from a snapshot of the cache.

The functions return objects that the library rich prints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import inf

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.panel_snapshot import Snapshot
from sirchat.ui.cells import StyledRun, cut, lay_out, line_of, shown
from sirchat.ui.compact_panel import gap, gauge, headline
from sirchat.ui.tables import draw_histogram, draw_ranking, draw_turns, heading, score_text
from sirchat.ui.theme import LIMITS, ROLE_NAMES, Theme

_BESIDE = 110
"""Least width, in columns, at which two sections are drawn side by side."""

_RANKED = 10
"""Number of tokens in each of the two rankings: highest scores, and evicted next."""

_MARGIN = 13
"""Width, in cells, of the column with a turn's number and role."""

_SINK, _PIN, _RECALLED = ("⟨", "⟩"), ("⟦", "⟧"), ("⟪", "⟫")


def draw_panel(snapshot: Snapshot, theme: Theme, width: int) -> RenderableType:
    """Draw the large panel, a box `width` cells wide that shows what the cache holds.

    Its parts are: how full the cache is, the text of all tokens in the cache, rankings of tokens, a
    histogram of surprisal, and a table of all turns.
    """
    inner = width - 4
    sections = [
        gauge(snapshot, theme, inner),
        *_recalled(snapshot, theme, inner),
        *_legend(theme, inner, recalled=snapshot.recalled > 0),
        Text(),
        *_held_text(snapshot, theme, inner),
        Text(),
        _rankings(snapshot, theme, inner),
        Text(),
        _statistics(snapshot, theme, inner),
    ]
    return Panel(
        Group(*sections),
        title=line_of([StyledRun(headline(snapshot), theme.heading)]),
        title_align="left",
        border_style=theme.border,
        width=width,
    )


def _held_text(snapshot: Snapshot, theme: Theme, width: int) -> list[Text]:
    """Lines with the text of all tokens in the cache: one block for each turn that has some."""
    lines: list[Text] = []
    roles = {turn.index: turn.role for turn in snapshot.turns}
    gaps = _gaps(snapshot)
    rows = list(zip(snapshot.rows, gaps[:-1], strict=True))
    blocks = [(turn, list(block)) for turn, block in groupby(rows, key=lambda row: row[0].turn)]
    for number, (turn, block) in enumerate(blocks):
        runs = list(_block(block, theme))
        if number == len(blocks) - 1:
            runs += gap(gaps[-1], 0, "", theme)
        label = _label(turn, roles.get(turn, ""), theme)
        lines += _beside(label, lay_out(runs, width - _MARGIN))
    if not blocks:
        runs = [StyledRun("nothing held", theme.quiet), *gap(gaps[-1], 0, "", theme)]
        return [line_of(runs)]
    return lines


def _gaps(snapshot: Snapshot) -> list[int]:
    """For each token in the cache, the number of evicted tokens between it and the one before.

    At the end is one number more: that of the evicted tokens after the last token in the cache.
    """
    pairs = [(-1, -1)]  # position and slot
    pairs += zip((row.position for row in snapshot.rows), snapshot.slots, strict=True)
    pairs.append((snapshot.seen, snapshot.in_all_layers))
    return [(b - a) - (slot_b - slot_a) for (a, slot_a), (b, slot_b) in pairwise(pairs)]


def _block(rows: Sequence[tuple[TokenRow, int]], theme: Theme) -> Iterator[StyledRun]:
    """Yield the styled text of one turn's tokens in the cache, with marks for missing tokens.

    Brackets stand round sinks (first tokens, which always stay), pinned tokens and recalled tokens.
    `rows` has pairs: a token, and the number of evicted tokens before it.
    """
    opened: tuple[str, str] | None = None
    for row, evicted in rows:
        brackets = _brackets(row)
        if opened and (brackets != opened or evicted):
            yield StyledRun(opened[1], theme.mark)
            opened = None
        text = shown(row.text)
        yield from gap(evicted, 0, text, theme)
        if brackets and not opened:
            yield StyledRun(brackets[0], theme.mark)
        opened = brackets
        yield StyledRun(text, theme.token(row))
    if opened:
        yield StyledRun(opened[1], theme.mark)


def _brackets(row: TokenRow) -> tuple[str, str] | None:
    if "sink" in row.flags:
        return _SINK
    if "pinned" in row.flags:
        return _PIN
    return _RECALLED if "recalled" in row.flags else None


def _label(turn: int, role: str, theme: Theme) -> Text:
    number, name = f"{turn:>4} ", cut(shown(ROLE_NAMES.get(role, role)), _MARGIN - 6)
    label = line_of([StyledRun(cut(number, 6), theme.quiet), StyledRun(name, theme.role(role))])
    label.pad_right(_MARGIN - label.cell_len)
    return label


def _beside(label: Text, lines: Sequence[Text]) -> list[Text]:
    """Put `label` before the first of `lines`, and as many blanks before each other line."""
    blank = Text(" " * label.cell_len, no_wrap=True, overflow="ignore")
    return [
        (blank if number else label).copy().append_text(line) for number, line in enumerate(lines)
    ]


def _rankings(snapshot: Snapshot, theme: Theme, width: int) -> RenderableType:
    """Draw two tables: the tokens in the cache with the highest scores, and those evicted next."""
    leaving = set(snapshot.evicted_next)
    strongest = sorted(snapshot.rows, key=lambda row: -row.shown_rank)[:_RANKED]
    weakest = sorted(
        (row for row in snapshot.rows if row.position in leaving), key=lambda row: row.shown_rank
    )[:_RANKED]
    name, scores = _scores(snapshot)
    half = _half(width)
    tables = [draw_ranking(rows, scores, name, theme, half) for rows in (strongest, weakest)]
    if not weakest:
        free = snapshot.budget - snapshot.resident
        tables[1] = Text(f"nothing: there is room for {free:,} tokens", theme.quiet)
    return _pair(
        Group(heading(_ranked_by(snapshot), theme, half), tables[0]),
        Group(heading("evicted next", theme, half), tables[1]),
        width,
    )


def _scores(snapshot: Snapshot) -> tuple[str, dict[int, str]]:
    """The title of the rankings' last column, and the texts of this column by stream position.

    The text is the token's score, if the policy's scores have a unit. If not, it is the token's
    rank, because scores without a unit may differ by powers of ten. If no token has a score, there
    are no texts.
    """
    known = [(row.position, row.score) for row in snapshot.rows if row.score is not None]
    if snapshot.unit:
        return "score", {position: score_text(score) for position, score in known}
    ascending = sorted(score for _, score in known)
    count = len(ascending)
    ranks = {position: count - bisect_right(ascending, score) + 1 for position, score in known}
    return "rank", {position: f"{rank:,} of {count:,}" for position, rank in ranks.items()}


def _ranked_by(snapshot: Snapshot) -> str:
    """The heading of the first ranking, which is by score or, if no token has one, by surprisal."""
    has_scores = any(row.score is not None for row in snapshot.rows)
    return "evicted last" if has_scores or not snapshot.rows else "most surprising"


def _statistics(snapshot: Snapshot, theme: Theme, width: int) -> RenderableType:
    """Draw the histogram of surprisal of held and evicted tokens, and the table of all turns."""
    half = _half(width)
    turns = Group(heading("turns", theme, half), draw_turns(snapshot.turns, theme))
    if snapshot.histogram is None:
        return turns
    threshold = snapshot.threshold if snapshot.unit == "nats" else None
    bars = draw_histogram(snapshot.histogram, threshold, theme, half)
    return _pair(Group(heading("surprise", theme, half), *bars), turns, width)


def _half(width: int) -> int:
    return (width - 4) // 2 if width >= _BESIDE - 4 else width


def _pair(left: RenderableType, right: RenderableType, width: int) -> RenderableType:
    """Draw two sections side by side if they fit, else one below the other."""
    half = _half(width)
    if half == width:
        return Group(left, Text(), right)
    grid = Table.grid(padding=0)
    for size in (half, width - 2 * half, half):
        grid.add_column(width=size)
    grid.add_row(left, "", right)
    return grid


def _recalled(snapshot: Snapshot, theme: Theme, width: int) -> list[Text]:
    """A list with a line that names the turns of the recalled tokens.

    Recalled tokens were restored from the archive for this round. The line also has the words that
    the turns share with the new turn. The list is empty if no token is recalled.
    """
    if not snapshot.recalled_turns:
        return []
    named = [
        f"turn {one.turn}" + (f" ({', '.join(map(shown, one.words))})" if one.words else "")
        for one in snapshot.recalled_turns
    ]
    line = cut(f"recalled for this round: {', '.join(named)}", width)
    return [line_of([StyledRun(line, theme.quiet)])]


def _legend(theme: Theme, width: int, *, recalled: bool) -> list[Text]:
    """Lines that explain the panel's colours and marks.

    The mark of recalled tokens is explained if `recalled` is true.
    """
    space = StyledRun("  ", theme.quiet)
    runs = [StyledRun("surprise in nats: ", theme.quiet)]
    for (low, high), shades in zip(pairwise((0.0, *LIMITS)), theme.tokens, strict=True):
        name = f"{low:g}+" if high == inf else f"{low:g}–{high:g}"
        runs += [StyledRun(name, shades[0], whole=True), space]
    runs.append(StyledRun("left after decay: ", theme.quiet))
    for name, style in zip(("most", "some", "little"), theme.tokens[2], strict=True):
        runs += [StyledRun(name, style, whole=True), space]
    runs += [StyledRun("⋯7", theme.gap, whole=True), StyledRun(" evicted  ", theme.quiet)]
    marks = [(_SINK, "sink"), (_PIN, "pinned"), *([(_RECALLED, "recalled")] if recalled else [])]
    for (opening, closing), name in marks:
        runs += [StyledRun(opening, theme.mark), StyledRun(name, theme.quiet)]
        runs += [StyledRun(closing, theme.mark), space]
    runs.append(StyledRun("template", theme.template, whole=True))
    return lay_out(runs, width)
