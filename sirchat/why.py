"""Where tokens stand: what they score, how that ranks, and whether they are held."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sirchat.engine import Engine
from sirchat.events import TokenRow
from sirchat.memory.ledger import State
from sirchat.snapshot import Positions, Texts, token_rows


@dataclass(frozen=True)
class Standing:
    """One token among those that are held.

    Attributes:
        row: the token.
        state: `held`, `archived` (it can come back) or `gone`.
        faded: the factor that the decays since it was read have made, 1 for none.
        rank: 1 for the highest score; where it would stand, if it is not held.
        held: tokens that are held now.
        threshold: nats below which a token would leave if room were needed now; None where nothing
            would, or the policy does not go by surprisal.
    """

    row: TokenRow
    state: str
    faded: float
    rank: int
    held: int
    threshold: float | None


def standings(
    engine: Engine, texts: Texts, positions: Positions, *, sinks: int, threshold: float | None
) -> list[Standing]:
    """The standing of the tokens at these positions, ascending."""
    ledger = engine.ledger
    held = np.sort(ledger.log_score_of(ledger.held_positions))
    scores = ledger.log_score_of(positions)
    above = len(held) - np.searchsorted(held, scores, side="right")
    faded = np.exp(ledger.log_decay - ledger.column("birth_decay")[positions])
    states = ledger.column("state")[positions].tolist()
    rows = token_rows(ledger, positions, texts, sinks)
    return [
        Standing(row, State(state).name.lower(), one, rank + 1, len(held), threshold)
        for row, state, one, rank in zip(rows, states, faded.tolist(), above.tolist(), strict=True)
    ]
