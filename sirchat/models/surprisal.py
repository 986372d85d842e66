"""Computes surprisal, -log p(token), from logits, or block by block from hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sirchat.models.devices import has_vnni
from sirchat.models.packed import BlockLinear, Int8Linear, PackedLinear, has_matrix_units

# Types of models whose logits are the product of the last hidden states and the output head.
_LINEAR_HEAD_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")

_BLOCK_ROWS, _BLOCK_TOKENS = 256, 1024  # hidden states and vocabulary tokens in a block on a CPU

_DIGIT_STEPS = 254  # steps of a digit that make one step of the digit before it


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

    Logits are never all in memory. On a CPU they are float32, also for bfloat16 weights;
    `tiles.cpp` errs by 2^-17 for eight-bit weights, and for blocks all errs by 0.01 to 0.02 nats.
    """
    weight = getattr(head, "weight", hidden)
    if not (hidden.device.type == weight.device.type == "cpu"):  # the head may be on disk
        states = torch.split(hidden, _BLOCK_ROWS)
        each = (torch.log_softmax(head(some).float(), -1) for some in states)
        blocks = zip(each, torch.split(ids, _BLOCK_ROWS), strict=True)
        parts = [log_p.gather(1, some.to(log_p.device)[:, None])[:, 0] for log_p, some in blocks]
        return -torch.cat(parts).clamp_max(0.0)
    is_block = isinstance(head, BlockLinear)
    is_native = is_block or (isinstance(head, PackedLinear) and head.max_native_rows > 0)
    if is_native and head.bias is None and has_matrix_units():
        given = hidden.float().contiguous(), *(getattr(head, name) for name in head.row_dims), ids
        ops = torch.ops.sirchat
        score = ops.score_blocks if is_block else ops.score_8
        scores: Tensor = score(*given)  # of blocks of the vocabulary, and ids
        return (torch.logsumexp(scores[:-1], 0) - scores[-1]).clamp_min_(0.0)
    if isinstance(head, BlockLinear):
        return _surprisal_by_blocks(head, hidden.float().contiguous(), ids)
    total = torch.full((len(ids),), -torch.inf)  # log of the sum of exp(logit) so far
    chosen = torch.empty(len(ids))
    is_fast = isinstance(head, Int8Linear) and has_vnni()
    products = _WholeNumberProducts(head, hidden) if is_fast else _FloatProducts(head, hidden)
    for start in range(0, head.out_features, _BLOCK_TOKENS):
        end = min(start + _BLOCK_TOKENS, head.out_features)
        products.select_weights(start, end)
        for at in range(0, len(ids), _BLOCK_ROWS):
            some = slice(at, at + _BLOCK_ROWS)
            logits = products.multiply(some)  # [m, n]
            if isinstance(head, Int8Linear):
                logits.mul_(head.scale[start:end])
            if head.bias is not None:
                logits.add_(head.bias[start:end])
            total[some] = torch.logaddexp(total[some], torch.logsumexp(logits, -1))
            here = ((ids[some] >= start) & (ids[some] < end)).nonzero()[:, 0]
            chosen[some][here] = logits[here, ids[some][here] - start]
    return (total - chosen).clamp_min_(0.0)


def _surprisal_by_blocks(head: BlockLinear, hidden: Tensor, ids: Tensor) -> Tensor:
    """As `surprisal_of_states`; all logits but those of `ids` are of states rounded to 8 bits."""
    # In 16 bits, errors would be 0.0001 nats, not 0.02, and a text would take a fifth longer.
    bias = torch.zeros(head.out_features) if head.bias is None else head.bias.float()
    total = torch.full((len(ids),), -torch.inf)
    parts = (torch.split(whole, _BLOCK_TOKENS) for whole in (head.blocks, bias))
    for blocks, some_bias in zip(*parts, strict=True):
        logits = torch.ops.sirchat.multiply_blocks(hidden, blocks).add_(some_bias)  # [m, n]
        total = torch.logaddexp(total, torch.logsumexp(logits, -1))
    chosen = (head.rows(ids) * hidden).sum(-1) + bias[ids]
    return (total - chosen).clamp_min_(0.0)


class _FloatProducts:
    """Multiplies hidden states [m, d] with the head's weights for some tokens, in float32."""

    def __init__(self, head: Any, hidden: Tensor) -> None:
        self._head, self._hidden = head, hidden.float()

    def select_weights(self, start: int, end: int) -> None:
        head = self._head
        rows = head.q[start:end] if isinstance(head, Int8Linear) else head.weight[start:end]
        self._weight = rows.float().T  # [d, n]

    def multiply(self, some: slice) -> Tensor:
        """Multiply some hidden states with the n selected weights: [m, n]."""
        return self._hidden[some] @ self._weight


class _WholeNumberProducts:
    """Like `_FloatProducts`, but in whole numbers, which are fast with VNNI."""

    # A state is the sum of three eight-bit digits times their steps, exact to 2^-24 of its largest
    # number.

    def __init__(self, head: Int8Linear, hidden: Tensor) -> None:
        self._head, rest = head, hidden.float()
        self._step = rest.abs().amax(1, keepdim=True).clamp_min_(1e-30) / 127  # [m, 1]
        digits, step = list[Tensor](), self._step
        for _ in range(3):
            digit = (rest / step).round_()
            digits.append(digit.to(torch.int8))
            rest, step = torch.addcmul(rest, digit, step, value=-1), step / _DIGIT_STEPS
        self._digits = torch.stack(digits)  # [3, m, d]

    def select_weights(self, start: int, end: int) -> None:
        self._weight = self._head.q[start:end].T  # [d, n]

    def multiply(self, some: slice) -> Tensor:
        digits = self._digits[:, some]
        products = torch._int_mm(digits.flatten(0, 1), self._weight).float()
        first, second, third = products.view(3, digits.shape[1], -1)
        third.div_(_DIGIT_STEPS).add_(second).div_(_DIGIT_STEPS).add_(first)
        product: Tensor = third.mul_(self._step[some])
        return product
