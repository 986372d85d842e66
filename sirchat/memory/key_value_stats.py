"""Statistics of tokens' keys and values, by which eviction policies rank tokens.

Each statistic is one number per token: the mean over a layer's key/value heads, then over layers.
Statistics are computed from the stored keys and values whenever tokens are ranked, so they are the
same after a switch of policies, an undo or a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sirchat.memory.ledger import KeyValueStat

_TINY = 1e-12  # least length to divide by, so that the cosine of a zero vector is 0


class Block(NamedTuple):
    """Keys and values of k of the n tokens that a policy ranks."""

    rows: Tensor  # [k], their indices among the n tokens
    tensors: list[Tensor]  # two for each layer, keys then values, each [H, k, D]


Blocks = Callable[[bool], Iterator[Block]]  # keys as attention reads them, or as first written


@torch.inference_mode()
def key_value_stats(
    wanted: Collection[KeyValueStat], count: int, blocks: Blocks
) -> dict[KeyValueStat, Tensor]:
    """Statistics [count], float64, by name; NaN for a token that is in no block."""
    stats = {name: torch.full((count,), torch.nan, dtype=torch.float64) for name in wanted}
    if set(wanted) - {"key_similarity"}:
        for block in blocks(False):
            keys, values = block.tensors[::2], block.tensors[1::2]
            for name, stat in stats.items():
                if name == "key_norm":
                    stat[block.rows] = _mean([_norm(key, 2) for key in keys])
                elif name == "value_norm":
                    stat[block.rows] = _mean([_norm(value, 1) for value in values])
    if "key_similarity" in wanted:
        # The cosine with the mean of the keys, each of length 1, equals that with their sum.
        sums = list[Tensor]()
        for block in blocks(True):
            parts = [_sum_of_units(key) for key in block.tensors[::2]]  # [H, 1, D]
            pairs = zip(sums, parts, strict=bool(sums))
            sums = [total + part.to(total.device) for total, part in pairs] or parts
        for block in blocks(True):
            pairs = zip(block.tensors[::2], sums, strict=True)
            cosines = [_cosines(key, total.to(key.device)) for key, total in pairs]
            stats["key_similarity"][block.rows] = _mean(cosines)
    return stats


def _sum_of_units(keys: Tensor) -> Tensor:
    return (1 / _norm(keys, 2).clamp_min(_TINY))[:, None] @ keys.float()  # [H, 1, D]


def _cosines(keys: Tensor, anchor: Tensor) -> Tensor:
    products = (keys.float() @ anchor.mT)[..., 0]  # [H, k] of [H, k, D] and [H, 1, D]
    return products / (_norm(keys, 2) * _norm(anchor, 2)).clamp_min(_TINY)


def _mean(layers: list[Tensor]) -> Tensor:
    total = torch.zeros(layers[0].shape[1], dtype=torch.float64, device=layers[0].device)
    for layer in layers:  # [H, k]
        total += layer.double().mean(0).to(total.device)
    return (total / len(layers)).cpu()


def _norm(x: Tensor, p: int) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, p, dim=-1, dtype=torch.float32)
    return norm
