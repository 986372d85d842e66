"""Finds the conversation that a request continues, so that no message is read twice.

A client sends all messages with each request. A key, which is a hash, stands for each prefix of
these messages, that is, for the first n of them. A conversation has the keys of the prefixes that
its session has read.
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
    """A conversation is in use, or memory has no free place: try again after a reply has ended."""


@dataclass(frozen=True)
class History:
    """The messages of a request.

    Attributes:
        system: the system prompt; None if there is none.
        messages: role and text of each message, as `tools.as_said` writes them.
        keys: `keys[n]` is the hash of the system prompt, the tools and the first n messages.
        tools: the tools that the model may call, as JSON; "" if there are none.
    """

    system: str | None
    messages: tuple[tuple[str, str], ...]
    keys: tuple[bytes, ...]
    tools: str = ""

    @classmethod
    def of(
        cls, system: str | None, messages: Iterable[tuple[str, str]], tools: str = ""
    ) -> History:
        """Make a history; lone surrogates in the texts are replaced, as no tokenizer reads them."""
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
    """The key of a prefix that is one message longer than the prefix with the key `key`.

    Blanks around a reply don't change the result, because clients often remove them.
    """
    said = text.strip() if role == "assistant" else text
    return sha256(key + role.encode() + b"\n" + said.encode()).digest()


@dataclass(eq=False)
class ServedConversation:
    """A conversation on the server: its session, and which messages this session has read.

    Attributes:
        id: the name by which clients refer to this conversation; nobody can guess it.
        keys: the keys, as in `History`, of the messages that the session has read or generated.
        roles: the role of each of these messages.
        settings: settings that were changed for this conversation alone, such as its policy.
        saving: writes the conversation to its file; None if it has no file yet.
        is_busy: whether a reply is being generated in this conversation, or it is being saved.
        is_exact: whether the session has read exactly the messages that have `keys`; if not, the
            conversation is not continued.
        is_outdated: whether its file lacks the newest part, because it could not be written.
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
        self.roles.append("user" if role == "tool" else role)  # undo can go back to before it

    def fork(self, history: History) -> int:
        """The number of first messages of `history` that the session need not read again.

        It never includes the last message of `history`. If the session has messages that are not in
        `history`, it must undo them; it can only go back to just before a user message, so that the
        number may be smaller than the number of equal messages.
        """
        return shared_messages(self.keys, self.roles, history, len(self.session.undoable))

    def fitness(self, history: History) -> tuple[int, bool, bool]:
        """How well this conversation fits `history`: a tuple; the greater it is, the better.

        Its items are the number of shared messages (see `fork`), whether nothing has to be undone,
        and whether the conversation is free.
        """
        shared = self.fork(history)
        return shared, shared == len(self.roles), not self.is_busy

    def is_answered_again(self, history: History) -> bool:
        """Whether `history` has all messages of this conversation up to its last user message.

        Then the two can only differ in the reply to that message, and in what comes later.
        """
        asked = 1 + self._last_question
        return len(history.keys) > asked and history.keys[asked] == self.keys[asked]

    @property
    def first(self) -> str:
        """The beginning of the first user message, on one line; "" if there is none."""
        turns = self.session.turns
        return next((shown_first(one.text) for one in turns if one.role == "user"), "")

    def copy(self) -> ServedConversation | None:
        """A copy with a session of its own; None if the conversation is too large to be copied."""
        session = copied(self.session, KV_BYTES)
        if session is None:
            return None
        return ServedConversation(session, [*self.keys], [*self.roles], settings={**self.settings})

    def take_back(self) -> None:
        """Undo the last user message and any reply to it; if that fails, clear `is_exact`."""
        self.is_exact = self.back_to(self._last_question)

    def back_to(self, count: int) -> bool:
        """Undo all messages but the first `count`; returns whether that was possible.

        Pinned tokens of the remaining messages stay pinned.
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
        """Index of the last user message in `roles`."""
        return len(self.roles) - 1 - self.roles[::-1].index("user")


def shown_first(text: str) -> str:
    """The beginning of a message, on one line, as a list of conversations shows it."""
    return " ".join(text.split())[:_FIRST]


def shared_messages(
    keys: Sequence[bytes], roles: Sequence[str], history: History, undoable: int
) -> int:
    """The number of first messages of `history` that a conversation need not read again.

    `keys` and `roles` are those of the conversation. The result is 0 if more than `undoable` of its
    user messages would have to be undone.
    """
    most = min(len(keys), len(history.keys) - 1)
    shared = next((n for n in reversed(range(most)) if keys[n] == history.keys[n]), 0)
    while shared and shared < len(roles) and roles[shared] != "user":
        shared -= 1
    return shared if roles[shared:].count("user") <= undoable else 0


class Conversations:
    """The conversations of one model; at most `limit` of them are in memory.

    When a place in memory is needed, the conversation used longest ago is removed from memory. It
    goes to the disk if conversations are saved; otherwise it is lost.

    Args:
        model: the loaded model, which all conversations share.
        profile: the settings of each new conversation.
        limit: the largest number of conversations in memory.
        disk: the saved conversations; None if conversations are not saved.
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
        self._all: list[ServedConversation] = []  # by last use, the latest at the end

    def take(self, history: History) -> ServedConversation | None:
        """Find the conversation in which to answer `history`, and mark it as busy.

        This is the conversation that has read most of these messages, or else a new one. Returns
        None if that conversation is busy, or if no place in memory is free.
        """
        found = max(reversed(self._all), key=lambda one: one.fitness(history), default=None)
        shared = 0 if found is None else found.fork(history)
        if self._disk is not None and (saved := self._disk.best(history, shared)) is not None:
            if not self._make_room():
                return None
            if (found := self._load(saved)) is None:
                return self.take(history)  # `saved` is no longer listed
            shared = found.fork(history)
        if found is None or not shared:
            return self._use(self._new(history))
        if found.is_busy:
            return None
        return self._use(self._at(found, history, shared) or self._new(history))

    def find(self, ident: str) -> ServedConversation | None:
        """The conversation with this id; if it is on disk, it is loaded. None if there is none.

        Raises BusyError if it is on disk and no place in memory is free.
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
        """Change the conversation with this id by calling `work`, and save it.

        Returns the conversation and the events that `work` returned; None if there is no such
        conversation. `then` is called when it has been saved. Raises BusyError if it is in use.
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
        """The list of all conversations that clients see; the one used last is the first."""
        kept = [(one.id, one.first, len(one.roles), one.is_busy, True) for one in self._all]
        saved = [] if self._disk is None else self._disk.all
        away = [(one.id, one.first, len(one.roles), False, False) for one in saved]
        names = ("id", "first", "messages", "busy", "in_memory")
        return [dict(zip(names, one, strict=True)) for one in reversed([*away, *kept])]

    def release(
        self, conversation: ServedConversation, then: Callable[[], None] = lambda: None
    ) -> None:
        """End the use of a conversation: save it, and then mark it as free.

        If it can't be continued, it is dropped from memory instead. `then` is called when it is
        free, perhaps in another thread.
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
        """Save all conversations, with keys and values; unfinished replies are not saved."""
        if self._disk is not None:
            for one in self._all:
                leave = self._disk.put_away if one.is_exact and one.roles else self._disk.give_up
                leave(one)
            self._disk.end()
        self._all = []

    def _at(
        self, found: ServedConversation, history: History, shared: int
    ) -> ServedConversation | None:
        """Take a conversation back to the first `shared` messages of `history`, and return it.

        `found` has read these messages. Messages that it has read after them are undone in a copy,
        so that both branches stay. But if the client only asks for another reply to the last
        message, they are undone in `found` itself, and the old reply is lost. Returns None if undo
        is not possible.
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
        """Load a conversation from the disk into memory; None if its file can't be used."""
        assert self._disk is not None
        loaded = self._disk.load(saved)
        if loaded is not None:
            self._all.append(loaded)
        return loaded

    def _make_room(self, besides: ServedConversation | None = None) -> bool:
        """Make sure that one more conversation has a place in memory; returns whether it has.

        If necessary, a conversation is removed from memory; it is neither a busy one nor `besides`.
        """
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
