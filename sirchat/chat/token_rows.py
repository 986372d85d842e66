"""Describes single tokens by plain values: records of tokens, and the policy's scores of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sirchat.chat.events import TokenRow
from sirchat.engine.engine import Engine
from sirchat.memory.key_values import EXACT, Positions
from sirchat.memory.ledger import Flag, HeldRows, Role
from sirchat.memory.policies.base import ScorePolicy
from sirchat.text.detokenizer import Texts

Floats = NDArray[np.float64]

_LARGEST = float(np.finfo(np.float64).max)


def policy_scores(engine: Engine, positions: Positions) -> Floats | None:
    """The policy's scores [n] of the tokens at `positions` [n], ascending, as if all were held.

    Tokens with the lowest scores are evicted first. None if the policy has no scores.
    """
    policy = engine.settings.policy
    if not isinstance(policy, ScorePolicy):
        return None
    scores = _as_if_held(engine, positions, lambda rows: {"score": policy.score(rows)})
    return scores.get("score", np.zeros(0))


def shown_scores(engine: Engine, scores: Floats) -> Floats:
    """The policy's scores [n] as users see them: finite, and not as logarithms."""
    policy = engine.settings.policy
    if isinstance(policy, ScorePolicy) and policy.log_scale:
        return _finite_exp(scores)
    return np.nan_to_num(scores, nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)


def score_factors(engine: Engine, positions: Positions) -> dict[str, Floats]:
    """The factors [n], by name, whose product is each token's score; empty if there are none."""
    policy = engine.settings.policy
    if not isinstance(policy, ScorePolicy):
        return {}
    factors = _as_if_held(engine, positions, policy.log_factors)
    return {name: _finite_exp(logarithms) for name, logarithms in factors.items()}


def is_measured(engine: Engine, positions: Positions) -> NDArray[np.bool_]:
    """Mask [n] of the tokens whose attention is recorded; all True if the policy uses none."""
    ledger, config = engine.ledger, engine.settings.policy.attention_stats
    if config is None:
        return np.ones(len(positions), bool)
    if config.window:
        return np.full(len(positions), ledger.attention.recent(ledger.held_positions).any())
    return ledger.attention.totals(positions, ledger.log_decay) > 0


def token_rows(
    engine: Engine,
    positions: Positions,
    texts: Texts,
    scores: Floats | None,
    roles: Sequence[str] = (),
) -> tuple[TokenRow, ...]:
    """A record of each token at these positions [n], ascending; `scores` [n] are the policy's.

    `roles` are those of the turns; the tokens of a `summary` get that role, too.
    """
    ledger, listed = engine.ledger, positions.tolist()

    def column(name: str) -> list[Any]:
        values: list[Any] = ledger.column(name)[positions].tolist()
        return values

    ids, flags = column("token_id"), column("flags")
    decayed = np.exp(ledger.log_decayed_surprisal_of(positions)).tolist()
    attention = ledger.attention.totals(positions, ledger.log_decay).tolist()
    shown = [None] * len(listed) if scores is None else shown_scores(engine, scores).tolist()
    text = texts(ids, listed)
    turn, role, surprisal = column("turn"), column("role"), column("surprisal")
    summaries = {index for index, of in enumerate(roles) if of == "summary"}
    is_summary = [t in summaries and r != Role.TEMPLATE for t, r in zip(turn, role, strict=True)]
    erased = int(Flag.ERASED)  # comparing with a Flag takes ten times as long
    arrival_key, counted = column("arrival_key"), ledger.attention.has_records
    bits = engine.store.archive.bits(positions).tolist()
    return tuple(
        TokenRow(
            position=listed[i],
            id=ids[i],
            text="" if flags[i] & erased else text[i],
            turn=turn[i],
            role="summary" if is_summary[i] else Role(role[i]).name.lower(),
            surprisal=None if math.isnan(surprisal[i]) else surprisal[i],
            decayed_surprisal=decayed[i],
            score=shown[i],
            arrival_key=arrival_key[i],
            flags=_flag_names(flags[i], listed[i] < engine.settings.sinks, bits[i]),
            attention=attention[i] if counted else None,
        )
        for i in range(len(listed))
    )


def _as_if_held(
    engine: Engine, positions: Positions, compute: Callable[[HeldRows], dict[str, Tensor]]
) -> dict[str, Floats]:
    """The values, by name, that `compute` gives the rows at `positions` [n] as if held."""
    # A score may depend on the other held rows. A held row is scored among all held rows but those
    # that recall restored; a row that recall restored, among all held rows; an evicted row, among
    # the held rows and all rows at `positions`.
    placement = engine.store.placement
    held, without_recalled = placement.held, placement.held_without_recalled
    results: dict[str, Floats] = {}
    unknown = np.ones(len(positions), bool)
    for among in (without_recalled, held, np.union1d(held, positions)):
        here = unknown & np.isin(positions, among)
        if here.any():
            indices = np.searchsorted(among, positions[here])
            for name, values in compute(engine.choice.view(among)).items():
                result = results.setdefault(name, np.zeros(len(positions)))
                result[here] = values.double().numpy()[indices]
            unknown &= ~here
    return results


def _finite_exp(logarithms: Floats) -> Floats:
    """The exponentials of `logarithms`, limited to the largest float64; 0 for NaN."""
    known = np.nan_to_num(logarithms, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    numbers: Floats = np.exp(known.clip(max=np.log(_LARGEST)))
    return numbers


@lru_cache(maxsize=256)
def _flag_names(flags: int, is_sink: bool, bits: int) -> tuple[str, ...]:
    names = ["sink"] * is_sink + [f"{bits} bits"] * (bits != EXACT)
    shown = flags & ~Flag.CONTINUES  # the text itself shows this
    names += [flag.name.lower() for flag in Flag if shown & flag and flag.name]
    return tuple(names)
