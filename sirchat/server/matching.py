"""Finds the messages of a request that a conversation has read already, even at other places.

Clients write the time into the system prompt, let a window slide over the messages, clear old tool
results, or insert documents. Messages that did not change are not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from functools import partial
from itertools import chain, starmap
from typing import Any

import numpy as np

from sirchat.chat.editing import KeptTurn, ReadTurns, can_edit
from sirchat.chat.events import Event
from sirchat.errors import ModelError
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag
from sirchat.server.conversation import History, KnownConversation, ServedConversation
from sirchat.text.reply_marks import prefix_length
from sirchat.text.template import TurnIds

# Least characters of texts, after what left a chat, by which it is known: two chats may have the
# same short messages, and one must not remember the other.
MIN_SHARED_CHARS = 200
_MIN_COMMON_END = 32  # tokens at the end of a system prompt that are worth to be kept
_ROLE_FOR_NEIGHBOURS = {"tool": "user", "calls": "assistant"}

# Reads a message, of this role and text, before one of a role, if that is given; with these ids.
ReadMessage = Callable[[str, str, str | None, TurnIds | None], Iterable[Event]]


def matched(conversation: KnownConversation, history: History) -> dict[int, int]:
    """Map messages of `history` that a conversation has read to their numbers in the conversation.

    The last of them is a reply. If names differ and little text matches, only a beginning that both
    have in common counts.
    """
    marks, request_marks, pairs = conversation.marks, history.marks[:-1], dict[int, int]()
    if not set(marks) & set(request_marks):
        return pairs
    prefix = prefix_length(marks, request_marks)
    pairs |= {number: number for number in range(prefix)}
    matcher = SequenceMatcher(None, marks[prefix:], request_marks[prefix:])
    for old, new, size in matcher.get_matching_blocks():
        numbers = range(prefix + new, prefix + new + size)
        pairs |= zip(numbers, range(prefix + old, prefix + old + size), strict=True)
    _cut_to_last_reply(pairs, history)
    missing = set(range(len(marks))) - set(pairs.values())
    is_named = history.name == conversation.name != ""
    has_all = conversation.prompt_mark == history.prompt_mark and not missing
    first_missing = min(missing, default=0)
    after = {history.messages[new] for new, old in pairs.items() if old >= first_missing}
    chars = sum(len(text) for role, text in after if role != "calls")
    if not (is_named or has_all) and chars < MIN_SHARED_CHARS:  # then what both begin with
        common = min(prefix, conversation.prefix_length(history))
        pairs = {number: number for number in range(common)}
        _cut_to_last_reply(pairs, history)
    return pairs if len(pairs) > 1 else {}


def unread(history: History, read: Collection[int], has_prompt: bool) -> int:
    """How many characters of `history`, without its last message, remain to be read.

    Messages numbered in `read` were read; with `has_prompt`, so were system prompt and tools.
    """
    messages = enumerate(history.messages[:-1])
    chars = sum(len(text) + 1 for number, (_, text) in messages if number not in read)
    return chars + (0 if has_prompt else len(history.system or "") + len(history.tools))


def edited(
    conversation: ServedConversation, history: History, reused: Mapping[int, int], read: ReadMessage
) -> list[KeptTurn | ReadTurns]:
    """The turns that make the conversation equal to `history`, up to the last `reused` message.

    `reused` is the result of `matched`. Empty if that is impossible. The session already has the
    template of `history`; its system prompt becomes that of `history`.
    """
    session, numbers = conversation.session, conversation.turn_numbers
    system_turns = [index for index, turn in enumerate(session.turns) if turn.role == "system"]
    has_one_prompt = system_turns in ([], [0]) and history.messages[0][0] == "user"
    if not (has_one_prompt and can_edit(session) and len(numbers) == len(conversation.marks)):
        return []
    with suppress(ModelError):
        return _Edit(conversation, history, numbers, read).parts(reused)
    return []


class _Edit:
    """Makes the parts of one edit of a conversation, whose messages are the turns `numbers`."""

    def __init__(
        self,
        conversation: ServedConversation,
        history: History,
        numbers: Sequence[int],
        read: ReadMessage,
    ) -> None:
        self._conversation, self._history, self._numbers = conversation, history, numbers
        self._session, self._read = conversation.session, read
        self._ids, self._flags = map(self._session.ledger.column, ("token_id", "flags"))
        opening = self._session.template.opening(history.messages[0][1], history.system)
        self._system_ids, self._first_message_ids = opening
        self._rows = dict[int, Positions]()  # of the messages that stay
        self._old_roles = _roles_for_neighbours(conversation.roles)
        self._new_roles = _roles_for_neighbours(role for role, _ in history.messages)
        self._request_marks = set(history.marks)

    def parts(self, reused: Mapping[int, int]) -> list[KeptTurn | ReadTurns]:
        """The parts, up to the last of the `reused` messages that can stay."""
        for number, old in reused.items():
            rows = self._rows_in_place(number, old, 0 in reused.values())
            if rows is not None:
                self._rows[number] = rows
        _cut_to_last_reply(self._rows, self._history)
        if not self._rows:
            return []
        parts, next_turn, next_message = self._system_parts(), 0, 0
        before_reused = list[KeptTurn | ReadTurns]()  # what stands before all that stays
        for number, rows in sorted(self._rows.items()):
            turn, new_messages = self._numbers[reused[number]], range(next_message, number)
            left_out = self._left_out_turns(range(next_turn, turn), new_messages)
            if parts or not left_out:
                parts += left_out
            else:  # the first tokens of a chat are sinks, and these must be there
                before_reused = left_out
            if new_messages:
                arguments = [self._read_arguments(new, reused) for new in new_messages]
                read = partial(chain.from_iterable, starmap(self._read, arguments))
                parts.append(ReadTurns(read))
            parts.append(KeptTurn(turn, rows))
            if before_reused and self._new_roles[number] == "assistant":
                parts, before_reused = [*parts, *before_reused], []
            next_turn, next_message = turn + 1, number + 1
        return parts

    def _rows_in_place(self, number: int, old: int, has_first: bool) -> Positions | None:
        """The rows of a message that stays, if the template writes it alike in its new place."""
        session, (role, text) = self._session, self._history.messages[number]
        rows = session.ledger.of_turn(self._numbers[old])
        role_before, role_after = self._new_roles[number - 1], self._new_roles[number + 1]
        if role in ("user", "tool") and self._old_roles[old + 1] != role_after:
            return None
        is_moved = self._old_roles[old - 1] != role_before
        is_moved |= number == 0 and self._history.prompt_mark != self._conversation.prompt_mark
        is_erased = self._flags[rows] & np.uint8(Flag.ERASED) != 0
        if not is_moved or is_erased.any():  # what was erased is not read again
            return rows
        if role != "user":
            return None
        ids = self._first_message_ids
        if number:
            ids = session.template.user_turn(text, after_user=role_before == "user")
        old_ids, first_rows = self._ids[rows].tolist(), session.ledger.of_turn(self._numbers[0])
        for next_role in (None, "assistant") if role_after == "assistant" else ("user",):
            new_ids = session.template.followed_by(ids, next_role).ids
            if new_ids == old_ids:
                return rows
            # What the template writes before a chat stands before the message that was the first.
            prompt_rows = first_rows[: max(0, len(new_ids) - len(old_ids))]
            may_be_first = number == 0 and not has_first
            if may_be_first and [*self._ids[prompt_rows].tolist(), *old_ids] == new_ids:
                return np.concatenate([prompt_rows, rows])
        return None

    def _system_parts(self) -> list[KeptTurn | ReadTurns]:
        """The system prompt: kept where it begins and ends alike, otherwise read anew."""
        session, ids = self._session, self._system_ids
        has_prompt = bool(session.turns) and session.turns[0].role == "system"
        rows = session.ledger.of_turn(0) if has_prompt else np.zeros(0, np.int64)
        if self._history.prompt_mark == self._conversation.prompt_mark:
            return [KeptTurn(0, rows)] if has_prompt else []
        session.note_profile(session.profile.model_copy(update={"system": self._history.system}))
        if ids is None:
            return []
        old_ids = self._ids[rows].tolist()
        common = min(prefix_length(ids.ids, old_ids), len(ids.ids) - 1)
        # Such as tools behind another time; at least one id between is read.
        tail = prefix_length(ids.ids[common + 1 :][::-1], old_ids[common:][::-1])
        tail = tail if tail >= _MIN_COMMON_END else 0
        self._conversation.has_exact_prompt &= tail == 0
        tail_start = len(ids.ids) - tail
        content = max(0, ids.content[0] - common), max(0, min(ids.content[1], tail_start) - common)
        rest = TurnIds(ids.ids[common:tail_start], ids.roles[common:tail_start], content)

        def read() -> Iterator[Event]:
            if session.profile.pin_system:
                session.engine.choice.check_pins(len(rest.ids))
            yield from session.read_system(rest)

        parts: list[KeptTurn | ReadTurns] = [KeptTurn(0, rows[:common])] if common else []
        parts.append(ReadTurns(read, joins=common > 0, joins_next=tail > 0))
        return [*parts, KeptTurn(0, rows[len(old_ids) - tail :])] if tail else parts

    def _left_out_turns(self, turns: range, new_messages: range) -> list[KeptTurn | ReadTurns]:
        """The turns that only recall may use, because no new messages replace them."""
        # Without tokens that other messages reuse, and messages that are in the request.
        session, marks = self._session, self._conversation.marks
        left_out = {turn for turn in turns if session.turns[turn].is_left_out}
        old_messages = [i for i, turn in enumerate(self._numbers) if turn in turns]
        old_roles = [self._old_roles[i] for i in old_messages]
        if not new_messages or old_roles != [self._new_roles[i] for i in new_messages]:
            unsent = [i for i in old_messages if marks[i] not in self._request_marks]
            left_out |= {self._numbers[i] for i in unsent}
        parts, reused_rows = list[KeptTurn | ReadTurns](), [*self._rows.values()]
        for turn in sorted(left_out):
            rows = np.setdiff1d(session.ledger.of_turn(turn), np.concatenate(reused_rows))
            if len(rows):
                parts.append(KeptTurn(turn, rows, is_left_out=True))
        return parts

    def _read_arguments(self, number: int, reused: Mapping[int, int]) -> tuple[Any, ...]:
        """The arguments of `ReadMessage` for a message; a generated reply after it is left out."""
        role, text = self._history.messages[number]
        next_role: str | None = self._history.messages[number + 1][0]
        if number + 1 in self._rows and next_role in ("assistant", "calls"):
            reply = self._session.turns[self._numbers[reused[number + 1]]]
            next_role = next_role if reply.finish == "read" else None
        return role, text, next_role, None if number else self._first_message_ids


def _roles_for_neighbours(roles: Iterable[str]) -> list[str]:
    """The role of each message as its neighbours see it, and "" for both ends."""
    return [*(_ROLE_FOR_NEIGHBOURS.get(role, role) for role in roles), ""]


def _cut_to_last_reply(found: dict[int, Any], history: History) -> None:
    """Remove the last messages from `found` until the last one is a reply."""
    while found and history.messages[max(found)][0] not in ("assistant", "calls"):
        del found[max(found)]
