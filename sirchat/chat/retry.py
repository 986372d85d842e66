"""Answers the last message again under temporary settings, or continues a reply that was cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from sirchat.chat.events import Delta, Event, Notice, Reading, TurnDone, Undone
from sirchat.chat.session import Session
from sirchat.chat.settings import updated_profile
from sirchat.chat.state import UNFINISHED, GeneratedReply, UndoPoint, last_generated_reply
from sirchat.chat.summary import PREFIX, pin_summary
from sirchat.chat.tool_loop import answer, reply_format
from sirchat.chat.turn import Interrupted, never
from sirchat.errors import UsageError
from sirchat.memory.key_values import LostTokensError


def settings_for_full(session: Session) -> tuple[dict[str, Any], str]:
    """The settings to change for `/retry full`, which holds the whole chat, and a note.

    Both are empty if all is held; the note is for a chat longer than the context. Raises UsageError
    if tokens were evicted and the archive is off.
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


def retry_as_usual(session: Session, interrupted: Interrupted = never) -> Iterator[Event]:
    """Replace the last reply by another, under the same settings; raises as `Session.retry`."""
    before = last_generated_reply(session.ledger, session.turns)
    yield from session.retry(interrupted)
    if before is None or before != last_generated_reply(session.ledger, session.turns):
        yield Notice("the last reply is replaced by this one")
        return
    profile, why = session.profile, "the reply is the same"
    if profile.temperature == 0 or profile.top_k == 1:
        setting = "temperature 0" if profile.temperature == 0 else "top_k 1"
        why += f": with {setting} it can't differ"
    yield Notice(f"{why}; try /set temperature 0.7, /set top_k 40, and /retry")


def retry_with_settings(
    session: Session,
    updates: dict[str, Any],
    describe: Callable[[Session], str],
    interrupted: Interrupted = never,
) -> Iterator[Event]:
    """Replace the last reply under the settings `updates`; `describe` returns a notice about it.

    Raises UndoError if no message can be undone, SettingError if a setting is not allowed, and
    UsageError if tools are on, changing nothing. If answering fails, the old reply is restored.
    """
    if session.toolbox.tools:  # what they return in the trial would be lost
        raise UsageError("/retry under other settings can't call tools", hint="/retry alone can")
    # The model answers in a trial, which is undone. Then it reads the message, and the tokens of
    # the new reply, under the usual settings: so the cache is as if these had given that reply.
    point, turns = session.asked_point(), session.turns
    text = point.text
    summaries = [turn.text for turn in turns[point.turns :] if turn.is_summary]
    updated_profile(session.profile, session.model, "/retry", updates)
    yield from reply_format(session, session.toolbox)  # it may be refused
    before = last_generated_reply(session.ledger, session.turns)
    notices = session.undo_summaries()
    attempt, events = session.state.attempt, session.undo(to_ask_again=True)
    points, kept = session.history.messages, session.state.retried
    try:
        yield from dict.fromkeys([*events, *notices])
        with trial(session, "/retry", updates):
            for event in session.ask(text, interrupted, attempt=attempt + 1):
                if isinstance(event, Reading | Delta | Notice):
                    yield event
            reply, note = last_generated_reply(session.ledger, session.turns), describe(session)
        yield Notice(note)
        events = list(session.ask(text, attempt=attempt + 1, reply=reply))
    except BaseException:
        if session.history.messages is not points:
            session.undo(to_ask_again=True)
            session.state.retried = kept
        answer_as_before(session, text, attempt, before, summaries)
        raise
    session.recall.undo()  # what it has found now, the reply did not have
    yield from (event for event in events if not isinstance(event, Reading | Delta | Undone))


def answer_as_before(
    session: Session,
    text: str,
    attempt: int,
    reply: GeneratedReply | None,
    summaries: Sequence[str],
) -> None:
    """Read the message `text`, its `reply` if it had one, and the `summaries` after it."""
    if reply is None:
        list(session.read_question(text))
    else:
        list(session.ask(text, attempt=attempt, reply=reply))
    for said in summaries:
        list(pin_summary(session, said.removeprefix(PREFIX)))


def go_on(session: Session, interrupted: Interrupted = never) -> Iterator[Event]:
    """Continue the last reply, which was cut, as if it had not been cut.

    Raises UsageError if the reply is complete, and UndoError if its message can't be undone.
    """
    reply = last_generated_reply(session.ledger, session.turns)
    if reply is None or session.turns[-1].finish not in UNFINISHED:
        raise UsageError("the last reply is complete", hint="/retry replaces it by another")
    allowed = yield from reply_format(session, session.toolbox, reply)
    try:
        events = session.return_to(session.history.before_end)
    except LostTokensError:  # in a resumed chat, for example
        if session.turns[-2].role == "tool":  # it would be lost
            why = "the result of a tool, which the last reply follows, would be lost"
            raise UsageError(f"/continue: {why}", hint="/retry asks again") from None
        yield from _generate_again(session, reply, interrupted)
    else:
        yield from events
        box, text, begun = session.toolbox, session.undoable_message, session.state.last_reply_stats
        yield from answer(session, box, text, interrupted, allowed=allowed, begun=begun)


def _generate_again(
    session: Session, reply: GeneratedReply, interrupted: Interrupted
) -> Iterator[Event]:
    """Undo the last message, generate the same `reply` to it, and go on."""
    text, attempt, length = session.undoable_message, session.state.attempt, len(reply.ids)
    yield from session.undo(to_ask_again=True)

    def stops() -> bool:
        is_begun = session.turns[-1].role == "assistant"
        return is_begun and session.state.last_reply_stats.tokens_out >= length and interrupted()

    for event in session.ask(text, stops, attempt=attempt, reply=replace(reply, finish=None)):
        written = session.state.last_reply_stats.tokens_out
        if isinstance(event, Delta) and written <= length:
            yield Reading(written, length)
        elif not isinstance(event, Notice | TurnDone) or written > length:
            yield event


@contextmanager
def trial(session: Session, source: str, updates: dict[str, Any]) -> Iterator[None]:
    """Context manager, between rounds: `updates` hold in its block; all is undone at its end."""
    profile, history, engine = session.profile, replace(session.history), session.engine
    settings, start = engine.settings, UndoPoint.now(session.state, engine)
    with engine.store.without_limit():
        try:
            session.switch(source, **updates)
            yield
        finally:
            session.profile, session.history = profile, history
            session.state = start.restored_state(session.state, to_ask_again=True)
            engine.ledger.pin_only(start.checkpoint.pinned)  # those since may be too many for it
            engine.switcher.switch(settings)
            engine.undo(start.checkpoint)
    session.recall.undo()


@contextmanager
def temporary_settings(session: Session, source: str, updates: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: the settings `updates` hold in its block, and the old ones afterwards.

    Error messages begin with `source`, the command that changes the settings.
    """
    before = {name: getattr(session.profile, name) for name in updates}
    rules = np.array([*chain(*session.ledger.rules())], np.int64)
    if updates:
        session.switch(source, **updates)
    gone = np.setdiff1d(rules, session.ledger.pinned_positions)  # as they have no room meanwhile
    try:
        yield
    finally:
        if updates:
            session.switch(source, **before)
            if len(gone):
                session.engine.switcher.pin(gone, True)
