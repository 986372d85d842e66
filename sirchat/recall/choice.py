"""Chooses what recall restores: the tokens with the best scores, or the turns that fit best."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.engine import Engine
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, Role, State

_TURNS_AT_ONCE = 32
# Of the best score, of the score of either turn beside it, of the best score after the best turn.
# The first two were chosen with SmolLM2 and 80 facts in 4,000 tokens of real talk (seed 1, budget
# 256): replies named the fact in 0.26 of the cases, and in 0.12 if turns were restored as long as
# there was room. In both cases, the right reply was the likeliest of four in 0.81. Stricter numbers
# did as well there, but would have found less evidence for questions about LoCoMo and Realtalk. The
# rule for newer turns finds 0.94 of 64 corrections, and without it 0.83.
_LEAST_SHARE, _BESIDE, _LEAST_NEWER = 0.6, 0.8, 0.5


@dataclass(frozen=True)
class SearchResult:
    """Archived tokens and their scores.

    `positions` [n] are stream positions, ascending, `scores` [n] their scores. With the setting
    `recall_scope: layer`, `layers` [layers, n] has the scores in each layer; else it is None.
    """

    positions: Positions
    scores: Tensor
    layers: Tensor | None = None


def restore(engine: Engine, result: SearchResult) -> None:
    """Restore the best of these tokens to the slots that are reserved for recall."""
    recall, reserve = engine.settings.recall, engine.residency.divide().reserve
    pick = partial(choose, positions=result.positions, n=reserve, span=recall.span if recall else 0)
    if result.layers is None:
        engine.residency.fill_reserve(pick(result.scores))
    else:
        nothing = np.zeros(0, np.int64)  # for all layers together
        engine.residency.fill_reserve(nothing, tuple(pick(scores) for scores in result.layers))


def choose(scores: Tensor, positions: Positions, n: int, span: int = 0) -> Positions:
    """The stream positions, ascending, of at most n tokens: the best, each with its neighbours.

    `scores` [k] belong to `positions` [k]; of equal scores the newer token wins. Neighbours are at
    most `span` positions away, the nearest first.
    """
    newest_first = torch.argsort(scores.flip(0), descending=True, stable=True)
    order = positions[len(positions) - 1 - newest_first.numpy()]
    if not span:
        return np.sort(order[:n])
    candidates, chosen = set(positions.tolist()), dict[int, None]()
    for hit in order.tolist():
        for near in sorted(range(hit - span, hit + span + 1), key=lambda at: abs(at - hit)):
            if near in candidates and len(chosen) < n:
                chosen[near] = None
        if len(chosen) >= n:
            break
    return np.sort(np.fromiter(chosen, np.int64, len(chosen)))


def best_turns(
    engine: Engine, scores: NDArray[np.float64], *, is_auto: bool
) -> SearchResult | None:
    """The archived tokens of the turns with the highest `scores` [turns]; None without any.

    Turns are added, the newer of equal ones first, until they fill the reserve; with `is_auto` only
    those that fit (`_fitting`). Tokens that are restored already count as archived.
    """
    ledger, reserve = engine.ledger, engine.residency.divide().reserve
    turns = ledger.column("turn")  # ascending; bisect, because numpy's search copies the column
    positions, of_token, count = list[Positions](), list[NDArray[np.float64]](), 0
    which = np.flatnonzero(_fitting(scores)) if is_auto else np.arange(len(scores))
    best = which[::-1][np.argsort(-scores[which][::-1], kind="stable")]
    # Only the tokens of these turns are looked at, so the time does not grow with the archive.
    for at in range(0, len(best), _TURNS_AT_ONCE):
        if count >= reserve:
            break
        some = best[at : at + _TURNS_AT_ONCE]
        bounds = [(bisect_left(turns, turn), bisect_left(turns, turn + 1)) for turn in some]
        tokens = np.concatenate([np.arange(start, end) for start, end in bounds])
        score = np.repeat(scores[some], [end - start for start, end in bounds])
        flags = ledger.column("flags")[tokens]
        is_archived = ledger.column("state")[tokens] == int(State.ARCHIVED)
        can_return = (
            (is_archived | (flags & np.uint8(Flag.RECALLED) != 0))
            & (ledger.column("role")[tokens] != int(Role.TEMPLATE))  # it has no content
            & (flags & np.uint8(Flag.EXCLUDED) == 0)
            & engine.store.archive.has(tokens)
        )
        positions.append(tokens[can_return])
        of_token.append(score[can_return])
        count += len(positions[-1])
    if not count:
        return None
    joined = np.concatenate(positions)
    order = np.argsort(joined)
    return SearchResult(joined[order], torch.from_numpy(np.concatenate(of_token)[order]))


def _fitting(scores: NDArray[np.float64]) -> NDArray[np.bool_]:
    # Which turns [n] fit: the others distract the model. A turn after the best one may correct it:
    # it needs only half of the best score, if no turn beside it has a higher score than itself.
    best, beside = scores.max(initial=0.0), np.zeros_like(scores)
    beside[:-1] = scores[1:]
    beside[1:] = np.maximum(beside[1:], scores[:-1])
    is_newer = np.arange(len(scores)) > np.flatnonzero(scores == best).max(initial=-1)
    may_correct = is_newer & (scores >= _LEAST_NEWER * best) & (scores >= beside)
    is_high = (scores >= _LEAST_SHARE * best) & (scores >= _BESIDE * beside)
    fits: NDArray[np.bool_] = (may_correct | is_high) & (scores > 0)
    return fits
