"""A conversation on the server: its session, and which messages of a client it has read.

A client sends all messages of a chat with each request. Each message has a hash, its mark; a
conversation knows the marks of the messages that its session has read.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from typing import Any

from pydantic import ConfigDict

from sirchat.chat.editing import can_edit
from sirchat.chat.rereading import copy_session
from sirchat.chat.session import Session
from sirchat.chat.state import Turn
from sirchat.errors import UndoError
from sirchat.memory.key_values import LostTokensError
from sirchat.saved.autosave import AUTO_KV_BYTES, Autosave
from sirchat.saved.store import SavedTurn
from sirchat.text.reply_marks import prefix_length
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

    def copy(self) -> ServedConversation | None:
        """A copy with its session; None if keys and values take more than `AUTO_KV_BYTES`."""
        session = copy_session(self.session, AUTO_KV_BYTES)
        return None if session is None else self.with_session(session)

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
