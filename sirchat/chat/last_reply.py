"""Shows what the last reply attended to, and answers its message again under other settings."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sirchat.chat.conversation import Turn
from sirchat.chat.events import Delta, Event, Finish, Notice, Reading, Undone
from sirchat.chat.settings import switched
from sirchat.chat.words import STOP_WORDS
from sirchat.engine.engine import Engine
from sirchat.errors import UsageError
from sirchat.memory import recall
from sirchat.memory.ledger import Ledger, Role
from sirchat.memory.segments import Positions

if TYPE_CHECKING:  # that module imports this one
    from sirchat.chat.session import Session

SUMMARY = "Summary of our conversation so far, by the assistant: "
"""The beginning of every summary; a summary is a user turn that `/summarize` adds."""


@dataclass(frozen=True)
class Reply:
    """A reply that was generated: its token ids, and the reason why it ended."""

    ids: tuple[int, ...]
    finish: Finish


def last_round(turns: Sequence[Turn]) -> tuple[int, int] | None:
    """The indices of the last user turn that has a reply, and of this reply; None if there is none.

    Summaries, which are user turns that the user did not write, are skipped.
    """
    for index in range(len(turns) - 1, 0, -1):
        asked = turns[index - 1]
        is_pair = (asked.role, turns[index].role) == ("user", "assistant")
        if is_pair and not asked.text.startswith(SUMMARY):
            return index - 1, index
    return None


def reply_at_end(ledger: Ledger, turns: Sequence[Turn]) -> Reply | None:
    """The last of these turns as a `Reply`; None if the model did not write it."""
    if not turns or turns[-1].role != "assistant":
        return None
    is_said = ledger.column("role") == Role.ASSISTANT
    said = is_said & (ledger.column("turn") == len(turns) - 1)
    return Reply(tuple(ledger.column("token_id")[said].tolist()), turns[-1].finish)


@dataclass(frozen=True)
class AttentionPaid:
    """The attention that a reply paid to the tokens said before it.

    Attributes:
        start: stream position of the reply's first token.
        held: positions of the tokens in the cache when the reply ended; None if not known.
        shares: by position, the attention that each held token got, divided by the mean of these
            tokens. None if the model does not expose its attention weights.
    """

    start: int
    held: frozenset[int] | None
    shares: dict[int, float] | None


def attention_paid(
    engine: Engine, turn: int, at_reply: tuple[int, Positions], sinks: int
) -> AttentionPaid:
    """The attention that the reply with turn index `turn` paid to each held token before it.

    To measure it, the model reads the reply once more; no state changes. The first `sinks` tokens
    and the chat template's tokens are left out: models attend to these whatever the text is.
    `at_reply` has the number of tokens seen when the last reply ended, and the positions held at
    that time. If nothing was read or undone since then, only these positions count; otherwise all
    tokens that are held now count.
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

    Returns the turn's index and the common words. Rare words count more, and come first; common
    English words do not count. A turn that ends with a question mark counts half. None if no
    earlier turn shares a word.
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


def settings_for_full(session: Session) -> tuple[dict[str, Any], str]:
    """The settings to change so that `/retry full` holds as many tokens as the context allows.

    Also returns a note, which is empty unless the chat is longer than the model's context. The
    settings are empty if every token is held now. Raises UsageError if the archive is off, because
    evicted tokens then can't be restored.
    """
    profile, model = session.profile, session.model
    if session.resident == session.seen:
        return {}, ""
    if profile.archive == "off":
        raise UsageError(
            "/retry full: the archive is off, so what was evicted can't be restored",
            hint="after /set archive ram, evicted tokens can be restored",
        )
    to_come = profile.max_new_tokens + len(session.template.closing)
    if session.seen + to_come <= model.context_length:
        return {"policy": "full", "policy_options": {}, "recall": "off", "evict": "when-full"}, ""
    updates = {"budget": model.context_length, "recall": "off"}
    return updates, f"the chat is longer than the model's context of {model.context_length:,}"


def retry_under(
    session: Session,
    updates: dict[str, Any],
    describe: Callable[[Session], str],
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Answer the user's last message again, under the settings `updates`, for this reply only.

    The new reply replaces the old one. Afterwards the settings are as before. The message is then
    read again, and the new reply's tokens are generated again, under these settings, so that the
    cache is as if the model had given the new reply under them. `describe` is called while
    `updates` hold; its text becomes a notice.

    Raises UndoError and SettingError, changing nothing. If answering fails, the old reply stays.
    """
    text, attempt = session.last_said, session.conversation.attempt
    switched(session.profile, session.model, "/retry", updates)
    before = session.last_reply
    yield from session.undo(keep_pins=True)
    try:
        with session.trial("/retry", updates):
            for event in session.ask(text, interrupted, attempt=attempt + 1):
                if isinstance(event, Reading | Delta | Notice):
                    yield event
            reply, note = session.last_reply, describe(session)
    except BaseException:
        if before is not None:
            list(session.ask(text, attempt=attempt, reply=before))
        raise
    for event in session.ask(text, attempt=attempt + 1, reply=reply):
        if not isinstance(event, Reading | Delta | Undone):
            yield event
    yield Notice(note)


def retriever_for_retry(session: Session, name: str) -> str:
    """The name of the retriever for `/retry recall NAME`: `name`, if it is not empty.

    Otherwise it is the chat's retriever or, if recall is off, `recall.BEST`.
    """
    usual = session.profile.recall
    return name or (recall.BEST if usual == "off" else usual)
