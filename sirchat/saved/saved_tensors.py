"""Names and checks the tensors that are saved beside a chat: keys and values, attention, state."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sirchat.memory.attention import AttentionCheckpoint, QueryWindow
from sirchat.memory.key_values import CacheState, KeyValues, Tiers

_ATTENTION = "attention."
_STATE = "state."
_TIERS = "tiers."


def key_value_tensors(rows: KeyValues) -> dict[str, torch.Tensor]:
    """The tensors to save for keys and values, by name: 0, 1, ..., and their positions."""
    named = {str(n): tensor for n, tensor in enumerate(rows.tensors)}
    positions, written_at = map(torch.from_numpy, (rows.positions, rows.written_at))
    if rows.tiers is not None:
        named |= {f"{_TIERS}{n}": centre for n, centre in enumerate(rows.tiers.centres)}
        named[f"{_TIERS}bits"] = torch.from_numpy(rows.tiers.bits)
    return {**named, "positions": positions, "written_at": written_at}


def attention_tensors(received: AttentionCheckpoint) -> dict[str, torch.Tensor]:
    """The tensors to save for received attention; none if none was recorded."""
    if not received.total.any():
        return {}
    named: dict[str, NDArray[Any]] = {
        "positions": received.positions,
        "total": received.total,
        "log_decay": received.log_decay,
    }
    for number, part in enumerate(received.window):
        named |= {f"{number}.positions": part.positions, f"{number}.weights": part.weights}
    return {_ATTENTION + key: torch.from_numpy(array.copy()) for key, array in named.items()}


def state_tensors(state: CacheState) -> dict[str, torch.Tensor]:
    """The tensors to save for the state of recurrent and convolution layers."""
    return {
        f"{_STATE}{number}.{kind}.{which}": tensor.contiguous()
        for number, layer in enumerate(state)
        for (kind, which), tensor in layer.items()
    }


def pop_key_values(tensors: dict[str, torch.Tensor]) -> KeyValues:
    """Take the keys and values out of `tensors`, which must have nothing else left."""
    positions = tensors.pop("positions").numpy()
    written_at = tensors.pop("written_at").numpy()
    tiers, bits = None, tensors.pop(f"{_TIERS}bits", None)
    if bits is not None:
        tiers = Tiers(bits.numpy(), [tensors.pop(f"{_TIERS}{n}") for n in range(len(tensors) // 2)])
    return KeyValues(positions, written_at, [tensors[str(n)] for n in range(len(tensors))], tiers)


def key_values_fit(rows: KeyValues, example: KeyValues, seen: int) -> bool:
    """Whether saved keys and values fit a model and a stream of `seen` tokens.

    `example` has the keys and values of one token of that model.
    """
    count = len(rows)
    shapes = [(*tensor.shape[:1], count, *tensor.shape[2:]) for tensor in example.tensors]
    return (
        _are_ascending(rows.positions, seen)
        and rows.written_at.shape == (count,)
        and rows.written_at.dtype == np.int64
        and bool(((rows.written_at >= 0) & (rows.written_at < 2**31)).all())
        and [tuple(tensor.shape) for tensor in rows.tensors] == shapes
        and [one.dtype for one in rows.tensors] == [one.dtype for one in example.tensors]
        and (rows.tiers is None or rows.tiers.fit(example.tensors, seen))
    )


def pop_attention(tensors: dict[str, torch.Tensor]) -> AttentionCheckpoint | None:
    """Take the received attention out of `tensors`; None if it was not saved."""
    keys = [key for key in tensors if key.startswith(_ATTENTION)]
    named = {key.removeprefix(_ATTENTION): tensors.pop(key).numpy() for key in keys}
    if not named:
        return None
    count = sum(key.endswith(".weights") for key in named)
    window = [QueryWindow(named[f"{n}.positions"], named[f"{n}.weights"]) for n in range(count)]
    return AttentionCheckpoint(
        named["positions"], named["total"], named["log_decay"], tuple(window)
    )


def attention_fits(received: AttentionCheckpoint, seen: int) -> bool:
    """Whether arrays of saved attention fit each other and a stream of `seen` tokens."""
    return (
        _are_ascending(received.positions, seen)
        and received.total.shape == received.log_decay.shape == received.positions.shape
        and all(
            _are_ascending(part.positions, seen)
            and part.weights.ndim in (2, 4)
            and part.weights.shape[-1:] == part.positions.shape
            for part in received.window
        )
    )


def pop_state(tensors: dict[str, torch.Tensor], example: CacheState) -> CacheState:
    """Take the state of recurrent layers out of `tensors`, to the device of `example`.

    Returns () if names, shapes or dtypes differ from the example's; it must be computed again then.
    """
    saved = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_STATE)}
    expected = state_tensors(example)
    if saved.keys() != expected.keys() or any(
        (saved[name].shape, saved[name].dtype) != (like.shape, like.dtype)
        for name, like in expected.items()
    ):
        return ()
    return tuple(
        {
            (kind, which): saved[f"{_STATE}{number}.{kind}.{which}"].to(like.device)
            for (kind, which), like in layer.items()
        }
        for number, layer in enumerate(example)
    )


def _are_ascending(positions: NDArray[Any], seen: int) -> bool:
    """Whether `positions` [n] are ascending stream positions below `seen`."""
    if positions.ndim != 1 or positions.dtype != np.int64:
        return False
    inside = ((positions >= 0) & (positions < seen)).all()
    return bool(inside and (np.diff(positions) > 0).all())
