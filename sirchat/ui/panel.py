"""Draws what the cache holds, from a snapshot: the compact panel below a reply, and the large one.

The compact panel is drawn several times a second, perhaps over a slow connection: at most eight
rows, none of which wraps, and few bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.panel_snapshot import HeldShare, Snapshot
from sirchat.chat.statements import StatedFact
from sirchat.chat.words import is_punctuation, split_words, without_template
from sirchat.config.values import format_number
from sirchat.ui.cells import StyledRun, cut, join_runs, known_width_line, wrap_runs
from sirchat.ui.tables import (
    NOTHING_HELD_GLYPH,
    bin_label,
    draw_histogram,
    draw_turns,
    held_share_glyph,
    section_title,
)
from sirchat.ui.text import displayable_line, restored_from_bits
from sirchat.ui.theme import BUCKET_LIMITS, ROLE_NAMES, Theme

# Of the compact panel:
_ROWS = 3  # most rows of held text
_ONLY_MARKS: Final = "only punctuation and the marks between messages"
# Of the large panel:
_LONGEST_BARS = 80  # columns of the histogram
_MARGIN = 13  # width of the column with a turn's number and role
# Whose tokens the budget holds, and the signs of their segments in the bar.
_SEGMENTS: Final = {
    "user": ("yours", "█"),
    "assistant": ("the model's", "▓"),
    "system": ("system prompt", "▒"),
    "summary": ("summary", "▤"),
    "tool": ("tools'", "▞"),
    "recalled": ("recalled", "▚"),
    "template": ("format", "░"),
}
_SINK, _PIN, _RECALLED = ("⟨", "⟩"), ("⟦", "⟧"), ("⟪", "⟫")


def draw_compact_panel(
    snapshot: Snapshot, theme: Theme, width: int, *, evicted: Sequence[str] = ()
) -> RenderableType:
    """Draw the compact panel; `evicted` are words that were just evicted, shown struck out."""
    width -= 1  # a full row would make some terminals wrap
    lines = [
        _title(snapshot, theme, width),
        _gauge(snapshot, theme, width),
        _strip(snapshot.turns, theme, width),
        _evicted_next_line(snapshot, theme, width),
        *_strongest_words(snapshot, theme, width),
    ]
    if evicted:
        lines.insert(4, _evicted(evicted, theme, width))
    return Group(*lines)


def draw_prompt_panel(
    snapshot: Snapshot, facts: Sequence[StatedFact], theme: Theme, width: int, rows: int = 2
) -> RenderableType:
    """Draw the panel above the prompt: what the budget holds, and what is left of what you said.

    Facts that a later message may replace come last. Each list has at most so many rows.
    """
    width -= 1  # a full row would make some terminals wrap
    current = sorted(facts, key=lambda fact: fact.newer is None)[::-1]
    parts = {
        "held, of what you told": [fact for fact in current if fact.held == fact.tokens],
        "held in part": [fact for fact in current if 0 < fact.held < fact.tokens],
        "evicted, of what you told": [fact for fact in current if not fact.held],
    }
    lines = [_segments(snapshot, theme, width)]
    if current and not parts["held, of what you told"]:
        lines += _listed("held, of what you told", ["none whole"], theme, width)
    for name, found in parts.items():
        if texts := [f'"{fact.left or fact.text}"' for fact in found]:
            lines += _listed(name, texts, theme, width, rows=rows)
    if told := _told(snapshot):
        lines += _listed("recalled for the last reply alone", told, theme, width, rows=rows)
    leaving = snapshot.leaving_words
    whose = {role: _joined(w for w in leaving if leaving[w] == role) for role in _SEGMENTS}
    if text := "; ".join(f"{_SEGMENTS[role][0]}: {of}" for role, of in whose.items() if of):
        name, _, text = text.partition(": ")
        lines += _listed(f"evicted next, {name}", [text], theme, width)
    return Group(*lines)


def _segments(snapshot: Snapshot, theme: Theme, width: int) -> Text:
    """A row with the budget as a bar of segments, and how many tokens each has."""
    styles = {"user": theme.user, "assistant": theme.model, "system": theme.system}
    known = [
        (name, sign, styles.get(who, theme.template), count)
        for who, (name, sign) in _SEGMENTS.items()
        if (count := snapshot.held_by.get(who, 0))
    ]
    if free := snapshot.budget - snapshot.resident:
        known.append(("free", "·", theme.empty, free))
    counts = "  ".join(f"{sign} {name} {count:,}" for name, sign, _, count in known)
    summary = f" {snapshot.budget:,} tokens: {counts}"
    cells = max(8, min(width // 3, width - cell_len(summary)))
    ends = [
        0,
        *(
            round(cells * sum(part[3] for part in known[: n + 1]) / max(1, snapshot.budget))
            for n in range(len(known))
        ),
    ]
    bar = [
        StyledRun(sign * (end - start), style)
        for (_, sign, style, _), (start, end) in zip(known, pairwise(ends), strict=True)
    ]
    return join_runs([*bar, StyledRun(cut(summary, width - cells), theme.secondary)])


def _listed(name: str, texts: Sequence[str], theme: Theme, width: int, rows: int = 1) -> list[Text]:
    """Rows, at most so many, with as many of the texts as fit, and how many more there are."""
    name += ": "
    count, lines, room = 0, [""], width - len(name) - 1  # one cell for a comma
    for text in texts:
        item = known_width_line(displayable_line(text))
        left = len(texts) - count - 1
        more = len(f" and {left} more") if left else 0
        longer = f"{lines[-1]}, {item}" if count else item
        if cell_len(longer) + (more if len(lines) == rows else 0) <= room:
            lines[-1] = longer
        elif not count:
            lines[-1] = cut(item, room - more)
        elif len(lines) < rows:
            lines[-1] += ","
            lines.append(cut(item, room - more))
        else:
            break
        count += 1
    if left := len(texts) - count:
        lines[-1] += f" and {left} more"
    labels = [name, *[" " * len(name)] * (len(lines) - 1)]
    return [
        join_runs([StyledRun(label, theme.secondary), StyledRun(line, theme.model)])
        for label, line in zip(labels, lines, strict=True)
    ]


def draw_full_panel(snapshot: Snapshot, theme: Theme, width: int) -> RenderableType:
    """Draw the large panel: all held tokens, a histogram of surprisal, and all turns."""
    inner = width - 4
    sections = [
        _gauge(snapshot, theme, inner),
        *_recalled(snapshot, theme, inner),
        *_legend(theme, inner, recalled=snapshot.recalled > 0),
        Text(),
        *_held_text(snapshot, theme, inner),
        Text(),
        *_statistics(snapshot, theme, inner),
    ]
    return Panel(
        Group(*sections),
        title=join_runs([StyledRun(_headline(snapshot), theme.heading)]),
        title_align="left",
        border_style=theme.empty,
        width=width,
    )


def _headline(snapshot: Snapshot) -> str:
    name = " · ".join((snapshot.policy, f"decay {format_number(snapshot.decay)}", snapshot.model))
    return known_width_line(displayable_line(name))


def _gauge(snapshot: Snapshot, theme: Theme, width: int) -> Text:
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
    full = round(bar_width * min(1.0, snapshot.resident / max(1, snapshot.budget)))
    bar = [StyledRun("━" * full, theme.filled), StyledRun("─" * (bar_width - full), theme.empty)]
    return join_runs([*bar, StyledRun(f"  {summary}", theme.secondary)])


def _gap(evicted: int, left_out: int, following: str, theme: Theme) -> list[StyledRun]:
    """The mark for missing tokens before the text `following`; empty if none are missing.

    It is `⋯n` for n evicted tokens, or else `…` for tokens that are held, but left out here.
    """
    mark = f"⋯{evicted}" if evicted > 0 else "…" if left_out > 0 else ""
    if mark and following[:1].isdigit():  # separates the count from a digit of the text
        mark += "·"
    return [StyledRun(mark, theme.gap)] if mark else []


def _title(snapshot: Snapshot, theme: Theme, width: int) -> Text:
    """Policy, decay, model and speed."""
    speed = f"{snapshot.speed:,.0f} tok/s" if snapshot.speed > 0 else ""
    name = cut(_headline(snapshot), width - len(speed) - 10)
    rule = StyledRun("──", theme.empty)
    runs = [rule, StyledRun(f" {name} ", theme.secondary), rule]
    if speed:
        runs += [StyledRun(f" {speed} ", theme.secondary), rule]
    return join_runs(runs)


def _strip(turns: Sequence[HeldShare], theme: Theme, width: int) -> Text:
    """One cell per turn, which shows the share of it that is held; the oldest may be left out."""
    gone = sum(1 for turn in turns if turn.tokens and held_share_glyph(turn) == NOTHING_HELD_GLYPH)
    summary = f"  {gone:,} wholly evicted" if gone else ""
    room = width - len("turns ") - len(summary)
    left_out = ""
    if len(turns) > room:
        room = max(1, room - len(f"⋯{len(turns)} "))
        left_out = f"⋯{len(turns) - room} "
        turns = turns[-room:]
    cells = [StyledRun(held_share_glyph(turn), theme.role_style(turn.role)) for turn in turns]
    label = StyledRun(f"turns {left_out}", theme.secondary)
    return join_runs([label, *cells, StyledRun(summary, theme.secondary)])


def _evicted_next_line(snapshot: Snapshot, theme: Theme, width: int) -> Text:
    """A line with the words that are evicted next; if there are none, how many tokens have room."""
    free = snapshot.budget - snapshot.resident
    if count := len(snapshot.evicted_next):
        words = _joined(snapshot.leaving_words) or _ONLY_MARKS
        text = f"{count:,} of {snapshot.resident:,} are evicted next: {words}"
    else:
        text = f"room for {free:,} tokens"
    return join_runs([StyledRun(cut(text, width), theme.secondary)])


def _evicted(words: Sequence[str], theme: Theme, width: int) -> Text:
    label = "evicted: "
    text = cut(_joined(words), width - len(label))
    return join_runs([StyledRun(label, theme.secondary), StyledRun(text, theme.evicted)])


def _joined(words: Iterable[str]) -> str:
    return ", ".join(filter(None, map(known_width_line, words)))


class _Word(NamedTuple):
    """A held word; `slot` is the index of its first token among all held tokens."""

    first: TokenRow
    slot: int
    runs: list[StyledRun]
    score: float


def _strongest_words(snapshot: Snapshot, theme: Theme, width: int) -> list[Text]:
    """The held words of highest score, as many as fit, in their order, and who said them."""
    slots = {row.position: slot for row, slot in zip(snapshot.rows, snapshot.slots, strict=True)}
    words = [
        _Word(
            rows[0],
            slots[rows[0].position],
            [StyledRun(known_width_line(row.text), theme.token_style(row)) for row in rows],
            # Punctuation is not counted: a word of nothing else comes last.
            max((row.rank_key for row in rows if not is_punctuation(row.text)), default=-math.inf),
        )
        for rows in split_words(without_template(snapshot.rows))
    ]
    most = _ROWS * width // 2  # a word takes two cells at least
    ranked = sorted(words, key=lambda word: -word.score)[:most]

    def lines(count: int) -> list[Text]:
        chosen = sorted(ranked[:count], key=lambda word: word.slot)
        return wrap_runs(_with_gaps(chosen, snapshot, theme), width)

    count = bisect_right(range(1, len(ranked) + 1), _ROWS, key=lambda count: len(lines(count)))
    return lines(max(1, count))[:_ROWS]


def _with_gaps(words: Iterable[_Word], snapshot: Snapshot, theme: Theme) -> Iterator[StyledRun]:
    """The words in their styles, each turn's after its speaker, with marks for missing tokens."""
    position = slot = turn = -1
    for first, at, runs, _ in words:
        unseen = at - slot - 1
        evicted = first.position - position - 1 - unseen
        if first.turn == turn:
            yield from _gap(evicted, unseen, runs[0].text, theme)
            yield runs[0]
        else:  # a message begins: held tokens that are not shown need no mark
            yield from _gap(evicted, 0, "", theme)
            if position >= 0 or evicted > 0:
                yield StyledRun(" ", theme.gap)
            name = known_width_line(ROLE_NAMES.get(first.role, first.role))
            yield StyledRun(f"{name}: ", theme.role_style(first.role) + theme.gap)
            yield runs[0]._replace(text=runs[0].text.removeprefix(" "))
        yield from runs[1:]
        turn = first.turn
        position, slot = first.position + len(runs) - 1, at + len(runs) - 1
    unseen = snapshot.resident - slot - 1
    yield from _gap(snapshot.seen - position - 1 - unseen, unseen, "", theme)


def _told(snapshot: Snapshot) -> list[str]:
    """The sentences that were recalled, that of most tokens first, and who said each."""
    turns = sorted(snapshot.recalled_turns, key=lambda turn: -turn.tokens)
    names = {share.index: ROLE_NAMES.get(share.role, share.role) for share in snapshot.turns}
    whose = {turn.turn: names.get(turn.turn, "") + restored_from_bits(turn.bits) for turn in turns}
    return [f'{whose[turn.turn]}: "{turn.text}"'.lstrip(": ") for turn in turns if turn.text]


def _recalled(snapshot: Snapshot, theme: Theme, width: int) -> list[Text]:
    """A line with the sentences that were recalled, or else the words that found them."""
    if told := _told(snapshot):
        return _listed("recalled for this round", told, theme, width)
    words = list(dict.fromkeys(word for turn in snapshot.recalled_turns for word in turn.words))
    return _listed("recalled by the words", words, theme, width) if words else []


def _legend(theme: Theme, width: int, *, recalled: bool) -> list[Text]:
    """Lines that explain the panel's colours and marks."""
    space = StyledRun("  ", theme.secondary)
    runs = [StyledRun("how much a token surprised the model, in nats: ", theme.secondary)]
    for (low, high), shades in zip(pairwise((0.0, *BUCKET_LIMITS)), theme.tokens, strict=True):
        runs += [StyledRun(bin_label(low, high), shades[0]), space]
    runs.append(StyledRun("left after decay: ", theme.secondary))
    for name, style in zip(("most", "some", "little"), theme.tokens[2], strict=True):
        runs += [StyledRun(name, style), space]
    runs += [StyledRun("⋯7", theme.gap)]
    runs.append(StyledRun(": 7 tokens were evicted here  ", theme.secondary))
    marks = [(_SINK, "sink"), (_PIN, "pinned"), *([(_RECALLED, "recalled")] if recalled else [])]
    for (opening, closing), name in marks:
        runs += [StyledRun(opening, theme.bracket), StyledRun(name, theme.secondary)]
        runs += [StyledRun(closing, theme.bracket), space]
    runs.append(StyledRun("template", theme.template))
    return wrap_runs(runs, width)


def _held_text(snapshot: Snapshot, theme: Theme, width: int) -> list[Text]:
    """Lines with the text of all held tokens: one block for each turn that has some."""
    lines: list[Text] = []
    roles = {turn.index: turn.role for turn in snapshot.turns}
    gaps = _gaps(snapshot)
    rows = list(zip(snapshot.rows, gaps[:-1], strict=True))
    parts = groupby(rows, lambda row: (row[0].turn, row[0].position < snapshot.prompt))
    blocks = [(*part, list(block)) for part, block in parts]
    for number, (turn, is_prompt, block) in enumerate(blocks):
        runs = list(_block(block, theme))
        if number == len(blocks) - 1:
            runs += _gap(gaps[-1], 0, "", theme)
        label = _label(turn, "system" if is_prompt else roles.get(turn, ""), theme)
        blank = Text(" " * label.cell_len, no_wrap=True, overflow="ignore")
        for index, line in enumerate(wrap_runs(runs, width - _MARGIN)):
            lines.append((blank if index else label).copy().append_text(line))
    if not blocks:
        return [
            join_runs([StyledRun("nothing held", theme.secondary), *_gap(gaps[-1], 0, "", theme)])
        ]
    return lines


def _gaps(snapshot: Snapshot) -> list[int]:
    """The number of evicted tokens before each held token, and, at the end, after the last."""
    pairs = [(-1, -1)]  # position and slot
    pairs += zip((row.position for row in snapshot.rows), snapshot.slots, strict=True)
    pairs.append((snapshot.seen, snapshot.resident))
    return [(b - a) - (slot_b - slot_a) for (a, slot_a), (b, slot_b) in pairwise(pairs)]


def _block(rows: Sequence[tuple[TokenRow, int]], theme: Theme) -> Iterator[StyledRun]:
    """One turn's held tokens, each with the number of evicted tokens before it, in their styles."""
    opened: tuple[str, str] | None = None
    for row, evicted in rows:
        brackets = _brackets(row)
        if opened and (brackets != opened or evicted):
            yield StyledRun(opened[1], theme.bracket)
            opened = None
        text = known_width_line(row.text)
        yield from _gap(evicted, 0, text, theme)
        if brackets and not opened:
            yield StyledRun(brackets[0], theme.bracket)
        opened = brackets
        yield StyledRun(text, theme.token_style(row))
    if opened:
        yield StyledRun(opened[1], theme.bracket)


def _brackets(row: TokenRow) -> tuple[str, str] | None:
    if "sink" in row.flags:
        return _SINK
    if "pinned" in row.flags:
        return _PIN
    return _RECALLED if "recalled" in row.flags else None


def _label(turn: int, role: str, theme: Theme) -> Text:
    number, name = f"{turn:>4} ", cut(known_width_line(ROLE_NAMES.get(role, role)), _MARGIN - 6)
    label = join_runs(
        [StyledRun(cut(number, 6), theme.secondary), StyledRun(name, theme.role_style(role))]
    )
    label.pad_right(_MARGIN - label.cell_len)
    return label


def _statistics(snapshot: Snapshot, theme: Theme, width: int) -> list[RenderableType]:
    sections: list[RenderableType] = []
    if snapshot.histogram is not None:
        threshold = snapshot.threshold if snapshot.unit == "nats" else None
        bars = draw_histogram(snapshot.histogram, threshold, theme, min(width, _LONGEST_BARS))
        sections += [section_title("surprise", theme, width), *bars, Text()]
    return [*sections, section_title("turns", theme, width), draw_turns(snapshot.turns, theme)]
