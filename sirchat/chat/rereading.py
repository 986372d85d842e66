"""Lets the model read a conversation again, whole or up to an earlier turn; or copies a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np

from sirchat.chat.pinned_text import PinnedText, own_pins, pin_again, pin_newest, pinned_text
from sirchat.chat.session import Session
from sirchat.chat.state import Turn
from sirchat.config.profile import Profile
from sirchat.errors import UndoError
from sirchat.models.progress import Progress


def read_again(
    session: Session,
    turns: Sequence[Turn],
    pins: Iterable[PinnedText] = (),
    progress: Progress | None = None,
) -> None:
    """Let the new session `session` read `turns` again, and pin the texts `pins` again.

    Each turn keeps its index. If the settings have a system prompt, it is read in place of the last
    one in `turns`. `session.state.repinned` says how many pins are kept and lost.

    Raises the same errors as `Session.read_user`.
    """
    profile, lost, done = session.profile, 0, 0
    prompts = [number for number, turn in enumerate(turns) if turn.role == "system"]
    parts: dict[int, list[PinnedText]] = {}
    for part in pins:
        parts.setdefault(part.turn, []).append(part)
    lost += _read_prompt(session, None, pinned=False)
    for number, turn in enumerate(turns):
        if turn.role == "system":
            prompt = (profile.system if number == prompts[-1] else None) or turn.text or " "
            pinned = profile.pin_system and prompt == profile.system and number == prompts[-1]
            lost += _read_prompt(session, prompt, pinned=pinned)
        elif turn.role == "user":
            list(session.read_user(turn.text))
            session.turns[-1].is_summary = turn.is_summary
        else:
            list(session.read_reply(turn.text))
        for index in range(done, done := len(session.turns)):
            lost += pin_again(session, index, parts.get(index, []))
        if progress is not None:
            progress("reading the chat", number + 1, len(turns))
    if session.profile.system != profile.system:
        lost += _read_prompt(session, profile.system, pinned=profile.pin_system)
    session.note_profile(profile)
    for number in prompts:  # for an erased prompt, a blank was read
        if number < len(session.turns) and not turns[number].text:
            session.turns[number] = Turn("system")
    session.state.repinned = len(own_pins(session)), lost


def read_whole(session: Session, progress: Progress | None = None) -> Session:
    """A new session that has read all turns of `session` again, so that they can be undone."""
    again = Session(session.model, session.profile)
    read_again(again, session.turns, pinned_text(session), progress)
    again.state.attempt = session.state.attempt  # another reply gets other numbers
    return again


def read_before_last(session: Session, progress: Progress | None = None) -> Session:
    """A new session that has read all turns before the last user turn, under its system prompt.

    Raises UndoError if there is no user turn.
    """
    start = check_rewind(session, 1)[-1]
    point = session.undo_points[-1].checkpoint.cache if session.undo_points else None
    pinned = own_pins(session)
    if point is not None:  # pins that were made since then are taken back
        pinned = np.intersect1d(pinned, point.pinned)
    again = Session(session.model, _profile_at(session, start))
    read_again(again, session.turns[:start], pinned_text(session, pinned), progress)
    return again


def check_rewind(session: Session, count: int) -> list[int]:
    """The indices of all user turns; raises UndoError if there are fewer than `count`."""
    asked = [index for index, turn in enumerate(session.turns) if turn.role == "user"]
    if count > len(asked):
        raise UndoError(f"only {len(asked)} of your messages can be taken back, not {count}")
    return asked


def rewind(session: Session, count: int) -> bool:
    """Undo the last `count` user turns; returns whether the text before them was read again.

    That is done where they can't be undone exactly. Raises UndoError, changing nothing, if there
    are fewer user turns.
    """
    asked = check_rewind(session, count)
    try:
        for _ in range(count):
            session.undo()
    except UndoError:
        start = asked[-count]
        before, pins = session.turns[:start], pinned_text(session)
        profile = _profile_at(session, start)
        session.reset()
        session.note_profile(profile)
        read_again(session, before, pins)
        return True
    return False


def copied(session: Session, limit: int | None = None) -> Session | None:
    """An independent copy of the session in the same state, without reading.

    If all keys and values are larger than `limit` bytes, it has only those of the held tokens; if
    these alone are larger, there is no copy.
    """
    copy = Session(session.model, session.profile)
    if not session.seen:
        return copy
    rows = session.rows(limit)
    if rows is None:
        return None
    points = [replace(point, state=deepcopy(point.state)) for point in session.undo_points]
    attention = session.ledger.attention.checkpoint(rows.positions)
    copy.load(session.save(), deepcopy(session.state), rows, attention, points)
    return copy


def _read_prompt(session: Session, prompt: str | None, *, pinned: bool) -> int:
    """Evict the system prompt, and read `prompt` instead, if any.

    Returns how many of the user's pins were unpinned to make room for it.
    """
    session.switch("system", system=None)  # else the same prompt would not be read again
    size = len(session.template.system(prompt).ids) if prompt and pinned and session.seen else 0
    lost = pin_newest(session, own_pins(session), size)
    session.switch("system", system=prompt, pin_system=pinned)
    return lost


def _profile_at(session: Session, start: int) -> Profile:
    """The session's settings, with the system prompt that was in force when turn `start` began."""
    prompts = [turn.text for turn in session.turns[:start] if turn.role == "system"]
    if len(prompts) == start or all(turn.role != "system" for turn in session.turns[start:]):
        return session.profile  # nothing was said yet, or no other prompt came later
    return session.profile.model_copy(update={"system": prompts[-1] or None if prompts else None})
