"""Describes the KV cache at one moment, by plain values that the panel draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sirchat.chat.conversation import Conversation
from sirchat.chat.events import TokenRow
from sirchat.chat.targets import template_prompt_positions
from sirchat.chat.token_rows import (
    Floats,
    is_punctuation,
    near_positions,
    policy_scores,
    shown_scores,
    token_rows,
    without_template,
    words_at,
)
from sirchat.engine.engine import Engine
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.recall import RecalledTurn
from sirchat.text.detokenizer import Texts

_MAX_LEAVING_TOKENS = 6  # tokens whose words are named among those that will be evicted next


@dataclass(frozen=True)
class HeldShare:
    """How much of one turn is held."""

    index: int
    role: str
    tokens: int  # held or evicted
    held: int
    surprisal: float | None  # mean over `tokens`, in nats; null if not known
    held_said: int  # held tokens of the message, not of the chat template


@dataclass(frozen=True)
class Snapshot:
    """The KV cache at one moment, as a panel draws it.

    A short snapshot, for the compact panel, leaves out what takes long to compute.
    """

    model: str
    policy: str
    decay: float
    budget: int  # tokens
    resident: int  # tokens held now
    seen: int  # tokens read or generated since the chat began
    recalled: int  # held tokens that recall restored for this round
    speed: float  # tokens per second of the current or the last reply; 0 before the first
    # A token with at most this score would be evicted if room were needed now; null if every token
    # ever read is held, if there is plenty of room, or if the policy has no scores.
    threshold: float | None
    evicted_next: tuple[int, ...]  # ascending positions; empty while there is plenty of room
    rows: tuple[TokenRow, ...]  # all held tokens; in a short snapshot those with high scores
    slots: tuple[int, ...]  # index of each of `rows` among all held tokens
    turns: tuple[HeldShare, ...]  # all turns of the chat
    # Some words of `evicted_next`, most surprising first, and the role that wrote each.
    leaving_words: Mapping[str, str] = field(default_factory=dict)
    recalled_turns: tuple[RecalledTurn, ...] = ()  # of the tokens that recall restored
    # Of the held tokens, how many each wrote: `user`, `assistant`, `system` or `template`; of
    # these, those of a `summary` and `recalled` ones are counted apart.
    held_by: Mapping[str, int] = field(default_factory=dict)
    # First position of the text of `prompt`, without the template's marks, and the one after it
    own_text: tuple[int, int] = (0, 0)
    prompt: int = 0  # first tokens, which are a system prompt that the chat template itself adds

    @property
    def evicted(self) -> int:
        return self.seen - self.resident


def take_snapshot(chat: Conversation, strongest: int | None) -> Snapshot:
    """Take a snapshot of the cache as it is now.

    With `strongest`, it is a short one: with the `strongest` tokens of the highest scores outside
    the chat template, and without the turns' mean surprisals.
    """
    engine, texts, roles = chat.engine, chat.texts, chat.state.roles
    ledger, held = engine.ledger, engine.ledger.held_positions
    leaving = engine.evictor.next_evicted(engine.choice.round if chat.state.in_round else None)
    scores = policy_scores(engine, held)
    if strongest is None:
        slots = np.arange(len(held))
    else:
        order = ledger.log_decayed_surprisal_of(held) if scores is None else scores
        slots = _strongest(ledger, order, held, strongest)
    slot_scores = None if scores is None else scores[slots]
    template_text = template_prompt_positions(ledger, texts)
    return Snapshot(
        model=chat.model.name,
        policy=chat.profile.policy,
        decay=chat.profile.decay,
        budget=engine.budget,
        resident=engine.resident,
        seen=ledger.seen,
        recalled=len(engine.store.placement.recalled),
        speed=chat.speed,
        threshold=_threshold(engine, scores, held, leaving),
        evicted_next=tuple(leaving.tolist()),
        rows=token_rows(engine, held[slots], texts, slot_scores, roles),
        slots=tuple(slots.tolist()),
        turns=_held_shares(ledger, held, roles, with_means=strongest is None),
        leaving_words=_leaving_words(engine, leaving, texts, roles),
        recalled_turns=chat.recall.turns,
        held_by=_held_by(ledger, held, roles, template_text[1]),
        own_text=(template_text[0].start, template_text[0].stop),
        prompt=template_text[1],
    )


def _held_by(ledger: Ledger, held: Positions, roles: Sequence[str], prompt: int) -> dict[str, int]:
    role = np.where(held < prompt, np.int64(Role.SYSTEM), ledger.column("role")[held])
    is_recalled = ledger.column("flags")[held] & Flag.RECALLED != 0
    summaries = [turn for turn, of in enumerate(roles) if of == "summary"]
    is_summary = np.isin(ledger.column("turn")[held], summaries)
    is_summary &= (role != Role.TEMPLATE) & ~is_recalled
    counts = np.bincount(role[~is_recalled & ~is_summary], minlength=len(Role)).tolist()
    by_role = {role.name.lower(): counts[role] for role in Role}
    return by_role | {"recalled": int(is_recalled.sum()), "summary": int(is_summary.sum())}


def _strongest(ledger: Ledger, order: Floats, held: Positions, count: int) -> Positions:
    """Indices [count] of the held tokens [n] with the highest `order` [n], without the template."""
    others = np.flatnonzero(ledger.column("role")[held] != Role.TEMPLATE)
    if count >= len(others):
        return others
    return np.sort(others[np.argpartition(-order[others], count)[:count]])


def _threshold(
    engine: Engine, scores: Floats | None, held: Positions, leaving: Positions
) -> float | None:
    ledger = engine.ledger
    if scores is None or not len(leaving) or ledger.seen == ledger.held_count:
        return None
    return float(shown_scores(engine, scores[np.searchsorted(held, leaving)]).max())


def _leaving_words(
    engine: Engine, leaving: Positions, texts: Texts, roles: Sequence[str]
) -> dict[str, str]:
    """Some whole words with tokens at `leaving`, most surprising first, and the role of each."""
    ledger = engine.ledger
    others = leaving[ledger.column("role")[leaving] != Role.TEMPLATE]
    surprisal = np.nan_to_num(ledger.column("surprisal")[others])
    best = others[np.argsort(-surprisal, kind="stable")[: 4 * _MAX_LEAVING_TOKENS]].tolist()
    shown = texts(ledger.column("token_id")[best].tolist(), best)
    words = [p for p, text in zip(best, shown, strict=True) if not is_punctuation(text)]
    named = words[:_MAX_LEAVING_TOKENS]
    near = np.asarray(near_positions(named, ledger.seen), np.int64)
    rows = without_template(token_rows(engine, near, texts, None, roles))
    said_by = sorted({row.role for row in rows})  # of what both said, "user" comes last, and counts
    of = {w: role for role in said_by for w in words_at(named, [r for r in rows if r.role == role])}
    return {word: of[word] for word in words_at(named, rows) if word in of}


def _held_shares(
    ledger: Ledger, held: Positions, roles: Sequence[str], *, with_means: bool
) -> tuple[HeldShare, ...]:
    turn, count = ledger.column("turn"), len(roles)
    bounds = np.searchsorted(turn, np.arange(count + 1))
    others = held[ledger.column("role")[held] != Role.TEMPLATE]
    columns = zip(
        range(count),
        roles,
        np.diff(bounds).tolist(),
        np.bincount(turn[held], minlength=count).tolist(),
        _mean_surprisals(ledger, bounds) if with_means else [None] * count,
        np.bincount(turn[others], minlength=count).tolist(),
        strict=True,
    )
    return tuple(HeldShare(*values) for values in columns)


def _mean_surprisals(ledger: Ledger, bounds: Positions) -> list[float | None]:
    """Each turn's mean surprisal in nats; the turns' tokens are between the `bounds`."""
    surprisal = ledger.column("surprisal").astype(np.float64)
    known = ~np.isnan(surprisal)
    total = np.concatenate(([0.0], np.cumsum(np.where(known, surprisal, 0.0))))
    count = np.concatenate(([0], np.cumsum(known)))
    sums, counts = np.diff(total[bounds]).tolist(), np.diff(count[bounds]).tolist()
    return [s / n if n else None for s, n in zip(sums, counts, strict=True)]
