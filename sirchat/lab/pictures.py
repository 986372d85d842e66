"""Pictures for papers, by matplotlib, which the extra `plots` brings: a chat's memory over time."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirchat.errors import UsageError
from sirchat.memory.ledger import ROW, Flag
from sirchat.saved.store import SessionStore
from sirchat.ui.text import displayable_line

_MOST_VECTORS = 20_000  # marks; more are drawn as pixels, also in an SVG
_MOST_LABELS = 30  # of turns
_COLOURS = {"evicted": "0.85", "restored": "tab:red", "pinned": "tab:orange", "erased": "black"}


def picture(draw: Callable[[Any], None], kind: str, title: str) -> bytes:
    """The picture that `draw` makes on the axes it gets, as a file of this `kind`, svg or png.

    Raises UsageError without matplotlib.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        hint = "pip install 'sirchat[plots]'"
        raise UsageError("a picture needs the package matplotlib", hint=hint) from None
    file = BytesIO()
    values = {"svg.hashsalt": title, "svg.fonttype": "none", "text.parse_math": False}
    with rc_context(values), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of characters that the font lacks
        figure = Figure(figsize=(9, 6), layout="constrained")
        axes = figure.subplots()
        line = re.sub("[\ufffe\uffff]", "\ufffd", displayable_line(title))  # XML has no such
        axes.set_title(line, fontsize="medium")
        draw(axes)
        figure.savefig(file, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else {})
    return file.getvalue()


def picture_of_memory(store: SessionStore, kind: str) -> bytes:
    """A saved chat's tokens by turn: which were held, evicted and restored, pinned and erased.

    What was held is known after the turns with which the chat was saved, mostly those that end a
    round; elsewhere the picture says that it is not known. Pinned and erased: as of now.
    """
    rows, turns, held_by_turn = store.rows(ROW), store.turns(), store.held_by_turn()
    marks, unknown = _marks(rows, held_by_turn)
    now, end = len(next(reversed(held_by_turn.values()), ())), max(1, len(turns)) - 0.5
    title = f"{store.id}: {now:,} of {len(rows):,} tokens held"
    why = "read again, as after /erase, or not saved then"
    title += f"; hatched: not known, {why}" if unknown else ""

    def draw(axes: Any) -> None:
        from matplotlib.collections import LineCollection

        is_many = sum(map(len, marks.values())) > _MOST_VECTORS
        width = float(np.clip(380 / max(1, len(rows)), 0.3, 6))  # points
        for state in ("evicted", "erased", "held"):
            ends = marks[state][:, [[1, 0], [2, 0]]]  # [n, 2, 2], x and y of both ends
            lines = LineCollection(list(ends), linewidths=width, gid=state, rasterized=is_many)
            lines.set(color=_COLOURS.get(state), label=f"_{state}" if state == "held" else state)
            axes.add_collection(lines)
        nats = rows["surprisal"][marks["held"][:, 0].astype(int)]
        lines.set_array(np.ma.masked_invalid(nats))
        lines.set_clim(0, np.nanquantile(np.append(nats, 1), 0.98))
        axes.figure.colorbar(lines, ax=axes, label="held: surprisal, nats", extend="max")
        for state, marker, side in (("restored", ">", 1), ("pinned", "<", 2)):
            style = {"color": _COLOURS[state], "markersize": 3, "rasterized": is_many}
            x, y = marks[state][:, side], marks[state][:, 0]
            axes.plot(x, y, marker, **style, label=state, gid=state, clip_on=False)
        for span in unknown:
            axes.axvspan(*span, fc="0.93", ec="0.8", hatch="//", zorder=2.1, gid="unknown")
        shown = turns[:: 1 + len(turns) // _MOST_LABELS]
        starts = np.searchsorted(rows["turn"], [turn.index for turn in shown]) - 0.5
        names = [f"{turn.role} {turn.index}" for turn in shown]
        axes.set_yticks(starts, names, fontsize="x-small", va="top")
        axes.set(xlim=(-0.5, end), ylim=(max(1, len(rows)) - 0.5, -0.5), xlabel="turn")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="lower left", fontsize="small")  # where no token is read yet

    return picture(draw, kind, title)


def _marks(
    rows: NDArray[Any], held_by_turn: dict[int, NDArray[np.int64]]
) -> tuple[dict[str, NDArray[np.float64]], list[tuple[float, float]]]:
    """By state: the token's position, and where it begins and ends [n, 3]; what is not known.

    Turn t is from t - 0.5 to t + 0.5. What is held at the end of a round is drawn for all of it.
    """
    turn, end, before = rows["turn"].astype(np.float64), -0.5, np.zeros(0, np.int64)
    is_held, read = np.zeros(len(rows), bool), 0
    is_pinned, is_erased = (rows["flags"] & int(f) > 0 for f in (Flag.PINNED, Flag.ERASED))
    rounds = np.maximum(rows["round"], 1)  # the system prompt is before the first one
    since, was_evicted = turn - 0.5, np.zeros(len(rows), bool)
    marks, unknown = {"restored": [np.zeros((0, 3))]}, list[tuple[float, float]]()

    def mark(state: str, of: NDArray[Any], until: float) -> None:
        new = np.stack([of, since[of], np.full(len(of), until)], -1)
        marks.setdefault(state, []).append(new)

    for last, cached in held_by_turn.items():
        begun, read = read, int(np.searchsorted(turn, last, "right"))
        held = cached[~is_erased[cached]]
        round = np.searchsorted(rounds, rounds[:read][-1:].sum())
        start = max(end, turn[round:read].min(initial=last) - 0.5)
        unknown += [(end, start)] if start > end else []
        new = held[~is_held[held]]
        is_held[before], is_held[held] = False, True
        gone = before[~is_held[before]]
        left, came = (before, held) if start > end else (gone, new)
        mark("held", left, end)
        since[came] = np.maximum(start, turn[came] - 0.5)
        mark("restored", new[was_evicted[new]], start)
        was_evicted[gone] = True
        was_evicted[begun:read] |= ~is_held[begun:read]
        before, end = held, last + 0.5
    mark("held", before, end)
    since, last_end = turn - 0.5, turn.max(initial=0) + 0.5
    unknown += [(end, last_end)] if end < last_end else []
    of = {"evicted": was_evicted & ~is_erased, "pinned": is_pinned, "erased": is_erased}
    for state, which in of.items():
        mark(state, np.flatnonzero(which), last_end)
    return {state: np.concatenate(parts) for state, parts in marks.items()}, unknown
