"""Rows read as if under a budget: which earlier tokens each token still sees.

A cache with gaps is what a model lives in once something was forgotten. Learning from such rows, it
puts what a fact means into the tokens that stay, and reads facts of which little else is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.training.rows import Batch

SINKS, RECENT = 4, 32
MIN_BUDGET = 96
RANDOM_SHARE = 0.15  # share of rows that forget at random; the others forget the least surprising
INFORMATIVE_NATS = 0.7  # nats: a less surprising word of a value can be guessed from the others


@dataclass(frozen=True, slots=True)
class Gaps:
    """What a batch may see, and which of its answers nothing that is left can give.

    `visible` [rows, 1, tokens, tokens] is true where a token (third dimension) sees another;
    `lost` [rows, tokens + 1] marks the tokens of answers whose fact was forgotten, as `Batch` does.
    """

    visible: Tensor
    lost: Tensor


def draw_gaps(rng: Random, losses: Tensor, batch: Batch, user: int) -> Gaps:
    """Forget by a budget drawn for each row whenever a user speaks (id `user`).

    losses: [rows, tokens] in nats, of the tokens of `batch` but the first.
    """
    surprisal = torch.nn.functional.pad(losses.float(), (1, 0)).numpy()  # [rows, tokens + 1]
    ids, answer, fact = batch.ids.numpy(), batch.answer.numpy(), batch.fact.numpy()
    rows, tokens = losses.shape
    visible = np.zeros((rows, 1, tokens, tokens), bool)
    lost = np.zeros((rows, tokens + 1), bool)
    for i in range(rows):
        turns = np.flatnonzero(ids[i, :tokens] == user)
        budget = math.exp(rng.uniform(math.log(MIN_BUDGET), math.log(tokens / 2)))
        by_chance = rng.random() < RANDOM_SHARE
        noise = np.array([rng.random() for _ in range(tokens)])
        score = noise if by_chance else surprisal[i, :tokens]
        visible[i, 0] = visible_under_budget(score, turns, int(budget))
        lost[i] = lost_answers(visible[i, 0], surprisal[i], answer[i], fact[i])
    return Gaps(torch.from_numpy(visible), torch.from_numpy(lost))


def visible_under_budget(
    score: NDArray[np.floating], turns: NDArray[np.int64], budget: int
) -> NDArray[np.bool_]:
    """What each token sees, [tokens, tokens], if at each of `turns` the lowest scores leave.

    Sinks and the most recent tokens stay; what has left stays away.
    """
    tokens = len(score)
    visible = np.tri(tokens, dtype=bool)
    held = np.ones(tokens, bool)
    for turn in turns:
        candidates = np.flatnonzero(held[SINKS : max(SINKS, turn - RECENT)]) + SINKS
        excess = int(held[:turn].sum()) - budget
        if excess <= 0:
            continue
        gone = candidates[np.argsort(score[candidates], kind="stable")[:excess]]
        held[gone] = False
        visible[turn:, gone] = False
    return visible


def lost_answers(
    visible: NDArray[np.bool_],
    surprisal: NDArray[np.floating],
    answer: NDArray[np.bool_],
    fact: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which tokens belong to an answer of whose value a telling token is out of sight."""
    lost = np.zeros(len(fact), bool)
    for number in range(1, int(fact.max(initial=0)) + 1):
        told: list[int] = []
        for at in np.flatnonzero(fact == number).tolist():
            if answer[at]:
                seen = visible[at - 1]  # by the token that has to foretell it
                lost[at] = any(not seen[one] for one in told if surprisal[one] > INFORMATIVE_NATS)
            else:  # told anew, the newer value counts
                told = [*told, at] if told and told[-1] == at - 1 else [at]
    return lost
