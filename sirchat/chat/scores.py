"""What the policy ranks rows by, for whoever shows it: its own score, in display units."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.engine import Engine
from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import ScorePolicy

Positions = NDArray[np.int64]
Floats = NDArray[np.float64]

_LARGEST = float(np.finfo(np.float64).max)


def policy_scores(engine: Engine, positions: Positions) -> Floats | None:
    """The policy's scores of rows at `positions` [n], ascending; higher stays.

    None for a policy without scores. Rows that are not held are scored as if they were.
    """
    policy = engine.settings.policy
    if not isinstance(policy, ScorePolicy):
        return None
    found = _as_if_held(engine, positions, lambda rows: {"score": policy.score(rows)})
    return found.get("score", np.zeros(0))


def shown_scores(engine: Engine, scores: Floats) -> Floats:
    """Scores [n] as people see them: finite, and not as logarithms."""
    policy = engine.settings.policy
    if isinstance(policy, ScorePolicy) and policy.log_scale:
        return finite_exp(scores)
    return np.nan_to_num(scores, nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)


def score_unit(engine: Engine) -> str:
    """Unit of the shown scores, such as "nats"; empty for a plain number."""
    policy = engine.settings.policy
    return policy.unit if isinstance(policy, ScorePolicy) else ""


def explaining_factors(engine: Engine, positions: Positions) -> dict[str, Floats]:
    """The factors [n] that explain the policy's scores at `positions` [n], by name."""
    policy = engine.settings.policy
    if not isinstance(policy, ScorePolicy):
        return {}
    found = _as_if_held(engine, positions, policy.log_factors)
    return {name: finite_exp(one) for name, one in found.items()}


def finite_exp(logarithms: Floats) -> Floats:
    """The exponential, at most the largest number there is; of NaN it is 0."""
    known = np.nan_to_num(logarithms, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    numbers: Floats = np.exp(known.clip(max=np.log(_LARGEST)))
    return numbers


def _as_if_held(
    engine: Engine, positions: Positions, compute: Callable[[HeldRows], dict[str, Tensor]]
) -> dict[str, Floats]:
    """What `compute` gives for the rows at `positions` [n], by name, [n] each.

    A score may depend on the other rows. Rows that the policy holds are computed as it sees them;
    recalled rows as if the policy held them too; all other rows as if all of these were held.
    """
    held = engine.ledger.held_positions
    own = np.setdiff1d(held, engine.ledger.recalled, assume_unique=True)
    found: dict[str, Floats] = {}
    unknown = np.ones(len(positions), bool)
    for among in (own, held, np.union1d(held, positions)):
        here = unknown & np.isin(positions, among)
        if here.any():
            at = np.searchsorted(among, positions[here])
            for name, one in compute(engine.view(among)).items():
                values = found.setdefault(name, np.zeros(len(positions)))
                values[here] = one.double().numpy()[at]
            unknown &= ~here
    return found
