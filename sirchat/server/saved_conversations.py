"""The conversations on disk: each is a saved chat, in the server's own folder.

One thread writes them all, so that no reply waits for the disk: each after every finished turn, its
keys and values when it leaves memory.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
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
from sirchat.saved.autosave import Autosave
from sirchat.saved.database import SUFFIX, as_damage_errors, require
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import fingerprint, saved_profile
from sirchat.saved.segments import FOLDER
from sirchat.saved.session_list import remove_session
from sirchat.saved.store import SessionStore
from sirchat.server.conversation import (
    History,
    ServedConversation,
    count_shared_messages,
    first_words,
)

MOST_BYTES = 8 * 2**30  # of all files of conversations that are only on disk
MOST_BRANCHES = 16  # of all conversations, with which nobody went on

_LOG = logging.getLogger(__name__)
_SILENCE = 600  # least number of seconds between two logged errors of writing
_FIELD = "served"  # the name of `_Fields` in the table `head`


class _Fields(BaseModel):
    """The fields that the server adds to a saved chat's state, in the table `head` of its file."""

    model_config = ConfigDict(strict=True)

    id: str
    keys: list[str]
    roles: list[str]
    marks: list[str] = []
    turns: int  # number of the session's turns, the system prompt included
    settings: dict[str, Any]
    least_budget: int = 0
    origin: str = ""
    is_branch: bool = False
    is_edited: bool = False
    name: str = ""


@dataclass(frozen=True, eq=False)
class SavedConversation:
    """An entry for a conversation on disk; its fields are those of `ServedConversation`.

    `first` is how it begins; `file` has the path once the file is written, None if that failed.
    """

    id: str
    keys: tuple[bytes, ...]
    roles: tuple[str, ...]
    marks: tuple[bytes, ...]
    settings: dict[str, Any]
    least_budget: int
    first: str
    origin: str
    is_branch: bool
    is_edited: bool
    name: str
    file: Future[Path | None]

    @staticmethod
    def of(conversation: ServedConversation, file: Future[Path | None]) -> SavedConversation:
        """The entry for a conversation in memory."""
        return SavedConversation(
            conversation.id,
            tuple(conversation.keys),
            tuple(conversation.roles),
            tuple(conversation.marks),
            {**conversation.settings},
            conversation.least_budget,
            conversation.first,
            conversation.origin,
            conversation.is_branch,
            conversation.is_edited,
            conversation.name,
            file,
        )

    @staticmethod
    def read(store: SessionStore) -> SavedConversation:
        """The entry for the conversation in an open file; SessionError if it has none."""
        head = store.head()
        with as_damage_errors(store.path):
            fields = _Fields.model_validate(head.fields.get(_FIELD) if head else None)
            keys, marks = (tuple(map(bytes.fromhex, each)) for each in (fields.keys, fields.marks))
            turns, roles = store.turns(), tuple(fields.roles)
            require(len(turns) == fields.turns and len(keys) == len(roles) + 1)
        first, origin = first_words(turns), fields.origin or fields.id
        about = fields.settings, fields.least_budget, first, origin
        kind = fields.is_branch, fields.is_edited, fields.name
        return SavedConversation(
            fields.id, keys, roles, marks, *about, *kind, _finished_future(store.path)
        )


class SavedConversations:
    """The list of the conversations that are only on disk, not in memory.

    At most `limit` conversations exist on disk, those that are also in memory included.
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
        """The entry with this id; None if there is none, or if it is in memory."""
        return next((saved for saved in self.all if saved.id == ident), None)

    def best_match(
        self, history: History, shared: int, *, is_exact: bool
    ) -> SavedConversation | None:
        """The entry whose conversation has read most messages of `history`, without undo.

        None if no conversation has read more than `shared` messages of it. Those of another name do
        not count; `is_exact`: nor do edited ones.
        """
        best = None
        for saved in reversed(self.all):
            if not history.may_use(saved.name) or (is_exact and saved.is_edited):
                continue
            count = count_shared_messages(saved.keys, saved.roles, history, 0)
            if count > shared:
                best, shared = saved, count
        return best

    def load(self, saved: SavedConversation) -> ServedConversation | None:
        """Load a conversation, and remove it from this list; None if its file can't be used."""
        self.all.remove(saved)
        if (path := saved.file.result()) is None:
            return None
        store = None
        try:
            store = SessionStore.open(path)
            saved = SavedConversation.read(store)  # the last turns may not have been written
            session = self._resumed(store, saved)
        except SirchatError as error:
            _LOG.warning("a saved conversation can't be continued: %s", error)
            if store is not None:
                store.close()
            return None
        said = [*saved.keys], [*saved.roles], [*saved.marks]
        loaded = ServedConversation(session, *said, id=saved.id)
        loaded.origin, loaded.is_branch = saved.origin, saved.is_branch
        loaded.is_edited, loaded.least_budget = saved.is_edited, saved.least_budget
        loaded.has_exact_prompt = not saved.is_edited
        loaded.name = saved.name
        loaded.settings, loaded.saving = saved.settings, Autosave(session, store, self._folder)
        self._files[loaded] = saved
        return loaded

    def save(self, conversation: ServedConversation, then: Callable[[], None]) -> None:
        """Let the writing thread write what is new in a conversation, and then call `then`."""

        def write() -> None:
            self._write(conversation)
            then()

        self._writer.submit(write)

    def move_to_disk(self, conversation: ServedConversation) -> SavedConversation:
        """Let the writing thread save a conversation that leaves memory; returns its new entry."""

        def write() -> Path | None:
            self._write(conversation, with_kv=True)
            return self._close(conversation)

        saved = SavedConversation.of(conversation, self._writer.submit(write))
        self.all.append(saved)
        return saved

    def keep_last_saved(self, conversation: ServedConversation) -> None:
        """Give up the unsaved part of a conversation that leaves memory; its file stays listed."""
        if (saved := self._files.get(conversation)) is not None:
            self.all.append(replace(saved, file=self._writer.submit(self._close, conversation)))

    def prune(self, held: Collection[ServedConversation]) -> None:
        """Delete the conversations used longest ago, if there are too many or too large ones.

        `held` are those in memory. First of all go branches with which nobody went on, and of which
        a newer one is there: so they push out no other conversation.
        """
        newer = {each.origin for each in held}
        kept, branches = list[SavedConversation](), list[SavedConversation]()
        for saved in reversed(self.all):
            (branches if saved.is_branch and saved.origin in newer else kept).append(saved)
            newer.add(saved.origin)
        stays, size = set[SavedConversation](), 0
        for saved in (*kept, *branches[:MOST_BRANCHES]):
            size += _size(saved)
            if len(stays) + len(held) < self._limit and size <= MOST_BYTES:
                stays.add(saved)
        for saved in self.all:
            if saved not in stays:
                self._writer.submit(_remove, saved)
        self._listed = [saved for saved in self.all if saved in stays]

    def end(self) -> None:
        """Delete surplus conversations, and wait until the writing thread ends."""
        self.prune(())
        self._writer.shutdown()

    def _resumed(self, store: SessionStore, saved: SavedConversation) -> Session:
        """The session saved in `store`, under the server's settings and those of its own."""
        before = saved_profile(store, (self._profile.policy,))
        now = {name: getattr(self._profile, name) for name in Profile.model_fields}
        session = Session(self._model, before.model_copy(update={n: now[n] for n in FIXED}))
        resume_session(session, store)
        values = {name: now[name] for name in now if name not in (*FIXED, "system")}
        values |= saved.settings
        values["budget"] = max(values["budget"], saved.least_budget)
        other = {name: v for name, v in values.items() if getattr(session.profile, name) != v}
        if other:
            session.switch("the server", **other)
        return session

    def _write(self, conversation: ServedConversation, *, with_kv: bool = False) -> None:
        """Write what is new in a conversation; after an error, its next turn tries again."""
        saving = conversation.saving or Autosave(conversation.session, folder=self._folder)
        saving.more = {_FIELD: _fields(conversation)}
        try:
            if conversation.saving is None:
                saving.begin()
                conversation.saving = saving
            else:
                saving.save()
            path = self._folder / f"{saving.id}{SUFFIX}"
            self._files[conversation] = SavedConversation.of(conversation, _finished_future(path))
            conversation.is_outdated = False
            if with_kv:
                saving.save_kv()
        except Exception as error:  # replies go on after any error
            conversation.is_outdated = conversation.saving is not None
            if time.monotonic() - self._said_at > _SILENCE:
                known = error if isinstance(error, SirchatError) else type(error).__name__
                _LOG.error("conversations can't be saved now: %s", known)
                self._said_at = time.monotonic()

    def _close(self, conversation: ServedConversation) -> Path | None:
        """Close a conversation's file without writing; its path, None if it was never written."""
        if conversation.saving is not None:
            conversation.saving.close_without_saving()
            conversation.saving = None
        saved = self._files.pop(conversation, None)
        return None if saved is None else saved.file.result()

    def _read(self) -> list[SavedConversation]:
        """The entries of this model's conversations in the folder; the one changed last at the end.

        Files that a process has open, and damaged ones, are left out.
        """
        entries, model = [], (self._model.precision, fingerprint(self._model))
        for path in sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime):
            try:
                with SessionStore.open(path) as store:
                    if (store.meta.get("dtype"), store.meta.get("fingerprint")) == model:
                        entries.append(SavedConversation.read(store))
            except SirchatError as error:
                _LOG.info("a saved conversation is left out: %s", error)
        return entries


def _fields(conversation: ServedConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "keys": [key.hex() for key in conversation.keys],
        "roles": [*conversation.roles],
        "marks": [mark.hex() for mark in conversation.marks],
        "turns": len(conversation.session.turns),
        "settings": {**conversation.settings},
        "least_budget": conversation.least_budget,
        "origin": conversation.origin,
        "is_branch": conversation.is_branch,
        "is_edited": conversation.is_edited,
        "name": conversation.name,
    }


def _finished_future(path: Path) -> Future[Path | None]:
    file: Future[Path | None] = Future()
    file.set_result(path)
    return file


def _size(saved: SavedConversation) -> int:
    """Size of a conversation's files in bytes; 0 if they are missing or being written."""
    if not saved.file.done() or (path := saved.file.result()) is None:
        return 0
    files = [path, path.with_suffix(".safetensors"), *path.with_suffix(FOLDER).glob("*")]
    return sum(file.stat().st_size for file in files if file.exists())


def has_keys_and_values(saved: SavedConversation) -> bool:
    """Whether loading this conversation computes nothing."""
    path = saved.file.result() if saved.file.done() else None
    return path is not None and path.with_suffix(".safetensors").exists()


def _remove(saved: SavedConversation) -> None:
    with suppress(SirchatError):  # another server may use it
        if (path := saved.file.result()) is not None:
            remove_session(path)
