"""Saves a running chat to its file after every turn.

Each update compares the file with the chat and writes the differences, whatever has changed (a new
turn, an undo). Keys and values are saved when the chat ends, or on request.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirchat import paths
from sirchat.chat.session import Session
from sirchat.config.profile import parse_size
from sirchat.engine.types import EngineState
from sirchat.errors import SessionError
from sirchat.memory.ledger import ROW
from sirchat.saved.saved_state import make_head, passages_of, session_metadata
from sirchat.saved.saved_tensors import attention_tensors, key_value_tensors, state_tensors
from sirchat.saved.segments import FEWEST
from sirchat.saved.session_list import make_room, remove_session, reveals_text
from sirchat.saved.store import ALL, Head, SavedPassages, SavedTurn, SessionStore

# With `save_kv: auto`, the most bytes of keys and values that are saved when a chat ends, and of
# those of evicted tokens that are saved before that.
KV_BYTES = 256 * 2**20

# Columns of the ledger: where one of them differs, another token stands at this position now.
_COLUMNS = ("token_id", "turn", "surprisal", "birth_decay")


@dataclass(frozen=True)
class _Contents:
    """What a session's file contains; the session may have newer turns."""

    turns: list[SavedTurn]
    rows: NDArray[np.void]
    head: Head | None
    passages: NDArray[np.void]  # of `PASSAGE`


_NOTHING = _Contents([], np.zeros(0, ROW), None, SavedPassages().rows)


class Autosave:
    """Keeps one session's file up to date; no file is made before the first turn is finished.

    `store` is the open file that the session was resumed from; a new one is made in `folder`, by
    default that of the user's chats.
    """

    def __init__(
        self, session: Session, store: SessionStore | None = None, folder: Path | None = None
    ) -> None:
        self.name = store.name if store else ""  # given by the user; the next update writes it
        self.more: dict[str, Any] = {}  # further values, as JSON, for the head
        self._session, self._store = session, store
        self._folder = folder or paths.sessions_dir()
        self._family = str(store.meta.get("family", "")) if store else ""
        self._epoch, self._erasures = session.epoch, session.erasures
        self._is_replaced = False  # whether `replace_session` was called since the last update
        self._file = _NOTHING
        if store:
            head, passages = store.head(), store.passages().rows
            if head and head.fields.get("encoder") != session.model.passage_encoder.check_sum:
                passages["turn"] = -1  # so that all are written again
            self._file = _Contents(store.turns(), store.rows(ROW), head, passages)

    @property
    def id(self) -> str:
        """The session's id; empty while the session has no file."""
        if self._store is None or self._epoch != self._session.epoch:
            return ""
        return self._store.id

    @property
    def family(self) -> str:
        """The id of the chat from which this one was branched, in one or more steps, or its own."""
        return self._family or self.id

    def update(self) -> None:
        """Write to the file what has changed in the session since the last update.

        Once this method has returned, a power loss can't undo the changes. Raises SessionError if
        writing fails.
        """
        if self._epoch != self._session.epoch:
            self._leave_file()
        saved, passages = self._session.save(), passages_of(self._session)
        turns = _turns_of(self._session)
        if not turns and self._store is None:
            return
        store = self._store = self._store or self._new()
        if store.name != self.name:
            store.rename(self.name)
        if self._erasures != self._session.erasures or self._is_replaced:
            facts = (
                session_metadata(self._session.model, self._family) if self._is_replaced else None
            )
            rewrite(store, self._session, facts, self.more)
            self._erasures, self._is_replaced = self._session.erasures, False
            self._file = _Contents(turns, saved.rows, None, passages.rows)
            self._save_evicted(store, saved.rows)
            return
        self._truncate(store, turns, saved)
        head = self._head(saved)
        new_turns, new_rows = turns[len(self._file.turns) :], saved.rows[len(self._file.rows) :]
        before, count = self._file.passages, _common_count(self._file.passages, passages.rows)
        kept = int(before["start"][count]) if count < len(before) else ALL
        new = SavedPassages(passages.rows[count:], passages.vectors[count:])
        if new_turns or len(new_rows) or len(new.rows) or kept != ALL:
            store.append(new_turns, new_rows, head, new, kept)
        elif _is_same_state(head, self._file.head):  # saved keys and values stay valid
            store.check_place()
        else:
            store.save_state(head)
        self._file = _Contents(turns, saved.rows, head, passages.rows)
        self._save_evicted(store, saved.rows)

    def save_kv(self) -> bool:
        """Save keys and values, if the setting `save_kv` allows it; returns whether they were."""
        mode = self._session.profile.save_kv
        if self._store is None or mode == "off" or not self._session.seen:
            return False
        limit = KV_BYTES if mode == "auto" else None
        rows = self._session.copy_key_values(limit, self._store.segments.written)
        if rows is None:
            self._store.kv.drop()
            return False
        stamp = secrets.token_hex(8)
        received = self._session.ledger.attention.checkpoint(rows.positions)
        saved = self._session.save()
        tensors = key_value_tensors(rows) | attention_tensors(received) | state_tensors(saved.state)
        self._store.kv.save(tensors, stamp)
        head = self._head(saved, stamp)
        self._store.save_state(head)
        self._file = replace(self._file, head=head)
        make_room(self._folder, parse_size(self._session.profile.save_kv_limit) or 0)
        return True

    def close(self) -> None:
        """Save the session, including its keys and values, and close the file."""
        try:
            if self._epoch == self._session.epoch:
                self.update()
                self.save_kv()
        finally:
            self.close_without_saving()

    def close_without_saving(self) -> None:
        """Close the session's file without saving anything more."""
        if self._store is not None:
            self._store.close()

    def begin(self) -> None:
        """Create the session's file by a first update; after an error, there is no file."""
        try:
            self.update()
        except BaseException:
            if self._store is not None and self.id:
                store, self._store = self._store, None
                store.close()
                with suppress(SessionError):
                    remove_session(store.path)
            raise

    def branch(self, name: str) -> Autosave:
        """Copy the whole chat to a new file called `name`; returns its `Autosave`."""
        copy = Autosave(self._session, folder=self._folder)
        copy.name, copy._family = name, self.family
        copy.begin()
        return copy

    def keep_file_after_reset(self) -> None:
        """After a reset, go on in this file; without this call, an update begins a new file."""
        self._epoch = self._session.epoch

    def replace_session(self, session: Session) -> None:
        """From now on, save `session`, which has the same conversation, in this file."""
        is_current = self._epoch == self._session.epoch
        self._session, self._epoch = session, session.epoch if is_current else -1
        self._erasures, self._is_replaced = session.erasures, self._store is not None

    def drop_revealing_name(self, said: str, *, whole: bool) -> bool:
        """Remove the chat's name if it reveals the erased text `said`; return whether it did."""
        if not reveals_text(self.name, said, whole=whole):
            return False
        self.name = ""
        return True

    def _save_evicted(self, store: SessionStore, rows: NDArray[np.void]) -> None:
        """Write keys and values of tokens that were evicted since then, once they fill a file.

        Errors are ignored, for what was not written can be read again.
        """
        session, mode = self._session, self._session.profile.save_kv
        new = np.setdiff1d(session.archived, store.segments.written, assume_unique=True)
        if mode != "off" and len(new) >= FEWEST:
            with suppress(SessionError):
                store.segments.add(
                    new, session.copy_archived, rows, KV_BYTES if mode == "auto" else None
                )

    def _leave_file(self) -> None:
        """Leave the file as it is; the next update begins a new one."""
        self.close()
        self._store, self._epoch, self._file = None, self._session.epoch, _NOTHING
        self.name, self._family, self._is_replaced = "", "", False

    def _new(self) -> SessionStore:
        folder = paths.private_dir(self._folder)
        return SessionStore.create(folder, session_metadata(self._session.model, self._family))

    def _head(self, saved: EngineState, stamp: str = "") -> Head:
        head = make_head(saved, self._session, stamp)
        return replace(head, fields=head.fields | self.more)

    def _truncate(self, store: SessionStore, turns: list[SavedTurn], saved: EngineState) -> None:
        """Remove from the file the turns and rows that the session no longer has."""
        seen = _common_length(self._file.rows, saved.rows)
        same = [old == new for old, new in zip(self._file.turns, turns, strict=False)]
        count = same.index(False) if False in same else len(same)
        if (count, seen) == (len(self._file.turns), len(self._file.rows)):
            return
        held = saved.held[saved.held < seen]
        fields = self._head(saved).fields
        fields["pinned"] = [position for position in fields["pinned"] if position < seen]
        fields["pins"] = [place for place in fields["pins"] if place[0] < count]
        fields["conversation"] |= {"in_round": False, "pending_ids": []}
        store.kv.drop()
        store.truncate(count, seen, Head(seen, held, None, fields))
        passages = self._file.passages
        passages = passages[passages["end"] <= seen]
        self._file = _Contents(self._file.turns[:count], self._file.rows[:seen], None, passages)


def rewrite(
    store: SessionStore,
    session: Session,
    facts: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    """Replace all contents of a session's file by those of `session`, and `facts` if given.

    Nothing of the old contents stays in any file. `more` are further values for the head.
    """
    saved = session.save()
    head = make_head(saved, session)
    head = replace(head, fields=head.fields | (more or {}))
    store.replace(_turns_of(session), saved.rows, head, facts, passages_of(session))


def _turns_of(session: Session) -> list[SavedTurn]:
    return [
        SavedTurn(index, turn.role, turn.text, turn.finish, turn.thinking, turn.time)
        for index, turn in enumerate(session.turns)
    ]


def _is_same_state(head: Head, other: Head | None) -> bool:
    """Whether two heads differ in nothing but the stamp of their keys and values."""
    if other is None or head.seen != other.seen:
        return False
    logits, others = (b"" if x.logits is None else x.logits.tobytes() for x in (head, other))
    fields = [json.dumps({**x.fields, "kv": ""}, sort_keys=True) for x in (head, other)]
    return fields[0] == fields[1] and logits == others and np.array_equal(head.held, other.held)


def _common_count(passages: NDArray[np.void], other: NDArray[np.void]) -> int:
    """Count the passages that are equal in two arrays, up to the first difference."""
    count = min(len(passages), len(other))
    differs = passages[:count] != other[:count]
    return int(differs.argmax()) if differs.any() else count


def _common_length(rows: NDArray[np.void], other: NDArray[np.void]) -> int:
    """Count the rows that are equal in two ledgers, up to the first difference."""
    count = min(len(rows), len(other))
    differs = np.zeros(count, bool)
    for name in _COLUMNS:
        a, b = rows[name][:count], other[name][:count]
        differs |= (a != b) & ~((a != a) & (b != b))  # two NaNs count as equal
    return int(differs.argmax()) if differs.any() else count
