"""The conversations on disk: each is a saved chat, in the server's own folder.

One thread writes all of them, so that no reply waits for the disk. A conversation is written after
every finished turn, and its keys and values when it leaves memory.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sirchat.chat.session import Session
from sirchat.config.profile import FIXED_SETTINGS, Profile
from sirchat.errors import SirchatError
from sirchat.memory.policies import import_typed
from sirchat.models.model import LoadedModel
from sirchat.saved.autosave import Autosave
from sirchat.saved.database import SUFFIX, as_damage_errors, require
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import model_fingerprint, saved_profile
from sirchat.saved.session_list import remove_session
from sirchat.saved.store import SessionStore
from sirchat.server.conversation import KnownConversation, ServedConversation, preview

MAX_DISK_BYTES = 8 * 2**30  # of all files of conversations that are only on disk
MAX_BRANCHES = 16  # of all conversations, with which nobody went on

_LOG = logging.getLogger(__name__)
_LOG_INTERVAL_SECONDS = 600  # least number of seconds between two logged errors of writing
_HEAD_FIELD = "served"  # of a file's state record: a `KnownConversation`
_ADAPTER = TypeAdapter(KnownConversation)


@dataclass(eq=False, kw_only=True)
class SavedConversation(KnownConversation):
    """A conversation on disk.

    `first` is its beginning; `file` has the path once the file is written, None if that failed.
    """

    first: str
    file: Future[Path | None]

    @staticmethod
    def from_memory(served: ServedConversation, file: Future[Path | None]) -> SavedConversation:
        return SavedConversation(**served.known_fields(), first=served.first, file=file)

    @staticmethod
    def from_file(store: SessionStore) -> SavedConversation:
        """Make the entry of a conversation in an open file; raises SessionError if it has none."""
        head, file = store.state_record(), Future[Path | None]()
        with as_damage_errors(store.path):
            fields: Any = head and head.fields.get(_HEAD_FIELD)
            turns = store.turns()
            known = _ADAPTER.validate_json(json.dumps(fields))
            require(len(turns) == fields["turns"] and len(known.marks) == len(known.roles))
        file.set_result(store.path)
        return SavedConversation(**known.known_fields(), first=preview(turns), file=file)

    @property
    def kv_file(self) -> Path | None:
        """The file of keys and values; None if they are not saved, or not yet written."""
        path = self.file.result() if self.file.done() else None
        return path and path.with_suffix(".safetensors")

    def has_keys_and_values(self) -> bool:
        """Whether keys and values are saved, so that loading computes nothing."""
        return self.kv_file is not None and self.kv_file.exists()

    def nbytes_on_disk(self) -> int:
        """Bytes of its files; 0 if they are missing or being written."""
        if (file := self.kv_file) is None:
            return 0
        files = file, file.with_suffix(SUFFIX)
        return sum(each.stat().st_size for each in files if each.exists())


class SavedConversations:
    """The list of conversations that are only on disk, not in memory.

    At most `limit` conversations exist on disk, including those that are also in memory.
    """

    def __init__(self, model: LoadedModel, profile: Profile, limit: int, folder: Path) -> None:
        self._model, self._profile = model, profile
        import_typed(profile.policy)  # in a replica, nobody has typed it
        self._limit, self._folder = limit, folder
        self._writer = ThreadPoolExecutor(1, "saving")
        self._logged_at = -math.inf  # time of the last logged error, in seconds
        self._files: dict[ServedConversation, SavedConversation] = {}  # entries of those in memory
        self._entries: list[SavedConversation] | None = None  # None until the folder is read
        self._reading = self._writer.submit(self._read_folder)

    @property
    def entries(self) -> list[SavedConversation]:
        """Entries of the conversations that are only on disk; the last used one is at the end."""
        if self._entries is None:
            self._entries = self._reading.result()
        return self._entries

    def load(self, saved: SavedConversation) -> ServedConversation | None:
        """Load a conversation, and remove it from the list; None if its file can't be used."""
        self.entries.remove(saved)
        if (path := saved.file.result()) is None:
            return None
        store = None
        try:
            store = SessionStore.open(path)
            saved = SavedConversation.from_file(store)  # the last turns may not have been written
            session = self._resume(store, saved)
        except SirchatError as error:
            _LOG.warning("a saved conversation can't be continued: %s", error)
            if store is not None:
                store.close()
            return None
        autosave, is_exact = Autosave(session, store, self._folder), not saved.is_edited
        loaded = ServedConversation(
            session=session, **saved.known_fields(), autosave=autosave, has_exact_prompt=is_exact
        )
        self._files[loaded] = saved
        return loaded

    def save(self, conversation: ServedConversation, then: Callable[[], None]) -> None:
        """Let the writing thread save what is new in a conversation, and then call `then`."""

        def write() -> None:
            self._write(conversation)
            then()

        self._writer.submit(write)

    def move_to_disk(self, conversation: ServedConversation) -> SavedConversation:
        """Let the writing thread save a conversation that leaves memory; returns its entry."""

        def write() -> Path | None:
            self._write(conversation, with_kv=True)
            return self._close(conversation)

        saved = SavedConversation.from_memory(conversation, self._writer.submit(write))
        self.entries.append(saved)
        return saved

    def keep_last_saved(self, conversation: ServedConversation) -> None:
        """List a conversation that leaves memory as it was saved last; close its file later."""
        if (saved := self._files.get(conversation)) is not None:
            self.entries.append(replace(saved, file=self._writer.submit(self._close, conversation)))

    def prune(self, held: Collection[ServedConversation]) -> None:
        """Delete the conversations used longest ago if there are too many, or too many bytes.

        `held` are those in memory. Branches that nobody continued, and that have a newer branch, go
        first, so that they push out no other conversation.
        """
        newer = {each.origin for each in held}
        others, branches = list[SavedConversation](), list[SavedConversation]()
        for saved in reversed(self.entries):
            (branches if saved.is_branch and saved.origin in newer else others).append(saved)
            newer.add(saved.origin)
        stays, size = set[SavedConversation](), 0
        for saved in (*others, *branches[:MAX_BRANCHES]):
            size += saved.nbytes_on_disk()
            if len(stays) + len(held) < self._limit and size <= MAX_DISK_BYTES:
                stays.add(saved)
        for saved in self.entries:
            if saved not in stays:
                self._writer.submit(_remove, saved)
        self._entries = [saved for saved in self.entries if saved in stays]

    def end(self) -> None:
        """Delete surplus conversations, and wait until the writing thread ends."""
        self.prune(())
        self._writer.shutdown()

    def _resume(self, store: SessionStore, saved: SavedConversation) -> Session:
        """The session saved in `store`, with the server's settings and its own ones."""
        profile = saved_profile(store)
        current = {name: getattr(self._profile, name) for name in Profile.model_fields}
        profile = profile.model_copy(update={name: current[name] for name in FIXED_SETTINGS})
        session = Session(self._model, profile)
        resume_session(session, store)
        unchanged = (*FIXED_SETTINGS, "system")
        values = {name: current[name] for name in current if name not in unchanged}
        values |= saved.settings
        values["budget"] = max(values["budget"], saved.least_budget)
        changed = {name: v for name, v in values.items() if getattr(session.profile, name) != v}
        if changed:
            session.switch("the server", **changed)
        return session

    def _write(self, conversation: ServedConversation, *, with_kv: bool = False) -> None:
        """Write what is new in a conversation; after an error, its next turn tries again."""
        autosave = conversation.autosave or Autosave(conversation.session, folder=self._folder)
        fields = _ADAPTER.dump_python(conversation, mode="json")
        autosave.extra_fields = {_HEAD_FIELD: fields | {"turns": len(conversation.session.turns)}}
        try:
            autosave.save()
            conversation.autosave = autosave
            file = Future[Path | None]()
            file.set_result(self._folder / f"{autosave.id}{SUFFIX}")
            self._files[conversation] = SavedConversation.from_memory(conversation, file)
            conversation.is_outdated = False
            if with_kv:
                autosave.save_kv()
        except Exception as error:  # replies go on after any error
            conversation.is_outdated = conversation.autosave is not None
            if time.monotonic() - self._logged_at > _LOG_INTERVAL_SECONDS:
                problem = error if isinstance(error, SirchatError) else type(error).__name__
                _LOG.error("conversations can't be saved now: %s", problem)
                self._logged_at = time.monotonic()

    def _close(self, conversation: ServedConversation) -> Path | None:
        """Close a conversation's file without writing; returns its path, None if never written."""
        if conversation.autosave is not None:
            conversation.autosave.close_without_saving()
            conversation.autosave = None
        saved = self._files.pop(conversation, None)
        return None if saved is None else saved.file.result()

    def _read_folder(self) -> list[SavedConversation]:
        """This model's conversations in the folder, last changed at the end."""
        # Damaged files, and files that a process has open, are left out.
        entries, dtype = [], self._model.precision
        known = model_fingerprint(self._model)
        for path in sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime):
            try:
                with SessionStore.open(path) as store:
                    if store.meta.get("dtype") == dtype and store.meta["fingerprint"] == known:
                        entries.append(SavedConversation.from_file(store))
            except SirchatError as error:
                _LOG.info("a saved conversation is left out: %s", error)
        return entries


def _remove(saved: SavedConversation) -> None:
    with suppress(SirchatError):  # another server may use it
        if (path := saved.file.result()) is not None:
            remove_session(path)
