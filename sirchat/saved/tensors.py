"""Keys, values and attention of a saved chat, as named tensors."""

from __future__ import annotations

from typing import Any

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


def pop_rows(tensors: dict[str, torch.Tensor] | None) -> Rows | None:
    """The rows that `row_tensors` was given; None for None."""
    if tensors is None:
        return None
    positions = tensors.pop("positions").numpy()
    written_at = tensors.pop("written_at").numpy()
    return Rows(positions, written_at, [tensors[str(n)] for n in range(len(tensors))])
