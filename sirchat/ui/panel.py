"""Draws what the cache holds, from a snapshot: the compact panel below a reply, and the large one.

The compact panel is drawn several times a second, perhaps over a slow connection: it has at most
eight rows, none of which wraps, and few bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Final, NamedTuple

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.panel_snapshot import HeldShare, Snapshot
from sirchat.chat.statements import StatedFact
from sirchat.chat.token_rows import is_punctuation, split_words, without_template
from sirchat.ui.cells import StyledRun, cut, join_runs, token_line, wrap_runs
from sirchat.ui.tables import (
    NOTHING_HELD,
    draw_turns,
    held_share_glyph,
)
from sirchat.ui.text import displayable_line, restored_from_bits
from sirchat.ui.theme import BUCKET_LIMITS, ROLE_NAMES, Theme

_MAX_WORD_LINES = 3  # lines of held words in the compact panel
_ONLY_MARKS: Final = "only punctuation and the marks between messages"
_LABEL_COLUMNS = 13  # in the large panel, for a turn's number and role
# Whose tokens the budget holds, and the sign of each in the bar.
_OWNERS: Final = {
    "user": ("yours", "█"),
    "assistant": ("the model's", "▓"),
    "system": ("system prompt", "▒"),
    "summary": ("summary", "▤"),
    "tool": ("tools'", "▞"),
    "recalled": ("recalled", "▚"),
    "template": ("format", "░"),
}
_MIN_BAR_CELLS = 8  # of the bar above the prompt
_BRACKETS: Final = {"sink": ("⟨", "⟩"), "pinned": ("⟦", "⟧"), "recalled": ("⟪", "⟫")}  # by flag


def draw_compact_panel(
    snapshot: Snapshot, theme: Theme, width: int, *, evicted: Sequence[str] = ()
) -> RenderableType:
    """Draw the compact panel; `evicted` are words just evicted, shown struck out."""
    width -= 1  # a full row would make some terminals wrap
    lines = [
        _title_line(snapshot, theme, width),
        _fill_line(snapshot, theme, width),
        _turns_line(snapshot.turns, theme, width),
        _evicted_next_line(snapshot, theme, width),
    ]
    if evicted:
        label = StyledRun("evicted: ", theme.secondary)
        words = cut(_join_words(evicted), width - len(label.text))
        lines.append(join_runs([label, StyledRun(words, theme.evicted)]))
    return Group(*lines, *_strongest_words(snapshot, theme, width))


def draw_prompt_panel(
    snapshot: Snapshot, facts: Sequence[StatedFact], theme: Theme, width: int, max_rows: int = 2
) -> RenderableType:
    """Draw the panel above the prompt: what the budget holds, and what is left of what you said.

    Each list takes at most `max_rows` rows. Facts that a later message may replace come last.
    """
    width -= 1  # a full row would make some terminals wrap
    told = {state: list[str]() for state in ("held", "partly held", "evicted")}
    for fact in sorted(facts, key=lambda fact: fact.newer is None)[::-1]:
        text = fact.left if fact.state == "partly held" else fact.text
        told[fact.state].append(f'"{text}"')
    lists = {
        "held, of what you told": told["held"] or ["none whole"] * bool(facts),
        "held in part": told["partly held"],
        "evicted, of what you told": told["evicted"],
        "recalled for the last reply alone": _recalled_sentences(snapshot),
    }
    lines = [_budget_line(snapshot, theme, width)]
    for name, texts in lists.items():
        lines += _list_lines(name, texts, theme, width, max_rows)
    leaving = snapshot.leaving_words
    by_owner = [
        f"{name}: {words}"
        for owner, (name, _) in _OWNERS.items()
        if (words := _join_words(word for word in leaving if leaving[word] == owner))
    ]
    name, _, words = "; ".join(by_owner).partition(": ")
    return Group(*lines, *_list_lines(f"evicted next, {name}", [words] * bool(words), theme, width))


def _budget_line(snapshot: Snapshot, theme: Theme, width: int) -> Text:
    """The budget as a bar with a segment for each owner of tokens, and the number of each."""
    styles = {"user": theme.user, "assistant": theme.model, "system": theme.system}
    segments = [
        (sign, name, styles.get(owner, theme.template), count)
        for owner, (name, sign) in _OWNERS.items()
        if (count := snapshot.held_by.get(owner, 0))
    ]
    if free := snapshot.budget - snapshot.resident:
        segments.append(("·", "free", theme.empty, free))
    labels = [f"{sign} {name} {count:,}" for sign, name, _, count in segments]
    short = [one.replace("the ", "").replace(" prompt", "") for one in labels if one[0] != "·"]
    long, tight = (f" {snapshot.budget:,} tokens: {'  '.join(each)}" for each in (labels, short))
    forms = long, tight, f" {snapshot.budget:,}: {' '.join(short)}"
    fitting = (one for one in forms if cell_len(one) <= width - _MIN_BAR_CELLS)
    summary = next(fitting, forms[-1])
    bar_width = max(_MIN_BAR_CELLS, min(width // 3, width - cell_len(summary)))
    totals = accumulate((count for *_, count in segments), initial=0)
    ends = [round(bar_width * total / max(1, snapshot.budget)) for total in totals]
    bar = [
        StyledRun(sign * (end - start), style)
        for (sign, _, style, _), (start, end) in zip(segments, pairwise(ends), strict=True)
    ]
    return join_runs([*bar, StyledRun(cut(summary, width - bar_width), theme.secondary)])


def _list_lines(
    name: str, texts: Sequence[str], theme: Theme, width: int, max_rows: int = 1
) -> list[Text]:
    """Lines with as many texts as fit, and the number of others; none without texts."""
    if not texts:
        return []
    label = f"{name}: "
    count, lines, room = 0, [""], width - len(label) - 1  # one cell for a comma
    for text in texts:
        item = token_line(displayable_line(text))
        remaining = len(texts) - count - 1
        reserved = len(f" and {remaining} more") if remaining else 0
        longer = f"{lines[-1]}, {item}" if count else item
        if cell_len(longer) + (reserved if len(lines) == max_rows else 0) <= room:
            lines[-1] = longer
        elif not count:
            lines[-1] = cut(item, room - reserved)
        elif len(lines) < max_rows:
            lines[-1] += ","
            lines.append(cut(item, room - reserved))
        else:
            break
        count += 1
    if remaining := len(texts) - count:
        lines[-1] += f" and {remaining} more"
    labels = [label, *[" " * len(label)] * (len(lines) - 1)]
    return [
        join_runs([StyledRun(label, theme.secondary), StyledRun(line, theme.model)])
        for label, line in zip(labels, lines, strict=True)
    ]


def draw_full_panel(snapshot: Snapshot, theme: Theme, width: int) -> RenderableType:
    """Draw the large panel: all held tokens, and all turns."""
    inner_width = width - 4
    sections = [
        _fill_line(snapshot, theme, inner_width),
        *_recalled_lines(snapshot, theme, inner_width),
        *_legend(theme, inner_width, has_recalled=snapshot.recalled > 0),
        Text(),
        *_held_text(snapshot, theme, inner_width),
        Text(),
        Text("turns", theme.heading),
        draw_turns(snapshot.turns, theme),
    ]
    return Panel(
        Group(*sections),
        title=join_runs([StyledRun(_title(snapshot), theme.heading)]),
        title_align="left",
        border_style=theme.empty,
        width=width,
    )


def _title(snapshot: Snapshot) -> str:
    name = " · ".join((snapshot.policy, f"decay {snapshot.decay:g}", snapshot.model))
    return token_line(displayable_line(name))


def _fill_line(snapshot: Snapshot, theme: Theme, width: int) -> Text:
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
    filled = round(bar_width * min(1.0, snapshot.resident / max(1, snapshot.budget)))
    return join_runs(
        [
            StyledRun("━" * filled, theme.filled),
            StyledRun("─" * (bar_width - filled), theme.empty),
            StyledRun(f"  {summary}", theme.secondary),
        ]
    )


def _gap_mark(evicted: int, unshown: int, next_text: str, theme: Theme) -> list[StyledRun]:
    """The mark before `next_text` for missing tokens: `⋯n` for n evicted, else `…` for held."""
    mark = f"⋯{evicted}" if evicted > 0 else "…" if unshown > 0 else ""
    if mark and next_text[:1].isdigit():  # separates the count from a digit of the text
        mark += "·"
    return [StyledRun(mark, theme.gap)] if mark else []


def _title_line(snapshot: Snapshot, theme: Theme, width: int) -> Text:
    speed = f"{snapshot.speed:,.0f} tok/s" if snapshot.speed > 0 else ""
    title = cut(_title(snapshot), width - len(speed) - 10)
    rule = StyledRun("──", theme.empty)
    runs = [rule, StyledRun(f" {title} ", theme.secondary), rule]
    if speed:
        runs += [StyledRun(f" {speed} ", theme.secondary), rule]
    return join_runs(runs)


def _turns_line(turns: Sequence[HeldShare], theme: Theme, width: int) -> Text:
    """A cell for each turn with the share of it that is held; the oldest may be left out."""
    evicted = sum(bool(turn.tokens) and held_share_glyph(turn) == NOTHING_HELD for turn in turns)
    summary = f"  {evicted:,} wholly evicted" if evicted else ""
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
    """The words that are evicted next, or else the number of tokens that still fit."""
    text = f"room for {snapshot.budget - snapshot.resident:,} tokens"
    if count := len(snapshot.evicted_next):
        words = _join_words(snapshot.leaving_words) or _ONLY_MARKS
        text = f"{count:,} of {snapshot.resident:,} are evicted next: {words}"
    return join_runs([StyledRun(cut(text, width), theme.secondary)])


def _join_words(words: Iterable[str]) -> str:
    return ", ".join(filter(None, map(token_line, words)))


class _Word(NamedTuple):
    first: TokenRow
    slot: int  # index of its first token among all held tokens
    runs: list[StyledRun]
    score: float


def _strongest_words(snapshot: Snapshot, theme: Theme, width: int) -> list[Text]:
    """The held words of highest score that fit, in their order, and who said them."""
    slots = {row.position: slot for row, slot in zip(snapshot.rows, snapshot.slots, strict=True)}
    words = [
        _Word(
            rows[0],
            slots[rows[0].position],
            [StyledRun(token_line(row.text), theme.token_style(row)) for row in rows],
            # Punctuation is not counted: a word of nothing else comes last.
            max((row.rank_key for row in rows if not is_punctuation(row.text)), default=-math.inf),
        )
        for rows in split_words(without_template(snapshot.rows))
    ]
    max_words = _MAX_WORD_LINES * width // 2  # a word takes two cells at least
    ranked = sorted(words, key=lambda word: -word.score)[:max_words]

    def lines(count: int) -> list[Text]:
        in_order = sorted(ranked[:count], key=lambda word: word.slot)
        return wrap_runs(_with_gaps(in_order, snapshot, theme), width)

    counts = range(1, len(ranked) + 1)
    fitting = bisect_right(counts, _MAX_WORD_LINES, key=lambda count: len(lines(count)))
    return lines(max(1, fitting))[:_MAX_WORD_LINES]


def _with_gaps(words: Iterable[_Word], snapshot: Snapshot, theme: Theme) -> Iterator[StyledRun]:
    """Yield words in their styles, with speakers, and marks for missing tokens."""
    position = slot = turn = -1  # of the token before
    for first, first_slot, runs, _ in words:
        unshown = first_slot - slot - 1
        evicted = first.position - position - 1 - unshown
        if first.turn == turn:
            yield from _gap_mark(evicted, unshown, runs[0].text, theme)
            yield runs[0]
        else:  # a message begins: held tokens that are not shown need no mark
            yield from _gap_mark(evicted, 0, "", theme)
            if position >= 0 or evicted > 0:
                yield StyledRun(" ", theme.gap)
            speaker = token_line(ROLE_NAMES.get(first.role, first.role))
            yield StyledRun(f"{speaker}: ", theme.role_style(first.role) + theme.gap)
            yield runs[0]._replace(text=runs[0].text.removeprefix(" "))
        yield from runs[1:]
        turn = first.turn
        position, slot = first.position + len(runs) - 1, first_slot + len(runs) - 1
    unshown = snapshot.resident - slot - 1
    yield from _gap_mark(snapshot.seen - position - 1 - unshown, unshown, "", theme)


def _recalled_sentences(snapshot: Snapshot) -> list[str]:
    speakers = {share.index: ROLE_NAMES.get(share.role, share.role) for share in snapshot.turns}
    return [
        f'{speakers.get(turn.turn, "")}{restored_from_bits(turn.bits)}: "{turn.text}"'.lstrip(": ")
        for turn in sorted(snapshot.recalled_turns, key=lambda turn: -turn.tokens)
        if turn.text
    ]


def _recalled_lines(snapshot: Snapshot, theme: Theme, width: int) -> list[Text]:
    """A line with the recalled sentences, or else with the words that found them."""
    if sentences := _recalled_sentences(snapshot):
        return _list_lines("recalled for this round", sentences, theme, width)
    words = list(dict.fromkeys(word for turn in snapshot.recalled_turns for word in turn.words))
    return _list_lines("recalled by the words", words, theme, width)


def _legend(theme: Theme, width: int, *, has_recalled: bool) -> list[Text]:
    space = StyledRun("  ", theme.secondary)
    runs = [StyledRun("how much a token surprised the model, in nats: ", theme.secondary)]
    for (low, high), shades in zip(pairwise((0.0, *BUCKET_LIMITS)), theme.tokens, strict=True):
        name = f"{low:g}+" if high == math.inf else f"{low:g}–{high:g}"
        runs += [StyledRun(name, shades[0]), space]
    runs.append(StyledRun("left after decay: ", theme.secondary))
    for name, style in zip(("most", "some", "little"), theme.tokens[2], strict=True):
        runs += [StyledRun(name, style), space]
    runs += [StyledRun("⋯7", theme.gap)]
    runs.append(StyledRun(": 7 tokens were evicted here  ", theme.secondary))
    for flag, (opening, closing) in _BRACKETS.items():
        if flag != "recalled" or has_recalled:
            runs += [StyledRun(opening, theme.bracket), StyledRun(flag, theme.secondary)]
            runs += [StyledRun(closing, theme.bracket), space]
    runs.append(StyledRun("template", theme.template))
    return wrap_runs(runs, width)


def _held_text(snapshot: Snapshot, theme: Theme, width: int) -> list[Text]:
    """Lines with the text of all held tokens: one block for each turn that has some.

    Turns without any, one after another, have one line with the number of their tokens.
    """
    ends = [0, *accumulate(turn.tokens for turn in snapshot.turns)]  # by turn, of the one before
    roles = [turn.role for turn in snapshot.turns]
    lines: list[Text] = []

    def add(label: Text, runs: Iterable[StyledRun]) -> None:
        blank = Text(" " * label.cell_len, no_wrap=True, overflow="ignore")
        for index, line in enumerate(wrap_runs(runs, width - _LABEL_COLUMNS)):
            lines.append((blank if index else label).copy().append_text(line))

    def add_evicted(first: int, end: int) -> None:
        if count := ends[end] - ends[first]:
            name = str(first) if end == first + 1 else f"{first}–{end - 1}"
            role = roles[first] if end == first + 1 else ""
            add(_turn_label(name, role, theme), _gap_mark(count, 0, "", theme))

    next_turn = position = 0  # of what follows the block before
    for turn, rows in groupby(snapshot.rows, lambda row: row.turn):
        add_evicted(next_turn, turn)
        next_turn, position = turn + 1, max(position, ends[turn])
        blocks = [
            list(block) for _, block in groupby(rows, lambda row: row.position < snapshot.prompt)
        ]
        for number, block in enumerate(blocks, 1):
            runs = list(_turn_runs(block, position, theme))
            position = block[-1].position + 1
            if number == len(blocks):
                runs += _gap_mark(ends[turn + 1] - position, 0, "", theme)
            role = "system" if block[0].position < snapshot.prompt else roles[turn]
            add(_turn_label(str(turn), role, theme), runs)
    add_evicted(next_turn, len(roles))
    return lines or [join_runs([StyledRun("nothing held", theme.secondary)])]


def _turn_runs(rows: Sequence[TokenRow], position: int, theme: Theme) -> Iterator[StyledRun]:
    """Held tokens of one turn in their styles, and what was evicted from `position` on."""
    opened: tuple[str, str] | None = None
    for row in rows:
        brackets = next((pair for flag, pair in _BRACKETS.items() if flag in row.flags), None)
        evicted = row.position - position
        if opened and (brackets != opened or evicted):
            yield StyledRun(opened[1], theme.bracket)
            opened = None
        text = token_line(row.text)
        yield from _gap_mark(evicted, 0, text, theme)
        if brackets and not opened:
            yield StyledRun(brackets[0], theme.bracket)
        opened = brackets
        yield StyledRun(text, theme.token_style(row))
        position = row.position + 1
    if opened:
        yield StyledRun(opened[1], theme.bracket)


def _turn_label(turn: str, role: str, theme: Theme) -> Text:
    name = cut(token_line(ROLE_NAMES.get(role, role)), _LABEL_COLUMNS - 6)
    runs = [StyledRun(cut(f"{turn:>4} ", 6), theme.secondary)]
    label = join_runs([*runs, StyledRun(name, theme.role_style(role))])
    label.pad_right(_LABEL_COLUMNS - label.cell_len)
    return label
