"""The rows that an engine holds, with their keys and values, to compare two engines."""

from __future__ import annotations

import torch
from torch import Tensor

from sirchat.engine.engine import Engine


def contents(engine: Engine) -> list[Tensor]:
    """Positions of the held rows, then keys and values of each layer."""
    layers = range(len(engine.cache.layers))
    views = [
        view(n) for n in layers for view in (engine.cache.layer_keys, engine.cache.layer_values)
    ]
    return [torch.from_numpy(engine.ledger.held_positions.copy()), *(one.clone() for one in views)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
