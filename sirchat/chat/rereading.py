"""Lets the model read a conversation again, as a whole or up to an earlier turn; copies sessions.

The user's pins are pinned again. They are found by their place in the text, because another model
has other tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch

from sirchat.chat.events import Event
from sirchat.chat.session import Session
from sirchat.chat.state import ConversationState, Turn
from sirchat.chat.token_rows import without_template
from sirchat.chat.tool_loop import calls_in, read_result
from sirchat.config.profile import Profile
from sirchat.errors import ContextFullError, SettingError, UndoError
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag
from sirchat.models.progress import Progress
from sirchat.text.detokenizer import tokens_spelling
from sirchat.text.tool_calls import ToolCall, call_id
from sirchat.text.transcript import join_reasoning


@dataclass(frozen=True)
class PinnedText:
    """A pinned part of a turn's text: its characters from `start` to `end` - 1.

    Blanks are not counted, because chat templates and tokenizers may change them.
    """

    turn: int  # its index
    start: int
    end: int
    is_rule: bool = False  # pinned by itself, when it was said


def read_again(
    session: Session,
    turns: Sequence[Turn],
    pins: Iterable[PinnedText] = (),
    unpinned: frozenset[tuple[int, str]] = frozenset(),
    progress: Progress | None = None,
) -> None:
    """Let the new session `session` read `turns` again, and pin the texts `pins` again.

    Each turn keeps its index. A system prompt in the settings is read in place of the last one in
    `turns`. `session.state.repinned` counts kept and lost pins. Raises as `Session.read_user`.
    """
    profile, wanted, done = session.profile, 0, 0
    prompts = [number for number, turn in enumerate(turns) if turn.role == "system"]
    parts: dict[int, list[PinnedText]] = {}
    calls: list[ToolCall] = []
    for part in pins:
        parts.setdefault(part.turn, []).append(part)
    _read_prompt(session, None, pinned=False)
    for number, turn in enumerate(turns):
        if turn.role == "system":
            prompt = (profile.system if number == prompts[-1] else None) or turn.text or " "
            pinned = profile.pin_system and prompt == profile.system and number == prompts[-1]
            _read_prompt(session, prompt, pinned=pinned)
        else:
            following = turns[number + 1].role if number + 1 < len(turns) else None
            calls = _read_turn(session, turn, following, calls)
        if turn.is_left_out:
            session.turns[-1].is_left_out, last = True, len(session.turns) - 1
            session.engine.evictor.evict_until_recalled(session.ledger.of_turn(last))
        for index in range(done, done := len(session.turns)):
            session.mark_torn(index, turns[index].torn)
            wanted += _pin_again(session, index, parts.get(index, []))
        if progress is not None:
            progress("reading the chat", number + 1, len(turns))
    if session.profile.system != profile.system:
        _read_prompt(session, profile.system, pinned=profile.pin_system)
    session.note_profile(profile)
    for number in prompts:  # for an erased prompt, a blank was read
        if number < len(session.turns) and not turns[number].text:
            session.turns[number] = Turn("system")
    for new, old in zip(session.turns, turns, strict=False):
        new.time = old.time
    pinned_now = len(_user_pins(session))
    session.state.repinned = pinned_now, wanted - pinned_now
    session.state.unpinned_sentences = frozenset(one for one in unpinned if one[0] < len(turns))


def _read_turn(
    session: Session, turn: Turn, next_role: str | None, calls: list[ToolCall]
) -> list[ToolCall]:
    """Read a turn that is no system prompt; `calls` have no result yet. Returns those left then."""
    if turn.role == "user":
        list(session.read_user(turn.text, next_role=next_role))
        session.turns[-1].is_summary = turn.is_summary
    elif turn.role == "tool":
        unknown = ToolCall(call_id(len(session.turns)), "tool", "{}")
        call, *calls = calls or [unknown]
        question = session.undoable_message
        list(read_result(session, call, turn.text, question, next_role=next_role))
    else:
        calls, given = calls_in(session, turn.text)
        list(session.read_reply(join_reasoning(turn.thinking, turn.text), given=given))
        session.turns[-1].text, session.turns[-1].thinking = turn.text, turn.thinking
        session.state.set_finish(len(session.turns) - 1, turn.finish)
    return calls


def reread_session(session: Session, progress: Progress | None = None) -> Session:
    """A new session that has read all turns of `session` again, so that they can be undone."""
    again = Session(session.model, session.profile)
    unpinned = session.state.unpinned_sentences
    read_again(again, session.turns, pinned_text(session), unpinned, progress)
    again.state.attempt = session.state.attempt  # another reply gets other numbers
    return again


def reread_before_message(
    session: Session, count: int, progress: Progress | None = None
) -> Session:
    """A new session that has read all turns before the last `count` user turns, at least one.

    Raises UndoError if there are fewer.
    """
    start = check_rewind(session, count)[-count]
    again = Session(session.model, _profile_at(session, start))
    unpinned = session.state.unpinned_sentences
    read_again(again, session.turns[:start], pinned_text(session), unpinned, progress)
    return again


def check_rewind(session: Session, count: int) -> list[int]:
    """The indices of all user turns; raises UndoError if there are fewer than `count`."""
    asked = [index for index, turn in enumerate(session.turns) if turn.role == "user"]
    if count > len(asked):
        raise UndoError(f"only {len(asked)} of your messages can be taken back, not {count}")
    return asked


def rewind(session: Session, count: int) -> tuple[Session, list[Event]]:
    """`session`, of which the last `count` user turns are undone, and the events, each once.

    If it can't undo so many, a new session that has read the turns before them; `session` may
    have undone some by then. Raises UndoError, changing nothing, if there are fewer user turns.
    """
    events = list[Event]()
    if count > len(session.history.messages):
        return reread_before_message(session, count), events
    for number in range(count):
        try:
            events = [*dict.fromkeys([*events, *session.undo()])]
        except UndoError:  # a token is lost
            return reread_before_message(session, count - number), []
    return session, events


def copy_session(session: Session, limit: int | None = None) -> Session | None:
    """An independent copy of the session in the same state, without reading.

    If all keys and values are larger than `limit` bytes, only held tokens have theirs. None if even
    these are larger.
    """
    copy = Session(session.model, session.profile)
    if not session.seen:
        return copy
    rows = session.engine.store.copy_key_values(limit)
    if rows is None:
        return None
    points = [replace(point, state=deepcopy(point.state)) for point in session.history.messages]
    attention = session.ledger.attention.checkpoint(rows.positions)
    copy.load(session.engine.save(), deepcopy(session.state), rows, attention, points)
    return copy


def copy_system_prompt(session: Session, profile: Profile) -> Session | None:
    """A session that has read the system prompt of `session`; only one id is read again.

    None if the system prompt has changed since it was read, or can't be copied.
    """
    prompt, engine = session.state.system.positions, session.engine
    positions, flags = np.arange(prompt.stop), session.ledger.column("flags")[: prompt.stop]
    copy, held = Session(session.model, profile), session.ledger.held_positions
    is_whole = not prompt.start and not (flags & np.uint8(Flag.ERASED | Flag.EXCLUDED)).any()
    is_there = is_whole and len(positions) > 1 and bool(np.isin(positions, held).all())
    if not is_there or engine.cache.has_state or session.ledger.attention.has_records:
        return None
    try:
        if profile.pin_system:
            copy.engine.choice.check_pins(len(positions))
        copy.engine.require_room(len(positions))
    except (SettingError, ContextFullError):  # reading it says so
        return None
    if len(positions) > copy.engine.choice.divide_budget().total:
        return None
    now, rows = engine.save(), session.ledger.rows()[positions]
    rows["turn"], rows["round"], rows["birth_decay"] = 0, 0, 0.0
    saved = replace(now, rows=rows, held=positions, log_decay=0.0, logits=None, round=0)
    state = ConversationState([replace(session.turns[0])], system=session.state.system)
    # The first rows are in order.
    written = engine.cache.first_written_rows(torch.from_numpy(positions), positions)
    copy.load(saved, state, written.to("cpu"))
    copy.ledger.pin(prompt, profile.pin_system)
    copy.engine.reader.read_last_again()
    return copy


def pinned_text(session: Session) -> list[PinnedText]:
    """The parts of the text that the user's pins spell."""
    positions = _user_pins(session)
    parts, of_rules = [], session.ledger.column("flags")[positions] & np.uint8(Flag.RULE) != 0
    for index in np.unique(session.ledger.column("turn")[positions]).tolist():
        turn = _SpelledTurn.of(session, index)
        for is_rule in (False, True):
            is_pinned = np.isin(turn.positions, positions[of_rules == is_rule])
            edges = np.flatnonzero(np.diff(is_pinned, prepend=False, append=False))
            for begin, end in turn.bounds[edges].reshape(-1, 2).tolist():
                start = _index_in(turn.text, turn.spelled[begin:end], turn.spelled, begin)
                if begin < end and start >= 0:
                    parts.append(PinnedText(index, start, start + end - begin, is_rule))
    return parts


def repinned_note(session: Session) -> str:
    """A line that says how many tokens are pinned again after a rereading; "" without pins."""
    again, lost = session.state.repinned
    if not again + lost:
        return ""
    many = "token that you had pinned is" if again == 1 else "tokens that you had pinned are"
    why = "pins take at most half of the budget, and what is no longer archived can't be pinned"
    left = f"; {lost:,} {'is' if lost == 1 else 'are'} not: {why}" if lost else ""
    return f"{again:,} {many} pinned again{left}"


def _user_pins(session: Session) -> Positions:
    """Positions of the tokens that the user pinned, without those pinned by `pin_system`."""
    pinned, prompt = session.ledger.pinned_positions, session.state.system.positions
    pinned = np.setdiff1d(pinned, session.state.result_pins)
    if not session.profile.pin_system:
        return pinned
    return pinned[(pinned < prompt.start) | (pinned >= prompt.stop)]


def _pin_again(session: Session, index: int, parts: Sequence[PinnedText]) -> int:
    """Pin these parts of turn `index`, as far as they fit; returns how many tokens they have."""
    if not parts:
        return 0
    turn = _SpelledTurn.of(session, index)
    positions = [turn.positions_of(part) for part in parts]
    missing = [part for part, own in zip(parts, positions, strict=True) if not len(own)]
    texts = [turn.text[part.start : part.end] for part in missing]
    _pin_newest(session, np.union1d(_user_pins(session), np.concatenate(positions)))
    for part, own in zip(parts, positions, strict=True):
        pinned = np.intersect1d(own, session.ledger.pinned_positions)
        session.ledger.flag(Flag.RULE, pinned, part.is_rule)
    spelled_otherwise = sum(len(session.template.as_text(text)) for text in texts)
    return len(np.unique(np.concatenate(positions))) + spelled_otherwise


def _pin_newest(session: Session, pins: Positions, more: int = 0) -> None:
    """Replace the user's pins by the newest of `pins` that fit beside `more` other pins."""
    ledger, before = session.ledger, _user_pins(session)
    division = session.engine.choice.divide_budget()
    after = pins
    if division.max_pins is not None:
        costly = pins[pins >= division.sinks]
        others = np.setdiff1d(ledger.pinned_positions, before)
        others = np.intersect1d(others, ledger.held_positions)
        room = max(0, division.max_pins - int((others >= division.sinks).sum()) - more)
        after = np.setdiff1d(pins, costly[: max(0, len(costly) - room)])
    for positions, pinned in (
        (np.setdiff1d(before, after), False),
        (np.setdiff1d(after, before), True),
    ):
        if len(positions):
            session.pin(positions, pinned)


def _read_prompt(session: Session, prompt: str | None, *, pinned: bool) -> None:
    """Evict the system prompt, and read `prompt`, for which the user's oldest pins may go."""
    session.switch("system", system=None)  # else the same prompt would not be read again
    is_read = prompt and pinned and session.seen
    size = len(session.template.system_turn(prompt).ids) if prompt and is_read else 0
    _pin_newest(session, _user_pins(session), size)
    session.switch("system", system=prompt, pin_system=pinned)


def _profile_at(session: Session, start: int) -> Profile:
    """The session's settings, with the system prompt in force when turn `start` began."""
    prompts = [turn.text for turn in session.turns[:start] if turn.role == "system"]
    if len(prompts) == start or all(turn.role != "system" for turn in session.turns[start:]):
        return session.profile  # nothing was said yet, or no other prompt came later
    return session.profile.model_copy(update={"system": prompts[-1] or None if prompts else None})


@dataclass(frozen=True, eq=False)
class _SpelledTurn:
    """A turn's tokens, without those of template and reasoning, beside its text; no whitespace."""

    positions: Positions  # [n] of the tokens
    bounds: Positions  # [n + 1], where each token begins in `spelled`, and its length
    spelled: str  # the text of the tokens
    text: str  # the turn's text; it differs if words were erased from only one of the two

    @staticmethod
    def of(session: Session, index: int) -> _SpelledTurn:
        positions = session.ledger.of_turn(index)
        rows = without_template(session.tokens(positions.tolist()))
        rows = [row for row in rows if "thinking" not in row.flags]
        pieces = ["".join(row.text.split()) for row in rows]
        return _SpelledTurn(
            np.asarray([row.position for row in rows], np.int64),
            np.cumsum([0, *map(len, pieces)], dtype=np.int64),
            "".join(pieces),
            "".join(session.turns[index].text.split()),
        )

    def positions_of(self, part: PinnedText) -> Positions:
        """Positions of the tokens that spell this part; empty if the turn's tokens lack it."""
        text = self.text[part.start : part.end]
        start = _index_in(self.spelled, text, self.text, part.start)
        if not text or start < 0:
            return self.positions[:0]
        return self.positions[tokens_spelling(self.bounds[1:], start, start + len(text))]


def _index_in(other: str, part: str, text: str, index: int) -> int:
    """Index in `other` of the occurrence of `part` that `text` has at `index`; or -1."""
    # The first occurrence in `text` corresponds to the first in `other`, and so on.
    if text == other:
        return index
    here, there = text.find(part), other.find(part)
    while 0 <= here < index and (following := other.find(part, there + 1)) >= 0:
        here, there = text.find(part, here + 1), following
    return there
