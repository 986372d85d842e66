"""The memory at one moment, for whoever draws or prints it: plain values, no engine behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sirchat.chat.events import TokenRow
from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.memory.ledger import Flag, Ledger, Role

Positions = NDArray[np.int64]
Floats = NDArray[np.float64]
Texts = Callable[[Sequence[int], Sequence[int]], list[str]]
"""Ids and their stream positions to the text of each; see `detokenize.TokenTexts`."""

EDGES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, float("inf"))
"""Surprisal in nats between which the histogram counts; a bin holds its lower edge."""


_LARGEST = float(np.log(np.finfo(np.float64).max))
_GLANCE_LEAVING = 12
"""Tokens next to go that a glance has the text of."""


@dataclass(frozen=True)
class TurnShare:
    """One turn: `held` of its `tokens` are still held.

    `surprisal` is the mean over all its tokens, held or not, in nats; null where none has any.
    """

    index: int
    role: str
    tokens: int
    held: int
    surprisal: float | None


@dataclass(frozen=True)
class Histogram:
    """Tokens by surprisal, one count for each bin between `EDGES`; those without are left out."""

    held: tuple[int, ...]
    forgotten: tuple[int, ...]


@dataclass(frozen=True)
class Snapshot:
    """What a panel needs to draw the memory.

    Attributes:
        model, policy, decay, budget: the settings in force; the budget in tokens.
        resident, seen: tokens held now, and ever read.
        recalled: held tokens that were brought back for this round.
        speed: tokens a second of the reply under way, else of the last one; 0 before the first.
        threshold: nats of decayed surprisal below which a token would leave if room were needed
            now; null where nothing was ever forgotten, or the policy goes by something else.
        needed: the same where it goes by a score of its own, as a row's `worth` is.
        next_to_go: positions of the tokens that would leave then, in stream order; none while
            there is plenty of room.
        rows: the held tokens in stream order, or some of them.
        slots: where each of `rows` stands among all held tokens.
        turns: every turn so far.
        histogram: surprisal of held and of forgotten tokens; null in a glance.
        apart: of the resident ones, those that each layer has for itself.
    """

    model: str
    policy: str
    decay: float | str
    budget: int
    resident: int
    seen: int
    recalled: int
    speed: float
    threshold: float | None
    next_to_go: tuple[int, ...]
    rows: tuple[TokenRow, ...]
    slots: tuple[int, ...]
    turns: tuple[TurnShare, ...]
    histogram: Histogram | None
    apart: int = 0
    needed: float | None = None

    @property
    def in_common(self) -> int:
        """Tokens that all layers hold."""
        return self.resident - self.apart

    @property
    def forgotten(self) -> int:
        """Tokens that were read and are no longer held by all layers."""
        return self.seen - self.in_common


def take_snapshot(
    engine: Engine,
    profile: Profile,
    texts: Texts,
    roles: Sequence[str],
    *,
    model: str,
    speed: float,
    in_round: bool,
    strongest: int | None = None,
) -> Snapshot:
    """The memory as it is now; `roles` has one entry for each turn.

    With `strongest`, a glance: only so many rows, those of highest score and a few of those that
    go next, and what takes time in proportion to the whole stream is left out.
    """
    ledger = engine.ledger
    held = ledger.held_positions
    leaving = engine.next_to_go(in_round=in_round)
    log_worth = log_worth_of(log_factors_of(engine, held))
    by_nats = log_worth is None
    strength = ledger.log_decayed_surprisal_of(held) if log_worth is None else log_worth
    needed = _needed(strength, held, leaving, engine, by_nats=by_nats)
    slots = _slots(strength, held, leaving, strongest)
    worth = None if log_worth is None else finite_exp(log_worth[slots])
    return Snapshot(
        model=model,
        policy=profile.policy,
        decay=profile.decay,
        budget=engine.budget,
        resident=engine.resident,
        seen=ledger.seen,
        recalled=engine.recalled,
        speed=speed,
        threshold=needed if by_nats else None,
        needed=None if by_nats else needed,
        next_to_go=tuple(leaving.tolist()),
        rows=token_rows(ledger, held[slots], texts, profile.sinks, worth),
        slots=tuple(slots.tolist()),
        turns=_turns(ledger, held, roles, whole=strongest is None),
        histogram=_histogram(ledger, held) if strongest is None else None,
        apart=engine.cache.inserted_count,
    )


def log_factors_of(engine: Engine, positions: Positions) -> dict[str, Floats]:
    """Logarithms of what the policy ranks rows by the product of, by name, [n] each; may be empty.

    Of the rows at `positions` [n], ascending: what the policy chose as it sees it, what was
    recalled as if it had been chosen, too, and any other row as if all of these had been.
    """
    policy, held = engine.settings.policy, engine.ledger.held_positions
    own = np.setdiff1d(held, engine.ledger.recalled, assume_unique=True)
    found: dict[str, Floats] = {}
    unknown = np.ones(len(positions), bool)
    for among in (own, held, np.union1d(held, positions)):
        here = unknown & np.isin(positions, among)
        if here.any():
            at = np.searchsorted(among, positions[here])
            for name, one in policy.log_factors(engine.view(among)).items():
                found.setdefault(name, np.zeros(len(positions)))[here] = one.double().numpy()[at]
            unknown &= ~here
    return found


def log_worth_of(factors: dict[str, Floats]) -> Floats | None:
    """The logarithm of what a policy ranks rows [n] by, apart from those that are recent anyway.

    By its `factors`; None where it goes by surprisal and decays alone, or by nothing of the kind.
    """
    if set(factors) <= {"surprisal"}:
        return None
    with np.errstate(invalid="ignore"):  # of what is infinite both ways
        worth: Floats = np.sum(list(factors.values()), axis=0)
    return np.nan_to_num(worth, copy=False, nan=-np.inf, posinf=np.inf, neginf=-np.inf)


def finite_exp(logarithms: Floats) -> Floats:
    """What these are the logarithms of; as large as a number can be, at most."""
    numbers: Floats = np.exp(logarithms.clip(max=_LARGEST))
    return numbers


def token_rows(
    ledger: Ledger,
    positions: Positions,
    texts: Texts,
    sinks: int,
    worth: Floats | None = None,
) -> tuple[TokenRow, ...]:
    """The tokens at these positions [n], ascending, as records; `worth` [n] is the policy's."""
    names = ("token_id", "turn", "role", "surprisal", "arrival_key", "flags")
    ids, *columns = (ledger.column(name)[positions].tolist() for name in names)
    at = positions.tolist()
    scores = np.exp(ledger.log_decayed_surprisal_of(positions)).tolist()
    counted = ledger.attention.is_counted
    attention = ledger.attention.of(positions, ledger.log_decay).tolist()
    worths = [None] * len(at) if worth is None else worth.tolist()
    return tuple(
        TokenRow(
            position=position,
            id=token_id,
            text="" if flags & Flag.ERASED else text,
            turn=turn,
            role=Role(role).name.lower(),
            surprisal=None if surprisal != surprisal else surprisal,
            score=score,
            arrival_key=key,
            flags=_flag_names(flags, position < sinks),
            attention=received if counted else None,
            worth=worth_of_row,
        )
        for (
            position,
            token_id,
            text,
            turn,
            role,
            surprisal,
            key,
            flags,
            score,
            received,
            worth_of_row,
        ) in zip(at, ids, texts(ids, at), *columns, scores, attention, worths, strict=True)
    )


def _slots(
    strength: Floats, held: Positions, leaving: Positions, strongest: int | None
) -> Positions:
    """Slots of the rows to tell about, ascending: all of them, or those of a glance."""
    if strongest is None or strongest >= len(held):
        return np.arange(len(held))
    best = np.argpartition(-strength, strongest)[:strongest]
    return np.union1d(best, np.searchsorted(held, leaving[:_GLANCE_LEAVING]))


def _needed(
    strength: Floats, held: Positions, leaving: Positions, engine: Engine, *, by_nats: bool
) -> float | None:
    """A policy without a score of its own that takes the decay into account goes by surprisal."""
    ledger = engine.ledger
    if not len(leaving) or ledger.seen == ledger.held_count:
        return None
    if by_nats and "decay" not in engine.settings.policy.uses:
        return None
    return float(finite_exp(strength[np.searchsorted(held, leaving)]).max())


def _turns(
    ledger: Ledger, held: Positions, roles: Sequence[str], *, whole: bool
) -> tuple[TurnShare, ...]:
    """Turns are contiguous in the stream, so their bounds are found by bisection."""
    turn = ledger.column("turn")
    bounds = np.searchsorted(turn, np.arange(len(roles) + 1))
    counts = np.bincount(turn[held], minlength=len(roles)).tolist()
    means = _means(ledger, bounds) if whole else [None] * len(roles)
    tokens = np.diff(bounds).tolist()
    return tuple(
        TurnShare(*turn)
        for turn in zip(range(len(roles)), roles, tokens, counts, means, strict=True)
    )


def _means(ledger: Ledger, bounds: Positions) -> list[float | None]:
    surprisal = ledger.column("surprisal").astype(np.float64)
    known = ~np.isnan(surprisal)
    total = np.concatenate(([0.0], np.cumsum(np.where(known, surprisal, 0.0))))
    count = np.concatenate(([0], np.cumsum(known)))
    sums, counts = np.diff(total[bounds]).tolist(), np.diff(count[bounds]).tolist()
    return [s / n if n else None for s, n in zip(sums, counts, strict=True)]


def _histogram(ledger: Ledger, held: Positions) -> Histogram:
    surprisal = ledger.column("surprisal")
    everything = np.histogram(surprisal[~np.isnan(surprisal)], EDGES)[0]
    present = surprisal[held]
    stays = np.histogram(present[~np.isnan(present)], EDGES)[0]
    return Histogram(tuple(stays.tolist()), tuple((everything - stays).tolist()))


def _flag_names(flags: int, sink: bool) -> tuple[str, ...]:
    names = ["sink"] if sink else []
    names += [flag.name.lower() for flag in Flag if flags & flag and flag.name]
    return tuple(names)
