"""Describes single tokens by plain values: records of tokens, and the policy's scores of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sirchat.chat.events import TokenRow
from sirchat.engine.engine import Engine
from sirchat.memory.ledger import Flag, HeldRows, Role
from sirchat.memory.policies.base import ScorePolicy
from sirchat.memory.segments import Positions
from sirchat.text.detokenizer import Texts

Floats = NDArray[np.float64]

_LARGEST = float(np.finfo(np.float64).max)


def policy_scores(engine: Engine, positions: Positions) -> Floats | None:
    """The eviction policy's score [n] of each token at the stream `positions` [n], ascending.

    The tokens with the lowest scores are evicted first. A token that is not in the cache is scored
    as if it were. Returns None if the policy has no scores.
    """
    policy = engine.settings.policy
    if not isinstance(policy, ScorePolicy):
        return None
    found = _as_if_held(engine, positions, lambda rows: {"score": policy.score(rows)})
    return found.get("score", np.zeros(0))


def shown_scores(engine: Engine, scores: Floats) -> Floats:
    """Convert a policy's scores [n] to the numbers that users see.

    If the policy's scores are logarithms, the exponential is taken. All results are finite.
    """
    policy = engine.settings.policy
    if isinstance(policy, ScorePolicy) and policy.log_scale:
        return finite_exp(scores)
    return np.nan_to_num(scores, nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)


def score_unit(engine: Engine) -> str:
    """The unit of the policy's scores, such as "nats"; empty if they have no unit."""
    policy = engine.settings.policy
    return policy.unit if isinstance(policy, ScorePolicy) else ""


def explaining_factors(engine: Engine, positions: Positions) -> dict[str, Floats]:
    """The factors whose product is the policy's score, for the tokens at `positions` [n].

    Returns one array [n] for each factor, by the factor's name; empty if the policy's scores are
    not such products.
    """
    policy = engine.settings.policy
    if not isinstance(policy, ScorePolicy):
        return {}
    found = _as_if_held(engine, positions, policy.log_factors)
    return {name: finite_exp(one) for name, one in found.items()}


def finite_exp(logarithms: Floats) -> Floats:
    """The exponentials of `logarithms`, limited to the largest float64; 0 for NaN."""
    known = np.nan_to_num(logarithms, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    numbers: Floats = np.exp(known.clip(max=np.log(_LARGEST)))
    return numbers


def _as_if_held(
    engine: Engine, positions: Positions, compute: Callable[[HeldRows], dict[str, Tensor]]
) -> dict[str, Floats]:
    """Compute values of the rows (tokens) at `positions` [n] as if all were in the cache.

    Returns, by name, the arrays [n] that `compute` returns. A score may depend on the other held
    rows, so `compute` gets a whole table of rows. For a held row, this table has all held rows
    except those that recall restored. For a row that recall restored, it has all held rows. For an
    evicted row, it has the held rows and all rows at `positions`.
    """
    held = engine.ledger.held_positions
    own = np.setdiff1d(held, engine.ledger.recalled, assume_unique=True)
    found: dict[str, Floats] = {}
    unknown = np.ones(len(positions), bool)
    for among in (own, held, np.union1d(held, positions)):
        here = unknown & np.isin(positions, among)
        if here.any():
            at = np.searchsorted(among, positions[here])
            for name, one in compute(engine.residency.view_of(among)).items():
                values = found.setdefault(name, np.zeros(len(positions)))
                values[here] = one.double().numpy()[at]
            unknown &= ~here
    return found


def token_rows(
    engine: Engine,
    positions: Positions,
    texts: Texts,
    sinks: int,
    scores: Floats | None,
) -> tuple[TokenRow, ...]:
    """A record of each token at these stream positions [n], which are ascending.

    `scores` [n] are the policy's scores of the tokens; None if the policy has no scores.
    """
    ledger, at = engine.ledger, positions.tolist()

    def column(name: str) -> list[Any]:
        values: list[Any] = ledger.column(name)[positions].tolist()
        return values

    ids, flags = column("token_id"), column("flags")
    decayed = np.exp(ledger.log_decayed_surprisal_of(positions)).tolist()
    attention = ledger.attention.totals(positions, ledger.log_decay).tolist()
    shown = [None] * len(at) if scores is None else shown_scores(engine, scores).tolist()
    text = texts(ids, at)
    turn, role, surprisal = column("turn"), column("role"), column("surprisal")
    erased = int(Flag.ERASED)  # comparing with a Flag takes ten times as long
    arrival_key, counted = column("arrival_key"), ledger.attention.is_counted
    return tuple(
        TokenRow(
            position=at[i],
            id=ids[i],
            text="" if flags[i] & erased else text[i],
            turn=turn[i],
            role=Role(role[i]).name.lower(),
            surprisal=None if math.isnan(surprisal[i]) else surprisal[i],
            decayed_surprisal=decayed[i],
            score=shown[i],
            arrival_key=arrival_key[i],
            flags=_flag_names(flags[i], at[i] < sinks),
            attention=attention[i] if counted else None,
        )
        for i in range(len(at))
    )


@lru_cache(maxsize=256)
def _flag_names(flags: int, sink: bool) -> tuple[str, ...]:
    names = ["sink"] if sink else []
    shown = flags & ~Flag.CONTINUES  # the text itself shows this
    names += [flag.name.lower() for flag in Flag if shown & flag and flag.name]
    return tuple(names)
