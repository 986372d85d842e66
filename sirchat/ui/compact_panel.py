"""The compact panel: at most eight rows, none of which wraps, and few bytes per frame.

Pure functions from a snapshot to something rich can print. It is drawn several times a second
while a model runs, perhaps over a slow connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from typing import Final, NamedTuple

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.snapshot import Snapshot, TurnShare
from sirchat.config.values import short
from sirchat.ui.cells import (
    StyledRun,
    cut,
    lay_out,
    line_of,
    quoted,
    shown,
    shown_line,
    significant,
)
from sirchat.ui.theme import Theme

_ROWS = 3
"""Rows of held text."""

_BYTES_A_COLUMN = 12
"""Most bytes of held text per frame and column of the screen, colours included."""

_SHARES: Final = "▁▂▃▄▅▆▇"
_NOTHING: Final = "·"
_ALL: Final = "█"


def draw_compact_panel(
    snapshot: Snapshot, theme: Theme, width: int, *, flash: Sequence[TokenRow] = ()
) -> RenderableType:
    """Title, gauge, turns, next tokens to leave, and the held text of highest score.

    `flash`: tokens that were evicted since the last frame; they are struck out.
    """
    width -= 1  # a full row would make some terminals wrap
    lines = [
        _title(snapshot, theme, width),
        gauge(snapshot, theme, width),
        strip(snapshot.turns, theme, width),
        _leaving(snapshot, theme, width),
        *_held(snapshot, theme, width, flash),
    ]
    return Group(*lines)


def headline(snapshot: Snapshot) -> str:
    """Policy, decay and model."""
    name = " · ".join((snapshot.policy, f"decay {short(snapshot.decay)}", snapshot.model))
    return shown_line(name)


def _title(snapshot: Snapshot, theme: Theme, width: int) -> Text:
    """The rule is short: across the whole screen it would be a tenth of a frame's bytes."""
    speed = f"{snapshot.speed:,.0f} tok/s" if snapshot.speed > 0 else ""
    name = cut(headline(snapshot), width - len(speed) - 10)
    rule = StyledRun("──", theme.border)
    runs = [rule, StyledRun(f" {name} ", theme.quiet), rule]
    if speed:
        runs += [StyledRun(f" {speed} ", theme.quiet), rule]
    return line_of(runs)


def gauge(snapshot: Snapshot, theme: Theme, width: int) -> Text:
    """How full the cache is, and as many counts as fit."""
    counts = [
        f"{snapshot.resident:,}/{snapshot.budget:,} held",
        f"{snapshot.seen:,} seen",
        f"{snapshot.forgotten:,} forgotten",
    ]
    if snapshot.recalled > 0:
        counts.append(f"{snapshot.recalled:,} recalled")
    while len(counts) > 1 and len("  ".join(counts)) > width - 10:
        counts.pop(1)
    summary = cut("  ".join(counts), width - 2)
    bar_width = min(max(width // 3, 8), width - len(summary) - 2)
    runs = bar(bar_width, snapshot.resident / max(1, snapshot.budget), theme)
    return line_of([*runs, StyledRun(f"  {summary}", theme.quiet)])


def bar(width: int, share: float, theme: Theme) -> list[StyledRun]:
    """A bar of `width` cells; its full and empty parts differ in weight as well as colour."""
    full = round(width * min(1.0, max(0.0, share)))
    return [StyledRun("━" * full, theme.gauge), StyledRun("─" * (width - full), theme.rest)]


def strip(turns: Sequence[TurnShare], theme: Theme, width: int) -> Text:
    """One cell per turn, the latest ones: how much of the turn is still held."""
    alive = sum(1 for turn in turns if turn.held)
    summary = f"  {alive} of {len(turns)} still hold something" if width >= 72 else ""
    room = width - len("turns ") - len(summary)
    left_out = ""
    if len(turns) > room:
        room = max(1, room - len(f"⋯{len(turns)} "))
        left_out = f"⋯{len(turns) - room} "
        turns = turns[-room:]
    cells = [StyledRun(share_glyph(turn), theme.role(turn.role)) for turn in turns]
    return line_of(
        [
            StyledRun(f"turns {left_out}", theme.quiet),
            *cells,
            StyledRun(summary if cells else "", theme.quiet),
        ]
    )


def share_glyph(turn: TurnShare) -> str:
    """The glyph for the held share of a turn; none and all have their own."""
    if not turn.held:
        return _NOTHING
    if turn.held >= turn.tokens:
        return _ALL
    return _SHARES[turn.held * len(_SHARES) // turn.tokens]


def _leaving(snapshot: Snapshot, theme: Theme, width: int) -> Text:
    """The threshold to stay, and the next tokens to leave, if the snapshot has their text."""
    parts = []
    if snapshot.threshold is not None and snapshot.unit:
        parts.append(f"a token needs {snapshot.threshold:.2f} {snapshot.unit} to stay")
    elif snapshot.threshold is not None:
        parts.append(f"a token needs a score of {significant(snapshot.threshold)} to stay")
    elif not snapshot.forgotten:
        parts.append("nothing forgotten yet")
    if not snapshot.next_to_go and snapshot.resident < snapshot.budget:
        parts.append(f"room for {snapshot.budget - snapshot.resident:,} tokens")
    weakest = set(snapshot.next_to_go)
    texts = [
        quoted(row.text) for row in snapshot.rows if row.position in weakest and shown(row.text)
    ]
    if texts:
        parts.append(f"next to go: {' '.join(texts[: width // 3])}")
    return line_of([StyledRun(cut("; ".join(parts), width), theme.quiet)])


class _Token(NamedTuple):
    """A token to draw; `slot` is its index among the held rows, None if it was just evicted."""

    position: int
    slot: int | None
    run: StyledRun
    score: float


def _held(snapshot: Snapshot, theme: Theme, width: int, flash: Sequence[TokenRow]) -> list[Text]:
    """The held text of highest score that fits, with the highest of what was just evicted."""
    evicted = _flashes(flash, theme, width)
    tokens = [
        _Token(row.position, slot, StyledRun(shown(row.text), theme.token(row)), row.rank_key)
        for row, slot in zip(snapshot.rows, snapshot.slots, strict=True)
    ]
    ranked = sorted(tokens, key=lambda token: -token.score)

    def runs(count: int) -> list[StyledRun]:
        chosen = sorted([*ranked[:count], *evicted], key=lambda token: token.position)
        return list(_with_gaps(chosen, snapshot, theme))

    return _most(runs, len(ranked), width)


def _most(runs: Callable[[int], list[StyledRun]], count: int, width: int) -> list[Text]:
    """Lines of nearly as many of `count` tokens as fit; each try corrects the one before."""
    best: list[Text] = []
    few, too_many = 0, count + 1
    while True:
        drawn = runs(count)
        over = _over(drawn, width)
        lines = lay_out(drawn, width) if over <= 1 else []
        if over <= 1 and len(lines) <= _ROWS:
            best, few = lines, count
        else:
            too_many, over = count, max(over, 1.02)
        if too_many - few <= 1 + few // 32:
            return best or lay_out(runs(1), width)[:_ROWS]
        count = min(max(int(count / max(over, 0.1)), few + 1), too_many - 1)


def _over(runs: Iterable[StyledRun], width: int) -> float:
    """Share of the rows' cells that the runs take, or of a frame's bytes if that is more."""
    cells, size, style = 0, 0, Style.null()
    for run in runs:
        if run.style is not style:
            style = run.style
            size += _switch(style)
        cells += cell_len(run.text)
        size += len(run.text.encode())
    return max(cells / (_ROWS * width), size / (_BYTES_A_COLUMN * width))


def _flashes(flash: Sequence[TokenRow], theme: Theme, width: int) -> list[_Token]:
    """The just evicted tokens of highest score, at most one row of them."""
    tokens: list[_Token] = []
    for row in nlargest(width, flash, key=lambda row: row.rank_key):
        text = shown(row.text)
        width -= cell_len(text) + 1
        if width < 0:
            break
        tokens.append(_Token(row.position, None, StyledRun(text, theme.flash), row.rank_key))
    return tokens


def _with_gaps(tokens: Iterable[_Token], snapshot: Snapshot, theme: Theme) -> Iterator[StyledRun]:
    """The tokens' runs, with a mark where tokens between them are missing."""
    position = slot = -1
    waiting: list[StyledRun] = []
    end = _Token(snapshot.seen, snapshot.in_all_layers, StyledRun("", Style.null()), 0.0)
    for token in (*tokens, end):
        if token.slot is None:
            waiting.append(token.run)
            continue
        unseen = token.slot - slot - 1
        forgotten = token.position - position - 1 - unseen - len(waiting)
        waiting.append(token.run)
        yield from gap(forgotten, unseen, waiting[0].text, theme)
        yield from waiting
        waiting.clear()
        position, slot = token.position, token.slot


def gap(forgotten: int, left_out: int, following: str, theme: Theme) -> list[StyledRun]:
    """`⋯n` for n forgotten tokens, else `…` for held ones that are not shown, else nothing."""
    mark = f"⋯{forgotten}" if forgotten > 0 else "…" if left_out > 0 else ""
    if mark and following[:1].isdigit():  # separates the count from a digit of the text
        mark += "·"
    return [StyledRun(mark, theme.gap, whole=True)] if mark else []


def _switch(style: Style) -> int:
    """Bytes to switch a style on and off, in 256 colours."""
    # Counted, not rendered: a Style keeps the codes of the first colour system it is rendered in.
    weights = (style.bold, style.dim, style.italic, style.underline, style.strike)
    codes = 2 * sum(map(bool, weights)) + (9 if style.color else 0)
    return codes + 6 if codes else 0
