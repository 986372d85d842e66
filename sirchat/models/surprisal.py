"""Computes surprisal, -log p(token), from logits, or block by block from hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sirchat.models.gguf.header import NATIVE_ROW_BLOCK
from sirchat.models.packed import (
    BlockLinear,
    GpuLinear,
    Int8Linear,
    PackedLinear,
    RowLinear,
    has_matrix_units,
)

# Types of models whose logits are the product of the last hidden states and the output head.
_LINEAR_HEAD_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")

# Hidden states in a block, but on a CPU, where a block has so many tokens of the vocabulary.
_BLOCK_ROWS, _BLOCK_TOKENS = 512, 1024


@dataclass(frozen=True, eq=False)
class PassResult:
    """The result of a forward pass over m ids."""

    surprisal: Tensor  # float32 [m - 1], in nats, of all ids but the first
    logits: Tensor  # float32 [V], raw, after the last id

    @classmethod
    def of_logits(cls, logits: Tensor, ids: Sequence[int]) -> PassResult:
        """Make the result from the logits [m, V] after each id."""
        if len(ids) == 1:
            return cls(logits.new_empty(0), logits[0])
        with torch.inference_mode():
            after = torch.tensor(ids[1:], device=logits.device)
            # A copy, so that the memory of the other rows is freed.
            return cls(surprisal(logits[:-1], after), logits[-1].clone())


def surprisal(logits: Tensor, ids: Tensor) -> Tensor:
    """-log p(id) after each row of raw logits [m, V]: float32 [m] in nats, at least 0.

    SirLLM calls it token entropy (arXiv:2405.12528, section 3.2).
    """
    logits = logits.float()
    chosen = logits.gather(-1, ids[:, None])[:, 0]
    return (torch.logsumexp(logits, -1) - chosen).clamp_min(0.0)


def has_linear_head(module: Any) -> bool:
    """Whether logits are just the product of the last hidden states and the head's weights."""
    head, config = module.get_output_embeddings(), module.config
    is_bent = bool(getattr(config, "final_logit_softcapping", None))
    is_linear = config.model_type in _LINEAR_HEAD_TYPES and isinstance(
        head, nn.Linear | PackedLinear
    )
    return is_linear and not is_bent


@torch.inference_mode()
def surprisal_of_states(head: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """The surprisal of each id [m] after the hidden states [m, d]: float32 in nats, at least 0.

    Logits are never all in memory. On a CPU they are float32, also for bfloat16 weights; those of a
    packed head err by 2^-17 (`tiles.cpp`), or all but those of `ids` by 0.01 to 0.02 nats.
    """
    weight = getattr(head, "weight", hidden)
    is_on_cpu = hidden.device.type == weight.device.type == "cpu"  # the head may be on disk
    if not is_on_cpu or isinstance(head, GpuLinear):
        states = torch.split(hidden, _BLOCK_ROWS)
        each = (torch.log_softmax(head(some).float(), -1) for some in states)
        blocks = zip(each, torch.split(ids, _BLOCK_ROWS), strict=True)
        parts = [log_p.gather(1, some.to(log_p.device)[:, None])[:, 0] for log_p, some in blocks]
        return -torch.cat(parts).clamp_max(0.0)
    hidden = hidden.float().contiguous()
    is_native = isinstance(head, BlockLinear) or getattr(head, "max_native_rows", 0) > 0
    if is_native and head.bias is None and has_matrix_units():
        given = hidden, *(getattr(head, name) for name in head.row_dims), ids
        ops = torch.ops.sirchat
        score = ops.score_blocks if isinstance(head, BlockLinear) else ops.score_8
        scores: Tensor = score(*given)  # of blocks of the vocabulary, and ids
        return (torch.logsumexp(scores[:-1], 0) - scores[-1]).clamp_min_(0.0)
    total = torch.full((len(ids),), -torch.inf)  # log of the sum of exp(logit) so far
    size = head.out_features
    # The library multiplies no fewer rows of weights than a block has.
    for start, end in pairwise(
        [0, *range(_BLOCK_TOKENS, size - NATIVE_ROW_BLOCK, _BLOCK_TOKENS), size]
    ):
        some = slice(start, end)
        logits = _logits_of(head, hidden, some, is_native=is_native)
        if head.bias is not None:
            logits.add_(head.bias[some])
        total = torch.logaddexp(total, torch.logsumexp(logits, -1))
    rows: Tensor = head.rows(ids) if isinstance(head, RowLinear) else head.weight[ids].float()
    chosen: Tensor = torch.linalg.vecdot(rows, hidden)
    if head.bias is not None:
        chosen += head.bias[ids]
    return (total - chosen).clamp_min_(0.0)


def _logits_of(head: Any, hidden: Tensor, some: slice, *, is_native: bool) -> Tensor:
    """The logits [m, n] of some tokens, without a bias, after the float32 states [m, d]."""
    # The library rounds states to 8 bits. With 16 bits, errors would be 0.0001 nats, not 0.02, and
    # a text would take a fifth longer.
    logits: Tensor
    if isinstance(head, BlockLinear):
        logits = torch.ops.sirchat.multiply_blocks(hidden, head.blocks[some])
    elif is_native:
        logits = torch.ops.sirchat.multiply_8(hidden, head.q[some], head.scale[some])
    elif isinstance(head, Int8Linear):
        logits = (hidden @ head.q[some].float().T).mul_(head.scale[some])
    else:
        logits = hidden @ head.weight[some].float().T
    return logits
