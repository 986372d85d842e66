"""Makes two kinds of attention masks for training: for anchors, and as if under a budget.

The mask of anchor-based attention is that of the paper Anchor-based LLMs (equation 4). Text is
divided into sequences, and each sequence ends with its anchor token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from sirchat.lab.training.rows import Batch

# A function that takes indices of row, head, query and key as tensors, and returns a bool tensor.
# The result says whether the query attends to the key
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def anchor_mask(
    is_anchor: Tensor,
    document: Tensor | None = None,
    is_kept: Tensor | None = None,
    *,
    sinks: int = 0,
) -> Tensor:
    """The attention mask, bool [B, 1, T, T], under which text is only seen through its anchors.

    `is_anchor` is bool [B, T], whether each token is an anchor, which ends a sequence.
    """
    rows, length = is_anchor.shape
    document = torch.zeros_like(is_anchor, dtype=torch.int64) if document is None else document
    row = torch.arange(rows, device=is_anchor.device)[:, None, None, None]
    at = torch.arange(length, device=is_anchor.device)
    return _mask_function(is_anchor, document, is_kept, sinks)(row, row, at[:, None], at)


def block_mask(is_anchor: Tensor, document: Tensor, *, sinks: int = 0) -> Any:
    """The mask of anchor-based attention as a block mask of PyTorch's flex attention."""
    rows, length = is_anchor.shape
    mask = _mask_function(is_anchor, document, None, sinks)
    return create_block_mask(mask, rows, None, length, length, device=str(is_anchor.device))


def _mask_function(
    is_anchor: Tensor, document: Tensor, is_kept: Tensor | None, sinks: int
) -> MaskFunction:
    # A new document also begins a new sequence.
    sequence = sequence_numbers(is_anchor) + document * is_anchor.shape[1]
    visible_later = is_anchor if is_kept is None else is_anchor | is_kept
    is_sink = position_in_document(document) < sinks

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_sequence = sequence[row, query] == sequence[row, key]
        earlier = ~is_anchor[row, query] & visible_later[row, key]
        same_document = document[row, query] == document[row, key]
        return (query >= key) & same_document & (same_sequence | earlier | is_sink[row, key])

    return mask


def sequence_numbers(is_anchor: Tensor) -> Tensor:
    """The number of the sequence that each token belongs to, int [B, T], from 0 in each row.

    A sequence ends with its anchor. `is_anchor`, bool [B, T], says where the anchors are.
    """
    before: Tensor = is_anchor.long().cumsum(1) - is_anchor.long()
    return before


def position_in_document(document: Tensor) -> Tensor:
    """The position of each token in its document, int [B, T], from 0.

    `document`, int [B, T], has the number of each token's document.
    """
    length = document.shape[1]
    at = torch.arange(length, device=document.device).expand_as(document)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return at - torch.where(begins, at, 0).cummax(1).values


SINKS, RECENT = 4, 32
MIN_BUDGET = 96
RANDOM_SHARE = 0.15  # share of rows with random evictions; the others evict the lowest surprisal
INFORMATIVE_NATS = 0.7  # a value's tokens of lower surprisal can be guessed from its other tokens


@dataclass(frozen=True, slots=True)
class Gaps:
    """An attention mask that imitates a budget for each row of a batch, and the answers it hides.

    `visible`, bool [rows, 1, tokens, tokens], is true where a token (third dimension) attends to
    another token (fourth dimension).
    """

    visible: Tensor
    lost: Tensor


def draw_gaps(rng: Random, losses: Tensor, batch: Batch, user: int) -> Gaps:
    """Make an attention mask for `batch` that imitates a random budget in each row.

    `losses` is [rows, tokens], the surprisal in nats of each token of `batch` but a row's first.
    """
    surprisal = torch.nn.functional.pad(losses.float(), (1, 0)).numpy()  # [rows, tokens + 1]
    ids, answer, fact = batch.ids.numpy(), batch.answer.numpy(), batch.fact.numpy()
    rows, tokens = losses.shape
    visible = np.zeros((rows, 1, tokens, tokens), bool)
    lost = np.zeros((rows, tokens + 1), bool)
    for i in range(rows):
        turns = np.flatnonzero(ids[i, :tokens] == user)
        budget = math.exp(rng.uniform(math.log(MIN_BUDGET), math.log(tokens / 2)))
        is_random = rng.random() < RANDOM_SHARE
        noise = np.array([rng.random() for _ in range(tokens)])
        score = noise if is_random else surprisal[i, :tokens]
        visible[i, 0] = visible_under_budget(score, turns, int(budget))
        lost[i] = lost_answers(visible[i, 0], surprisal[i], answer[i], fact[i])
    return Gaps(torch.from_numpy(visible), torch.from_numpy(lost))


def visible_under_budget(
    score: NDArray[np.floating], turns: NDArray[np.int64], budget: int
) -> NDArray[np.bool_]:
    """The causal mask, bool [tokens, tokens], of one row in which a budget hides evicted tokens.

    At each position in `turns`, the tokens of lowest `score` [tokens] before it are evicted until
    `budget` tokens are held.
    """
    tokens = len(score)
    visible = np.tri(tokens, dtype=bool)
    held = np.ones(tokens, bool)
    for turn in turns:
        candidates = np.flatnonzero(held[SINKS : max(SINKS, turn - RECENT)]) + SINKS
        excess = int(held[:turn].sum()) - budget
        if excess <= 0:
            continue
        evicted = candidates[np.argsort(score[candidates], kind="stable")[:excess]]
        held[evicted] = False
        visible[turn:, evicted] = False
    return visible


def lost_answers(
    visible: NDArray[np.bool_],
    surprisal: NDArray[np.floating],
    answer: NDArray[np.bool_],
    fact: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Find the answer tokens of one row that the model can't know under an attention mask.

    Returns bool [tokens + 1], true for each answer token for which the mask `visible` [tokens,
    tokens] hides a token of the fact's value with high `surprisal`.
    """
    lost = np.zeros(len(fact), bool)
    for number in range(1, int(fact.max(initial=0)) + 1):
        value: list[int] = []
        for at in np.flatnonzero(fact == number).tolist():
            if answer[at]:
                seen = visible[at - 1]  # the tokens that the token before `at` attends to
                lost[at] = any(not seen[one] for one in value if surprisal[one] > INFORMATIVE_NATS)
            else:  # if the fact is stated again, the newer value counts
                value = [*value, at] if value and value[-1] == at - 1 else [at]
    return lost
