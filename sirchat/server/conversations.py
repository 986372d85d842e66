"""Finds the conversation that a request continues, so that nothing is read twice.

A client sends all messages each time. Each prefix of them has a key, a hash; a conversation has the
keys of the prefixes that its session has read.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from sirchat.chat.session import Session
from sirchat.chat.snapshot import Snapshot
from sirchat.config.profile import Profile
from sirchat.errors import UndoError
from sirchat.models.model import LoadedModel
from sirchat.text.text_file import without_surrogates


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
        is_busy: whether a reply is being generated in this conversation.
        is_exact: whether the session has read these messages and nothing else.
    """

    session: Session
    keys: list[bytes]
    roles: list[str]
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    is_busy: bool = False
    is_exact: bool = True

    def add(self, role: str, text: str) -> None:
        """Note that the session has read or generated a message."""
        self.keys.append(key_after(self.keys[-1], role, text))
        self.roles.append("user" if role == "tool" else role)  # undo goes back to before it

    def fork(self, history: History) -> int:
        """How many messages of `history` need not be read; the session may have to undo others.

        Its last message is read in any case. Undo goes back to just before a user message.
        """
        most = min(len(self.keys), len(history.keys) - 1)
        shared = next((n for n in reversed(range(most)) if self.keys[n] == history.keys[n]), 0)
        while shared and shared < len(self.roles) and self.roles[shared] != "user":
            shared -= 1
        return shared

    def fitness(self, history: History) -> tuple[int, bool, bool]:
        """How well this conversation fits: shares most, has nothing else to undo, is not busy."""
        shared = self.fork(history)
        return shared, shared == len(self.roles), not self.is_busy

    def take_back(self) -> None:
        """Undo the last user message and its reply, if any, or else mark the session as inexact."""
        last = len(self.roles) - 1 - self.roles[::-1].index("user")
        self.is_exact = self.back_to(last)

    def back_to(self, count: int) -> bool:
        """Undo all messages but the first `count`; returns whether that was possible."""
        turns = self.roles[count:].count("user")
        if turns > len(self.session.undoable):
            return False
        try:
            for _ in range(turns):
                self.session.undo()
                last = len(self.roles) - 1 - self.roles[::-1].index("user")
                del self.roles[last:], self.keys[last + 1 :]
        except UndoError:
            return False
        return True


class Conversations:
    """The conversations of one model, at most `limit`; the one used longest ago is dropped first.

    Args:
        model: the loaded model, which all conversations share.
        profile: the settings of each new conversation.
        limit: the largest number of conversations.
    """

    def __init__(self, model: LoadedModel, profile: Profile, limit: int) -> None:
        self.model = model
        self.profile = profile
        self.limit = limit
        self._all: list[ServedConversation] = []  # the one used last at the end

    def take(self, history: History) -> ServedConversation | None:
        """The conversation in which to answer `history`, which becomes busy.

        It is one that has read some of these messages already, or a new one. Returns None if that
        conversation is busy, or if there is room for no more.
        """
        found = max(reversed(self._all), key=lambda one: one.fitness(history), default=None)
        shared = 0 if found is None else found.fork(history)
        if found is not None and shared and found.is_busy:
            return None
        if found is None or not shared or not found.back_to(shared):
            found = self._new(history)
        if found is not None:
            self._drop(found)
            self._all.append(found)
            found.is_busy = True
        return found

    def memory(self, ident: str) -> Snapshot | None:
        """The memory of the conversation with this id; None if there is none."""
        found = next((one for one in self._all if one.id == ident), None)
        return None if found is None else found.session.snapshot()

    def _new(self, history: History) -> ServedConversation | None:
        if len(self._all) >= self.limit:
            idle = next((one for one in self._all if not one.is_busy), None)
            if idle is None:
                return None
            self._drop(idle)
        profile = self.profile.model_copy(update={"system": history.system})
        return ServedConversation(Session(self.model, profile), [history.keys[0]], [])

    def release(self, conversation: ServedConversation) -> None:
        """Note that the reply has ended; the conversation stays if it is of any use."""
        conversation.is_busy = False
        if not conversation.is_exact or not conversation.roles:
            self._drop(conversation)

    def _drop(self, conversation: ServedConversation) -> None:
        self._all = [one for one in self._all if one is not conversation]
