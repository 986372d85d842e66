"""Draws tables of tokens and turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.evicted_text import EvictedTurn
from sirchat.chat.panel_snapshot import HeldShare
from sirchat.chat.statements import StatedFact
from sirchat.chat.why import TokenRank
from sirchat.recall import RecalledTurn
from sirchat.text.times import time_ago
from sirchat.ui.cells import token_line
from sirchat.ui.text import displayable_line, messages_ago, pluralize, shorten
from sirchat.ui.theme import ROLE_NAMES, Theme

NOTHING_HELD: Final = "·"  # the sign of a turn of which no word is held

# The cells of a table's columns, by their titles; columns of text are aligned on the left.
Columns = dict[str, Sequence[str] | Sequence[str | Text]]

_TEXT_COLUMNS: Final[dict[str, dict[str, Any]]] = {
    "role": {},
    "token": {"min_width": 8},
    "flags": {},
    "by the words": {"min_width": 12},
    "text": {"ratio": 1},
    "words that were evicted": {"ratio": 1},
    "you said": {"ratio": 1},
}
_GAP = 2  # cells between two columns
_SHARE_GLYPHS: Final = "▁▂▃▄▅▆▇"


def draw_tokens(rows: Sequence[TokenRow], theme: Theme, width: int | None = None) -> RenderableType:
    """Draw a table of tokens: id, surprisal, score; attention and flags if any token has them."""
    titles = ["position", "turn", "role", "token", "id", "surprisal", "score"]
    titles += ["attention"] * any(row.attention is not None for row in rows)
    titles += ["flags"] * any(row.flags for row in rows)
    return _tables(theme, _token_columns(rows, theme, *titles), width)


def draw_token_ranks(ranks: Sequence[TokenRank], theme: Theme, width: int) -> RenderableType:
    """Draw a table of tokens: each one's score, the score's factors, and its rank in the cache."""
    rows = [rank.row for rank in ranks]
    factors = list(ranks[0].factors) if ranks else []
    columns = _token_columns(rows, theme, "position", "turn", "token")
    columns |= {
        "is": [_rank_state(rank) for rank in ranks],
        **_token_columns(rows, theme, "surprisal"),
        "faded to": [f"{rank.decayed_to:.0%}" for rank in ranks],
        **{name: [format_three_digits(rank.factors[name]) for rank in ranks] for name in factors},
        **_token_columns(rows, theme, "score"),
        "rank": ["-" if rank.rank is None else f"{rank.rank:,} of {rank.held:,}" for rank in ranks],
    }
    if any(rank.threshold is not None for rank in ranks):
        columns["needs"] = [_format_score(rank.threshold) for rank in ranks]
    return _tables(theme, columns, width)


def _rank_state(rank: TokenRank) -> str:
    state = {"not_stored": "gone", "rereadable": "lost"}.get(rank.state, rank.state)
    return ", ".join([state, *(flag for flag in rank.row.flags if flag in ("sink", "pinned"))])


def draw_facts(facts: Sequence[StatedFact], now: float, theme: Theme, width: int) -> Table:
    """Draw a row for each fact: its time, whether it is held or a rule, and its text."""
    columns: Columns = {
        "when": [time_ago(fact.time, now) for fact in facts],
        "is": [_fact_state(fact, width // 4) for fact in facts],
        "you said": [displayable_line(fact.text) for fact in facts],
    }
    return _table(theme, columns)


def _fact_state(fact: StatedFact, max_quoted: int) -> str:
    """Such as `partly held, without "Anna"; newer: "My name is Berta."`; quotes are cut."""
    state, newer = fact.state, shorten(displayable_line(fact.newer_text), max_quoted)
    if state == "partly held" and not newer:  # else the text would have too little room
        words = [f'"{displayable_line(word)}"' for word in fact.missing]
        named = ", ".join(words[:2]) + (f" and {len(words) - 2} more" if len(words) > 2 else "")
        fits = cell_len(named) <= max_quoted
        state += f", without {named if fits else pluralize(len(words), 'word')}"
    if fact.is_rule:
        state += ", pinned as a rule"
    if newer:
        state += f'; newer{" in part" if fact.is_newer_in_part else ""}: "{newer}"'
    return state


def draw_recalled_turns(
    rows: Sequence[TokenRow], turns: Sequence[RecalledTurn], roles: Sequence[str], theme: Theme
) -> Table:
    """Draw a table of the turns with recalled tokens, the words that found them, and the text."""
    columns: Columns = {
        "said": [
            f"{ROLE_NAMES[roles[turn.turn]]}, {messages_ago(turn.turn, roles)}" for turn in turns
        ],
        "tokens": [f"{turn.tokens:,}" for turn in turns],
        "by the words": [
            displayable_line(", ".join(turn.words)) or (turn.reason and f"({turn.reason})")
            for turn in turns
        ],
    }
    if any(turn.bits for turn in turns):
        columns["restored from"] = [f"{turn.bits} bits" if turn.bits else "" for turn in turns]
    by_turn = {at: [*of_turn] for at, of_turn in groupby(rows, key=lambda row: row.turn)}
    texts = (turn.text or text_of_rows(by_turn.get(turn.turn, ())) for turn in turns)
    columns["text"] = list(map(displayable_line, texts))
    return _table(theme, columns)


def text_of_rows(rows: Iterable[TokenRow]) -> str:
    """The text of tokens in stream order, with … where others are missing between them."""
    text, next_position = "", None
    for row in rows:
        text += row.text if row.position == next_position else f" … {row.text}"
        next_position = row.position + 1
    return text.strip(" …")


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
        "mean surprise": [_format_surprisal(turn.surprisal) for turn in turns],
    }
    table = _table(theme, columns)
    for row, turn in zip(table.rows, turns, strict=True):
        row.style = None if turn.held else theme.secondary
    return table


def draw_evicted(turns: Sequence[EvictedTurn], theme: Theme, width: int) -> RenderableType:
    """Draw a row for each turn: its number of evicted tokens, and as many words as fit."""
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


def held_share_glyph(turn: HeldShare) -> str:
    """The character that shows how large a share of a turn's tokens is held."""
    if turn.held >= turn.tokens > 0:
        return "█"
    if not turn.held_said:
        return NOTHING_HELD
    return _SHARE_GLYPHS[turn.held * len(_SHARE_GLYPHS) // turn.tokens]


def _format_surprisal(nats: float | None) -> str:
    return "-" if nats is None else f"{nats:.2f}"


def _format_score(score: float | None) -> str:
    return "-" if score is None else format_three_digits(score)


def format_three_digits(number: float) -> str:
    """The number with three significant digits, such as 0.0123, 12,300 or 1.23e+09."""
    text = f"{number:#.3g}".removesuffix(".")
    return f"{float(text):,.0f}" if "e+" in text and abs(number) < 1e9 else text


def _table(theme: Theme, columns: Columns, width: int | None = None) -> Table:
    """A table; in a narrow window, texts are cut with …, but numbers never."""
    table = Table(
        box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style=theme.secondary, width=width
    )
    for title, cells in columns.items():
        if title in _TEXT_COLUMNS:
            # rich makes only columns that wrap narrower.
            table.add_column(Text(title, no_wrap=True), **_TEXT_COLUMNS[title])
        else:
            justify: JustifyMethod = "left" if title in ("is", "when", "said") else "right"
            min_width = _uncut_width(title, cells)
            table.add_column(title, justify=justify, no_wrap=True, min_width=min_width)
    for row in zip(*columns.values(), strict=True):
        table.add_row(
            *(Text(cell, no_wrap=True) if isinstance(cell, str) else cell for cell in row)
        )
    return table


def _tables(theme: Theme, columns: Columns, width: int | None) -> RenderableType:
    """As many tables as `columns` need to fit; each has the columns position and token."""
    tables: list[Columns] = [{}]
    widths = {
        title: _GAP
        + max(_uncut_width(title, cells), _TEXT_COLUMNS.get(title, {}).get("min_width", 0))
        for title, cells in columns.items()
    }
    for title, cells in columns.items():
        wider = {**tables[-1], title: cells}
        if width and len(tables[-1]) > 2 and sum(widths[key] for key in wider) - _GAP > width:
            tables.append({key: columns[key] for key in ("position", "token", title)})
        else:
            tables[-1] = wider
    return Group(*(_table(theme, table) for table in tables))


def _token_columns(rows: Sequence[TokenRow], theme: Theme, *titles: str) -> Columns:
    return {title: [_token_cell(row, title, theme) for row in rows] for title in titles}


def _token_cell(row: TokenRow, title: str, theme: Theme) -> str | Text:
    match title:
        case "role":
            return _role(row.role, theme)
        case "token":
            return Text(f'"{token_line(row.text)}"', theme.token_style(row), no_wrap=True)
        case "surprisal":
            return _format_surprisal(row.surprisal)
        case "score":
            return _format_score(row.score)
        case "attention":
            return format_three_digits(row.attention or 0.0)
        case "flags":
            return " ".join(row.flags)
        case _:
            return str(getattr(row, title))


def _role(role: str, theme: Theme) -> Text:
    return Text(ROLE_NAMES.get(role, role), theme.role_style(role), no_wrap=True)


def _uncut_width(title: str, cells: Sequence[str] | Sequence[str | Text]) -> int:
    return max(cell_len(str(cell)) for cell in [title, *cells])
