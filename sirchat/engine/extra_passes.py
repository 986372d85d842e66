"""Forward passes for measurements and recomputation, which leave the held tokens as they are.

The buffers of the cache may grow, and precomputed logits are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.reader import Reader
from sirchat.engine.types import ContinuationScore
from sirchat.memory.key_values import KeyValues, Positions
from sirchat.memory.ledger import Flag
from sirchat.models.attention_hook import PassWeights
from sirchat.models.surprisal import surprisal

# Tokens before a passage that are read with it. Of 84 facts that a cache of 256 tokens had evicted,
# SmolLM2 knows 0.94 when they are restored, 0.96 when they are read again, with 16 or 32 tokens
# before, 0.89 if the sinks are not read with them either, and 0.12 if they are not there. Keys
# differ by 0.17 of their length with 16, and 0.09 with 64.
_CONTEXT_TOKENS = 16


def attention_from(
    reader: Reader, rows: Tensor, visible: NDArray[np.bool_]
) -> NDArray[np.float64] | None:
    """The mean attention weight [n] on each held row, from the tokens at `rows` [k].

    The tokens are read again at their old positions; each sees itself and the earlier rows in
    `visible` [n]. The mean is over heads, layers and queries. None if the model shows no weights,
    has a recurrent state, or has a sliding window narrower than the cache.
    """
    model, cache, held = reader.model, reader.cache, reader.ledger.held_positions
    ids = reader.ledger.column("token_id")[held]
    max_rows = reader.pass_size(len(rows), is_observed=True)
    is_narrow = model.window is not None and cache.length + max_rows > model.window
    if is_narrow or cache.has_state:
        return None
    cache.grow_to(cache.length + max_rows)
    reader.drop_precomputed()  # its rows are overwritten
    slots, total = torch.arange(len(held)), np.zeros(len(held))
    hidden = slots[torch.from_numpy(~visible)]
    for start in range(0, len(rows), max_rows):
        part = rows[start : start + max_rows]
        own_slots = slots[part]
        positions = held[part.numpy()] if cache.absolute_positions else own_slots
        sees = torch.arange(cache.length) < own_slots[:, None]  # [k, n]
        sees[:, hidden] = False
        observer = PassWeights(range(len(cache.row_layers)))
        model.read(
            ids[part.numpy()].tolist(),
            cache,
            visible=torch.cat([sees, torch.eye(len(part), dtype=torch.bool)], dim=1),
            positions=positions.tolist(),
            observer=observer,
        )
        weights = observer.mean()  # [k, n + k]
        if weights is None:
            return None
        total += weights[:, slots.numpy()].sum(0, dtype=np.float64)
        total[part.numpy()] += weights[:, cache.length :].diagonal()
    return total / len(rows)


def score_continuations(
    reader: Reader, alternatives: Sequence[Sequence[int]]
) -> tuple[ContinuationScore, ...]:
    """The log-probabilities of several alternative continuations, read one by one.

    Raises RuntimeError if nothing has been read yet, or if an alternative is empty.
    """
    carried_logits, cache = reader.logits, reader.cache
    if carried_logits is None or not all(alternatives):
        raise RuntimeError(
            "nothing has been read yet" if carried_logits is None else "there is nothing to score"
        )
    scores = []
    for ids in alternatives:
        logits = carried_logits[None]
        if ids_to_read := ids[:-1]:  # the last id's own logits are not needed
            cache.grow_to(cache.length + len(ids_to_read))
            reader.drop_precomputed()
            after = _forward(reader, ids_to_read)
            logits = torch.cat([logits.to(after.device), after])  # [m, V]
        scores.append(_scored(ids, logits))
    return tuple(scores)


def recompute_rows(reader: Reader, positions: Positions, sinks: int) -> Iterator[KeyValues]:
    """Compute keys and values of the tokens at `positions` [n], ascending, from their ids again.

    Each passage is read in a new cache, after the first `sinks` tokens of the chat and some tokens
    right before the passage. Erased tokens are never read.
    """
    model, ledger = reader.model, reader.ledger
    ids, is_absolute = ledger.column("token_id"), reader.cache.absolute_positions
    flags = ledger.column("flags") & np.uint8(Flag.ERASED | Flag.EXCLUDED)
    readable = np.flatnonzero(flags == 0)
    breaks = np.flatnonzero(np.diff(positions) > _CONTEXT_TOKENS) + 1
    for passage in np.split(positions, breaks):
        start, end = np.searchsorted(readable, [passage[0], passage[-1] + 1])
        with_context = np.arange(max(0, start - _CONTEXT_TOKENS), end)
        positions_read = readable[np.union1d(np.arange(min(sinks, start)), with_context)]
        cache = model.new_cache(len(positions_read))
        cache.set_positions(absolute_positions=is_absolute)
        size = 1 if cache.reads_singly else reader.max_pass_ids
        for begin in range(0, len(positions_read), size):
            part = positions_read[begin : begin + size]
            model.read(ids[part].tolist(), cache, positions=part.tolist() if is_absolute else None)
            cache.commit(len(part), part)
        rows = torch.from_numpy(np.searchsorted(positions_read, passage))
        yield cache.first_written_rows(rows, passage)


def _forward(reader: Reader, ids: Sequence[int]) -> Tensor:
    """The logits [m, V] after each of the ids [m], which are not held afterwards."""
    model, cache, logits = reader.model, reader.cache, list[Tensor]()
    if not cache.reads_singly:
        return model.forward(ids, cache, positions=reader.next_positions(len(ids)))
    state, held_slots = cache.state, torch.arange(cache.length)
    try:
        for position, token_id in enumerate(ids, reader.ledger.seen):
            positions = [position] if cache.absolute_positions else None
            logits.append(model.forward([token_id], cache, positions=positions))
            cache.commit(1, position)
    finally:
        cache.keep(held_slots)
        cache.state = state
    return torch.cat(logits)


def _scored(ids: Sequence[int], logits: Tensor) -> ContinuationScore:
    """The log-probabilities of ids [m] from the logits [m, V] that predict each id."""
    with torch.inference_mode():
        predicted = torch.tensor(ids, device=logits.device)
        is_greedy = bool((logits.argmax(-1) == predicted).all())
        nats = surprisal(logits, predicted)
        return ContinuationScore(tuple(ids), tuple((-nats).tolist()), is_greedy)
