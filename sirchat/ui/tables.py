"""Draws tables of tokens and turns, and the histogram of the large panel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.evicted_text import EvictedTurn
from sirchat.chat.panel_snapshot import SURPRISAL_EDGES, HeldShare, Histogram
from sirchat.chat.statements import StatedFact
from sirchat.chat.why import TokenRank
from sirchat.recall import RecalledTurn
from sirchat.text.times import time_ago
from sirchat.ui.cells import StyledRun, cut, join_runs, quote_token
from sirchat.ui.text import displayable_line, messages_ago, shorten
from sirchat.ui.theme import ROLE_NAMES, Theme

NOTHING_HELD_GLYPH: Final = "·"  # the sign of a turn of which no word is held

# The cells of a table's columns, by their titles; columns of text are aligned on the left.
Columns = dict[str, Sequence[str] | Sequence[str | Text]]

_TEXTS: Final[dict[str, dict[str, Any]]] = {
    "role": {},
    "token": {"min_width": 8},
    "flags": {},
    "by the words": {"min_width": 12},
    "recalled text": {"ratio": 1},
    "words that were evicted": {"ratio": 1},
    "you said": {"ratio": 1},
}
_GAP = 2  # cells between two columns
_SHARES: Final = "▁▂▃▄▅▆▇"
_NEWER = 40  # most characters of a newer statement


def draw_tokens(rows: Sequence[TokenRow], theme: Theme, width: int | None = None) -> RenderableType:
    """Draw a table of tokens: id, surprisal, score; attention and flags if any token has them.

    Columns that don't fit into `width` cells go into further tables below.
    """
    titles = ["position", "turn", "role", "token", "id", "surprisal", "score"]
    titles += ["attention"] * any(row.attention is not None for row in rows)
    titles += ["flags"] * any(row.flags for row in rows)
    return _tables(theme, _columns(rows, theme, *titles), width)


def draw_token_ranks(token_ranks: Sequence[TokenRank], theme: Theme, width: int) -> RenderableType:
    """Draw a table of tokens: the score of each, the factors of the score, its rank in the cache.

    Columns that don't fit into `width` cells go into further tables below.
    """
    rows = [rank.row for rank in token_ranks]
    factors = list(token_ranks[0].factors) if token_ranks else []
    columns = _columns(rows, theme, "position", "turn", "token")
    columns |= {
        "is": [
            ", ".join([x.state, *(flag for flag in x.row.flags if flag in ("sink", "pinned"))])
            for x in token_ranks
        ],
        **_columns(rows, theme, "surprisal"),
        "faded to": [f"{rank.decayed_to:.0%}" for rank in token_ranks],
        **{name: [format_number(rank.factors[name]) for rank in token_ranks] for name in factors},
        **_columns(rows, theme, "score"),
        "rank": ["-" if x.rank is None else f"{x.rank:,} of {x.held:,}" for x in token_ranks],
    }
    if any(rank.threshold is not None for rank in token_ranks):
        columns["needs"] = [format_score(rank.threshold) for rank in token_ranks]
    return _tables(theme, columns, width)


def draw_facts(facts: Sequence[StatedFact], now: float, theme: Theme) -> Table:
    """A table with a row for each fact: its time, whether it is held or a rule, and its text."""
    newer = [shorten(displayable_line(fact.newer_text), _NEWER) for fact in facts]
    columns: Columns = {
        "when": [time_ago(fact.time, now) for fact in facts],
        "is": [
            ("held" if fact.held == fact.tokens else "partly held" if fact.held else "evicted")
            + (", pinned as a rule" if fact.is_rule else "")
            + (f'; newer{" in part" if fact.is_newer_in_part else ""}: "{text}"' if text else "")
            for fact, text in zip(facts, newer, strict=True)
        ],
        "you said": [displayable_line(fact.text) for fact in facts],
    }
    return _table(theme, columns)


def draw_recalled_turns(
    rows: Sequence[TokenRow], turns: Sequence[RecalledTurn], roles: Sequence[str], theme: Theme
) -> Table:
    """Draw a table of the turns with recalled tokens, the words that found them, and the text.

    `roles` are those of all turns of the chat.
    """
    ends = {row.position + 1 for row in rows}
    parts = [(row.turn, "" if row.position in ends else " … ", row.text) for row in rows]
    texts = [
        one.text or "".join(gap + text for turn, gap, text in parts if turn == one.turn).strip(" …")
        for one in turns
    ]
    columns: Columns = {
        "said": [
            f"{ROLE_NAMES[roles[turn.turn]]}, {messages_ago(turn.turn, roles)}" for turn in turns
        ],
        "tokens": [f"{turn.tokens:,}" for turn in turns],
        "by the words": [displayable_line(", ".join(turn.words)) for turn in turns],
    }
    if any(turn.bits for turn in turns):
        columns["restored from"] = [f"{turn.bits} bits" if turn.bits else "" for turn in turns]
    columns["recalled text"] = list(map(displayable_line, texts))
    return _table(theme, columns)


def draw_turns(turns: Sequence[HeldShare], theme: Theme) -> RenderableType:
    """Draw a table of all turns: number of tokens, tokens in the cache, mean surprisal in nats."""
    shares = [f"{turn.held / turn.tokens:.0%}" if turn.tokens else "-" for turn in turns]
    columns: Columns = {
        "turn": [str(turn.index) for turn in turns],
        "role": [_role(turn.role, theme) for turn in turns],
        "tokens": [f"{turn.tokens:,}" for turn in turns],
        "held": [f"{turn.held:,}" for turn in turns],
        "share": [
            Text.assemble(f"{share} ", (held_share_glyph(turn), theme.role_style(turn.role)))
            for share, turn in zip(shares, turns, strict=True)
        ],
        "mean surprise": [format_surprisal(turn.surprisal) for turn in turns],
    }
    table = _table(theme, columns)
    for row, turn in zip(table.rows, turns, strict=True):
        row.style = None if turn.held else theme.secondary
    return table


def draw_evicted(turns: Sequence[EvictedTurn], theme: Theme, width: int) -> RenderableType:
    """Draw a table with a row per turn: its number of evicted tokens, and the words that fit."""
    columns: Columns = {
        "turn": [str(turn.index) for turn in turns],
        "role": [_role(turn.role, theme) for turn in turns],
        "evicted": [
            f"{turn.tokens - turn.held:,} of {turn.tokens:,}"
            if turn.held
            else f"all {turn.tokens:,}"
            for turn in turns
        ],
        "words that were evicted": [", ".join(map(displayable_line, turn.words)) for turn in turns],
    }
    return _table(theme, columns, width=width)


def draw_histogram(
    histogram: Histogram, threshold: float | None, theme: Theme, width: int
) -> list[Text]:
    """A bar for each bin of surprisal: thick for held tokens, then thin for evicted ones.

    A mark shows the `threshold`: the score, in nats, from which on tokens are held.
    """
    lines = [join_runs([StyledRun(_bin("", "held", "evicted"), theme.secondary)])]
    marks = [
        f" ◂ held from {threshold:.2f} nats on"
        if threshold is not None and low <= threshold < high
        else ""
        for low, high in pairwise(SURPRISAL_EDGES)
    ]
    counts = list(zip(histogram.held, histogram.evicted, strict=True))
    room = width - cell_len(lines[0].plain) - 2  # two cells for rounding up
    scale = min(
        (room - len(mark)) / max(1, sum(pair)) for mark, pair in zip(marks, counts, strict=True)
    )
    for (low, high), (held, evicted), mark in zip(
        pairwise(SURPRISAL_EDGES), counts, marks, strict=True
    ):
        runs = [
            StyledRun(_bin(bin_label(low, high), f"{held:,}", f"{evicted:,}"), Style.null()),
            StyledRun("━" * _length(held * scale), theme.filled),
            StyledRun("─" * _length(evicted * scale), theme.empty),
            StyledRun(mark, theme.bracket),
        ]
        lines.append(join_runs(runs))
    return lines


def held_share_glyph(turn: HeldShare) -> str:
    """The character that shows how large a share of a turn's tokens is held."""
    if turn.held >= turn.tokens > 0:
        return "█"
    if not turn.held_said:
        return NOTHING_HELD_GLYPH
    return _SHARES[turn.held * len(_SHARES) // turn.tokens]


def section_title(text: str, theme: Theme, width: int) -> Text:
    """The styled title of a panel's section, cut to `width` cells."""
    return join_runs([StyledRun(cut(text, width), theme.heading)])


def bin_label(low: float, high: float) -> str:
    """The name of a range of surprisal, in nats, such as `2–4` or `7+`."""
    return f"{low:g}+" if high == inf else f"{low:g}–{high:g}"


def format_surprisal(surprisal: float | None) -> str:
    """A surprisal in nats as text with two decimals; `-` for None."""
    return "-" if surprisal is None else f"{surprisal:.2f}"


def format_score(score: float | None) -> str:
    """A score as text with three significant digits; `-` for None."""
    return "-" if score is None else format_number(score)


def format_number(number: float) -> str:
    """A number as text with three significant digits, such as 0.0123, 12,300 or 1.23e+09."""
    text = f"{number:#.3g}".removesuffix(".")
    return f"{float(text):,.0f}" if "e+" in text and abs(number) < 1e9 else text


def _table(theme: Theme, columns: Columns, width: int | None = None) -> Table:
    """A table; in a window that is too narrow for it, texts are cut with …, and no number."""
    table = Table(
        box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style=theme.secondary, width=width
    )
    for name, cells in columns.items():
        longest = _longest(name, cells)
        if name in _TEXTS:
            # rich makes only columns that wrap narrower.
            table.add_column(Text(name, no_wrap=True), **_TEXTS[name])
        elif name in ("is", "when", "said"):
            table.add_column(name, no_wrap=True, min_width=longest)
        else:
            table.add_column(name, justify="right", no_wrap=True, min_width=longest)
    for row in zip(*columns.values(), strict=True):
        table.add_row(
            *(Text(cell, no_wrap=True) if isinstance(cell, str) else cell for cell in row)
        )
    return table


def _tables(theme: Theme, columns: Columns, width: int | None) -> RenderableType:
    """As many tables as it takes for `columns` to fit; each has the columns position and token."""
    tables: list[Columns] = [{}]
    widths = {
        name: max(_longest(name, cells), _TEXTS.get(name, {}).get("min_width", 0)) + _GAP
        for name, cells in columns.items()
    }
    for name, texts in columns.items():
        wider = {**tables[-1], name: texts}
        if width and len(tables[-1]) > 2 and sum(widths[key] for key in wider) - _GAP > width:
            wider = {key: columns[key] for key in ("position", "token", name)}
            tables.append(wider)
        tables[-1] = wider
    return Group(*(_table(theme, one) for one in tables))


def _columns(rows: Sequence[TokenRow], theme: Theme, *titles: str) -> Columns:
    """Columns with facts of tokens."""
    return {title: [_cell(row, title, theme) for row in rows] for title in titles}


def _cell(row: TokenRow, title: str, theme: Theme) -> str | Text:
    match title:
        case "role":
            return _role(row.role, theme)
        case "token":
            return Text(quote_token(row.text), theme.token_style(row), no_wrap=True)
        case "surprisal":
            return format_surprisal(row.surprisal)
        case "score":
            return format_score(row.score)
        case "attention":
            return format_number(row.attention or 0.0)
        case "flags":
            return " ".join(row.flags)
        case _:
            return str(getattr(row, title))


def _role(role: str, theme: Theme) -> Text:
    return Text(ROLE_NAMES.get(role, role), theme.role_style(role), no_wrap=True)


def _longest(name: str, cells: Sequence[str] | Sequence[str | Text]) -> int:
    """Width of a column in cells, if nothing is cut."""
    return max(cell_len(str(cell)) for cell in [name, *cells])


def _bin(name: str, held: str, evicted: str) -> str:
    return f"{name:>5}  {held:>6}  {evicted:>9}  "


def _length(cells: float) -> int:
    """Length of a bar in whole cells: rounded, but at least 1, unless `cells` is 0."""
    return max(1, round(cells)) if cells > 0 else 0
