"""Finds the conversation that a request continues, so that nothing is read twice.

A client sends all messages each time. Each prefix of them has a key, a hash; a conversation has the
keys of the prefixes that its session has read.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from sirchat.chat.events import Event
from sirchat.chat.rereading import copied
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import UndoError
from sirchat.models.model import LoadedModel
from sirchat.saved.autosave import KV_BYTES, Autosave
from sirchat.text.text_file import without_surrogates

if TYPE_CHECKING:
    from sirchat.server.saved_conversations import SavedConversation, SavedConversations

_FIRST = 80  # characters


class BusyError(Exception):
    """Something can be done only when a reply under way has ended."""


@dataclass(frozen=True)
class History:
    """The messages of a request: a system prompt, then (role, text) of each message.

    `keys[n]` stands for the system prompt, the tools and the first n messages. `tools` is JSON;
    for messages that concern tools, roles and texts are as `tools.as_said` writes them.
    """

    system: str | None
    messages: tuple[tuple[str, str], ...]
    keys: tuple[bytes, ...]
    tools: str = ""

    @classmethod
    def of(
        cls, system: str | None, messages: Iterable[tuple[str, str]], tools: str = ""
    ) -> History:
        """The history of these messages, without lone surrogates, which no tokenizer reads."""
        system = None if system is None else without_surrogates(system)
        read = tuple((role, without_surrogates(text)) for role, text in messages)
        tools = without_surrogates(tools)
        keys = [sha256(b"" if system is None else b"system" + system.encode()).digest()]
        if tools:
            keys = [key_after(keys[0], "tools", tools)]
        for role, text in read:
            keys.append(key_after(keys[-1], role, text))
        return cls(system, read, tuple(keys), tools)


def key_after(key: bytes, role: str, text: str) -> bytes:
    """The key of a prefix and one more message; `key` is that of the prefix.

    Blanks around a reply don't count, because clients often remove them.
    """
    said = text.strip() if role == "assistant" else text
    return sha256(key + role.encode() + b"\n" + said.encode()).digest()


@dataclass(eq=False)
class ServedConversation:
    """A session, and which messages it has read.

    Attributes:
        id: the name by which clients ask for its memory; nobody can guess it.
        keys: as in `History`, for the messages that the session has read or generated.
        roles: the role of each of these messages.
        settings: what was set for this conversation alone, such as its policy.
        saving: writes the conversation to its file; None while it has none.
        is_busy: whether a reply is being generated in this conversation, or it is being saved.
        is_exact: whether the session has read these messages and nothing else.
        is_outdated: whether its file lacks what is new, because it can't be written.
    """

    session: Session
    keys: list[bytes]
    roles: list[str]
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    settings: dict[str, Any] = field(default_factory=dict)
    saving: Autosave | None = None
    is_busy: bool = False
    is_exact: bool = True
    is_outdated: bool = False

    def add(self, role: str, text: str) -> None:
        """Record a message that the session has read or generated."""
        self.keys.append(key_after(self.keys[-1], role, text))
        self.roles.append("user" if role == "tool" else role)  # undo goes back to before it

    def fork(self, history: History) -> int:
        """How many messages of `history` need not be read; the session may have to undo others.

        Its last message is read in any case. Undo goes back to just before a user message.
        """
        return shared_messages(self.keys, self.roles, history, len(self.session.undoable))

    def fitness(self, history: History) -> tuple[int, bool, bool]:
        """How well this conversation fits `history`; the greater, the better.

        First counts the number of shared messages, then whether nothing more must be undone, then
        whether no reply is under way.
        """
        shared = self.fork(history)
        return shared, shared == len(self.roles), not self.is_busy

    def is_answered_again(self, history: History) -> bool:
        """Whether `history` has this conversation's last user message: only its reply differs."""
        asked = 1 + self._last_question
        return len(history.keys) > asked and history.keys[asked] == self.keys[asked]

    @property
    def first(self) -> str:
        """The beginning of the first user message, on one line."""
        turns = self.session.turns
        return next((shown_first(one.text) for one in turns if one.role == "user"), "")

    def copy(self) -> ServedConversation | None:
        """The same conversation once more; None if it is too large to be copied."""
        session = copied(self.session, KV_BYTES)
        if session is None:
            return None
        return ServedConversation(session, [*self.keys], [*self.roles], settings={**self.settings})

    def take_back(self) -> None:
        """Undo the last user message and its reply, if any, or else mark the session as inexact."""
        self.is_exact = self.back_to(self._last_question)

    def back_to(self, count: int) -> bool:
        """Undo all messages but the first `count`; returns whether that was possible.

        What is pinned stays pinned.
        """
        turns = self.roles[count:].count("user")
        if turns > len(self.session.undoable):
            return False
        try:
            for _ in range(turns):
                self.session.undo(keep_pins=True)
                last = self._last_question
                del self.roles[last:], self.keys[last + 1 :]
        except UndoError:
            return False
        return True

    @property
    def _last_question(self) -> int:
        """Index of the last user message."""
        return len(self.roles) - 1 - self.roles[::-1].index("user")


def shown_first(text: str) -> str:
    """The beginning of a message, on one line, for a list of conversations."""
    return " ".join(text.split())[:_FIRST]


def shared_messages(
    keys: Sequence[bytes], roles: Sequence[str], history: History, undoable: int
) -> int:
    """How many messages of `history` a conversation with these `keys` and `roles` need not read.

    That is 0 if more than `undoable` of its user messages had to be undone.
    """
    most = min(len(keys), len(history.keys) - 1)
    shared = next((n for n in reversed(range(most)) if keys[n] == history.keys[n]), 0)
    while shared and shared < len(roles) and roles[shared] != "user":
        shared -= 1
    return shared if roles[shared:].count("user") <= undoable else 0


class Conversations:
    """The conversations of one model, at most `limit` in memory.

    The one used longest ago leaves memory first: to the disk, if conversations are saved.

    Args:
        model: the loaded model, which all conversations share.
        profile: the settings of each new conversation.
        limit: the largest number of conversations in memory.
        disk: the saved conversations; None if nothing is saved.
    """

    def __init__(
        self,
        model: LoadedModel,
        profile: Profile,
        limit: int,
        disk: SavedConversations | None = None,
    ) -> None:
        self.model = model
        self.profile = profile
        self.limit = limit
        self._disk = disk
        self._all: list[ServedConversation] = []  # the one used last at the end

    def take(self, history: History) -> ServedConversation | None:
        """The conversation in which to answer `history`, which becomes busy.

        It is one that has read some of these messages already, or a new one. Returns None if that
        conversation is busy, or if there is room for no more.
        """
        found = max(reversed(self._all), key=lambda one: one.fitness(history), default=None)
        shared = 0 if found is None else found.fork(history)
        if self._disk is not None and (saved := self._disk.best(history, shared)) is not None:
            if not self._make_room():
                return None
            if (found := self._load(saved)) is None:
                return self.take(history)  # without this one
            shared = found.fork(history)
        if found is None or not shared:
            return self._use(self._new(history))
        if found.is_busy:
            return None
        return self._use(self._at(found, history, shared) or self._new(history))

    def find(self, ident: str) -> ServedConversation | None:
        """The conversation with this id, in memory or on disk; None if there is none.

        Raises BusyError if it is on disk and there is no room for it now.
        """
        found = next((one for one in self._all if one.id == ident), None)
        if found is not None or self._disk is None or (saved := self._disk.find(ident)) is None:
            return found
        if not self._make_room():
            raise BusyError
        return self._load(saved)

    def change(
        self,
        ident: str,
        work: Callable[[ServedConversation], list[Event]],
        then: Callable[[], None],
    ) -> tuple[ServedConversation, list[Event]] | None:
        """Let `work` change the conversation with this id, and save it; None if there is none.

        `then` is called when it is saved. Raises BusyError while it is in use.
        """
        found = self.find(ident)
        if found is None:
            return None
        if found.is_busy:
            raise BusyError
        found.is_busy = True
        try:
            return found, work(found)
        finally:
            self.release(found, then)

    def overview(self) -> list[dict[str, Any]]:
        """What a list of all conversations shows, the one used last first."""
        kept = [(one.id, one.first, len(one.roles), one.is_busy, True) for one in self._all]
        saved = [] if self._disk is None else self._disk.all
        away = [(one.id, one.first, len(one.roles), False, False) for one in saved]
        names = ("id", "first", "messages", "busy", "in_memory")
        return [dict(zip(names, one, strict=True)) for one in reversed([*away, *kept])]

    def release(
        self, conversation: ServedConversation, then: Callable[[], None] = lambda: None
    ) -> None:
        """Note that the reply has ended; the conversation stays if it is of any use.

        It is saved; `then` is called, perhaps in another thread, when it is no longer busy.
        """

        def free() -> None:
            conversation.is_busy = False
            then()

        if not conversation.is_exact or not conversation.roles:
            self._drop(conversation)
            if self._disk is not None:
                self._disk.give_up(conversation)
            free()
        elif self._disk is None:
            free()
        else:
            self._disk.save(conversation, free)

    def end(self) -> None:
        """Save all conversations, with keys and values; without a reply that is under way."""
        if self._disk is not None:
            for one in self._all:
                leave = self._disk.put_away if one.is_exact and one.roles else self._disk.give_up
                leave(one)
            self._disk.end()
        self._all = []

    def _at(
        self, found: ServedConversation, history: History, shared: int
    ) -> ServedConversation | None:
        """A conversation that has read the first `shared` messages of `history`, as `found` has.

        If it has read others, too, it goes back in a copy, so that both branches stay; but another
        reply to the same message takes the place of the first one.
        """
        if shared == len(found.roles):
            return found
        if not found.is_answered_again(history):
            copy = found.copy() if self._make_room(besides=found) else None
            if copy is None and self._disk is not None:  # the other branch goes to the disk
                self._drop(found)
                self._disk.put_away(found).file.result()
                own = {**found.settings}
                copy = ServedConversation(found.session, found.keys, found.roles, settings=own)
            found = copy or found
        return found if found.back_to(shared) else None

    def _new(self, history: History) -> ServedConversation | None:
        if not self._make_room():
            return None
        profile = self.profile.model_copy(update={"system": history.system})
        return ServedConversation(Session(self.model, profile), [history.keys[0]], [])

    def _use(self, found: ServedConversation | None) -> ServedConversation | None:
        if found is not None:
            self._drop(found)
            self._all.append(found)
            found.is_busy = True
            if self._disk is not None:
                self._disk.prune(len(self._all))
        return found

    def _load(self, saved: SavedConversation) -> ServedConversation | None:
        """Bring a conversation back from the disk; None if its file can't be used."""
        assert self._disk is not None
        loaded = self._disk.load(saved)
        if loaded is not None:
            self._all.append(loaded)
        return loaded

    def _make_room(self, besides: ServedConversation | None = None) -> bool:
        """Let a conversation leave memory if there is no room for one more; returns success."""
        if len(self._all) < self.limit:
            return True
        idle = (one for one in self._all if not one.is_busy and one is not besides)
        if (leaving := next(idle, None)) is None:
            return False
        self._drop(leaving)
        if self._disk is not None:
            self._disk.put_away(leaving)
        return True

    def _drop(self, conversation: ServedConversation) -> None:
        self._all = [one for one in self._all if one is not conversation]
