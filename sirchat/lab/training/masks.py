"""Attention masks for training: anchor-based attention, and masks that imitate a budget.

The first kind is that of Anchor-based LLMs (equation 4). Text is divided into sequences, and each
ends with its anchor token. A token attends to its own sequence, and to the anchors of earlier
sequences. An anchor attends to its own sequence only, so that the anchor's keys and values must
represent the whole sequence.

Three rules are added to the equation. Documents in one row do not attend to each other. The first
`sinks` tokens of a document are visible to all its later tokens, as in a cache with sinks. Tokens
marked as kept are visible like anchors (section 6.1, where the whole source text is kept).

The second kind imitates a budget: these masks hide the tokens that a policy would evict, because
evictions leave gaps in a cache. A model trained with such gaps learns to represent a fact in the
tokens that are kept, and to recall a fact from the few of its tokens that are still visible.
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

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of the indices of row, head, query and key: whether the query attends to the key."""


def visible(
    is_anchor: Tensor,
    document: Tensor | None = None,
    is_kept: Tensor | None = None,
    *,
    sinks: int = 0,
) -> Tensor:
    """The mask of anchor-based attention, bool [B, 1, T, T].

    It is true where a token (third dimension) attends to another one (fourth dimension).

    Args:
        is_anchor: bool [B, T], whether each token is an anchor.
        document: int [B, T], number of each token's document; None for one document in each row.
        is_kept: bool [B, T], further tokens that are visible like anchors; None for no such tokens.
        sinks: number of tokens at each document's start that all its later tokens attend to.
    """
    rows, length = is_anchor.shape
    document = torch.zeros_like(is_anchor, dtype=torch.int64) if document is None else document
    row = torch.arange(rows, device=is_anchor.device)[:, None, None, None]
    at = torch.arange(length, device=is_anchor.device)
    return _mask_function(is_anchor, document, is_kept, sinks)(row, row, at[:, None], at)


def block_mask(is_anchor: Tensor, document: Tensor, *, sinks: int = 0) -> Any:
    """The mask that `visible` makes, as a block mask, with which flex attention skips empty blocks.

    Building the block mask still needs memory for a dense bool mask.
    """
    rows, length = is_anchor.shape
    mask = _mask_function(is_anchor, document, None, sinks)
    return create_block_mask(mask, rows, None, length, length, device=str(is_anchor.device))


def _mask_function(
    is_anchor: Tensor, document: Tensor, is_kept: Tensor | None, sinks: int
) -> MaskFunction:
    # A new document also begins a new sequence.
    sequence = sequences(is_anchor) + document * is_anchor.shape[1]
    visible_later = is_anchor if is_kept is None else is_anchor | is_kept
    is_sink = position_in_document(document) < sinks

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_sequence = sequence[row, query] == sequence[row, key]
        earlier = ~is_anchor[row, query] & visible_later[row, key]
        same_document = document[row, query] == document[row, key]
        return (query >= key) & same_document & (same_sequence | earlier | is_sink[row, key])

    return mask


def sequences(is_anchor: Tensor) -> Tensor:
    """The index, int [B, T], of each token's sequence; a sequence ends with its anchor."""
    before: Tensor = is_anchor.long().cumsum(1) - is_anchor.long()
    return before


def position_in_document(document: Tensor) -> Tensor:
    """The position of each token in its document, int [B, T], from 0."""
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
    """The attention mask of a batch in which each row has a budget, and the answers lost by it.

    `visible` [rows, 1, tokens, tokens] is true where a token (third dimension) attends to another.
    `lost` [rows, tokens + 1], with columns as in `Batch`, is true for the tokens of answers that
    can't be known, because the fact was evicted.
    """

    visible: Tensor
    lost: Tensor


def draw_gaps(rng: Random, losses: Tensor, batch: Batch, user: int) -> Gaps:
    """Draw a random budget for each row; at each user turn, hide the tokens above the budget.

    Args:
        rng: draws the budgets, and the scores of the rows with random evictions.
        losses: [rows, tokens], the loss in nats of each token of `batch` but a row's first.
        batch: the rows.
        user: the id of the token that begins a user turn.
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
    """A causal mask [tokens, tokens] without the tokens that a budget evicts.

    At each position in `turns`, the tokens of lowest score are evicted until `budget` tokens are
    held. Sinks and the most recent tokens are kept. Evicted tokens are never restored.
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
    """Mark [n] the answer tokens that can't be known under the mask `visible` [tokens, tokens].

    An answer token can't be known if the mask hides a token of the fact's value that can't be
    guessed from the value's other tokens.
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
