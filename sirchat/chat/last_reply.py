"""Shows which tokens the last reply attended to, and replaces the reply under other settings."""

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
"""The first words of every summary; a summary is a user turn that `/summarize` adds."""


@dataclass(frozen=True)
class Reply:
    """A reply that the model generated: its token ids, and the reason why it ended."""

    ids: tuple[int, ...]
    finish: Finish


def last_round(turns: Sequence[Turn]) -> tuple[int, int] | None:
    """The indices of the last user turn with a reply, and of this reply; None if no turn has one.

    A summary, which is a user turn that `/summarize` added, is skipped together with its reply.
    """
    for index in range(len(turns) - 1, 0, -1):
        asked = turns[index - 1]
        is_pair = (asked.role, turns[index].role) == ("user", "assistant")
        if is_pair and not asked.text.startswith(SUMMARY):
            return index - 1, index
    return None


def reply_at_end(ledger: Ledger, turns: Sequence[Turn]) -> Reply | None:
    """The last turn as a `Reply`; None if there is no turn, or if its role is not `assistant`.

    The token ids of the reply are taken from the `ledger`.
    """
    if not turns or turns[-1].role != "assistant":
        return None
    is_said = ledger.column("role") == Role.ASSISTANT
    said = is_said & (ledger.column("turn") == len(turns) - 1)
    return Reply(tuple(ledger.column("token_id")[said].tolist()), turns[-1].finish)


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


def settings_for_full(session: Session) -> tuple[dict[str, Any], str]:
    """The settings with which `/retry full` answers, so that the cache holds the whole chat.

    Returns two things. The first are the settings to change, by name; empty if every token is held
    now. The second is a note for the user: if the chat is longer than the model's context, it says
    that not all tokens can be held; otherwise it is empty. Raises UsageError if some tokens were
    evicted and the archive is off, because these tokens can't be restored.
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
    """Answer the user's last message again, with the settings `updates` for this one reply.

    The new reply replaces the old reply. First the model answers with the changed settings; this is
    a trial, which is undone. Then, with the usual settings, the message is read again, and so are
    the tokens of the new reply. So the cache is as if the new reply had been given with the usual
    settings. `describe` is called during the trial; the text that it returns becomes a notice.

    Raises UndoError if there is no message to undo, and SettingError if a setting is not allowed;
    both change nothing. If answering fails, the old reply is restored.
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
    """The name of the retriever, the method that finds archived tokens, for `/retry recall NAME`.

    It is `name`, unless this is empty. Then it is the retriever that the chat uses or, if recall is
    off in the chat, the default retriever `recall.BEST`.
    """
    usual = session.profile.recall
    return name or (recall.BEST if usual == "off" else usual)
