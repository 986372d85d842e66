"""Lets the model read a conversation again, whole or up to an earlier turn; or copies a session.

While a conversation is read again, the parts of the text that the user had pinned are pinned again.
They are found by their place in the text, because another model has other tokens. Each turn keeps
its index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np

from sirchat.chat.session import Session
from sirchat.chat.state import Turn, UndoPoint
from sirchat.chat.summary import pin_last_summary
from sirchat.chat.words import said
from sirchat.config.profile import Profile
from sirchat.errors import UndoError
from sirchat.memory.key_values import Positions
from sirchat.models.progress import Progress
from sirchat.text.detokenizer import tokens_spelling


@dataclass(frozen=True)
class PinnedText:
    """A part of a turn's text that the user pinned.

    It has the characters from index `start` to `end` - 1 of the turn with index `turn`. Blanks are
    not counted, because chat templates and tokenizers may change them.
    """

    turn: int
    start: int
    end: int


def own_pins(session: Session) -> Positions:
    """Stream positions of the tokens that the user pinned.

    They do not include the system prompt, which the setting `pin_system` pins.
    """
    pinned, prompt = session.limits.ledger.pinned_positions, session.conversation.system
    if not session.profile.pin_system:
        return pinned
    return pinned[(pinned < prompt.start) | (pinned >= prompt.stop)]


def pinned_text(session: Session, pinned: Positions | None = None) -> list[PinnedText]:
    """The parts of the chat's text that consist of the tokens at the stream positions `pinned`.

    If `pinned` is None, the positions of the tokens that the user pinned are used.
    """
    at = own_pins(session) if pinned is None else pinned
    found = []
    for index in np.unique(session.limits.ledger.column("turn")[at]).tolist():
        one = _Spelled.of(session, index)
        is_pinned = np.isin(one.positions, at)
        edges = np.flatnonzero(np.diff(is_pinned, prepend=False, append=False))
        for begin, end in one.bounds[edges].reshape(-1, 2).tolist():
            start = _counterpart(one.spelled[begin:end], one.spelled, begin, one.text)
            if begin < end and start >= 0:
                found.append(PinnedText(index, start, start + end - begin))
    return found


@dataclass(frozen=True, eq=False)
class _Spelled:
    """One turn's tokens, without those of the chat template, and its text, both without blanks.

    Attributes:
        positions: stream positions [n] of the tokens.
        bounds: [n + 1], the index in `spelled` at which each token begins, and at the end the
            length of `spelled`.
        spelled: the text of the tokens, joined.
        text: the turn's text. It differs from `spelled` if words were erased from only one of the
            two.
    """

    positions: Positions
    bounds: Positions
    spelled: str
    text: str

    @staticmethod
    def of(session: Session, index: int) -> _Spelled:
        at = np.flatnonzero(session.limits.ledger.column("turn") == index)
        rows = said(session.tokens(at.tolist()))
        pieces = ["".join(row.text.split()) for row in rows]
        return _Spelled(
            np.asarray([row.position for row in rows], np.int64),
            np.cumsum([0, *map(len, pieces)], dtype=np.int64),
            "".join(pieces),
            "".join(session.turns[index].text.split()),
        )

    def positions_of(self, one: PinnedText) -> Positions:
        """Stream positions of the tokens that spell the pinned text `one`.

        Empty if the tokens of this turn do not contain the text.
        """
        part = self.text[one.start : one.end]
        start = _counterpart(part, self.text, one.start, self.spelled)
        if not part or start < 0:
            return self.positions[:0]
        return self.positions[tokens_spelling(self.bounds[1:], start, start + len(part))]


def _counterpart(part: str, text: str, at: int, other: str) -> int:
    """Find the text `part`, which `text` has at index `at`, in the similar text `other`.

    Returns its index in `other`; -1 if it is not found. If `part` occurs several times in both
    texts, its first occurrence in `text` corresponds to its first in `other`, the second to the
    second, and so on.
    """
    if text == other:
        return at
    before, found = text.find(part), other.find(part)
    while 0 <= before < at and (following := other.find(part, found + 1)) >= 0:
        before, found = text.find(part, before + 1), following
    return found


def read_again(
    session: Session,
    turns: Sequence[Turn],
    pins: Iterable[PinnedText] = (),
    progress: Progress | None = None,
) -> None:
    """Let the new session `session` read `turns` again, and pin the texts `pins` again.

    Each turn keeps its index, and no reply is generated. If `turns` has several system prompts,
    each is read at its place, and evicted when the next system prompt is read. If the session's
    settings have a system prompt, it is read in place of the last one in `turns`.

    Two numbers are stored in `session.conversation.repinned`: how many tokens are pinned again, and
    how many could not be pinned. `progress` is called after each turn. Raises the same errors as
    `Session.read_user`.
    """
    wanted, lost, done = session.profile, 0, 0
    prompts = [number for number, turn in enumerate(turns) if turn.role == "system"]
    parts: dict[int, list[PinnedText]] = {}
    for one in pins:
        parts.setdefault(one.turn, []).append(one)
    lost += _read_prompt(session, None, pinned=False)
    for number, turn in enumerate(turns):
        if turn.role == "system":
            prompt = (wanted.system if number == prompts[-1] else None) or turn.text or " "
            pinned = wanted.pin_system and prompt == wanted.system and number == prompts[-1]
            lost += _read_prompt(session, prompt, pinned=pinned)
        elif turn.role == "user":
            list(session.read_user(turn.text))
            session.turns[-1].is_summary = turn.is_summary
        else:
            list(session.read_reply(turn.text))
        for index in range(done, done := len(session.turns)):
            lost += _pin_again(session, index, parts.get(index, []))
        if progress is not None:
            progress("reading the chat", number + 1, len(turns))
    if session.profile.system != wanted.system:
        lost += _read_prompt(session, wanted.system, pinned=wanted.pin_system)
    session.profile = wanted
    for number in prompts:  # for an erased prompt, a blank was read
        if number < len(session.turns) and not turns[number].text:
            session.turns[number] = Turn("system")
    session.conversation.repinned = len(own_pins(session)), lost


def _read_prompt(session: Session, prompt: str | None, *, pinned: bool) -> int:
    """Evict the session's system prompt, and read `prompt` instead; None for no prompt.

    The new prompt is pinned if `pinned` is true. Returns how many of the tokens that the user had
    pinned were unpinned to make room for the prompt.
    """
    session.switch("system", system=None)  # else the same prompt would not be read again
    size = len(session.template.system(prompt).ids) if prompt and pinned and session.seen else 0
    lost = _pin_newest(session, own_pins(session), size)
    session.switch("system", system=prompt, pin_system=pinned)
    return lost


def _pin_again(session: Session, index: int, parts: Sequence[PinnedText]) -> int:
    """Pin these parts of the text of turn `index`, which was just read again.

    Returns how many of the user's pinned tokens are lost. A token is lost if the turn does not
    contain its text, or if the cache has no more room for pinned tokens.
    """
    if not parts:
        return 0
    turn = _Spelled.of(session, index)
    found = [turn.positions_of(one) for one in parts]
    missing = [one for one, at in zip(parts, found, strict=True) if not len(at)]
    lost = sum(len(session.template.as_text(turn.text[one.start : one.end])) for one in missing)
    return lost + _pin_newest(session, np.union1d(own_pins(session), np.concatenate(found)))


def _pin_newest(session: Session, wanted: Positions, more: int = 0) -> int:
    """Pin the tokens at positions `wanted`, and unpin all others that the user pinned.

    If the cache has no room for so many pinned tokens, only the newest are pinned. Room for `more`
    other pinned tokens is left free. Returns how many of `wanted` are not pinned.
    """
    limits, own = session.limits, own_pins(session)
    free = wanted[wanted >= limits.sinks]
    fit = wanted
    if limits.most_pins is not None:
        others = limits.pins(np.setdiff1d(limits.ledger.held_positions, own))
        room = max(0, limits.most_pins - others - more)
        fit = np.setdiff1d(wanted, free[: max(0, len(free) - room)])
    for positions, pinned in ((np.setdiff1d(own, fit), False), (np.setdiff1d(fit, own), True)):
        if len(positions):
            session.pin(positions, pinned)
    return len(wanted) - len(own_pins(session))


def pins_note(session: Session) -> str:
    """A line for the user: how many tokens were pinned again when the chat's text was read again.

    The line is empty if the user had pinned nothing.
    """
    again, lost = session.conversation.repinned
    if not again + lost:
        return ""
    many = "token that you had pinned is" if again == 1 else "tokens that you had pinned are"
    left = f"; {lost:,} are not, as pins take at most half of the budget" if lost else ""
    return f"{again:,} {many} pinned again{left}"


def check_rewind(session: Session, count: int) -> list[int]:
    """The indices of all user turns, ascending.

    Raises UndoError if the chat has fewer than `count` user turns.
    """
    asked = [index for index, turn in enumerate(session.turns) if turn.role == "user"]
    if count > len(asked):
        raise UndoError(f"only {len(asked)} of your messages can be taken back, not {count}")
    return asked


def own_message(session: Session) -> str:
    """The text of the user's last message that can be undone.

    If no message can be undone, it is the text of the user's last message. Summaries, which are
    user turns that `/summarize` added, are skipped. Raises UndoError if the user wrote no message.
    """
    said = [(point.text, _is_summary(session, point)) for point in session.undoable] or [
        (turn.text, turn.is_summary) for turn in session.turns if turn.role == "user"
    ]
    own = [text for text, is_summary in said if not is_summary]
    if said and not own:
        raise UndoError("there is no message of yours to take back, only a summary")
    return own[-1] if own else session.last_said


def _is_summary(session: Session, point: UndoPoint) -> bool:
    """Whether the turn that undoing to `point` takes back is a summary."""
    later = session.turns[point.turns :]
    return next((turn.is_summary for turn in later if turn.role == "user"), False)


def undo_summaries(session: Session) -> None:
    """Undo the summaries (turns that `/summarize` added) after the user's last message.

    If a summary was undone, the summary before it is pinned again. Raises UndoError if the user
    wrote no message.
    """
    own_message(session)
    before = len(session.turns)
    while session.undoable and _is_summary(session, session.undoable[-1]):
        session.undo(keep_pins=True)
    if len(session.turns) < before:
        pin_last_summary(session)


def rewind(session: Session, count: int) -> bool:
    """Undo the last `count` user turns and all replies to them.

    If these turns can be undone exactly, the state before them is restored. Otherwise the session
    is reset, and reads the text of all earlier turns again. Returns whether the session was reset.

    Raises UndoError, changing nothing, if the chat has fewer than `count` user turns.
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
        session.profile = profile
        read_again(session, before, pins)
        return True
    return False


def read_before_last(session: Session, progress: Progress | None = None) -> Session:
    """A new session with the same settings, which has read all turns before the last user turn.

    Its system prompt is the one in force before that turn. `session` does not change. Raises
    UndoError if there is no user turn.
    """
    start = check_rewind(session, 1)[-1]
    point = session.undoable[-1].checkpoint.cache if session.undoable else None
    pinned = own_pins(session)
    if point is not None:  # pins that were made since then are taken back
        pinned = np.intersect1d(pinned, point.pinned)
    again = Session(session.model, _profile_at(session, start))
    read_again(again, session.turns[:start], pinned_text(session, pinned), progress)
    return again


def read_whole(session: Session, progress: Progress | None = None) -> Session:
    """A new session with the same settings, which has read all turns of `session` again.

    In the new session, the last turns can be undone. `session` does not change.
    """
    again = Session(session.model, session.profile)
    read_again(again, session.turns, pinned_text(session), progress)
    again.conversation.attempt = session.conversation.attempt  # another reply gets other numbers
    return again


def _profile_at(session: Session, start: int) -> Profile:
    """The session's settings, with the system prompt that was in force when turn `start` began."""
    prompts = [turn.text for turn in session.turns[:start] if turn.role == "system"]
    if len(prompts) == start or all(turn.role != "system" for turn in session.turns[start:]):
        return session.profile  # nothing was said yet, or no other prompt came later
    return session.profile.model_copy(update={"system": prompts[-1] or None if prompts else None})


def copied(session: Session, limit: int | None = None) -> Session | None:
    """A copy of the session in the same state; the model reads no text again.

    Later changes of one session do not affect the other. If the keys and values of all held and
    archived tokens are larger than `limit` bytes, the copy has only those of the held tokens; if
    these alone are larger, the function returns None.
    """
    copy = Session(session.model, session.profile)
    if not session.seen:
        return copy
    rows = session.rows(limit)
    if rows is None:
        return None
    points = [replace(one, state=deepcopy(one.state)) for one in session.undoable]
    attention = session.attention(rows.positions)
    copy.load(session.save(), deepcopy(session.conversation), rows, attention, points)
    return copy
