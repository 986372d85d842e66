"""Finds the conversation that a request continues, so that no message is read twice.

A client sends all messages of a chat with each request. Each prefix of these messages, that is, the
first n of them, has a key, which is a hash of the prefix. The server has, for each conversation,
the keys of the prefixes that its session has read. A request continues the conversation that has
read the longest prefix of the request's messages.
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
    """Raised if a conversation is in use, or if memory has no place for another conversation.

    The call that raised this error can be repeated after a reply has ended.
    """


@dataclass(frozen=True)
class History:
    """The messages of a request, with the system prompt and the tools.

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
        """Make a history from a system prompt, messages and tools, and compute its keys.

        Lone surrogates (invalid Unicode) in the texts are replaced, because no tokenizer can read
        them.
        """
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
    """Compute the key (a hash) of messages whose last message has this `role` and `text`.

    `key` is the key of all messages before the last one. Blanks around the text of a reply don't
    change the result, because clients often remove them.
    """
    said = text.strip() if role == "assistant" else text
    return sha256(key + role.encode() + b"\n" + said.encode()).digest()


@dataclass(eq=False)
class ServedConversation:
    """A conversation on the server: its session, and which messages this session has read.

    Attributes:
        session: the chat session, which has the KV cache.
        id: the name by which clients refer to this conversation; nobody can guess it.
        keys: `keys[n]` is the hash of the first n messages that the session has read or generated,
            as in `History`.
        roles: the role of each of these messages.
        settings: settings that were changed for this conversation alone, such as its policy.
        saving: writes the conversation to its file; None if the conversation has no file yet.
        is_busy: whether a reply is being generated in this conversation, or the conversation is
            being saved.
        is_exact: whether the session has read exactly the messages for which `keys` has hashes,
            and nothing else. If not, because an undo failed, the conversation is dropped.
        is_outdated: whether the conversation's file lacks the newest part, because writing it
            failed.
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
        """Add a message, which the session has read or generated, to `keys` and `roles`."""
        self.keys.append(key_after(self.keys[-1], role, text))
        self.roles.append("user" if role == "tool" else role)  # undo can go back to before it

    def fork(self, history: History) -> int:
        """Count the messages at the start of `history` that the session need not read again.

        The last message of `history` never counts. The session must undo its messages that are not
        in `history`. Undo goes back only to just before a user message, so the result can be
        smaller than the number of messages that are equal.
        """
        return shared_messages(self.keys, self.roles, history, len(self.session.undoable))

    def fitness(self, history: History) -> tuple[int, bool, bool]:
        """How well `history` can be continued in this conversation; a greater tuple is better.

        The items of the tuple are: the number of messages that need not be read again (see `fork`),
        whether the session need not undo any message, and whether the conversation is free (not
        busy).
        """
        shared = self.fork(history)
        return shared, shared == len(self.roles), not self.is_busy

    def is_answered_again(self, history: History) -> bool:
        """Whether `history` begins with this conversation's messages up to its last user message.

        If true, `history` and this conversation can differ only after this user message.
        """
        asked = 1 + self._last_question
        return len(history.keys) > asked and history.keys[asked] == self.keys[asked]

    @property
    def first(self) -> str:
        """The start of the first user message, on one line; "" if there is no user message."""
        turns = self.session.turns
        return next((shown_first(one.text) for one in turns if one.role == "user"), "")

    def copy(self) -> ServedConversation | None:
        """Copy this conversation and its session; returns None if the session is too large.

        The session is too large if keys and values of its held tokens take more than `KV_BYTES`
        bytes.
        """
        session = copied(self.session, KV_BYTES)
        if session is None:
            return None
        return ServedConversation(session, [*self.keys], [*self.roles], settings={**self.settings})

    def take_back(self) -> None:
        """Undo the last user message and the reply to it, if any.

        `is_exact` is set to whether undo was possible.
        """
        self.is_exact = self.back_to(self._last_question)

    def back_to(self, count: int) -> bool:
        """Undo all messages after the first `count`; returns whether this was possible.

        Pinned tokens of the first `count` messages stay pinned.
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
        """Index in `roles` of the last user message."""
        return len(self.roles) - 1 - self.roles[::-1].index("user")


def shown_first(text: str) -> str:
    """The first 80 characters of a message, on one line, for a list of conversations."""
    return " ".join(text.split())[:_FIRST]


def shared_messages(
    keys: Sequence[bytes], roles: Sequence[str], history: History, undoable: int
) -> int:
    """Count the messages at the start of `history` that a conversation need not read again.

    `keys` and `roles` are those of the conversation, as in `ServedConversation`. The result is 0 if
    the conversation would have to undo more than `undoable` of its user messages.
    """
    most = min(len(keys), len(history.keys) - 1)
    shared = next((n for n in reversed(range(most)) if keys[n] == history.keys[n]), 0)
    while shared and shared < len(roles) and roles[shared] != "user":
        shared -= 1
    return shared if roles[shared:].count("user") <= undoable else 0


class Conversations:
    """The conversations of one model; at most `limit` of them are in memory.

    When a place in memory is needed, the conversation used longest ago is removed from memory. It
    is written to the disk if conversations are saved; otherwise it is lost.

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

        This is the conversation that has read most messages of `history`, or a copy of it. If no
        conversation has read any of these messages, a new conversation is made. Returns None if the
        found conversation is busy, or if memory has no place for another conversation.
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
        """Find the conversation with the id `ident`; loads it if it is only on disk.

        Returns None if no conversation has this id, or if its file can't be used. Raises BusyError
        if the conversation must be loaded and memory has no place for it.
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
        """Call `work` to change the conversation with the id `ident`, and save the conversation.

        Returns the conversation and the events that `work` returned; None if no conversation has
        this id. `then` is called when the conversation has been saved. Raises BusyError if the
        conversation is in use, or if memory has no place to load it.
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
        """All conversations, in memory or on disk, as JSON objects; the one used last is first."""
        kept = [(one.id, one.first, len(one.roles), one.is_busy, True) for one in self._all]
        saved = [] if self._disk is None else self._disk.all
        away = [(one.id, one.first, len(one.roles), False, False) for one in saved]
        names = ("id", "first", "messages", "busy", "in_memory")
        return [dict(zip(names, one, strict=True)) for one in reversed([*away, *kept])]

    def release(
        self, conversation: ServedConversation, then: Callable[[], None] = lambda: None
    ) -> None:
        """End the use of a conversation: save it, and then mark it as free.

        A conversation that can't be continued is dropped from memory and not saved. In both cases,
        `then` is called when the conversation is free, perhaps in another thread.
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
        """Save all conversations in memory, with keys and values, and remove them from memory.

        A conversation with an unfinished reply stays on disk as it was before this reply.
        """
        if self._disk is not None:
            for one in self._all:
                leave = self._disk.put_away if one.is_exact and one.roles else self._disk.give_up
                leave(one)
            self._disk.end()
        self._all = []

    def _at(
        self, found: ServedConversation, history: History, shared: int
    ) -> ServedConversation | None:
        """Return a conversation that has read exactly the first `shared` messages of `history`.

        `found` has read these messages. If it has read more messages, they are undone in a copy of
        `found`, so that both branches can be continued. But if the client only asks for another
        reply to the last message, they are undone in `found` itself, and the old reply is lost.
        Returns None if undo is not possible.
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
        """Load a conversation from the disk into memory; returns None if its file can't be used."""
        assert self._disk is not None
        loaded = self._disk.load(saved)
        if loaded is not None:
            self._all.append(loaded)
        return loaded

    def _make_room(self, besides: ServedConversation | None = None) -> bool:
        """Make sure that memory has a place for one more conversation; returns whether it has.

        If all places are taken, the conversation used longest ago is removed from memory. Neither a
        busy conversation nor `besides` is removed.
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
