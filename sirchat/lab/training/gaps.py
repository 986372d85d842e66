"""Attention masks for training as if under a budget: evicted tokens are masked out.

After evictions a model's cache has gaps. Trained on rows with such gaps, it learns to represent a
fact in the tokens that are kept, and to recall a fact from the few tokens left of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.lab.training.rows import Batch

SINKS, RECENT = 4, 32
MIN_BUDGET = 96
RANDOM_SHARE = 0.15  # of rows that evict at random; the others evict the lowest surprisal
INFORMATIVE_NATS = 0.7  # a value's token with lower surprisal can be guessed from the others


@dataclass(frozen=True, slots=True)
class Gaps:
    """The attention mask of a batch, and its answers that the visible tokens can no longer give.

    `visible` [rows, 1, tokens, tokens] is true where a token (third dimension) attends to another;
    `lost` [rows, tokens + 1] marks the tokens of answers whose fact was evicted, as in `Batch`.
    """

    visible: Tensor
    lost: Tensor


def draw_gaps(rng: Random, losses: Tensor, batch: Batch, user: int) -> Gaps:
    """Draw a budget for each row, and evict down to it at each user turn (token id `user`).

    losses: [rows, tokens] in nats, of the tokens of `batch` except the first.
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
    """The mask, [tokens, tokens], if the lowest scores are evicted at each of the `turns`.

    Sinks and the most recent tokens are kept; evicted tokens never come back.
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
    """Which tokens belong to an answer for which an informative token of the value is masked."""
    lost = np.zeros(len(fact), bool)
    for number in range(1, int(fact.max(initial=0)) + 1):
        value: list[int] = []
        for at in np.flatnonzero(fact == number).tolist():
            if answer[at]:
                seen = visible[at - 1]  # by the token that has to predict it
                lost[at] = any(not seen[one] for one in value if surprisal[one] > INFORMATIVE_NATS)
            else:  # if the fact is stated again, the newer value counts
                value = [*value, at] if value and value[-1] == at - 1 else [at]
    return lost
