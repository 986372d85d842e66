"""Explains what the model had in memory: ranks of tokens, and the attention that a reply paid."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sirchat.chat.events import TokenRow
from sirchat.chat.panel_snapshot import Snapshot
from sirchat.chat.state import Turn
from sirchat.chat.token_rows import explaining_factors, policy_scores, token_rows
from sirchat.chat.words import STOP_WORDS
from sirchat.engine.engine import Engine
from sirchat.memory.ledger import Role, State
from sirchat.memory.segments import Positions
from sirchat.text.detokenizer import Texts


@dataclass(frozen=True)
class TokenRank:
    """How one token ranks among the tokens in the cache (the held tokens).

    Attributes:
        row: the token, with its score.
        state: `held`, `archived` (evicted, but can be restored) or `gone` (can't be restored).
        decayed_to: product of the decay factors of all rounds that ended since the token was read;
            1 if there is no decay.
        factors: by name, the factors of the score, except surprisal and decay.
        rank: the token's place among the held tokens by score; 1 is the highest score. An evicted
            token has the rank that it would have if it were held. Null for a policy without scores.
        held: number of held tokens.
        threshold: a token with at most this score would be evicted if room were needed now; null as
            in `Snapshot`.
        leaves: whether the token is among those that will be evicted next.
    """

    row: TokenRow
    state: str
    decayed_to: float
    factors: dict[str, float]
    rank: int | None
    held: int
    threshold: float | None
    leaves: bool


def token_ranks(
    engine: Engine, texts: Texts, positions: Positions, now: Snapshot, *, sinks: int
) -> list[TokenRank]:
    """Score, rank and state of each token at the stream `positions`, which are ascending.

    `now` is a snapshot of the present cache. The first `sinks` tokens get the flag `sink`.
    """
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
    leaving = set(now.evicted_next)
    factors = {  # surprisal and decay have columns of their own
        name: one[asked]
        for name, one in explaining_factors(engine, among).items()
        if name not in ("surprisal", "decay")
    }
    return [
        TokenRank(
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


def last_round(turns: Sequence[Turn]) -> tuple[int, int] | None:
    """The indices of the last user turn with a reply, and of this reply; None if no turn has one.

    A summary is skipped together with its reply.
    """
    for index in range(len(turns) - 1, 0, -1):
        asked = turns[index - 1]
        is_pair = (asked.role, turns[index].role) == ("user", "assistant")
        if is_pair and not asked.is_summary:
            return index - 1, index
    return None


@dataclass(frozen=True)
class AttentionPaid:
    """The attention that the tokens of a reply paid to earlier tokens.

    Attributes:
        start: stream position of the reply's first token.
        held: stream positions of the tokens in the cache when the reply ended; None if not known.
        shares: by stream position, the attention that each earlier held token received, divided by
            the mean over these tokens. None if the model does not expose its attention weights.
    """

    start: int
    held: frozenset[int] | None
    shares: dict[int, float] | None


def attention_paid(
    engine: Engine, turn: int, at_reply: tuple[int, Positions], sinks: int
) -> AttentionPaid:
    """The attention that the reply with turn index `turn` paid to each held token before it.

    To measure the attention, the model reads the reply once more; no state changes. The first
    `sinks` tokens and the chat template's tokens are left out: models attend to these tokens
    whatever the text is.

    `at_reply` has two values from the end of the chat's last reply: the number of tokens seen until
    then, and the stream positions of the tokens held then. If nothing was read or undone after
    that reply, the model attends only to the tokens held then. Otherwise it attends to all tokens
    that are held now.
    """
    ledger, (seen, held_then) = engine.ledger, at_reply
    then = frozenset(held_then.tolist()) if seen == engine.ledger.seen else None
    held, role = ledger.held_positions, ledger.column("role")
    said = np.flatnonzero((ledger.column("turn") == turn) & (role == Role.ASSISTANT))
    queries = np.flatnonzero(np.isin(held + 1, said))
    start = int(said[0]) if len(said) else ledger.seen
    if not len(queries):
        return AttentionPaid(start, then, {})
    visible = (held >= (0 if then is None else start)) | np.isin(held, held_then)
    found = engine.reader.attention_from(torch.from_numpy(queries), visible)
    if found is None:
        return AttentionPaid(start, then, None)
    counts = visible & (held < start) & (held >= max(1, sinks)) & (role[held] != Role.TEMPLATE)
    shares = found[counts] / max(found[counts].mean() if counts.any() else 0.0, 1e-12)
    return AttentionPaid(
        start, then, dict(zip(held[counts].tolist(), shares.tolist(), strict=True))
    )


def related_turn(turns: Sequence[Turn], asked: int) -> tuple[int, tuple[str, ...]] | None:
    """Find the turn before turn `asked` that has the most words in common with it.

    Returns the index of this earlier turn, and the words that both turns have, the rarest first.
    Rare words count more; stop words such as `the` do not count. The words of a turn that ends with
    a question mark count half. Returns None if no earlier turn shares a word.
    """
    texts = [_telling(turn.text) for turn in turns[:asked]]
    wanted = _telling(turns[asked].text)
    count = Counter(word for words in texts for word in words & wanted)
    rarity = {word: math.log(1 + asked / n) for word, n in count.items()}
    best: tuple[float, int, tuple[str, ...]] = (0.0, -1, ())
    for index, words in enumerate(texts):
        common = wanted & words
        is_question = turns[index].text.rstrip().endswith("?")
        score = sum(rarity[one] for one in sorted(common)) * (0.5 if is_question else 1.0)
        if score > 0 and score >= best[0]:
            best = score, index, tuple(sorted(common, key=lambda one: (-rarity[one], one)))
    return (best[1], best[2]) if best[2] else None


def _telling(text: str) -> set[str]:
    words = {word.casefold() for word in re.findall(r"[^\W_]+", text)}
    return {word for word in words if len(word) > 1} - STOP_WORDS
