"""Statistics of tokens' keys and values, by which eviction policies rank tokens.

Each statistic is one number for each token: the mean over a layer's key/value heads, then over all
layers. Whenever tokens are ranked, the statistics that the policy uses are computed anew from the
stored keys and values. Therefore they are the same after a switch of policies, an undo or a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.ledger import KeyValueStat

Floats = NDArray[np.float64]

_TINY = 1e-12
"""Minimum vector length to divide by, so that the cosine of a zero vector is 0."""


class Block(NamedTuple):
    """Keys and values of k tokens, out of the n tokens that a policy ranks.

    Attributes:
        rows: [k], the index of each of these tokens among the n ranked tokens.
        tensors: two for each layer, keys then values, each [H, k, D].
    """

    rows: NDArray[np.int64]
    tensors: list[Tensor]


Blocks = Callable[[], Iterator[Block]]


@torch.inference_mode()
def key_value_stats(
    wanted: Collection[KeyValueStat], count: int, written: Blocks, as_read: Blocks
) -> dict[KeyValueStat, Floats]:
    """Compute statistics of the keys and values of the tokens that a policy ranks.

    Returns an array [count] for each name. A token that is in no block gets NaN.

    Args:
        wanted: names of the statistics.
        count: number of ranked tokens.
        written: returns the tokens' keys and values in blocks, with keys as first written.
        as_read: returns these blocks with keys rotated to the positions at which attention reads
            them.
    """
    found = {name: np.full(count, np.nan) for name in wanted}
    if set(wanted) - {"key_similarity"}:
        for block in written():
            keys, values = block.tensors[::2], block.tensors[1::2]
            for name, of in found.items():
                if name == "key_norm":
                    of[block.rows] = _mean([_norm(key, 2) for key in keys])
                elif name == "value_norm":
                    of[block.rows] = _mean([_norm(value, 1) for value in values])
                elif name == "value_range":
                    of[block.rows] = _mean([one.amax(-1) - one.amin(-1) for one in values])
    if "key_similarity" in wanted:
        for rows, similarity in _similarities(as_read):
            found["key_similarity"][rows] = similarity
    return found


def _similarities(as_read: Blocks) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Compute the cosine of each token's key with the mean key, the statistic `key_similarity`.

    The mean key is the mean of all keys, each scaled to length 1. The cosine with the sum of these
    keys is computed, because it equals the cosine with their mean. Yields, for each block of k
    tokens, the tokens' row numbers [k] and cosines [k].
    """
    sums: list[Tensor] = []
    for block in as_read():
        parts = [_sum_of_units(key) for key in block.tensors[::2]]  # [H, 1, D]
        sums = [a + b.to(a.device) for a, b in zip(sums, parts, strict=True)] if sums else parts
    for block in as_read():
        pairs = zip(block.tensors[::2], sums, strict=True)
        yield block.rows, _mean([_cosines(key, one.to(key.device)) for key, one in pairs])


def _sum_of_units(keys: Tensor) -> Tensor:
    """Scale each of the keys [H, k, D] to length 1; returns the sum of each head's k keys.

    The sums are [H, 1, D].
    """
    return (1 / _norm(keys, 2).clamp_min(_TINY))[:, None] @ keys.float()


def _cosines(keys: Tensor, anchor: Tensor) -> Tensor:
    """Cosines [H, k] between `keys` [H, k, D] and one vector for each head, `anchor` [H, 1, D]."""
    products = (keys.float() @ anchor.mT)[..., 0]
    return products / (_norm(keys, 2) * _norm(anchor, 2)).clamp_min(_TINY)


def _mean(layers: list[Tensor]) -> Floats:
    """The mean [k] over heads, then over layers, of a tensor [H, k] for each layer."""
    total = torch.zeros(layers[0].shape[1], dtype=torch.float64, device=layers[0].device)
    for one in layers:
        total += one.double().mean(0).to(total.device)
    mean: Floats = (total / len(layers)).cpu().numpy()
    return mean


def _norm(x: Tensor, p: int) -> Tensor:
    """The p-norms [H, k] of the vectors `x` [H, k, D], as float32."""
    norm: Tensor = torch.linalg.vector_norm(x, p, dim=-1, dtype=torch.float32)
    return norm


def median_for_unknown(values: Floats) -> Floats:
    """The values [n], with each NaN replaced by the median of the other values.

    NaN stands for an unknown value. If all values are NaN, they are replaced by 0. `values` itself
    is changed.
    """
    unknown = np.isnan(values)
    if unknown.any():
        values[unknown] = 0.0 if unknown.all() else np.median(values[~unknown])
    return values
