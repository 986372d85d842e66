"""Keys, values and attention of a saved chat, as named tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sirchat.memory.attention import AttentionCheckpoint, QueryWindow
from sirchat.memory.segments import Rows

_ATTENTION = "attention."


def row_tensors(rows: Rows) -> dict[str, torch.Tensor]:
    """Keys and values by number, and where they stand."""
    named = {str(n): tensor for n, tensor in enumerate(rows.tensors)}
    positions, written_at = map(torch.from_numpy, (rows.positions, rows.written_at))
    return {**named, "positions": positions, "written_at": written_at}


def attention_tensors(received: AttentionCheckpoint) -> dict[str, torch.Tensor]:
    """The attention that rows received; empty where it was not tracked."""
    counted = [received.total, received.repeated]
    if not any(one is not None and one.any() for one in counted):
        return {}
    named: dict[str, NDArray[Any]] = {
        "positions": received.positions,
        "total": received.total,
        "log_decay": received.log_decay,
    }
    if received.repeated is not None:
        named["repeated"] = received.repeated
    for number, part in enumerate(received.window):
        named |= {f"{number}.positions": part.positions, f"{number}.weights": part.weights}
    return {_ATTENTION + key: torch.from_numpy(array.copy()) for key, array in named.items()}


def pop_attention(tensors: dict[str, torch.Tensor]) -> AttentionCheckpoint | None:
    """Remove the attention from saved tensors and return it."""
    keys = [key for key in tensors if key.startswith(_ATTENTION)]
    named = {key.removeprefix(_ATTENTION): tensors.pop(key).numpy() for key in keys}
    if not named:
        return None
    count = sum(key.endswith(".weights") for key in named)
    window = [QueryWindow(named[f"{n}.positions"], named[f"{n}.weights"]) for n in range(count)]
    return AttentionCheckpoint(
        named["positions"],
        named["total"],
        named["log_decay"],
        tuple(window),
        named.get("repeated"),
    )


def pop_rows(tensors: dict[str, torch.Tensor]) -> Rows:
    """The rows that `row_tensors` was given."""
    positions = tensors.pop("positions").numpy()
    written_at = tensors.pop("written_at").numpy()
    return Rows(positions, written_at, [tensors[str(n)] for n in range(len(tensors))])


def rows_fit(rows: Rows, one: Rows, seen: int) -> bool:
    """Whether saved rows are of the same shapes and types as `one` row of this model.

    `seen` is the number of tokens of the stream.
    """
    count, shapes = len(rows), [(*t.shape[:1], len(rows), *t.shape[2:]) for t in one.tensors]
    return (
        _ascend(rows.positions, seen)
        and rows.written_at.shape == (count,)
        and rows.written_at.dtype == np.int64
        and bool(((rows.written_at >= 0) & (rows.written_at < 2**31)).all())
        and [tuple(tensor.shape) for tensor in rows.tensors] == shapes
        and [tensor.dtype for tensor in rows.tensors] == [tensor.dtype for tensor in one.tensors]
    )


def attention_fits(received: AttentionCheckpoint, seen: int) -> bool:
    """Whether saved attention belongs to a stream of `seen` tokens."""
    columns = [received.total, received.log_decay, received.repeated]
    shapes = {column.shape for column in columns if column is not None}
    return (
        _ascend(received.positions, seen)
        and shapes == {received.positions.shape}
        and all(
            _ascend(part.positions, seen) and part.weights.shape[1:] == part.positions.shape
            for part in received.window
        )
    )


def _ascend(positions: NDArray[Any], seen: int) -> bool:
    """Whether these are stream positions [n], ascending."""
    if positions.ndim != 1 or positions.dtype != np.int64:
        return False
    inside = ((positions >= 0) & (positions < seen)).all()
    return bool(inside and (np.diff(positions) > 0).all())
