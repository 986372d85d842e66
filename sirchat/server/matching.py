"""Finds the messages of a request that a conversation has read already, wherever they stand now.

Clients write the time into the system prompt, let a window slide over the messages, clear old
results of tools, or insert documents. What they left as it was is not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import numpy as np

from sirchat.chat.editing import KeptTurn, ReadTurns, can_edit
from sirchat.chat.events import Event
from sirchat.errors import ModelError
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag
from sirchat.server.conversation import History, KnownConversation, ServedConversation
from sirchat.text.reply_marks import shared_prefix_length
from sirchat.text.template import TurnIds

# Least characters of texts, after what left a chat, by which it is known: two chats may have the
# same short messages, and one must not remember the other.
SURE = 200
_LEAST_TAIL = 32  # tokens at the end of a system prompt that are worth to be kept
_KINDS = {"tool": "user", "calls": "assistant"}  # as the messages after them tell them

# Reads a message, of this role and text, before one of a role, if that is given; with these ids.
ReadMessage = Callable[[str, str, str | None, TurnIds | None], Iterable[Event]]


def matched(known: KnownConversation, history: History) -> dict[int, int]:
    """Which messages of `history` a conversation has read: their numbers here, and there.

    The last such message is a reply. Unless it has the name in `history`, which only the same chat
    has, these may be only those before which all is the same.
    """
    keys, marks, is_sure = known.keys, known.marks, history.name == known.name != ""
    new, found = history.marks[:-1], dict[int, int]()
    if len(keys) != len(marks) + 1 or not set(marks) & set(new):
        return found
    same = shared_prefix_length(marks, new)
    found |= {number: number for number in range(same)}
    for at, number, size in SequenceMatcher(None, marks[same:], new[same:]).get_matching_blocks():
        numbers = range(same + number, same + number + size)
        found |= dict(zip(numbers, range(same + at, same + at + size), strict=True))
    _end_with_reply(found, history)
    stays = set(found.values())
    gone = next((at for at in range(len(marks)) if at not in stays), None)
    is_whole = keys[0] == history.keys[0] and gone is None
    after = {history.messages[number] for number, at in found.items() if at >= (gone or 0)}
    size = sum(len(text) for role, text in after if role != "calls")
    if not (is_sure or is_whole) and size < SURE:  # then what both begin with
        found = {
            number: number for number in range(shared_prefix_length(keys, history.keys[:-1]) - 1)
        }
        _end_with_reply(found, history)
    return found if len(found) > 1 else {}


def unread(history: History, read: Collection[int], has_prompt: bool) -> int:
    """How many characters of `history`, but its last message, remain to be read.

    The messages numbered in `read` were read; with `has_prompt`, system prompt and tools, too.
    """
    messages = enumerate(history.messages[:-1])
    left = sum(len(text) + 1 for number, (_, text) in messages if number not in read)
    return left + (0 if has_prompt else len(history.system or "") + len(history.tools))


def edited(
    conversation: ServedConversation,
    history: History,
    kept: Mapping[int, int],
    read: ReadMessage,
) -> list[KeptTurn | ReadTurns]:
    """What makes the conversation that of `history`, up to the last message in `kept`.

    That is what `matched` found. Empty if that can't be done. The session has the template of
    `history` already; its system prompt becomes that of `history`.
    """
    session, numbers = conversation.session, conversation.turn_numbers
    systems = [at for at, turn in enumerate(session.turns) if turn.role == "system"]
    is_plain = systems in ([], [0]) and history.messages[0][0] == "user"
    if not (is_plain and can_edit(session) and len(numbers) == len(conversation.marks)):
        return []
    with suppress(ModelError):
        return _Edit(conversation, history, numbers, read).parts(kept)
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
        first = history.messages[0][1]
        self._system, self._first = self._session.template.opening(first, history.system)
        self._rows = dict[int, Positions]()  # of the messages that stay
        self._roles = conversation.roles, [role for role, _ in history.messages]
        self._number_of = {turn: at for at, turn in enumerate(numbers)}

    def parts(self, kept: Mapping[int, int]) -> list[KeptTurn | ReadTurns]:
        """The parts, up to the last of the messages `kept` that can stay."""
        for number, old in kept.items():
            rows = self._rows_in_place(number, old, 0 in kept.values())
            if rows is not None:
                self._rows[number] = rows
        _end_with_reply(self._rows, self._history)
        if not self._rows:
            return []
        parts, done, at = self._system_parts(), 0, 0  # turns, and messages of the request, in them
        taken, known = np.concatenate([*self._rows.values()]), set(self._history.marks)
        first = list[KeptTurn | ReadTurns]()  # what stands before all that stays
        for number, rows in sorted(self._rows.items()):
            turn, new = self._numbers[kept[number]], range(at, number)
            out = self._left_out(range(done, turn), new, taken, known) if turn > done else []
            if parts or not out:
                parts += out
            else:  # the first tokens of a chat are sinks, and these must be there
                first = out
            if new:
                said = [self._new(at, kept) for at in new]
                parts.append(ReadTurns(partial(self._read_all, said)))
            parts.append(KeptTurn(turn, rows))
            if first and self._roles[1][number] in ("assistant", "calls"):
                parts, first = [*parts, *first], []
            done, at = turn + 1, number + 1
        return parts

    def _rows_in_place(self, number: int, old: int, has_first: bool) -> Positions | None:
        """The rows of a message that stays, if the template writes it so in its new place, too."""
        session, messages = self._session, self._history.messages
        role, text = messages[number]
        rows = session.ledger.of_turn(self._numbers[old])
        roles, now = self._roles
        if role in ("user", "tool") and (_kind(roles, old + 1) != _kind(now, number + 1)):
            return None
        is_moved = _kind(roles, old - 1) != _kind(now, number - 1)
        is_moved |= number == 0 and self._history.keys[0] != self._conversation.keys[0]
        is_erased = self._flags[rows] & np.uint8(Flag.ERASED) != 0
        if not is_moved or is_erased.any():  # what was erased is not read again
            return rows
        if role != "user":
            return None
        ids = self._first
        if number:
            ids = session.template.user_turn(text, after_user=_kind(now, number - 1) == "user")
        after = (None, "assistant") if _kind(now, number + 1) == "assistant" else ("user",)
        own, first = self._ids[rows].tolist(), session.ledger.of_turn(self._numbers[0])
        for wanted in (session.template.followed_by(ids, following).ids for following in after):
            if wanted == own:
                return rows
            # What the template writes before a chat stands before the message that was the first.
            head = first[: max(0, len(wanted) - len(own))]
            if not (number or has_first) and [*self._ids[head].tolist(), *own] == wanted:
                return np.concatenate([head, rows])
        return None

    def _system_parts(self) -> list[KeptTurn | ReadTurns]:
        """The system prompt: as it was, as far as it begins and ends alike, or read anew."""
        session, ids = self._session, self._system
        has_one = bool(session.turns) and session.turns[0].role == "system"
        rows = session.ledger.of_turn(0) if has_one else np.zeros(0, np.int64)
        if self._history.keys[0] == self._conversation.keys[0]:
            return [KeptTurn(0, rows)] if has_one else []
        session.note_profile(session.profile.model_copy(update={"system": self._history.system}))
        if ids is None:
            return []
        own = self._ids[rows].tolist()
        same = min(shared_prefix_length(ids.ids, own), len(ids.ids) - 1)
        # Such as tools behind another time; at least one id between is read.
        tail = shared_prefix_length(ids.ids[same + 1 :][::-1], own[same:][::-1])
        tail = tail if tail >= _LEAST_TAIL else 0
        self._conversation.has_exact_prompt &= tail == 0
        end = len(ids.ids) - tail
        content = max(0, ids.content[0] - same), max(0, min(ids.content[1], end) - same)
        rest = TurnIds(ids.ids[same:end], ids.roles[same:end], content)

        def read() -> Iterator[Event]:
            if session.profile.pin_system:
                session.engine.evictor.check_pins(len(rest.ids))
            yield from session.read_system(rest)

        new = ReadTurns(read, joins=same > 0, joins_next=tail > 0)
        head = [KeptTurn(0, rows[:same])] if same else []
        return [*head, new, *([KeptTurn(0, rows[len(own) - tail :])] if tail else [])]

    def _left_out(
        self, turns: range, new: range, taken: Positions, known: Collection[bytes]
    ) -> list[KeptTurn | ReadTurns]:
        """Those of these turns that only recall may use: none that the messages `new` replace.

        Without the tokens `taken` by others, and the messages `known` to be in the request.
        """
        session, marks, (roles, now) = self._session, self._conversation.marks, self._roles
        old = [self._number_of[turn] for turn in turns if turn in self._number_of]
        is_changed = [_kind(roles, at) for at in old] == [_kind(now, at) for at in new]
        out = {turn for turn in turns if session.turns[turn].is_left_out}
        if not (new and is_changed):
            out |= {self._numbers[at] for at in old if marks[at] not in known}
        rows = ((turn, np.setdiff1d(session.ledger.of_turn(turn), taken)) for turn in sorted(out))
        return [KeptTurn(turn, own, is_left_out=True) for turn, own in rows if len(own)]

    def _new(self, number: int, kept: Mapping[int, int]) -> tuple[Any, ...]:
        """What `ReadMessage` takes for a message; a generated reply after it is not given."""
        following: str | None = self._history.messages[number + 1][0]
        if number + 1 in self._rows and following in ("assistant", "calls"):
            reply = self._session.turns[self._numbers[kept[number + 1]]]
            following = following if reply.finish == "read" else None
        return *self._history.messages[number], following, None if number else self._first

    def _read_all(self, messages: Iterable[tuple[Any, ...]]) -> Iterator[Event]:
        for message in messages:
            yield from self._read(*message)


def _kind(roles: Sequence[str], at: int) -> str:
    """The role of the message with this number, as those beside it tell it; "" if there is none."""
    return _KINDS.get(roles[at], roles[at]) if 0 <= at < len(roles) else ""


def _end_with_reply(found: dict[int, Any], history: History) -> None:
    """Remove the last messages from `found`, by number, until one is a reply."""
    while found and history.messages[max(found)][0] not in ("assistant", "calls"):
        del found[max(found)]
