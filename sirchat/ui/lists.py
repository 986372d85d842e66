"""Draws saved chats, models, the memory that models take, and settings; imports nothing slow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.chat.model_defaults import sampling_in_words
from sirchat.config.profile import FIXED_SETTINGS, Profile
from sirchat.config.values import format_setting, policy_choices
from sirchat.memory.policies import policy_class
from sirchat.ui.text import class_summary, displayable, displayable_line, pluralize, shorten
from sirchat.ui.theme import Theme

if TYPE_CHECKING:  # the prompt needs none of these
    from sirchat.chat.session import Session
    from sirchat.models.fit import ModelFit
    from sirchat.models.listing import FoundModel
    from sirchat.saved.search import SnippetPart
    from sirchat.saved.session_list import SavedSession


Matches = Mapping[str, "Sequence[SnippetPart]"]  # lines found by a search, by chat id

_MATCH = "bold underline"  # style of a searched word
_MIN_TEXT_CELLS = 12
ALSO_KEPT = "all but window also keep the first tokens (sinks) and pins, most the newest (recent)"
MORE_HITS = "and {:,} more with a weaker match; add words to find fewer"  # of a search
_COLUMN_GAP = "  "
_TITLES = ("model", "kind", "on disk", "context", "budget", "KV cache", "fits up to")
_LEGEND = (
    "loading: the most that the weights take while they are loaded",
    "KV cache: of a budget of {shown:,} tokens; twice as many take twice as much",
    "archive: keys and values that are evicted in an hour of talk, {hour:,} tokens,",
    "  at most --archive-limit",
    "fits up to: the largest budget, in tokens, for which the free memory suffices",
)


def draw_policies(current: str, theme: Theme) -> RenderableType:
    """Draw the policies and what each keeps, a line each; a star marks the current one."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in policy_choices():
        kept = class_summary(policy_class, name).removeprefix("Keeps ").removeprefix("the sinks")
        kept = kept.removeprefix(" and").replace(", and the `recent` newest", "")
        marked = Text(f"{'*' if name == current else ' '} {name}", no_wrap=True)
        kept = kept.lstrip(", ")
        table.add_row(marked, Text(kept, theme.secondary, no_wrap=True, overflow="ellipsis"))
    return table


def draw_settings(profile: Profile, theme: Theme) -> RenderableType:
    """Draw a table of all settings: values, descriptions and, for sampling, their origins."""
    table, sampling = Table.grid(padding=(0, 2)), sampling_in_words(profile)
    for name, field in Profile.model_fields.items():
        value = getattr(profile, name)
        mark = "·" if name in FIXED_SETTINGS else " "
        shown = sampling.get(name) or shorten(format_setting(value), 60)
        is_set = name not in sampling or profile.origin(name) != "default"
        mark = "*" if is_set and value != field.default else mark
        meaning = field.description or ""
        cells = ((mark, ""), (name, "bold"), (shown, ""), (meaning, theme.secondary))
        table.add_row(*(Text(displayable_line(text), style) for text, style in cells))
    legend = "*: not the default; ·: fixed for this conversation; /set NAME VALUE changes a setting"
    table.add_row("", "", "", Text(legend, theme.secondary))
    return table


def draw_sessions(
    sessions: Sequence[SavedSession],
    width: int,
    matches: Matches = MappingProxyType({}),
    open_id: str = "",
) -> RenderableType:
    """Draw saved chats, two lines of at most `width` columns each; for 60 columns or more.

    `matches` are the lines found by a search, by chat id; `open_id` is the chat that is open now.
    """
    lines = [
        line
        for head, text in _session_texts(sessions, matches, open_id)
        for line in (head, Text.assemble("    ", text))
    ]
    for line in lines:
        line.no_wrap, line.overflow = True, "ignore"
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def print_sessions(
    sessions: Sequence[SavedSession], console: Console, matches: Matches = MappingProxyType({})
) -> None:
    """Print a list of saved chats; without a terminal, each chat takes one uncut line."""
    if console.file.isatty():
        console.print(draw_sessions(sessions, console.width, matches), soft_wrap=True)
        return
    for head, text in _session_texts(sessions, matches):
        console.print(Text.assemble(head, "  ", text), soft_wrap=True)


def _session_texts(
    sessions: Sequence[SavedSession], matches: Matches, open_id: str = ""
) -> Iterator[tuple[Text, Text]]:
    """Yield, for each chat, what is known of it in aligned columns, and its name and a text."""
    counts = [pluralize(session.turns, "message") for session in sessions]
    for session, count in zip(sessions, counts, strict=True):
        facts = f"  {session.updated:%Y-%m-%d %H:%M}  {count.rjust(max(map(len, counts)))}  "
        whose = "(this chat) " if session.id == open_id else "(open) " if session.in_use else ""
        preview = session.first_message  # or the last one, if that tells little
        preview = session.last_message if cell_len(preview) < _MIN_TEXT_CELLS else preview
        found = [(part.text, _MATCH * part.is_match) for part in matches.get(session.id, ())]
        name = [(session.name, "bold"), (": " * bool(found or preview), "")] * bool(session.name)
        head = [(session.id, ""), (facts, "dim"), (session.model, "dim")]
        yield _one_line(head), _one_line([(whose, "dim"), *name, *(found or [(preview, "")])])


def _one_line(parts: Iterable[tuple[str, str]]) -> Text:
    shown = ((displayable(text), style) for text, style in parts)
    return Text.assemble(*((re.sub(r"\s", " ", text), style) for text, style in shown))


@dataclass(frozen=True)
class ListedModel:
    """A model on this machine, and the memory that a chat with it takes; None: unknown."""

    found: FoundModel
    budget: int | None  # tokens
    cache: int | None  # bytes
    largest_budget: int | None = None  # budget that fits in the free memory; 0: none does
    is_default: bool = False


def print_models(models: Iterable[ListedModel], console: Console) -> None:
    """Print a table of the usable models, then every other model with its problem."""
    models = list(models)
    rows = [_model_cells(model) for model in models if not model.found.problem]
    table = [_TITLES, *rows]
    if sum(_column_widths(table)) + len(_COLUMN_GAP) * (len(_TITLES) - 1) <= console.width:
        _print_table(console, table, left=2)
    else:
        for name, kind, size, context, budget, cache, largest_budget in rows:
            _print_line(console, name, "bold")
            _print_line(console, f"  {kind}, {size}, context {context}")
            _print_line(console, f"  KV cache {cache} at budget {budget}")
            _print_line(console, f"  fits up to {largest_budget}")
    for model in models:
        if model.found.problem:
            line = f"{model.found.name}: {model.found.problem}"
            _print_line(console, displayable_line(line), "dim")


def format_bytes(size: int | None) -> str:
    """A size in bytes as text with a unit, such as `98 MB`; `?` for None."""
    if size is None:
        return "?"
    for unit, of in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= 0.995 * of:
            number = size / of
            return f"{number:.1f} {unit}" if number < 9.95 else f"{number:,.0f} {unit}"
    return f"{size} B"


def print_fit(fit: ModelFit, console: Console) -> None:
    """Print how much memory a model takes, in a table with a row for each choice."""
    from sirchat.models.fit import PROGRAM_BYTES, SHOWN_TOKENS, TOKENS_PER_HOUR

    found, shape = fit.found, fit.found.shape
    context = _format_count(shape.context_length if shape is not None else None)
    about = f"{shape.kind if shape is not None else '?'}, {fit.weights / 1e6:,.1f} million weights"
    title = displayable_line(f"{found.name}: {about}, context {context} tokens")
    _print_line(console, title, "bold")
    free, program = format_bytes(fit.free), format_bytes(PROGRAM_BYTES)
    _print_line(console, f"free memory here: {free}; sirchat itself takes {program} of it")
    _print_line(console, "")
    titles = "setting", "weights", "loading", "KV cache", "archive", "fits up to"
    rows: list[Sequence[str]] = [titles]
    for choice in fit.choices:
        name = choice.setting or f"as set ({choice.precision})"
        sizes = choice.weights, choice.loading, choice.cache, choice.archive
        rows.append((name, *map(format_bytes, sizes), _format_largest(choice.largest_budget)))
    _print_table(console, rows)
    _print_line(console, "")
    for line in _LEGEND:
        _print_line(console, line.format(shown=SHOWN_TOKENS, hour=TOKENS_PER_HOUR), "dim")


def describe_memory(session: Session) -> str:
    """What each device holds, such as `cpu: 37 MB weights, 5.2 MB KV cache`, and archive tiers.

    A token counts in the tier of its archived keys and values, even if the cache holds it, too.
    """
    kinds = {"weights": "weights", "cache": "KV cache", "archive": "archive"}
    stored = session.engine.store.archive
    tiers = stored.tier_sizes()
    parts = [
        f"{pluralize(tokens, 'token')} {f'in {bits} bits' if bits else 'exact'}"
        f" ({format_bytes(size)})"
        for bits, (tokens, size) in sorted(tiers.items(), key=lambda tier: -(tier[0] or 99))
    ]
    if also_held := int(stored.has(session.ledger.held_positions).sum()):
        parts.append(f"{also_held:,} of these are held, too")
    if lost := session.ledger.rereadable_count:
        parts.append(f"{pluralize(lost, 'token')} as text alone")
    devices = list[str]()
    for memory in session.memory:
        sizes = {name: int(getattr(memory, kind)) for kind, name in kinds.items()}
        held = ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size)
        devices.append(f"{memory.device}: {held}")
    archive = [f"archive: {', '.join(parts)}"] if tiers else []
    return "; ".join([*devices, *archive])


def _model_cells(model: ListedModel) -> list[str]:
    shape = model.found.shape
    cells = (
        model.found.name + (" (default)" if model.is_default else ""),
        shape.kind if shape is not None else "?",
        format_bytes(model.found.size),
        _format_count(shape.context_length if shape is not None else None),
        _format_count(model.budget),
        format_bytes(model.cache),
        _format_largest(model.largest_budget),
    )
    return [displayable_line(cell) for cell in cells]


def _format_largest(budget: int | None) -> str:
    return "too large" if budget == 0 else _format_count(budget)


def _column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def _print_table(console: Console, rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table with titles in the first row; the first `left` columns are left-aligned."""
    widths = _column_widths(rows)
    for number, row in enumerate(rows):
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            room = " " * (width - cell_len(cell))
            cells.append(f"{cell}{room}" if column < left else f"{room}{cell}")
        _print_line(console, _COLUMN_GAP.join(cells).rstrip(), "" if number else "bold")


def _format_count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _print_line(console: Console, line: str, style: str = "") -> None:
    # The terminal breaks a long name itself, so that it can be copied as a whole.
    console.print(Text(line, style=style), soft_wrap=True)
