"""`/why`: the scores of tokens, their ranks, and whether the tokens are held."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sirchat.chat.events import TokenRow
from sirchat.chat.scores import explaining_factors, policy_scores
from sirchat.chat.snapshot import Positions, Snapshot, Texts, token_rows
from sirchat.engine.engine import Engine
from sirchat.memory.ledger import State


@dataclass(frozen=True)
class Standing:
    """One token among those that are held.

    Attributes:
        row: the token, with its score.
        state: `held`, `archived` (it can come back) or `gone`.
        decayed_to: product of the decays since the token was read; 1 for none.
        factors: what else explains the score, by name.
        rank: 1 for the highest score of the held tokens; the rank it would have, if it is not held;
            null for a policy without scores.
        held: number of held tokens.
        threshold: score at or below which a token would leave now, as in `Snapshot`.
        leaves: whether the token is among those that would leave next.
    """

    row: TokenRow
    state: str
    decayed_to: float
    factors: dict[str, float]
    rank: int | None
    held: int
    threshold: float | None
    leaves: bool


def standings(
    engine: Engine, texts: Texts, positions: Positions, now: Snapshot, *, sinks: int
) -> list[Standing]:
    """The standing of the tokens at these positions, ascending, in the memory as it is `now`."""
    ledger = engine.ledger
    among = np.union1d(ledger.held_positions, positions)
    asked = np.searchsorted(among, positions)
    scores = policy_scores(engine, among)
    ranks: list[int | None] = [None] * len(positions)
    if scores is not None:
        held = np.sort(scores[np.searchsorted(among, ledger.held_positions)])
        above = len(held) - np.searchsorted(held, scores[asked], side="right")
        ranks = [int(one) + 1 for one in above]
    own_scores = None if scores is None else scores[asked]
    rows = token_rows(engine, positions, texts, sinks, own_scores)
    decayed_to = np.exp(ledger.log_decay - ledger.column("birth_decay")[positions])
    states = ledger.column("state")[positions].tolist()
    leaving = set(now.next_to_go)
    factors = {  # surprisal and decay have columns of their own
        name: one[asked]
        for name, one in explaining_factors(engine, among).items()
        if name not in ("surprisal", "decay")
    }
    return [
        Standing(
            row=row,
            state=State(states[i]).name.lower(),
            decayed_to=float(decayed_to[i]),
            factors={name: float(one[i]) for name, one in factors.items()},
            rank=ranks[i],
            held=ledger.held_count,
            threshold=now.threshold,
            leaves=row.position in leaving,
        )
        for i, row in enumerate(rows)
    ]
