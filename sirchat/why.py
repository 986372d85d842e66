"""Where tokens stand: what they score, how that ranks, and whether they are held."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np

from sirchat.engine import Engine
from sirchat.events import TokenRow
from sirchat.memory.ledger import State
from sirchat.memory.policies.base import ScorePolicy
from sirchat.snapshot import Positions, Texts, log_worth_of, token_rows

_LARGEST = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Standing:
    """One token among those that are held.

    Attributes:
        row: the token.
        state: `held`, `archived` (it can come back) or `gone`.
        faded: the factor that the decays since it was read have made, 1 for none.
        factors: what else the policy's score is the product of, by name.
        score: what the token is ranked by.
        rank: 1 for the highest score; where it would stand, if it is not held.
        held: tokens that are held now.
        threshold: nats below which a token would leave if room were needed now; None where nothing
            would, or the policy does not go by surprisal.
    """

    row: TokenRow
    state: str
    faded: float
    factors: dict[str, float]
    score: float
    rank: int
    held: int
    threshold: float | None


def standings(
    engine: Engine, texts: Texts, positions: Positions, *, sinks: int, threshold: float | None
) -> list[Standing]:
    """The standing of the tokens at these positions, ascending."""
    ledger, policy = engine.ledger, engine.memory.policy
    among = np.union1d(ledger.held_positions, positions)
    view = engine.view(among)
    worth = log_worth_of(policy, view)
    log_scores = ledger.log_score_of(among) if worth is None else worth
    factors = dict(policy.log_factors(view)) if isinstance(policy, ScorePolicy) else {}
    factors.pop("surprisal", None)  # which has columns of its own
    asked = np.searchsorted(among, positions)
    held = np.sort(log_scores[np.searchsorted(among, ledger.held_positions)])
    above = len(held) - np.searchsorted(held, log_scores[asked], side="right")
    faded = np.exp(ledger.log_decay - ledger.column("birth_decay")[positions])
    states = ledger.column("state")[positions].tolist()
    rows = token_rows(ledger, positions, texts, sinks)
    return [
        Standing(
            row=row,
            state=State(state).name.lower(),
            faded=float(faded[number]),
            factors={name: _number(float(one[at])) for name, one in factors.items()},
            score=_number(float(log_scores[at])),
            rank=int(above[number]) + 1,
            held=len(held),
            threshold=threshold,
        )
        for number, (row, state, at) in enumerate(zip(rows, states, asked.tolist(), strict=True))
    ]


def _number(logarithm: float) -> float:
    """What it is the logarithm of; as large as a number can be, at most."""
    return math.exp(min(logarithm, _LARGEST))
