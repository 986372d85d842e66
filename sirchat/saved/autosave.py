"""Saves a running chat to its file after every turn, and continues a saved chat (`--resume`).

Each update compares the file with the chat and writes the differences, whatever has changed (a new
turn, an undo). The keys and values of the cache are saved when the chat ends or on request. If keys
and values are not saved, resuming the chat computes those of the held tokens again, which gives
nearly the same cache.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sirchat import __version__, paths
from sirchat.chat.rereading import read_again
from sirchat.chat.session import Session
from sirchat.chat.state import Turn
from sirchat.engine.types import EngineState
from sirchat.errors import SessionError
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.cache_layers import CacheState
from sirchat.memory.key_values import KeyValues
from sirchat.memory.ledger import ROW
from sirchat.models.model import LoadedModel
from sirchat.saved.saved_state import (
    attention_fits,
    attention_tensors,
    decode_state,
    pop_attention,
    pop_rows,
    pop_state,
    row_tensors,
    rows_fit,
    saved_head,
    saved_pins,
    saved_turns,
    state_tensors,
)
from sirchat.saved.session_list import remove_session, tells_of
from sirchat.saved.store import Head, SavedTurn, SessionStore

KV_BYTES = 256 * 2**20
"""With the setting `save_kv: auto`, keys and values are saved only up to this size, in bytes."""

_VOLATILE = (
    "_name_or_path",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "distributed_config",
)
"""Names of config entries that depend on how a model was saved or loaded, not on the model."""

_TurnFields = tuple[str, str, str]  # role, text and finish of a turn
_COLUMNS = ("token_id", "turn", "surprisal", "birth_decay")
"""Names of the ledger columns that show whether a saved row is still the session's row.

If one of them has another value, another token stands at this position now.
"""


def fingerprint(model: LoadedModel) -> str:
    """A hash, as text, that identifies a model.

    It is computed from the model's config, vocabulary size, rotary frequencies, and a sample of its
    weights.
    """
    digest = hashlib.sha256()
    config = model.module.config.to_diff_dict()
    for name in _VOLATILE:
        config.pop(name, None)
    digest.update(repr(sorted(config.items(), key=str)).encode())
    digest.update(str(len(model.tokenizer)).encode())
    for rotation in (layer.key for layer in model.rotations):
        if rotation is not None:
            digest.update(rotation.inv_freq.numpy().tobytes())
    for shape, sample in model.weight_samples():
        digest.update(str(shape).encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


class Autosave:
    """Keeps one session's file up to date; no file is made before the first turn is finished.

    Args:
        session: the session to save.
        store: the open file that the session was resumed from; None for a new session.
        folder: where a new file is made; None for the folder of the user's saved chats.

    Attributes:
        name: the name that the user gave the session, or empty; the next update writes it to the
            file.
        more: further values, as JSON values by name, to write into the head, which is the record of
            the session's present state.
    """

    def __init__(
        self, session: Session, store: SessionStore | None = None, folder: Path | None = None
    ) -> None:
        self._folder = folder or paths.sessions_dir()
        self.more: dict[str, Any] = {}
        self._session = session
        self._store = store
        self._epoch = session.epoch
        self._erasures = session.erasures
        self._is_replaced = False  # whether `replace_session` was called since the last update
        self.name = store.name if store else ""
        self._family = str(store.meta.get("family", "")) if store else ""
        # The contents of the file; the session may have newer turns.
        self._turns = [(t.role, t.text, t.finish) for t in store.turns()] if store else []
        self._rows = store.rows(ROW) if store else np.zeros(0, ROW)
        self._head = store.head() if store else None

    @property
    def id(self) -> str:
        """The session's id; empty while the session has no file."""
        if self._store is None or self._epoch != self._session.epoch:
            return ""
        return self._store.id

    @property
    def family(self) -> str:
        """The id of the original chat, from which this chat was branched, maybe in several steps.

        If this chat is not a branch, the result is its own id.
        """
        return self._family or self.id

    def branch(self, name: str) -> Autosave:
        """Copy the whole chat to a new file, which gets the name `name`.

        Returns the `Autosave` of the new file. The old file is unchanged.
        """
        copy = Autosave(self._session, folder=self._folder)
        copy.name, copy._family = name, self.family
        copy.begin()
        return copy

    def begin(self) -> None:
        """Create the session's file by a first update.

        If the update fails, the file is deleted, the error is raised, and `begin` can be called
        again.
        """
        try:
            self.update()
        except BaseException:
            if self._store is not None and self.id:
                store, self._store = self._store, None
                store.close()
                with suppress(SessionError):
                    remove_session(store.path)
            raise

    def follow(self) -> None:
        """Let the session's new conversation replace the old one in this file after a reset.

        If this method is not called after a reset, the next update begins a new file.
        """
        self._epoch = self._session.epoch

    def unname(self, said: str, *, whole: bool) -> bool:
        """Remove the session's name if it contains the text `said`, which is about to be erased.

        If `whole` is true, `said` is the text of a complete turn, and a name that is a part of this
        text is removed, too. Returns whether the name was removed.
        """
        if not tells_of(self.name, said, whole=whole):
            return False
        self.name = ""
        return True

    def replace_session(self, session: Session) -> None:
        """Save `session` in this file from now on, in place of the present session.

        Both have the same conversation; `session` may have another model, or may have read the text
        again. The next update replaces the file's contents.
        """
        is_current = self._epoch == self._session.epoch
        self._session, self._epoch = session, session.epoch if is_current else -1
        self._erasures, self._is_replaced = session.erasures, self._store is not None

    def update(self) -> None:
        """Write to the file what has changed in the session since the last update.

        Once this method has returned, a power loss can't undo the changes. Raises SessionError if
        writing fails.
        """
        if self._epoch != self._session.epoch:  # after a reset: the old file is not changed
            self.close()
            self._store, self._epoch = None, self._session.epoch
            self._turns, self._rows, self._head = [], np.zeros(0, ROW), None
            self.name, self._family, self._is_replaced = "", "", False
        saved = self._session.save()
        turns = [_turn_fields(turn) for turn in self._session.turns]
        if not turns and self._store is None:
            return
        store = self._store = self._store or self._new()
        if store.name != self.name:
            store.rename(self.name)
        if self._erasures != self._session.erasures or self._is_replaced:
            meta = _meta(self._session.model, self._family) if self._is_replaced else None
            _rewrite(store, self._session, meta, self.more)
            self._erasures, self._is_replaced = self._session.erasures, False
            self._turns, self._rows, self._head = turns, saved.rows, None
            return
        self._truncate(store, turns, saved)
        head = self._head_of(saved)
        new = [SavedTurn(n, *turns[n]) for n in range(len(self._turns), len(turns))]
        if new or len(self._rows) < len(saved.rows):
            store.append(new, saved.rows[len(self._rows) :], head)
        elif _is_same_state(head, self._head):  # saved keys and values stay valid
            store.check_place()
        else:
            store.save_head(head)
        self._turns, self._rows, self._head = turns, saved.rows, head

    def save_kv(self) -> bool:
        """Save the session's keys and values, if the setting `save_kv` allows it.

        With the value `auto`, keys and values are saved only if they take at most `KV_BYTES`.
        Returns whether they were saved.
        """
        mode = self._session.profile.save_kv
        if self._store is None or mode == "off" or not self._session.seen:
            return False
        limit = KV_BYTES if mode == "auto" else None
        rows = self._session.rows(limit)
        if rows is None:
            self._store.drop_kv()
            return False
        stamp = secrets.token_hex(8)
        received, saved = self._session.attention(rows.positions), self._session.save()
        tensors = row_tensors(rows) | attention_tensors(received) | state_tensors(saved.state)
        self._store.save_kv(tensors, stamp)
        head = self._head_of(saved, stamp)
        self._store.save_head(head)
        self._head = head
        return True

    def close(self) -> None:
        """Save the session, including its keys and values, and close the file."""
        try:
            if self._epoch == self._session.epoch:
                self.update()
                self.save_kv()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the session's file without saving anything more."""
        if self._store is not None:
            self._store.close()

    def _head_of(self, saved: EngineState, stamp: str = "") -> Head:
        head = saved_head(saved, self._session, stamp)
        return replace(head, fields=head.fields | self.more)

    def _new(self) -> SessionStore:
        folder = paths.private_dir(self._folder)
        return SessionStore.create(folder, _meta(self._session.model, self._family))

    def _truncate(
        self, store: SessionStore, turns_now: Sequence[_TurnFields], saved: EngineState
    ) -> None:
        """Remove from the file the turns and rows that the session no longer has.

        `turns_now` are the session's present turns; `saved` is the engine's present state.
        """
        seen = _common_length(self._rows, saved.rows)
        same = [old == new for old, new in zip(self._turns, turns_now, strict=False)]
        turns = same.index(False) if False in same else len(same)
        if (turns, seen) == (len(self._turns), len(self._rows)):
            return
        held = saved.held[saved.held < seen]
        fields = self._head_of(saved).fields
        for name in ("pinned", "recalled"):
            fields[name] = [position for position in fields[name] if position < seen]
        fields["pins"] = [part for part in fields["pins"] if part[0] < turns]
        fields["conversation"] |= {"in_round": False, "pending_ids": []}
        store.drop_kv()
        store.truncate(turns, seen, Head(seen, held, None, fields))
        self._turns, self._rows, self._head = self._turns[:turns], self._rows[:seen], None


def resume_session(session: Session, store: SessionStore, *, rebuild: bool = False) -> None:
    """Load the conversation that is saved in `store` into `session`, which is new and empty.

    If `rebuild` is true, the saved state is ignored, and the model reads the saved text again.
    Raises SessionError if no turn is saved. Unless `rebuild` is true, also raises SessionError if
    the session was saved with another model or dtype.
    """
    head = store.head()
    if head is None:
        raise SessionError(f"session {store.id} holds no message yet")
    if rebuild:
        read_again(session, saved_turns(store, head), saved_pins(head))
        _rewrite(store, session, _meta(session.model, store.meta.get("family", "")))
        return
    check_model(store, session.model)
    saved, conversation, stamp = decode_state(store, head, session.model.vocab_size)
    rows, received, state = _kept(store, stamp, session.model, head.seen)
    session.load(replace(saved, state=state), conversation, rows, received)


def _kept(
    store: SessionStore, stamp: str, model: LoadedModel, seen: int
) -> tuple[KeyValues | None, AttentionCheckpoint | None, CacheState]:
    """Read a session's saved keys and values, saved attention and saved recurrent state.

    `stamp` identifies the saved tensors; `seen` is the session's number of tokens. If no keys and
    values that fit the model are saved, returns None, None and an empty tuple. If only the
    attention is missing or does not fit, None is returned in its place. If only the recurrent state
    does not fit, an empty tuple is returned in its place.
    """
    tensors = store.load_kv(stamp)
    if tensors is None:
        return None, None, ()
    cache = model.new_cache(1)
    model.forward([0], cache)
    cache.commit(1)
    try:
        state = pop_state(tensors, cache.state)
        received, rows = pop_attention(tensors), pop_rows(tensors)
    except (LookupError, TypeError):  # some are missing, or of a type that numpy lacks
        return None, None, ()
    one = cache.first_written(torch.arange(1), np.arange(1))
    if not rows_fit(rows, one, seen):
        return None, None, ()
    return rows, received if received is None or attention_fits(received, seen) else None, state


def _meta(model: LoadedModel, family: str) -> dict[str, Any]:
    """The facts to save about a session: model, dtype, versions, and `Autosave.family`, if any."""
    return {
        **({"family": family} if family else {}),
        "model": model.name,
        "fingerprint": fingerprint(model),
        "dtype": model.precision,
        "sirchat": __version__,
        "torch": torch.__version__,
    }


def check_model(store: SessionStore, model: LoadedModel) -> None:
    """Raise SessionError if a saved session was made with another model or dtype than `model`.

    The dtype is checked before the fingerprint, because the fingerprint depends on the dtype.
    """
    meta = {name: store.meta.get(name, "?") for name in ("model", "fingerprint", "dtype")}
    dtype = model.precision
    again = f"sirchat --resume {store.id}"
    rebuild = "or --rebuild, to let the loaded model read the chat again"
    kind, _, packed = meta["dtype"].partition(" ")
    how = " and the same --quantize" if packed or " " in dtype else ""
    if meta["dtype"] != dtype and meta["model"] == model.name:
        raise SessionError(
            f"session {store.id} has dtype {meta['dtype']}, but the model is loaded as {dtype}",
            hint=f"to continue this chat: {again} --dtype {kind}{how}; {rebuild}",
        )
    if meta["fingerprint"] != fingerprint(model):
        raise SessionError(
            f"session {store.id} was made with model {meta['model']}, not with this {model.name}",
            hint=f"to continue this chat: {again} --model {meta['model']}; {rebuild}",
        )


def _rewrite(
    store: SessionStore,
    session: Session,
    meta: dict[str, Any] | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Replace the contents of a session's file by the present contents of `session`.

    Nothing of the old contents stays in any file. The head, which is the record of the session's
    state, also gets the values `more`. `meta`, if not None, replaces the saved facts about the
    session.
    """
    saved = session.save()
    turns = [SavedTurn(n, *_turn_fields(turn)) for n, turn in enumerate(session.turns)]
    head = saved_head(saved, session)
    store.replace(turns, saved.rows, replace(head, fields={**head.fields, **more}), meta)


def _is_same_state(head: Head, other: Head | None) -> bool:
    """Whether two heads record the same state of a session, apart from their stamps.

    A head is the record of a session's state after its last turn. Its stamp identifies the saved
    keys and values.
    """
    if other is None or head.seen != other.seen:
        return False
    logits, others = (b"" if x.logits is None else x.logits.tobytes() for x in (head, other))
    fields = [json.dumps({**x.fields, "kv": ""}, sort_keys=True) for x in (head, other)]
    return fields[0] == fields[1] and logits == others and np.array_equal(head.held, other.held)


def _common_length(rows: NDArray[np.void], other: NDArray[np.void]) -> int:
    """Count the rows, one per token, that are equal in two ledgers, up to the first difference.

    Rows are equal if they have the same values in `_COLUMNS`.
    """
    count = min(len(rows), len(other))
    differs = np.zeros(count, bool)
    for name in _COLUMNS:
        a, b = rows[name][:count], other[name][:count]
        differs |= (a != b) & ~((a != a) & (b != b))  # two NaNs count as equal
    return int(differs.argmax()) if differs.any() else count


def _turn_fields(turn: Turn) -> _TurnFields:
    return turn.role, turn.text, turn.finish
