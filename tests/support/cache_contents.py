"""The rows that an engine holds, with their keys and values, and a session's state, to compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sirchat.chat.session import Session
from sirchat.engine.engine import Engine


def contents(engine: Engine) -> list[Tensor]:
    """Positions of the held rows, then keys and values of each layer."""
    layers = range(len(engine.cache.row_layers))
    views = [
        view(n) for n in layers for view in (engine.cache.layer_keys, engine.cache.layer_values)
    ]
    return [torch.from_numpy(engine.ledger.held_positions.copy()), *(one.clone() for one in views)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def state(chat: Session) -> tuple[Any, ...]:
    """Everything that what comes next depends on, and all counts but times."""
    rows = [(row.position, row.id, row.score, row.flags) for row in chat.snapshot().rows]
    end = chat.end()
    counts = (end.turns, end.seen, end.resident, end.tokens_out)
    logits = chat.save().logits
    return rows, counts, None if logits is None else logits.tolist()
