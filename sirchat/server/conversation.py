"""A conversation on the server: its session, and which messages of a client it has read.

A client sends all messages of a chat with each request. Each message has a hash, its mark; a
conversation knows the marks of the messages that its session has read.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields, replace
from difflib import SequenceMatcher
from functools import partial
from hashlib import sha256
from itertools import chain, starmap
from typing import Any

import numpy as np
from pydantic import ConfigDict

from sirchat.chat.editing import KeptTurn, ReadTurns, can_edit
from sirchat.chat.events import Event
from sirchat.chat.session import Session
from sirchat.chat.state import Turn
from sirchat.errors import ModelError, UndoError
from sirchat.memory.key_values import LostTokensError, Positions
from sirchat.memory.ledger import Flag
from sirchat.saved.autosave import Autosave
from sirchat.saved.store import SavedTurn
from sirchat.text.reply_parts import prefix_length
from sirchat.text.template import TurnIds
from sirchat.text.text_file import without_surrogates

_PREVIEW_CHARS = 80  # characters


@dataclass(frozen=True)
class History:
    """The messages of a request."""

    system: str | None
    messages: tuple[tuple[str, str], ...]  # role and text, as `ChatRequest.turns` has them
    prompt_mark: bytes  # the hash of system prompt and tools
    marks: tuple[bytes, ...]  # marks[n]: the hash of message n
    tools: str = ""  # JSON
    name: str = ""  # of the conversation which the client continues, if it says one

    @classmethod
    def of(
        cls,
        system: str | None,
        messages: Iterable[tuple[str, str]],
        tools: str = "",
        name: str = "",
    ) -> History:
        """A history of these messages, a mark (hash) for each; lone surrogates are replaced."""
        system = None if system is None else without_surrogates(system)
        read = tuple((role, without_surrogates(text)) for role, text in messages)
        tools = without_surrogates(tools)
        marks = tuple(mark_of(role, text) for role, text in read)
        return cls(system, read, _prompt_mark(system, tools), marks, tools, name=name)

    def may_use(self, name: str) -> bool:
        """Whether a conversation named `name` may continue with this; "" means no name."""
        return name in ("", self.name)


def mark_of(role: str, text: str) -> bytes:
    """The mark (hash) of a message."""
    if role == "assistant":  # clients often remove blanks around it
        text = text.strip()
    return sha256(role.encode() + b"\n" + text.encode()).digest()


def _prompt_mark(system: str | None, tools: str) -> bytes:
    mark = sha256(b"" if system is None else b"system" + system.encode()).digest()
    return sha256(mark + b"tools\n" + tools.encode()).digest() if tools else mark


@dataclass(eq=False, kw_only=True)
class KnownConversation:
    """What is known of a conversation, even if it is only on disk."""

    __pydantic_config__ = ConfigDict(strict=True, ser_json_bytes="hex", val_json_bytes="hex")

    # By which clients refer to it; nobody can guess it.
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    prompt_mark: bytes  # as in `History`
    roles: list[str] = field(default_factory=list)  # of the messages that the session has read
    marks: list[bytes] = field(default_factory=list)  # of these, as in `History`
    # Those that were changed for this conversation alone, such as its policy.
    settings: dict[str, Any] = field(default_factory=dict)
    # The smallest under which system prompt and tools can be pinned, if more than the server's.
    least_budget: int = 0
    origin: str = ""  # the id of the first conversation of which this is a copy, or its own
    is_branch: bool = False  # whether it is a copy, and only one request was answered in it
    is_edited: bool = False  # whether messages were changed before others that were not read again
    name: str = ""  # by which its client continues it, if it has one

    def __post_init__(self) -> None:
        self.origin = self.origin or self.id

    def known_fields(self) -> dict[str, Any]:
        return {each.name: copy(getattr(self, each.name)) for each in fields(KnownConversation)}

    @property
    def undoable(self) -> int:
        """How many user messages can be undone."""
        return 0

    def prefix_length(self, history: History) -> int:
        """How many messages `history` and this begin with in common, after the same prompt."""
        if self.prompt_mark != history.prompt_mark:
            return 0
        return prefix_length(self.marks, history.marks)

    def count_shared_messages(self, history: History) -> int:
        """How many messages of `history` need not be read again; the last one is always read.

        Undo goes back to just before a user message, so this may be fewer than the equal messages.
        """
        roles, count = self.roles, min(self.prefix_length(history), len(history.marks) - 1)
        while count and count < len(roles) and roles[count] != "user":
            count -= 1
        return count if roles[count:].count("user") <= self.undoable else 0


@dataclass(eq=False, kw_only=True)
class ServedConversation(KnownConversation):
    session: Session
    autosave: Autosave | None = None  # None if it has no file yet
    is_busy: bool = False  # whether it is being answered or saved
    # Whether the session has read the messages of `marks` and nothing else; else it is dropped.
    is_exact: bool = True
    is_outdated: bool = False  # whether the file lacks the newest part: writing it failed
    reasoning: str = ""  # the setting under which this message was read
    has_exact_prompt: bool = True  # whether no part of the system prompt was changed before another

    def add(self, role: str, text: str) -> None:
        self.marks.append(mark_of(role, text))
        self.roles.append("user" if role == "tool" else role)  # undo can go back to before it

    def reset(self) -> None:
        """Forget all messages; saved ones stay, as another conversation."""
        template = self.session.template
        self.session.reset()
        self.session.template = template
        self.id = self.origin = secrets.token_hex(12)
        self.is_edited, self.has_exact_prompt = False, True
        self.roles, self.marks = [], []

    def set_messages(self, history: History, count: int) -> None:
        """Note that the session has read only the first `count` messages of `history`."""
        self.prompt_mark, self.marks = history.prompt_mark, [*history.marks[:count]]
        roles = (role for role, _ in history.messages[:count])
        self.roles = ["user" if role == "tool" else role for role in roles]

    @property
    def turn_numbers(self) -> list[int]:
        """For each message, the index of its turn in the session."""
        turns = enumerate(self.session.turns)
        return [at for at, turn in turns if turn.role != "system" and not turn.is_left_out]

    @property
    def undoable(self) -> int:
        return len(self.session.history.messages)

    def history_with_earlier(self, history: History, matched_count: int) -> History:
        """Complete the history of a request that names this conversation by earlier messages.

        The client may send only new messages, or a window: its first messages may be the last ones
        here. Returns `history` itself if it begins at the chat's start, or if more messages match
        (`matched_count`) than a window would have.
        """
        if not self.roles or (len(history.marks) > 1 and history.marks[0] == self.marks[0]):
            return history
        # An empty message stands before a window that begins with a reply.
        start = int(history.messages[0] == ("user", "") and len(history.marks) > 1)
        messages, marks = history.messages[start:], history.marks[start:]
        end, overlap = self._place_of_window(marks)
        if matched_count > overlap:
            return history
        # Calls and results are read again, if need be, as the texts that the session has of them.
        roles = ("assistant" if role == "calls" else role for role in self.roles[:end])
        texts = (self.session.turns[turn].text for turn in self.turn_numbers)
        # Without a system prompt, the one before stays.
        system = self.session.profile.system if history.system is None else history.system
        prompt_mark, has_prompt = self.prompt_mark, history.system is not None or history.tools
        if has_prompt and history.prompt_mark != prompt_mark and can_edit(self.session):
            prompt_mark = _prompt_mark(system, history.tools)
        return replace(
            history,
            system=system,
            messages=(*zip(roles, texts, strict=False), *messages[overlap:]),
            prompt_mark=prompt_mark,
            marks=(*self.marks[:end], *marks[overlap:]),
        )

    def _place_of_window(self, marks: Sequence[bytes]) -> tuple[int, int]:
        """How many messages here come before the new ones of a window, and how many it has of them.

        The new messages follow the last one here, or replace the reply to the last user message.
        """
        question, before = self._last_question, len(marks) - 1  # the last one is always read
        if 0 < before <= question and self.marks[question - before : question + 1] == [*marks]:
            return question, before  # another reply to the last message
        size = len(self.marks)
        sizes = range(min(size, before), -1, -1)
        return size, next(n for n in sizes if [*marks[:n]] == self.marks[size - n :])

    def has_same_question(self, history: History) -> bool:
        """Whether `history` differs from this conversation only after its last user message."""
        return self.prefix_length(history) > self._last_question

    def has_answered(self, history: History) -> bool:
        """Whether this conversation ends with the last message of `history` and a reply to it."""
        return self.prefix_length(history) == len(history.marks) == len(self.marks) - 1

    def with_session(self, session: Session) -> ServedConversation:
        """A copy with a new id and a `session` that has read the same messages."""
        fields = self.known_fields() | {"id": secrets.token_hex(12), "is_branch": True, "name": ""}
        is_exact = self.has_exact_prompt
        return ServedConversation(session=session, **fields, has_exact_prompt=is_exact)

    def undo_reply(self) -> bool:
        """Undo the last reply. If that is impossible, undo its message, too, or all; return False.

        It is impossible under another setting `reasoning`, because then a message ends differently.
        """
        try:
            if self.session.profile.reasoning != self.reasoning:
                raise LostTokensError
            self.session.return_to(self.session.history.before_reply)
        except LostTokensError:
            self.undo_last_question()
            if not self.is_exact:
                self.reset()
            self.is_exact = False
            return False
        del self.roles[-1], self.marks[-1]
        return True

    def undo_last_question(self) -> None:
        """Undo the last user message and what follows; sets `is_exact` to False if impossible."""
        self.is_exact = self.undo_to(self._last_question)

    def undo_to(self, count: int) -> bool:
        """Undo all but the first `count` messages; pins stay. Returns False if impossible."""
        turns = self.roles[count:].count("user")
        if turns > self.undoable:
            return False
        try:
            for _ in range(turns):
                self.session.undo(to_ask_again=True)
                last = self._last_question
                del self.roles[last:], self.marks[last:]
        except UndoError:
            return False
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of memory for keys and values: those in the cache, and those archived in RAM."""
        engine = self.session.engine
        sizes = engine.store.archive.bytes_by_device()
        return engine.cache.nbytes + sum(sizes.values()) - sizes["disk"]

    @property
    def first(self) -> str:
        return preview(self.session.turns)

    @property
    def _last_question(self) -> int:
        return len(self.roles) - 1 - self.roles[::-1].index("user")


@dataclass(frozen=True)
class Continuation:
    """How a request goes on in a conversation."""

    conversation: ServedConversation
    history: History  # also with the messages before, if the client sends only the newest
    # The messages that were read already though they now follow others, and their numbers in the
    # conversation; empty if it goes on with all that it has read.
    reused: dict[int, int] = field(default_factory=dict)
    is_retry: bool = False  # whether it asks for another reply to the last message


def preview(turns: Iterable[Turn | SavedTurn]) -> str:
    """The beginning of the first user turn, on one line; "" if there is none."""
    text = next((turn.text for turn in turns if turn.role == "user"), "")
    return " ".join(text.split())[:_PREVIEW_CHARS]


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
