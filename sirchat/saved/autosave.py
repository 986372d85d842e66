"""Saves a running chat to its file after every turn.

Each save appends what is new. Ledger and session record how much of the past is saved unchanged;
where an undo or another change has altered it, the file is cut off first. Keys and values are saved
when the chat ends, or on request.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sirchat import paths
from sirchat.chat.session import Session
from sirchat.config.profile import parse_size
from sirchat.engine.types import EngineState
from sirchat.errors import SessionError
from sirchat.saved.saved_state import make_state_record, new_passages, session_metadata
from sirchat.saved.saved_tensors import attention_tensors, key_value_tensors, state_tensors
from sirchat.saved.session_list import create_branch, make_room, remove_session
from sirchat.saved.store import Extent, SavedTurn, SessionStore, StateRecord

# With `save_kv: auto`, at most so many bytes of keys and values are saved when a chat ends.
AUTO_KV_BYTES = 256 * 2**20


class Autosave:
    """Keeps the file of one session up to date. A session has one such object at a time.

    `store` is the open file that the session was resumed from. Without it, a file is made in
    `folder`, by default that of the user's chats, when the first turn is finished.
    """

    def __init__(
        self, session: Session, store: SessionStore | None = None, folder: Path | None = None
    ) -> None:
        self.name = store.name if store else ""  # given by the user; the next `save` writes it
        self.extra_fields: dict[str, Any] = {}  # further JSON values for the state record
        self._session, self._store = session, store
        self._folder = folder or paths.sessions_dir()
        self._family = str(store.meta.get("family", "")) if store else ""
        self._epoch, self._erasures = session.epoch, session.erasures
        self._is_replaced = False  # whether `replace_session` was called since the last save
        self._record = store.state_record() if store else None  # as it is in the file

    @property
    def id(self) -> str:
        """The session's id; empty while the session has no file."""
        if self._store is None or self._epoch != self._session.epoch:
            return ""
        return self._store.id

    @property
    def family(self) -> str:
        """The id of the chat from which this chat was branched, over all steps; or its own id."""
        return self._family or self.id

    def save(self) -> None:
        """Write all changes since the last save; they survive a power loss. Raises SessionError.

        The first save makes the file; after an error there is none.
        """
        session = self._session
        if self._epoch != session.epoch:
            self._detach_file()
        if not session.turns and self._store is None:
            return
        is_first = self._store is None
        if self._store is None:
            folder = paths.make_private_dir(self._folder)
            about = session_metadata(session.model, self._family)
            self._store = SessionStore.create(folder, about)
        store = self._store
        try:
            if store.name != self.name:
                store.rename(self.name)
            self._write(store, is_rewritten=self._erasures != session.erasures or self._is_replaced)
        except BaseException:
            if is_first:
                self._store = None
                store.close()
                with suppress(SessionError):
                    remove_session(store.path)
            raise
        self._erasures, self._is_replaced = session.erasures, False

    def _write(self, store: SessionStore, *, is_rewritten: bool) -> None:
        """Cut off what changed in the file, or all if `is_rewritten`, and append what is new."""
        session, ledger, size = self._session, self._session.ledger, store.size
        held = min(session.state.saved_turns, size.turns)
        turn, start = (0, 0) if is_rewritten else (held, min(ledger.saved, size.rows))
        old_encoder = self._record and self._record.fields.get("encoder")
        is_same_encoder = old_encoder == session.model.passage_encoder.checksum
        saved_end = min(start, size.passages) if is_same_encoder else 0
        passages, passages_end = new_passages(session, saved_end)
        saved = session.engine.save(start)
        record = self._make_record(saved)
        turns = [SavedTurn(at, **vars(one)) for at, one in enumerate(session.turns[turn:], turn)]
        extent = Extent(turn, start, passages_end, held)
        flagged = sorted(position for position in ledger.flagged if position < start)
        flags = dict(zip(flagged, ledger.column("flags")[flagged].tolist(), strict=True))
        is_longer = turns or len(saved.rows) or len(passages.rows)
        is_cut = extent != size
        is_other = self._is_replaced or not _is_same_state(record, self._record)
        if is_longer or is_cut or flags or is_other:
            meta = session_metadata(session.model, self._family) if self._is_replaced else None
            store.append(turns, saved.rows, record, passages, extent, flags, meta)
            self._record = record
        else:  # saved keys and values stay valid
            store.check_not_removed()
        session.state.saved_turns = len(session.turns)
        ledger.saved, ledger.flagged = session.seen, set()

    def save_kv(self) -> bool:
        """Make the saved keys and values current, as `save_kv` allows; returns whether they are.

        If they are too large, the old ones are deleted.
        """
        mode = self._session.profile.save_kv
        if self._store is None or mode == "off" or not self._session.seen:
            return False
        former = self._record.fields.get("kv") if self._record else ""
        if former and self._store.kv.load(former) is not None:  # a chat that was only looked at
            return True
        limit = AUTO_KV_BYTES if mode == "auto" else None
        max_bytes = parse_size(self._session.profile.save_kv_limit) or 0
        saved = self._session.engine.save(self._session.seen)
        tensors = state_tensors(saved.state)
        if (rows := self._session.engine.store.copy_key_values(limit)) is not None:
            received = self._session.ledger.attention.checkpoint(rows.positions)
            tensors |= key_value_tensors(rows) | attention_tensors(received)
        # A larger file would push out those of all other chats, and then itself.
        if rows is None or sum(tensor.nbytes for tensor in tensors.values()) > max_bytes:
            self._store.kv.drop()
        else:
            stamp = secrets.token_hex(8)
            self._store.kv.save(tensors, stamp)
            record = self._make_record(saved, stamp)
            self._store.append([], saved.rows, record)
            self._record = record  # not before: the file has the old one, should this have failed
        make_room(self._folder, max_bytes)
        return self._store.path.with_suffix(".safetensors").exists()

    def close(self) -> None:
        """Save the session with its keys and values, and close the file."""
        try:
            if self._epoch == self._session.epoch:
                self.save()
                self.save_kv()
        finally:
            self.close_without_saving()

    def close_without_saving(self) -> None:
        if self._store is not None:
            self._store.close()

    def branch(self, name: str) -> Autosave:
        """Copy what is saved to a new file called `name`; returns the `Autosave` of the copy."""
        assert self._store is not None
        return Autosave(self._session, create_branch(self._store, name), self._folder)

    def replace_session(self, session: Session) -> None:
        """From now on, save `session`, which has the same conversation, to this file."""
        is_current = self._epoch == self._session.epoch
        self._session, self._epoch = session, session.epoch if is_current else -1
        self._erasures, self._is_replaced = session.erasures, self._store is not None

    def _detach_file(self) -> None:
        """Close the file as it is; the next `save` begins a new one."""
        self.close()
        self._store, self._epoch, self._record = None, self._session.epoch, None
        self.name, self._family, self._is_replaced = "", "", False

    def _make_record(self, saved: EngineState, stamp: str = "") -> StateRecord:
        record = make_state_record(saved, self._session, stamp)
        return replace(record, fields=record.fields | self.extra_fields)


def _is_same_state(record: StateRecord, other: StateRecord | None) -> bool:
    """Whether two records differ in nothing but the stamp of their keys and values."""
    if other is None or record.seen != other.seen:
        return False
    logits, others = (b"" if x.logits is None else x.logits.tobytes() for x in (record, other))
    fields = [json.dumps({**x.fields, "kv": ""}, sort_keys=True) for x in (record, other)]
    return fields[0] == fields[1] and logits == others and np.array_equal(record.held, other.held)
