"""A server's conversations; finds the one that a request continues, so nothing is read twice.

A request continues the conversation that has read the longest prefix of the request's messages.
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
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from sirchat.chat.editing import can_edit
from sirchat.chat.events import Event
from sirchat.chat.rereading import copy_session, copy_system_prompt
from sirchat.chat.session import Session
from sirchat.config.profile import FIXED_SETTINGS, Profile
from sirchat.errors import SirchatError
from sirchat.memory.free_memory import free_memory
from sirchat.memory.policies import import_typed
from sirchat.models.model import LoadedModel
from sirchat.saved.autosave import AUTO_KV_BYTES, Autosave
from sirchat.saved.database import SUFFIX, as_damage_errors, require
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import model_fingerprint, saved_profile
from sirchat.saved.session_list import remove_session
from sirchat.saved.store import SessionStore
from sirchat.server.conversation import (
    Continuation,
    History,
    KnownConversation,
    ServedConversation,
    matched,
    preview,
    unread,
)
from sirchat.server.fields import RequestError

_MIN_CHARS_TO_LOAD = 2000  # characters, which take longer to read than a conversation to load


class BusyError(Exception):
    """A conversation is in use, or memory has no room for another; the client may try again."""


class Limits(BaseModel):
    """How many conversations a server keeps in memory and on disk, and how many requests may wait.

    `reuse` says what is not read again: `messages` that a conversation has read, wherever they
    stand now, or `exact`: only messages before which nothing has changed.
    """

    model_config = ConfigDict(frozen=True)

    conversations: int = Field(default=8, ge=1, le=1000)
    saved: int = Field(default=100, ge=1, le=10000)
    queue: int = Field(default=256, ge=0, le=10000)
    reuse: Literal["exact", "messages"] = "messages"


class ConversationPool:
    """The conversations of one model, in memory and in `folder`.

    If room is needed, or if all take more than half of the memory that was free, the conversation
    used longest ago leaves memory, for the disk unless the setting `save` is off. `profile` has the
    settings of new conversations.
    """

    def __init__(self, model: LoadedModel, profile: Profile, limits: Limits, folder: Path) -> None:
        self.model, self._profile, self._limits = model, profile, limits
        saved = SavedConversations(model, profile, limits.saved, folder) if profile.save else None
        self._disk = saved
        free = free_memory()
        self._max_bytes = math.inf if free is None else free // 2
        self._in_memory: list[ServedConversation] = []  # by last use, the latest at the end

    def take(self, history: History) -> Continuation:
        """How to answer `history` in a conversation, marked busy; it may be new, or a copy.

        Raises BusyError if the best match is busy, or if memory has no room for another.
        """
        named = self._find(lambda each: each.name == history.name) if history.name else None
        if named is not None and named.is_busy:
            raise BusyError
        if named is not None:
            full = named.history_with_earlier(history, len(matched(named, history)))
            if full is not history:  # it has the messages before, too
                is_edit = full.prompt_mark != named.prompt_mark  # or other tools
                named.is_edited |= is_edit
                earlier = min(len(named.marks), len(full.marks) - 1) if is_edit else 0
                reused = {number: number for number in range(earlier)}
                self._begin_use(named)
                return Continuation(named, full, reused, named.has_answered(full))
        found = self._take_by_messages(history)
        self._begin_use(found.conversation)
        if history.name:
            if named is not None:
                named.name = ""
            found.conversation.name = history.name
        return found

    def _take_by_messages(self, history: History) -> Continuation:
        """As `take`, for the conversation that shares most messages."""
        is_exact = self._limits.reuse == "exact"
        usable = (each for each in self._newest_first if history.may_use(each.name))
        candidates = (each for each in usable if not (is_exact and each.is_edited))
        best = max(candidates, key=partial(_match_quality, history), default=None)
        shared = 0 if best is None else best.count_shared_messages(history)
        if shared and isinstance(best, SavedConversation):
            if (best := self._load(best)) is None:
                return self._take_by_messages(history)  # it is no longer listed
            shared = best.count_shared_messages(history)
        if not is_exact and shared < len(history.marks) - 1:
            edited = self._find_editable(history, unread(history, range(shared), shared > 0))
            if edited is not None:
                return edited
        if not (shared and isinstance(best, ServedConversation)):
            if (answered := self._find_answered(history)) is not None:
                return Continuation(answered, history, is_retry=True)
            return Continuation(self._create(history), history)
        if best.is_busy:
            raise BusyError
        if shared < len(best.roles) and best.has_answered(history):
            return Continuation(best, history, is_retry=True)
        return Continuation(self._rewind(best, history, shared) or self._create(history), history)

    def find(self, ident: str) -> ServedConversation:
        """The conversation with this id, loaded if it is only on disk.

        Raises RequestError if there is none, and BusyError if memory has no room to load it.
        """
        if (found := self._find(lambda each: each.id == ident)) is None:
            raise RequestError("there is no such conversation; it may be dropped", status=404)
        return found

    def _find(self, matches: Callable[[KnownConversation], bool]) -> ServedConversation | None:
        found = next(filter(matches, self._newest_first), None)
        return self._load(found) if isinstance(found, SavedConversation) else found

    @property
    def _newest_first(self) -> list[ServedConversation | SavedConversation]:
        """All conversations: first those in memory, then those on disk; last used first."""
        on_disk = [] if self._disk is None else self._disk.entries
        return [*reversed(self._in_memory), *reversed(on_disk)]

    def change(
        self,
        ident: str,
        work: Callable[[ServedConversation], list[Event]],
        then: Callable[[], None],
    ) -> tuple[ServedConversation, list[Event]]:
        """Change a conversation by `work`, save it, and then call `then`.

        Returns the conversation and the events of `work`. Raises the errors of `find`, and
        BusyError if the conversation is in use.
        """
        conversation = self.find(ident)
        if conversation.is_busy:
            raise BusyError
        conversation.is_busy = True
        try:
            return conversation, work(conversation)
        finally:
            self.release(conversation, then)

    def overview(self) -> list[dict[str, Any]]:
        """All conversations, in memory or on disk, as JSON objects; the last used is first."""
        return [
            {
                "id": each.id,
                "name": each.name,
                "first": each.first,
                "messages": len(each.roles),
                "busy": isinstance(each, ServedConversation) and each.is_busy,
                "in_memory": isinstance(each, ServedConversation),
                "bytes": each.nbytes if isinstance(each, ServedConversation) else 0,
            }
            for each in self._newest_first
        ]

    def release(
        self, conversation: ServedConversation, then: Callable[[], None] = lambda: None
    ) -> None:
        """End the use of a conversation: save it, or drop it if it can't be continued.

        `then` is called once the conversation is free, perhaps in another thread.
        """

        def free() -> None:
            conversation.is_busy = False
            then()

        if not conversation.is_exact or not conversation.roles:
            self._remove(conversation)
            if self._disk is not None:
                self._disk.keep_last_saved(conversation)
            free()
        elif self._disk is None:
            free()
        else:
            self._disk.save(conversation, free)

    def end(self) -> None:
        """Save all conversations with keys and values, but no part of an unfinished reply."""
        if self._disk is not None:
            for conversation in self._in_memory:
                is_whole = conversation.is_exact and conversation.roles
                (self._disk.move_to_disk if is_whole else self._disk.keep_last_saved)(conversation)
            self._disk.end()
        self._in_memory = []

    def _rewind(
        self, conversation: ServedConversation, history: History, shared: int
    ) -> ServedConversation | None:
        """A conversation with only the first `shared` messages of `history`; None if impossible."""
        # Further messages are undone in a copy, so that both branches can be continued.
        if shared == len(conversation.roles):
            conversation.is_branch = False
            return conversation
        if not conversation.has_same_question(history):
            conversation = self._branch(conversation)
        return conversation if conversation.undo_to(shared) else None

    def _find_answered(self, history: History) -> ServedConversation | None:
        """A conversation whose only message is that of `history`, for another reply to it."""
        usable = (
            each
            for each in reversed(self._in_memory)
            if not (each.is_busy or each.is_edited or each.settings.keys() - {"pin_system"})
        )
        answered = (each for each in usable if each.has_answered(history))
        return next((each for each in answered if each.name == history.name), None)

    def _branch(self, conversation: ServedConversation) -> ServedConversation:
        """Copy a conversation so that both can be continued; the original may move to disk."""
        session = None  # if keys and values take too much
        if self._make_room(besides=conversation):
            session = copy_session(conversation.session, AUTO_KV_BYTES)
        if session is None and self._disk is not None:
            self._remove(conversation)
            self._disk.move_to_disk(conversation).file.result()
            session = conversation.session
        return conversation if session is None else conversation.with_session(session)

    def _find_editable(self, history: History, max_chars: int) -> Continuation | None:
        """A conversation to edit for `history`, with at most `max_chars` left to read, or None."""
        # A copy if the client goes on from before the last question, perhaps with both.
        best, reused = None, dict[int, int]()
        for each in self._newest_first:
            pairs = matched(each, history) if history.may_use(each.name) else {}
            chars = unread(history, pairs, each.prompt_mark == history.prompt_mark)
            session = each.session if isinstance(each, ServedConversation) else None
            if not pairs or chars >= max_chars:
                continue
            if self._can_edit if session is None else can_edit(session):
                best, reused, max_chars = each, pairs, chars
        if isinstance(best, SavedConversation):
            best = self._load(best)
        if best is None or not can_edit(best.session):
            return None
        if best.is_busy:
            raise BusyError
        end = max(reused.values()) + 1
        ends_with_question = best.marks[end : end + 1] == [history.marks[-1]]
        is_retry = ends_with_question and best.roles[end:].count("user") == 1
        is_branch = end < len(best.marks)
        best = self._branch(best) if is_branch and not is_retry else best
        best.is_edited, best.is_branch = True, end < len(best.marks)
        return Continuation(best, history, reused)

    @cached_property
    def _can_edit(self) -> bool:
        return can_edit(Session(self.model, self._profile))

    def _create(self, history: History) -> ServedConversation:
        if not self._make_room():
            raise BusyError
        profile = self._profile
        if history.system is not None or not history.name:
            profile = profile.model_copy(update={"system": history.system})
        exact = (each for each in reversed(self._in_memory) if each.has_exact_prompt)
        read = (each for each in exact if each.roles)
        source = next((each for each in read if each.prompt_mark == history.prompt_mark), None)
        source = source or self._load_same_prompt(history)
        session = Session(self.model, profile)
        new = ServedConversation(session=session, prompt_mark=history.prompt_mark)
        if source is not None:  # it begins with the same
            new.least_budget, is_pinned = source.least_budget, source.settings.get("pin_system")
            new.settings = {} if is_pinned is None else {"pin_system": is_pinned}
            changes = {"budget": max(profile.budget, new.least_budget), **new.settings}
            profile = profile.model_copy(update=changes)
            copied = copy_system_prompt(source.session, profile)
            new.session = copied or Session(self.model, profile)
        return new

    def _load_same_prompt(self, history: History) -> ServedConversation | None:
        """Load a conversation with this system prompt and tools, if that is faster than reading."""
        has_room = len(self._in_memory) + 1 < self._limits.conversations
        is_long = len(history.system or "") + len(history.tools) >= _MIN_CHARS_TO_LOAD
        if self._disk is None or not (has_room and is_long):
            return None
        for saved in reversed(self._disk.entries):
            is_exact = saved.prompt_mark == history.prompt_mark and not saved.is_edited
            kv_file = saved.kv_file if is_exact else None
            if kv_file is not None and kv_file.exists():  # so that loading computes nothing
                return self._load(saved)
        return None

    def _begin_use(self, conversation: ServedConversation) -> None:
        self._remove(conversation)
        self._in_memory.append(conversation)
        conversation.is_busy = True
        if self._disk is not None:
            while sum(each.nbytes for each in self._in_memory) > self._max_bytes:
                if not self._unload_oldest():
                    break
            self._disk.prune(self._in_memory)

    def _load(self, saved: SavedConversation) -> ServedConversation | None:
        """Load from disk; None if the file can't be used; raises BusyError if memory is full."""
        if not self._make_room():
            raise BusyError
        assert self._disk is not None
        loaded = self._disk.load(saved)
        if loaded is not None:
            self._in_memory.append(loaded)
        return loaded

    def _make_room(self, besides: ServedConversation | None = None) -> bool:
        """Unload an idle conversation, but not `besides`, if memory is full; False if none can."""
        return len(self._in_memory) < self._limits.conversations or self._unload_oldest(besides)

    def _unload_oldest(self, besides: ServedConversation | None = None) -> bool:
        """Unload the conversation used longest ago; returns False if all are in use."""
        idle = (each for each in self._in_memory if not each.is_busy and each is not besides)
        if (leaving := next(idle, None)) is None:
            return False
        self._remove(leaving)
        if self._disk is not None:
            self._disk.move_to_disk(leaving)
        return True

    def _remove(self, conversation: ServedConversation) -> None:
        self._in_memory = [each for each in self._in_memory if each is not conversation]


def _match_quality(history: History, conversation: KnownConversation) -> tuple[int, bool, bool]:
    """How well a conversation fits `history`; a greater tuple is better."""
    shared = conversation.count_shared_messages(history)
    if not isinstance(conversation, ServedConversation):
        return shared, False, False
    return shared, not conversation.is_busy, shared == len(conversation.roles)


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

        saved = self._files.get(conversation)
        if saved is not None and saved.id != conversation.id:  # it was reset
            self.keep_last_saved(conversation)
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
        """List a conversation as it was saved last; the writing thread closes its file."""
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
