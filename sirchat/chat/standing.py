"""Where tokens stand: what they score, how that ranks, and whether they are held."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sirchat.chat.events import TokenRow
from sirchat.chat.snapshot import (
    Positions,
    Snapshot,
    Texts,
    finite_exp,
    log_factors_of,
    log_worth_of,
    token_rows,
)
from sirchat.engine.engine import Engine
from sirchat.memory.ledger import State


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
        needed: the same, as a score, where the policy goes by one of its own.
    """

    row: TokenRow
    state: str
    faded: float
    factors: dict[str, float]
    score: float
    rank: int
    held: int
    threshold: float | None
    needed: float | None


def standings(
    engine: Engine, texts: Texts, positions: Positions, now: Snapshot, *, sinks: int
) -> list[Standing]:
    """The standing of the tokens at these positions, ascending, in the memory as it is `now`."""
    ledger = engine.ledger
    among = np.union1d(ledger.held_positions, positions)
    factors = log_factors_of(engine, among)
    worth = log_worth_of(factors)
    log_scores = ledger.log_decayed_surprisal_of(among) if worth is None else worth
    asked = np.searchsorted(among, positions)
    held = np.sort(log_scores[np.searchsorted(among, ledger.held_positions)])
    above = len(held) - np.searchsorted(held, log_scores[asked], side="right")
    faded = np.exp(ledger.log_decay - ledger.column("birth_decay")[positions])
    states = ledger.column("state")[positions].tolist()
    rows = token_rows(ledger, positions, texts, sinks)
    scores = finite_exp(log_scores[asked])
    others = {  # surprisal and decays have columns of their own
        name: finite_exp(one[asked])
        for name, one in factors.items()
        if name not in ("surprisal", "fade")
    }
    return [
        Standing(
            row=row,
            state=State(state).name.lower(),
            faded=float(faded[number]),
            factors={name: float(one[number]) for name, one in others.items()},
            score=float(scores[number]),
            rank=int(above[number]) + 1,
            held=len(held),
            threshold=now.threshold,
            needed=now.needed,
        )
        for number, (row, state) in enumerate(zip(rows, states, strict=True))
    ]
