"""Draws saved chats, models, the memory that models take, and settings as tables.

This module imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.config.profile import FIXED, Profile
from sirchat.config.values import as_typed
from sirchat.ui.cells import cut
from sirchat.ui.text import displayable, displayable_line, shorten
from sirchat.ui.theme import Theme

if TYPE_CHECKING:  # the prompt needs none of these
    from sirchat.models.device_map import Layout, ModelPart
    from sirchat.models.devices import DeviceMemory
    from sirchat.models.fit import Choice, ModelFit
    from sirchat.models.listing import FoundModel
    from sirchat.saved.search import Part
    from sirchat.saved.session_list import SavedSession


def draw_settings(profile: Profile, theme: Theme) -> RenderableType:
    """Draw a table of all settings, with their values and descriptions.

    Before a setting, `*` means that its value is not the default; `·` means that it can't be
    changed in a chat.
    """
    table = Table.grid(padding=(0, 2))
    for name, field in Profile.model_fields.items():
        value = getattr(profile, name)
        mark = "·" if name in FIXED else " "
        mark = "*" if value != field.default else mark
        shown = shorten(as_typed(value), 60)
        cells = ((mark, ""), (name, "bold"), (shown, ""), (field.description or "", theme.quiet))
        table.add_row(*(Text(displayable_line(text), style) for text, style in cells))
    legend = "*: not the default; ·: fixed for this conversation; /set NAME VALUE changes a setting"
    table.add_row("", "", "", Text(legend, theme.quiet))
    return table


Fragment = tuple[str, str]
"""A style (`dim`, `bold`, `match` or "" for none), and a text in this style."""

_STYLES = {"match": "bold underline"}
_ONE_LINE = 120  # from this width on, in columns, a chat takes one line instead of two
_LONGEST_MODEL, _LEAST_TEXT = 20, 12  # cells


class SessionLines:
    """The lines of a list of saved chats, in aligned columns; for windows of 60 columns or more.

    Args:
        sessions: the chats, in the order in which they are listed.
        present: the id of the chat that is open now, or "".
        found: after a search, the parts of a line with the words that were found, by the id of its
            chat.
    """

    def __init__(
        self,
        sessions: Sequence[SavedSession],
        present: str = "",
        found: Mapping[str, Sequence[Part]] = MappingProxyType({}),
    ) -> None:
        self.sessions, self._present, self._found = sessions, present, found
        self._turns = max((len(_turns(one)) for one in sessions), default=0)
        models = (cell_len(_model(one)) for one in sessions)
        self._model = min(max(models, default=0), _LONGEST_MODEL)

    def of(self, number: int, width: int) -> list[list[Fragment]]:
        """The line of chat `number` (from 0): id, time of change, turns, model, name and text.

        A line is a list of fragments (pairs of style and text). If `width`, in columns, is small,
        there are two lines, and name and text are on the second.
        """
        one = self.sessions[number]
        facts = f"  {one.updated:%Y-%m-%d %H:%M}  {_turns(one):>{self._turns}}  "
        head = [("", displayable_line(one.id)), ("dim", facts)]
        if width < _ONE_LINE:
            return [
                _cut([*head, ("dim", _model(one))], width),
                _cut([("", "    "), *self._text(one)], width),
            ]
        model = cut(_model(one), self._model)
        padding = " " * (self._model - cell_len(model) + 2)
        return [_cut([*head, ("dim", f"{model}{padding}"), *self._text(one)], width)]

    def _text(self, one: SavedSession) -> list[Fragment]:
        """Fragments (pairs of style and text) with the chat's name and a line of its text.

        The line is the one that a search has found. If there was no search, it is the user's last
        message or, if that is very short, the user's first message.
        """
        whose = "(this chat) " if one.id == self._present else "(open) " if one.in_use else ""
        said = one.last if cell_len(one.last) >= _LEAST_TEXT else one.first
        parts = self._found.get(one.id, ())
        name = [("bold", one.name), ("", ": " if said else "")] if one.name else []
        text = [("match" if part.is_match else "", part.text) for part in parts] or [("", said)]
        return [("dim", whose), *name, *text]


def draw_sessions(chats: SessionLines, width: int) -> RenderableType:
    """Draw a list of saved chats: the lines of all chats, each cut to `width` cells."""
    return Group(
        *(
            Text.assemble(
                *((text, _STYLES.get(style, style)) for style, text in line),
                no_wrap=True,
                overflow="ignore",
            )
            for number in range(len(chats.sessions))
            for line in chats.of(number, width)
        )
    )


def print_sessions(chats: SessionLines, console: Console) -> None:
    """Print a list of saved chats; where there is no terminal, each chat takes one line, uncut."""
    width = console.width if console.is_terminal else _NO_LIMIT
    console.print(draw_sessions(chats, width), soft_wrap=True)


_NO_LIMIT = 10_000


def _turns(one: SavedSession) -> str:
    return f"{one.turns:,} message{'s' * (one.turns != 1)}"


def _model(one: SavedSession) -> str:
    return displayable_line(one.model)


def _cut(line: Iterable[Fragment], width: int) -> list[Fragment]:
    """Remove control characters from a line of fragments (style and text); cut it to `width` cells.

    Fragments without text are left out.
    """
    shown: list[Fragment] = []
    for style, text in line:
        text = cut(" ".join(displayable(text).splitlines()).replace("\t", " "), width)
        width -= cell_len(text)
        if text:
            shown.append((style, text))
    return shown


_TITLES = ("model", "kind", "on disk", "context", "budget", "KV cache", "fits up to")


_GAP = "  "


@dataclass(frozen=True)
class ListedModel:
    """A model on this machine, with what a chat with this model takes.

    Attributes:
        found: the model.
        budget: the budget of a chat, in tokens; None if it is unknown.
        cache: size of the KV cache of a chat, in bytes; None if it is unknown.
        largest: the largest budget that fits in the free memory; 0 if none does, None if unknown.
        is_default: whether a chat uses this model if the user names none.
    """

    found: FoundModel
    budget: int | None
    cache: int | None
    largest: int | None = None
    is_default: bool = False


def print_models(models: Iterable[ListedModel], console: Console) -> None:
    """Print a table of the models that can be used, then every other model with its problem."""
    models = list(models)
    rows = [_model_cells(one) for one in models if not one.found.problem]
    wide = [max(cell_len(row[n]) for row in [_TITLES, *rows]) for n in range(len(_TITLES))]
    fits = sum(wide) + len(_GAP) * (len(wide) - 1) <= console.width
    if fits:
        for number, row in enumerate([_TITLES, *rows]):
            _print(console, _aligned(row, wide), "bold" if number == 0 else "")
    else:
        for name, kind, size, context, budget, cache, largest in rows:
            _print(console, name, "bold")
            _print(console, f"  {kind}, {size}, context {context}")
            _print(console, f"  KV cache {cache} at budget {budget}")
            _print(console, f"  fits up to {largest}")
    for one in models:
        if one.found.problem:
            line = f"{one.found.name}: {one.found.problem}"
            _print(console, displayable_line(line), "dim")


def in_bytes(size: int | None) -> str:
    """A size in bytes as text with a unit, such as `98 MB`; `?` for None."""
    if size is None:
        return "?"
    for unit, of in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= 0.995 * of:
            number = size / of
            return f"{number:.1f} {unit}" if number < 9.95 else f"{number:,.0f} {unit}"
    return f"{size} B"


def _model_cells(one: ListedModel) -> list[str]:
    shape = one.found.shape
    cells = (
        one.found.name + " (default)" * one.is_default,
        shape.kind if shape is not None else "?",
        in_bytes(one.found.size),
        _count(shape.context_length if shape is not None else None),
        _count(one.budget),
        in_bytes(one.cache),
        _largest(one.largest),
    )
    return [displayable_line(cell) for cell in cells]


def print_fit(fit: ModelFit, console: Console) -> None:
    """Print how much memory a model takes, in two tables with a row for each choice of settings."""
    from sirchat.models.fit import PROGRAM, TOKENS_PER_HOUR

    found, shape = fit.found, fit.found.shape
    context = _count(shape.context_length if shape is not None else None)
    about = f"{shape.kind if shape is not None else '?'}, {fit.weights / 1e6:,.1f} million weights"
    _print(console, displayable_line(f"{found.name}: {about}, context {context} tokens"), "bold")
    own = in_bytes(PROGRAM)
    _print(console, f"free memory here: {in_bytes(fit.free)}, of which {own} are for sirchat")
    budgets = list(fit.choices[0].caches)
    _print(console, "")
    rows = [
        ("setting", "weights", "loading", "reading", "archive", "fits up to"),
        *(
            (
                _setting(one),
                in_bytes(one.weights),
                in_bytes(one.loading),
                in_bytes(one.working),
                in_bytes(one.archive),
                _largest(one.largest_budget),
            )
            for one in fit.choices
        ),
    ]
    _print_table(console, rows)
    _print(console, "")
    titles = ("KV cache for a budget of", *(f"{one:,}" for one in budgets))
    caches = ((_setting(one), *map(in_bytes, one.caches.values())) for one in fit.choices)
    _print_table(console, [titles, *caches])
    _print(console, "")
    for line in _LEGEND:
        _print(console, line.format(hour=TOKENS_PER_HOUR), "dim")


_LEGEND = (
    "loading: the most that the weights take while they are loaded",
    "reading: weights that are unpacked for a short time while a text is read",
    "archive: keys and values that are evicted in an hour of talk, {hour:,} tokens,",
    "  at most --archive-limit",
    "fits up to: the largest budget, in tokens, for which the free memory suffices",
)


def print_layout(name: str, layout: Layout, console: Console) -> None:
    """Print which layers of a model each of several GPUs would hold, and whether the model fits."""
    from sirchat.models.device_map import GPU_RESERVE

    head = f"{name}: {layout.precision}, KV cache for {layout.budget:,} tokens"
    _print(console, displayable_line(head), "bold")
    _print(console, f"{in_bytes(GPU_RESERVE)} of each device stay free")
    _print(console, "")
    rows = [("device", "memory", "layers", "weights", "KV cache", "room left")]
    for at, (size, parts) in enumerate(layout.devices):
        rest = size - GPU_RESERVE - sum(one.size for one in parts)
        rows.append((f"cuda:{at}", in_bytes(size), *_held(parts, layout), in_bytes(max(0, rest))))
    if layout.left:
        rows.append(("elsewhere", "", *_held(layout.left, layout), ""))
    _print_table(console, rows)
    _print(console, "")
    if layout.fits:
        _print(console, "it fits")
    else:
        over = in_bytes(sum(one.size for one in layout.left))
        _print(console, f"it does not fit: {over} are left; --device-map auto puts these into main")
        _print(console, "memory, and on disk what does not fit into it")


def _held(parts: Sequence[ModelPart], layout: Layout) -> tuple[str, str, str]:
    """Three texts about `parts` of a model: their layers, bytes of weights, bytes of KV cache.

    Consecutive layers are written `0-15`.
    """
    numbers = [one.name for one in parts if one.name.isdigit()]
    layers = "-".join(dict.fromkeys([*numbers[:1], *numbers[-1:]]))
    others = [one.name for one in parts if not one.name.isdigit()]
    first, last = ("embeddings" in others) * ["embeddings"], ("output" in others) * ["output"]
    cache = in_bytes(sum(one.cache for one in parts)) if layout.knows_cache else "?"
    named = ", ".join([*first, *[layers] * bool(layers), *last])
    return named or "none", in_bytes(sum(one.weights for one in parts)), cache


def memory_in_words(held: Iterable[DeviceMemory]) -> str:
    """One line about what each device holds, such as `cpu: 37 MB weights, 5.2 MB KV cache`."""
    kinds = {"weights": "weights", "cache": "KV cache", "archive": "archive"}
    return "; ".join(
        f"{one.device}: "
        + ", ".join(
            f"{in_bytes(size)} {name}"
            for kind, name in kinds.items()
            if (size := int(getattr(one, kind)))
        )
        for one in held
    )


def _setting(choice: Choice) -> str:
    return choice.setting or f"as set ({choice.precision})"


def _largest(budget: int | None) -> str:
    return "too large" if budget == 0 else _count(budget)


def _print_table(console: Console, rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first row has the titles; only the first column is left-aligned."""
    wide = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        _print(console, _aligned(row, wide, 1), "" if number else "bold")


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _aligned(row: Sequence[str], wide: Sequence[int], left: int = 2) -> str:
    """One line of a table: the texts in `row`, padded to the widths of the columns, `wide`.

    The first `left` texts are aligned at the left, all others at the right.
    """
    cells = []
    for number, (cell, width) in enumerate(zip(row, wide, strict=True)):
        room = " " * (width - cell_len(cell))
        cells.append(f"{cell}{room}" if number < left else f"{room}{cell}")
    return _GAP.join(cells).rstrip()


def _print(console: Console, line: str, style: str = "") -> None:
    # The terminal breaks a long name itself, so that it can be copied as a whole.
    console.print(Text(line, style=style), soft_wrap=True)
