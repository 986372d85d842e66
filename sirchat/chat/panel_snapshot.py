"""Describes the KV cache at one moment, by plain values that the panel draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sirchat.chat.events import RecalledTurn, TokenRow
from sirchat.chat.token_rows import Floats, policy_scores, score_unit, shown_scores, token_rows
from sirchat.chat.words import around, is_mark, said, words_at
from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.memory.ledger import Ledger, Role
from sirchat.memory.segments import Positions
from sirchat.text.detokenizer import Texts

EDGES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, float("inf"))
"""Edges of the bins of `Histogram`: surprisal in nats; a bin includes its lower edge."""

_LEAVING = 6
"""A snapshot names the words of at most this many of the tokens that will be evicted next."""


@dataclass(frozen=True)
class HeldShare:
    """How much of one turn is in the cache.

    Attributes:
        index, role: the turn's index, and who wrote it.
        tokens: number of the turn's tokens, held or evicted.
        held: how many of these tokens are in the cache.
        surprisal: mean surprisal of these tokens, in nats; null if it is not known.
        held_said: how many held tokens belong to the message, not to the chat template.
    """

    index: int
    role: str
    tokens: int
    held: int
    surprisal: float | None
    held_said: int


@dataclass(frozen=True)
class Histogram:
    """Number of held tokens, and of evicted tokens, in each bin of surprisal.

    `EDGES` has the edges of the bins.
    """

    held: tuple[int, ...]
    evicted: tuple[int, ...]


@dataclass(frozen=True)
class Snapshot:
    """The KV cache at one moment, as a panel draws it.

    A short snapshot, for the compact panel, leaves out what takes long to compute.

    Attributes:
        model, policy, decay, budget: the current settings; the budget in tokens.
        resident: number of tokens held now.
        seen: number of tokens read or generated since the chat began.
        recalled: number of held tokens that recall restored for this round.
        speed: tokens per second of the current or the last reply; 0 before the first reply.
        threshold: a token with at most this score would be evicted if room were needed now; null if
            every token ever read is held, if there is plenty of room, or if the policy has no
            scores.
        unit: unit of the scores, such as "nats"; empty for a plain number.
        evicted_next: positions of the tokens that would be evicted next, ascending; empty while
            there is plenty of room.
        leaving_words: a few of the words to which the tokens of `evicted_next` belong, the most
            surprising first.
        rows: the held tokens in stream order; in a short snapshot those with the highest scores.
        slots: index of each row of `rows` among all held tokens.
        turns: for every turn of the chat, how many of its tokens are held.
        histogram: numbers of held and of evicted tokens by surprisal; null in a short snapshot.
        in_single_layers: number of held tokens that only some layers hold.
        recalled_turns: the turns of the tokens that recall restored for this round.
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
    evicted_next: tuple[int, ...]
    rows: tuple[TokenRow, ...]
    slots: tuple[int, ...]
    turns: tuple[HeldShare, ...]
    histogram: Histogram | None
    in_single_layers: int = 0
    unit: str = ""
    leaving_words: tuple[str, ...] = ()
    recalled_turns: tuple[RecalledTurn, ...] = ()

    @property
    def in_all_layers(self) -> int:
        """Number of tokens that the caches of all layers hold."""
        return self.resident - self.in_single_layers

    @property
    def evicted(self) -> int:
        """Number of tokens that were read, and that at least one layer no longer holds."""
        return self.seen - self.in_all_layers


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
    recalled_turns: tuple[RecalledTurn, ...] = (),
) -> Snapshot:
    """Take a snapshot of the cache as it is now; `roles` has the role of each turn.

    If `strongest` is None, the snapshot has all held tokens. If it is a number, the snapshot is
    short, for the compact panel: it has only this many tokens, those with the highest scores
    outside the chat template, and neither a histogram nor the turns' mean surprisals.
    """
    ledger = engine.ledger
    held = ledger.held_positions
    leaving = engine.residency.next_evicted(in_round=in_round)
    scores = policy_scores(engine, held)
    order = ledger.log_decayed_surprisal_of(held) if scores is None else scores
    slots = _slots(ledger, order, held, strongest)
    return Snapshot(
        model=model,
        policy=profile.policy,
        decay=profile.decay,
        budget=engine.budget,
        resident=engine.resident,
        seen=ledger.seen,
        recalled=engine.residency.recalled,
        speed=speed,
        threshold=_threshold(engine, scores, held, leaving),
        unit=score_unit(engine),
        evicted_next=tuple(leaving.tolist()),
        rows=token_rows(engine, held[slots], texts, profile.sinks, _at(scores, slots)),
        slots=tuple(slots.tolist()),
        turns=_turns(ledger, held, roles, whole=strongest is None),
        histogram=_histogram(ledger, held) if strongest is None else None,
        in_single_layers=engine.cache.inserted_count,
        leaving_words=_leaving_words(engine, leaving, texts, profile.sinks),
        recalled_turns=recalled_turns,
    )


def _at(scores: Floats | None, slots: Positions) -> Floats | None:
    return None if scores is None else scores[slots]


def _slots(ledger: Ledger, order: Floats, held: Positions, strongest: int | None) -> Positions:
    """Choose the held tokens that a snapshot shows.

    Returns their indices [k] among the n held tokens, ascending. If `strongest` is None, all are
    chosen. Otherwise this many are chosen: of the tokens outside the chat template, those with the
    highest values in `order` [n].
    """
    if strongest is None:
        return np.arange(len(held))
    others = np.flatnonzero(ledger.column("role")[held] != Role.TEMPLATE)
    if strongest >= len(others):
        return others
    return np.sort(others[np.argpartition(-order[others], strongest)[:strongest]])


def _leaving_words(engine: Engine, leaving: Positions, texts: Texts, sinks: int) -> tuple[str, ...]:
    """A few of the words whose tokens will be evicted next, the most surprising first.

    `leaving` are the stream positions of these tokens. A word is shown whole, even if some of its
    tokens are already evicted.
    """
    ledger = engine.ledger
    others = leaving[ledger.column("role")[leaving] != Role.TEMPLATE]
    surprisal = np.nan_to_num(ledger.column("surprisal")[others])
    best = others[np.argsort(-surprisal, kind="stable")[: 4 * _LEAVING]].tolist()
    shown = texts(ledger.column("token_id")[best].tolist(), best)
    at = [p for p, text in zip(best, shown, strict=True) if not is_mark(text)][:_LEAVING]
    near = np.asarray(around(at, ledger.seen), np.int64)
    return words_at(at, said(token_rows(engine, near, texts, sinks, None)))


def _threshold(
    engine: Engine, scores: Floats | None, held: Positions, leaving: Positions
) -> float | None:
    """The highest score, as users see it, of the tokens that will be evicted next.

    `leaving` are the stream positions of these tokens. Returns None if `leaving` is empty, if every
    token ever read is held, or if the policy has no scores.
    """
    ledger = engine.ledger
    if scores is None or not len(leaving) or ledger.seen == ledger.held_count:
        return None
    return float(shown_scores(engine, scores[np.searchsorted(held, leaving)]).max())


def _turns(
    ledger: Ledger, held: Positions, roles: Sequence[str], *, whole: bool
) -> tuple[HeldShare, ...]:
    """For each turn, how many of its tokens are held.

    The turns' mean surprisals are computed only if `whole` is true; else they are None.
    """
    turn = ledger.column("turn")
    bounds = np.searchsorted(turn, np.arange(len(roles) + 1))
    counts = np.bincount(turn[held], minlength=len(roles)).tolist()
    others = held[ledger.column("role")[held] != Role.TEMPLATE]
    held_said = np.bincount(turn[others], minlength=len(roles)).tolist()
    means = _means(ledger, bounds) if whole else [None] * len(roles)
    tokens = np.diff(bounds).tolist()
    return tuple(
        HeldShare(i, role, tokens[i], counts[i], means[i], held_said[i])
        for i, role in enumerate(roles)
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
