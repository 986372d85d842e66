"""The conversations on disk: each is a saved chat, in the server's own folder.

One thread writes all conversations, so that no reply waits for the disk. A conversation is written
after each finished turn. Its keys and values are written when it is removed from memory.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sirchat.chat.session import Session
from sirchat.config.profile import FIXED, Profile
from sirchat.errors import SirchatError
from sirchat.models.model import LoadedModel
from sirchat.saved.autosave import Autosave, fingerprint, resume_session
from sirchat.saved.database import SUFFIX, decoding, require
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.session_list import remove_session
from sirchat.saved.store import SessionStore
from sirchat.server.conversations import (
    History,
    ServedConversation,
    shared_messages,
    shown_first,
)

MOST_BYTES = 8 * 2**30
"""Largest size, in bytes, of all files of conversations that are only on disk.

If the files are larger, the conversations used longest ago are deleted first.
"""

_LOG = logging.getLogger(__name__)
_SILENCE = 600  # least number of seconds between two logged errors of writing
_FIELD = "served"  # the name of `_Fields` in the table `head`


class _Fields(BaseModel):
    """The fields that the server adds to a saved chat's state, in the table `head` of its file."""

    model_config = ConfigDict(strict=True)

    id: str
    keys: list[str]
    roles: list[str]
    turns: int  # number of the session's turns, the system prompt included
    settings: dict[str, Any]


@dataclass(frozen=True, eq=False)
class SavedConversation:
    """An entry for a conversation on disk, which is used to list it and to find it.

    Attributes:
        id, keys, roles, settings: as in `ServedConversation`.
        first: the beginning of the conversation's first user message.
        file: a future with the path of the conversation's file, done when the file is written; its
            result is None if writing failed.
    """

    id: str
    keys: tuple[bytes, ...]
    roles: tuple[str, ...]
    settings: dict[str, Any]
    first: str
    file: Future[Path | None]

    @staticmethod
    def of(conversation: ServedConversation, file: Future[Path | None]) -> SavedConversation:
        """Make the entry for a conversation in memory.

        `file` is a future with the path of the conversation's file.
        """
        return SavedConversation(
            conversation.id,
            tuple(conversation.keys),
            tuple(conversation.roles),
            {**conversation.settings},
            conversation.first,
            file,
        )

    @staticmethod
    def read(store: SessionStore) -> SavedConversation:
        """Make the entry for the conversation in an open file.

        Raises SessionError if the file has no conversation of the server, or is damaged.
        """
        head = store.head()
        with decoding(store.path):
            fields = _Fields.model_validate(head.fields.get(_FIELD) if head else None)
            keys = tuple(map(bytes.fromhex, fields.keys))
            turns = store.turns()
            count = len(fields.roles)
            if len(turns) != fields.turns:  # a crash came while turns were replaced
                own = sum(turn.role != "system" for turn in turns)
                require(own < count == fields.turns - (len(turns) - own))
                count = own
            require(len(keys) == len(fields.roles) + 1)
        first = next((shown_first(turn.text) for turn in turns if turn.role == "user"), "")
        keys, roles = keys[: count + 1], tuple(fields.roles[:count])
        return SavedConversation(fields.id, keys, roles, fields.settings, first, _at(store.path))


class SavedConversations:
    """The list of the conversations that are only on disk, not in memory.

    Args:
        model: the loaded model.
        profile: the server's settings.
        limit: the largest number of conversations on disk, including those that are also in memory.
        folder: the folder with the files of the conversations.
    """

    def __init__(self, model: LoadedModel, profile: Profile, limit: int, folder: Path) -> None:
        self._model, self._profile = model, profile
        self._limit, self._folder = limit, folder
        self._writer = ThreadPoolExecutor(1, "saving")
        self._said_at = -math.inf  # time of the last logged error, in seconds
        self._files: dict[ServedConversation, SavedConversation] = {}  # entries of those in memory
        self._found: Future[list[SavedConversation]] | None = self._writer.submit(self._read)
        self._listed: list[SavedConversation] = []

    @property
    def all(self) -> list[SavedConversation]:
        """Entries of the conversations that are only on disk; the one used last is at the end."""
        if self._found is not None:
            self._listed, self._found = self._found.result(), None
        return self._listed

    def find(self, ident: str) -> SavedConversation | None:
        """The entry of the conversation with the id `ident`.

        Returns None if no conversation has this id, or if the conversation is in memory.
        """
        return next((one for one in self.all if one.id == ident), None)

    def best(self, history: History, shared: int) -> SavedConversation | None:
        """The entry of the conversation that has read most messages at the start of `history`.

        Only conversations that can be continued without undo count. Returns None if none of them
        has read more than `shared` of these messages.
        """
        best = None
        for one in reversed(self.all):
            own = shared_messages(one.keys, one.roles, history, 0)
            if own > shared:
                best, shared = one, own
        return best

    def load(self, saved: SavedConversation) -> ServedConversation | None:
        """Load a conversation into memory, and remove its entry `saved` from this list.

        Returns None if the conversation's file can't be used.
        """
        self.all.remove(saved)
        if (path := saved.file.result()) is None:
            return None
        store = None
        try:
            store = SessionStore.open(path)
            saved = SavedConversation.read(store)  # the last turns may not have been written
            session = self._resumed(store, saved.settings)
        except SirchatError as error:
            _LOG.warning("a saved conversation can't be continued: %s", error)
            if store is not None:
                store.close()
            return None
        loaded = ServedConversation(session, [*saved.keys], [*saved.roles], id=saved.id)
        loaded.settings, loaded.saving = saved.settings, Autosave(session, store, self._folder)
        self._files[loaded] = saved
        return loaded

    def _resumed(self, store: SessionStore, own: dict[str, Any]) -> Session:
        """Continue the session that is saved in `store`, with the server's settings.

        The session is loaded with its saved settings, and then switched to those of the server.
        `own` are settings that were changed for this conversation alone; they replace the server's.
        """
        before = saved_profile(store, (self._profile.policy,))
        now = {name: getattr(self._profile, name) for name in Profile.model_fields}
        session = Session(self._model, before.model_copy(update={n: now[n] for n in FIXED}))
        resume_session(session, store)
        wanted = {name: now[name] for name in now if name not in (*FIXED, "system")} | own
        changed = {n: v for n, v in wanted.items() if getattr(session.profile, n) != v}
        if changed:
            session.switch("the server", **changed)
        return session

    def save(self, conversation: ServedConversation, then: Callable[[], None]) -> None:
        """Let the writing thread write what is new in a conversation, and then call `then`."""

        def write() -> None:
            self._write(conversation)
            then()

        self._writer.submit(write)

    def put_away(self, conversation: ServedConversation) -> SavedConversation:
        """Let the writing thread write a conversation, with keys and values, and close its file.

        The caller removes the conversation from memory. Returns the conversation's new entry in
        this list.
        """

        def write() -> Path | None:
            self._write(conversation, with_kv=True)
            return self._close(conversation)

        saved = SavedConversation.of(conversation, self._writer.submit(write))
        self.all.append(saved)
        return saved

    def give_up(self, conversation: ServedConversation) -> None:
        """Drop all that a conversation in memory has read since its last finished turn.

        If the conversation has a file, the file is closed, and the conversation's entry is listed
        again as it was after that turn.
        """
        if (saved := self._files.get(conversation)) is not None:
            self.all.append(replace(saved, file=self._writer.submit(self._close, conversation)))

    def prune(self, others: int) -> None:
        """Delete conversations that are only on disk, if there are too many or too large ones.

        Those used longest ago are deleted first. At most `limit` conversations may exist, including
        the `others`, which is the number of conversations in memory. The files of the conversations
        that are only on disk may take at most `MOST_BYTES` bytes.
        """
        stays: list[SavedConversation] = []
        size = 0
        for one in reversed(self.all):
            size += _size(one)
            if len(stays) + others < self._limit and size <= MOST_BYTES:
                stays.insert(0, one)
            else:
                self._writer.submit(_remove, one)
        self._listed = stays

    def end(self) -> None:
        """Delete surplus conversations (see `prune`), and wait until the writing thread ends."""
        self.prune(0)
        self._writer.shutdown()

    def _write(self, conversation: ServedConversation, *, with_kv: bool = False) -> None:
        """Write what is new in a conversation to its file; `with_kv` also writes keys and values.

        If an error occurs, it is not raised, and the next finished turn tries to write again. Of
        several errors within `_SILENCE` seconds, only the first is logged.
        """
        saving = conversation.saving or Autosave(conversation.session, folder=self._folder)
        saving.more = {_FIELD: _fields(conversation)}
        conversation.is_outdated = conversation.saving is not None
        try:
            if conversation.saving is None:
                saving.begin()
                conversation.saving = saving
            else:
                saving.update()
            path = self._folder / f"{saving.id}{SUFFIX}"
            self._files[conversation] = SavedConversation.of(conversation, _at(path))
            conversation.is_outdated = False
            if with_kv:
                saving.save_kv()
        except Exception as error:  # replies go on after any error
            if time.monotonic() - self._said_at > _SILENCE:
                known = error if isinstance(error, SirchatError) else type(error).__name__
                _LOG.error("conversations can't be saved now: %s", known)
                self._said_at = time.monotonic()

    def _close(self, conversation: ServedConversation) -> Path | None:
        """Close a conversation's file without writing to it.

        Returns the path of the file; None if the conversation has never been written.
        """
        if conversation.saving is not None:
            conversation.saving.abandon()
            conversation.saving = None
        saved = self._files.pop(conversation, None)
        return None if saved is None else saved.file.result()

    def _read(self) -> list[SavedConversation]:
        """Read the entries of all conversations in the folder; the one changed last is at the end.

        Conversations of another model, files that a process has open, and damaged files are left
        out.
        """
        found, wanted = [], (self._model.precision, fingerprint(self._model))
        for path in sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda one: one.stat().st_mtime):
            try:
                with SessionStore.open(path) as store:
                    if (store.meta.get("dtype"), store.meta.get("fingerprint")) == wanted:
                        found.append(SavedConversation.read(store))
            except SirchatError as error:
                _LOG.info("a saved conversation is left out: %s", error)
        return found


def _fields(conversation: ServedConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "keys": [key.hex() for key in conversation.keys],
        "roles": [*conversation.roles],
        "turns": len(conversation.session.turns),
        "settings": {**conversation.settings},
    }


def _at(path: Path) -> Future[Path | None]:
    """Make a future that is already done: its result is `path`, the path of a written file."""
    file: Future[Path | None] = Future()
    file.set_result(path)
    return file


def _size(saved: SavedConversation) -> int:
    """Total size of a conversation's files in bytes; 0 if they are missing or being written."""
    if not saved.file.done() or (path := saved.file.result()) is None:
        return 0
    files = (path, path.with_suffix(".safetensors"))
    return sum(file.stat().st_size for file in files if file.exists())


def _remove(saved: SavedConversation) -> None:
    with suppress(SirchatError):  # another server may use it
        if (path := saved.file.result()) is not None:
            remove_session(path)
