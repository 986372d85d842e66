"""Draws the compact panel, which shows in at most eight rows what the model's cache holds.

The functions turn a snapshot of the cache into objects that the library rich prints. The panel is
drawn several times a second while a model runs, perhaps over a slow connection. So no row wraps,
and each frame (one drawing of the panel) takes few bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.panel_snapshot import HeldShare, Snapshot
from sirchat.chat.words import is_mark, said, split_words
from sirchat.config.values import short
from sirchat.ui.cells import (
    StyledRun,
    cut,
    lay_out,
    line_of,
    shown,
    shown_line,
)
from sirchat.ui.theme import LIMITS, ROLE_NAMES, Theme

_ROWS = 3
"""Maximum number of rows that show held text, the text of tokens in the cache."""

_BYTES_A_COLUMN = 12
"""Maximum bytes of held text (with its colours) in one frame, for each column of the screen."""

_SHARES: Final = "▁▂▃▄▅▆▇"
_NOTHING: Final = "·"
_ALL: Final = "█"
_ONLY_MARKS: Final = "only punctuation and the marks between messages"
_NO_BREAK: Final = "\xa0"
"""A space at which no line may be broken."""

_WIDE = 72
"""Least width of the panel, in columns, for whole sentences; a narrower panel has short labels."""


def draw_compact_panel(
    snapshot: Snapshot, theme: Theme, width: int, *, evicted: Sequence[str] = ()
) -> RenderableType:
    """Draw the compact panel, `width` cells wide.

    It shows how full the cache is, all turns, the words that are evicted next, and the words in the
    cache that have the highest scores. `evicted` are words that were just evicted; if there are
    any, one more row shows these words, struck out.
    """
    width -= 1  # a full row would make some terminals wrap
    lines = [
        _title(snapshot, theme, width),
        gauge(snapshot, theme, width),
        strip(snapshot.turns, theme, width),
        _leaving(snapshot, theme, width),
        *_held(snapshot, theme, width),
    ]
    if evicted:
        lines.insert(4, _evicted(evicted, theme, width))
    return Group(*lines)


def headline(snapshot: Snapshot) -> str:
    """One line of text with the names of policy and model, and the decay; the title of a panel."""
    name = " · ".join((snapshot.policy, f"decay {short(snapshot.decay)}", snapshot.model))
    return shown_line(name)


def _title(snapshot: Snapshot, theme: Theme, width: int) -> Text:
    """The panel's first row: policy, decay, model, speed, and which colour means which surprisal.

    The rules between these parts are short, which takes fewer bytes than long rules.
    """
    speed = f"{snapshot.speed:,.0f} tok/s" if snapshot.speed > 0 else ""
    name = cut(headline(snapshot), width - len(speed) - 10)
    rule = StyledRun("──", theme.border)
    runs = [rule, StyledRun(f" {name} ", theme.quiet), rule]
    if speed:
        runs += [StyledRun(f" {speed} ", theme.quiet), rule]
    return line_of([*runs, *_legend(theme, width - sum(cell_len(run.text) for run in runs))])


def _legend(theme: Theme, room: int) -> list[StyledRun]:
    """Runs of styled text that name the range of surprisal, in nats, of each colour.

    Returns an empty list if the runs would take more than `room` cells.
    """
    names = [f"<{limit:g}" for limit in LIMITS[:-1]] + [f"{LIMITS[-2]:g}+"]
    for label in (" surprise in nats:", " nats:"):
        if len(label) + sum(len(name) + 1 for name in names) <= room:
            shades = [
                StyledRun(f" {name}", shade[0])
                for name, shade in zip(names, theme.tokens, strict=True)
            ]
            return [StyledRun(label, theme.quiet), *shades]
    return []


def gauge(snapshot: Snapshot, theme: Theme, width: int) -> Text:
    """A row with a bar that shows how full the cache is, and as many token counts as fit."""
    counts = [
        f"{snapshot.resident:,}/{snapshot.budget:,} held",
        f"{snapshot.seen:,} seen",
        f"{snapshot.evicted:,} evicted",
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
    """Two pieces of a bar of `width` cells: a thick one for `share` (0 to 1), then a thin one."""
    full = round(width * min(1.0, max(0.0, share)))
    return [StyledRun("━" * full, theme.gauge), StyledRun("─" * (width - full), theme.rest)]


def strip(turns: Sequence[HeldShare], theme: Theme, width: int) -> Text:
    """A row with one cell per turn, which shows how large a share of the turn is in the cache.

    If there are more turns than cells, the oldest turns are left out, and the row says how many.
    """
    gone = sum(1 for turn in turns if turn.tokens and share_glyph(turn) == _NOTHING)
    if width >= _WIDE:
        count = f"{gone:,} of {len(turns):,} turns" if gone else "none"
        summary = f"  {count} wholly evicted" if turns else ""
    else:
        summary = f"  {gone:,} wholly evicted" if gone else ""
    room = width - len("turns ") - len(summary)
    left_out = ""
    if len(turns) > room:
        room = max(1, room - len(f"⋯{len(turns)} "))
        left_out = f"⋯{len(turns) - room} "
        turns = turns[-room:]
    cells = [StyledRun(share_glyph(turn), theme.role(turn.role)) for turn in turns]
    return line_of(
        [StyledRun(f"turns {left_out}", theme.quiet), *cells, StyledRun(summary, theme.quiet)]
    )


def share_glyph(turn: HeldShare) -> str:
    """The character that shows how large a share of a turn's tokens is in the cache.

    A full block means all tokens; a dot means no word of the turn; a lower block means a part.
    """
    if turn.held >= turn.tokens > 0:
        return _ALL
    if not turn.held_said:
        return _NOTHING
    return _SHARES[turn.held * len(_SHARES) // turn.tokens]


def _leaving(snapshot: Snapshot, theme: Theme, width: int) -> Text:
    """A row with the words that are evicted next, and the score below which tokens are evicted.

    If nothing is evicted next, the row says for how many tokens there is room.
    """
    parts, leave, count = [], "evicted next", len(snapshot.evicted_next)
    if snapshot.threshold is not None and snapshot.unit:
        least = f"{snapshot.threshold:.2f}"
        if not count:
            parts.append(f"scores below {least} are evicted first")
        elif width >= _WIDE:
            leave = f"evicted next, as their score is below {least}"
        else:
            leave = f"evicted next (score below {least})"
    elif snapshot.threshold is not None:
        leave = f"the weakest {count:,} of {snapshot.resident:,} are evicted next"
    elif not snapshot.evicted:
        parts.append("nothing evicted yet")
    if count:
        words = _joined(snapshot.leaving_words) or _ONLY_MARKS
        parts.append(f"{leave}: {words}")
    elif snapshot.resident < snapshot.budget:
        parts.append(f"room for {snapshot.budget - snapshot.resident:,} tokens")
    return line_of([StyledRun(cut("; ".join(parts), width), theme.quiet)])


def _evicted(words: Sequence[str], theme: Theme, width: int) -> Text:
    """A row with the words that were just evicted, as many as fit into `width` cells."""
    label = "evicted: "
    text = cut(_joined(words), width - len(label))
    return line_of([StyledRun(label, theme.quiet), StyledRun(text, theme.flash)])


def _joined(words: Sequence[str]) -> str:
    """The words in one text, separated by commas; words without visible text are left out."""
    return ", ".join(filter(None, map(shown, words)))


class _Word(NamedTuple):
    """A word in the cache that may be drawn in the panel.

    `first` is its first token, and `slot` the index of that token among all held tokens. `runs` is
    its styled text. The words of highest `score` are drawn.
    """

    first: TokenRow
    slot: int
    runs: list[StyledRun]
    score: float


def _held(snapshot: Snapshot, theme: Theme, width: int) -> list[Text]:
    """Lines with the words in the cache that have the highest scores, and with who said them.

    As many words are drawn as fit into the panel's rows for held text.
    """
    slots = {row.position: slot for row, slot in zip(snapshot.rows, snapshot.slots, strict=True)}
    words = [
        _Word(
            rows[0],
            slots[rows[0].position],
            [StyledRun(shown(row.text), theme.token(row)) for row in rows],
            # Punctuation is not counted: a word of nothing else comes last.
            max((row.rank_key for row in rows if not is_mark(row.text)), default=-math.inf),
        )
        for rows in split_words(said(snapshot.rows))
    ]
    ranked = sorted(words, key=lambda word: -word.score)

    def runs(count: int) -> list[StyledRun]:
        chosen = sorted(ranked[:count], key=lambda word: word.slot)
        return list(_with_gaps(chosen, snapshot, theme))

    return _most(runs, len(ranked), width)


def _most(runs: Callable[[int], list[StyledRun]], count: int, width: int) -> list[Text]:
    """Lines with nearly as many words as fit into the panel's rows for held text.

    `runs(n)` must return the styled text of the n words of highest score; there are `count` words.
    The function calls `runs` with different n until it knows how many words fit.
    """
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
    """How much of the panel's space for held text the `runs` take; 1 means all of it.

    Returns the larger of two shares: of the cells of this space, and of its maximum number of
    bytes.
    """
    cells, size, style = 0, 0, Style.null()
    for run in runs:
        if run.style is not style:
            style = run.style
            size += _switch(style)
        cells += cell_len(run.text)
        size += len(run.text.encode())
    return max(cells / (_ROWS * width), size / (_BYTES_A_COLUMN * width))


def _with_gaps(words: Iterable[_Word], snapshot: Snapshot, theme: Theme) -> Iterator[StyledRun]:
    """Yield the styled text of some words in the cache, with a mark wherever tokens are missing.

    A label with the speaker's name comes before the first word of each turn.
    """
    position = slot = turn = -1
    for first, at, runs, _ in words:
        unseen = at - slot - 1
        evicted = first.position - position - 1 - unseen
        if first.turn == turn:
            yield from gap(evicted, unseen, runs[0].text, theme)
            yield runs[0]
        else:  # a message begins: held tokens that are not shown need no mark
            yield from gap(evicted, 0, "", theme)
            if position >= 0 or evicted > 0:
                yield StyledRun(" ", theme.gap)
            name = shown(ROLE_NAMES.get(first.role, first.role))
            yield StyledRun(f"{name}:{_NO_BREAK}", theme.role(first.role) + theme.gap)
            yield runs[0]._replace(text=runs[0].text.removeprefix(" "))
        yield from runs[1:]
        turn = first.turn
        position, slot = first.position + len(runs) - 1, at + len(runs) - 1
    unseen = snapshot.in_all_layers - slot - 1
    yield from gap(snapshot.seen - position - 1 - unseen, unseen, "", theme)


def gap(evicted: int, left_out: int, following: str, theme: Theme) -> list[StyledRun]:
    """A list with the mark for tokens that are missing in a drawn text; empty if none are missing.

    The mark is `⋯n` if n = `evicted` tokens are not in the cache, and otherwise `…` if `left_out`
    tokens are in the cache, but not drawn. `following` is the text after the mark; if it begins
    with a digit, the mark ends with a dot.
    """
    mark = f"⋯{evicted}" if evicted > 0 else "…" if left_out > 0 else ""
    if mark and following[:1].isdigit():  # separates the count from a digit of the text
        mark += "·"
    return [StyledRun(mark, theme.gap, whole=True)] if mark else []


@lru_cache(maxsize=256)
def _switch(style: Style) -> int:
    """Number of bytes of the escape sequences that switch a style on and off, in 256 colours."""
    # Counted, not rendered: a Style keeps the codes of the first colour system it is rendered in.
    weights = (style.bold, style.dim, style.italic, style.underline, style.strike)
    codes = 2 * sum(map(bool, weights)) + (9 if style.color else 0)
    return codes + 6 if codes else 0
