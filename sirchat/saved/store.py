"""The file of a saved session: its turns, one ledger row per token, and the state after all turns.

The file is an SQLite database. One transaction writes a turn's text, its rows and the new state
(the head); undo removes all three. If the writing process is killed, the file still has the last
complete turn. Deleted data is overwritten.

A store holds an exclusive lock on its file until it is closed or its process dies. `database`
describes the durability of commits.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from sirchat.errors import SessionError
from sirchat.saved.database import (
    APPLICATION,
    FORMAT,
    SUFFIX,
    TABLES,
    check_format,
    check_sums,
    check_whole,
    decoding,
    explained,
    locked,
    make_durable,
    new_file,
    put_sums,
    refuse_missing,
    require,
    sync,
    unsign,
)
from sirchat.saved.index import remove_from_index
from sirchat.saved.keys_values import KeysAndValues
from sirchat.text.transcript import RoleName

if TYPE_CHECKING:  # a list of sessions needs no torch
    from torch import Tensor

_ROLES = get_args(RoleName)
_NONE = 2**62  # larger than every index, so that no turn or row is changed


@dataclass(frozen=True, slots=True)
class SavedTurn:
    """A saved message: `index` is its number, from 0, and `finish` is the reason why it ended."""

    index: int
    role: str
    text: str
    finish: str


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The head of a session's file: the record of the session's state after its last turn.

    Args:
        seen: number of tokens of the stream so far; each has one ledger row.
        held: stream positions [n] of the n tokens in the cache, ascending.
        logits: raw logits [vocabulary] after the last token; None if they are not known.
        fields: all other values of the session's state, as JSON values by name.
    """

    seen: int
    held: NDArray[np.int64]
    logits: NDArray[np.float32] | None
    fields: dict[str, Any]


class SessionStore:
    """The file of one saved session, open and locked; use `create` or `open` to make a store.

    Once a method that writes has returned, a power loss can't undo the change. If the file can't be
    written, such a method raises SessionError, and nothing is changed.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._kv = KeysAndValues(path)
        with decoding(path):
            self._file = path.stat()
            self.meta: dict[str, Any] = dict(self._about("meta"))
            require(all(isinstance(value, str) for value in self.meta.values()))
            self.name = str(self._about("name") or "")

    @classmethod
    def create(cls, folder: Path, meta: Mapping[str, Any]) -> Self:
        """Create the file of a new session in `folder`; returns the open store.

        `meta` are facts about the session, as JSON values by name. They stay in the file until
        `replace` changes them, so they must not contain text of the conversation. Raises
        SessionError if no file can be created.
        """
        about = {"meta": dict(meta), "created": time.time()}
        values = [(name, json.dumps(value)) for name, value in about.items()]
        path = new_file(folder, SUFFIX)
        try:
            with explained(path), locked(path) as connection:
                connection.execute(f"PRAGMA application_id={APPLICATION}")
                connection.execute(f"PRAGMA user_version={FORMAT}")
                for table in TABLES:
                    connection.execute(table)
                connection.executemany("INSERT INTO about VALUES (?, ?)", values)
                put_sums(connection)
                make_durable(connection)
                sync(folder)
                return cls(path, connection)
        except SessionError:
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a saved session; a change that a crash interrupted is completed or undone.

        Raises SessionError for a file that is missing, not a session, of a newer sirchat, in use by
        another process, or damaged.
        """
        refuse_missing(path)
        with decoding(path), locked(path) as connection:
            check_format(connection, path)
            check_whole(connection, path)
            check_sums(connection, path)
            make_durable(connection)
            store = cls(path, connection)
            store._kv.drop_unfinished()
            store._finish_erasing()
            return store

    @property
    def id(self) -> str:
        """The session's id: the minute in which it was created, and four random letters."""
        return self.path.stem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and release its lock; a second call does nothing."""
        with suppress(sqlite3.Error):  # an empty journal left behind does no harm
            self._connection.execute("PRAGMA journal_mode=DELETE")
            unsign(self.path)
        self._connection.close()

    def check_place(self) -> None:
        """Raise SessionError if the file was removed, because later writes to it would be lost."""
        try:
            is_there = os.path.samestat(self._file, self.path.stat())
        except OSError:
            is_there = False
        if not is_there:
            raise SessionError(f"{self.path} was removed while it was in use")

    def append(self, turns: Sequence[SavedTurn], rows: NDArray[Any], head: Head) -> None:
        """Add turns, one ledger row for each of the k tokens read since the last call, and a head.

        `rows` [k] is a structured array. Saved rows never change later: all values that can change,
        such as which rows are held, are in the head, which is replaced.
        """
        self._add_columns(rows)
        first = min((turn.index for turn in turns), default=_NONE)
        with self._transaction(first, head.seen - len(rows)):
            seen = self._seen()
            _check_count(rows, head.seen - seen)
            self._put_turns(turns)
            self._put_rows(seen, rows)
            self._put_head(head)

    def save_head(self, head: Head) -> None:
        """Replace only the saved head, which is the session's state without its tokens.

        Raises ValueError if tokens have been read since the session was saved.
        """
        with self._transaction(_NONE, _NONE):
            if head.seen != self._seen():
                raise ValueError(
                    f"the state has {head.seen} tokens, but {self._seen()} rows are saved"
                )
            self._put_head(head)

    def rename(self, name: str) -> None:
        """Set the name that the user gives the session; an empty text removes the name."""
        with self._transaction(_NONE, _NONE) as connection:
            connection.execute("DELETE FROM about WHERE name = 'name'")
            if name:
                self._put_about("name", name)
        self.name = name
        remove_from_index(self.path)

    def branch(self, name: str, origin: str) -> None:
        """Mark this session, a copy of the session `origin` (an id), as a branch called `name`."""
        meta = {"family": origin, **self.meta}
        with self._transaction(_NONE, _NONE):
            for key, value in (("meta", meta), ("name", name), ("created", time.time())):
                self._put_about(key, value)
        self.meta, self.name = meta, name

    def turns(self) -> list[SavedTurn]:
        """Read all turns (messages) of the session, in order."""
        with decoding(self.path):
            found = self._all("SELECT turn, role, text, finish FROM turns ORDER BY turn")
            for number, (index, role, *texts) in enumerate(found):
                require(index == number and role in _ROLES and all(map(_is_text, texts)))
            return [
                SavedTurn(index=index, role=role, text=text, finish=finish)
                for index, role, text, finish in found
            ]

    def rows(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Read the ledger rows [seen], one for each token of the stream, as an array of `dtype`.

        A file of an older version of sirchat may lack the last fields; their values are then NaN.
        Raises SessionError if the saved rows have other fields than `dtype`.
        """
        with decoding(self.path):
            saved = self._saved_fields(dtype)
            parts = self._all("SELECT data FROM rows ORDER BY start")
            rows = np.frombuffer(b"".join(data for (data,) in parts), saved)
            _check_count(rows, self._seen())
            return _with_columns(rows, dtype)

    def head(self) -> Head | None:
        """Read the session's state after its last turn; None for a session without turns."""
        with decoding(self.path):
            found = self._all("SELECT seen, held, logits, fields FROM head LIMIT 1")
            return _head(*found[0]) if found else None

    def truncate(self, turns: int, seen: int, head: Head) -> None:
        """Delete every turn from index `turns` on and every row from position `seen` on.

        `head` replaces the saved head; it is the session's state after the last turn that stays.
        """
        with self._transaction() as connection:
            if not head.seen == seen <= self._seen():
                raise ValueError(
                    f"can't cut {self._seen()} tokens to {seen}: the new state has {head.seen}"
                )
            connection.execute("DELETE FROM turns WHERE turn >= ?", (turns,))
            connection.execute("DELETE FROM rows WHERE start >= ?", (seen,))
            self._cut_last_rows(seen)
            self._put_head(head)
        remove_from_index(self.path)

    def replace(
        self,
        turns: Sequence[SavedTurn],
        rows: NDArray[Any],
        head: Head,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Replace all contents of the file; nothing of the old contents stays in any file.

        Saved keys and values, which were computed from the old text, are deleted, too. `meta`, if
        not None, replaces the facts given to `create`.
        """
        _check_count(rows, head.seen)
        self._add_columns(rows)
        self.drop_kv()
        with self._transaction() as connection:
            for table in ("turns", "rows", "head"):
                connection.execute(f"DELETE FROM {table}")
            self._put_turns(turns)
            self._put_rows(0, rows)
            self._put_head(head)
            self._put_about("erasing", True)
            if meta is not None:
                self._put_about("meta", dict(meta))
                self.meta = dict(meta)
        self._finish_erasing()
        remove_from_index(self.path)

    def save_kv(self, tensors: Mapping[str, Tensor], stamp: str) -> None:
        """Save keys and values in a file beside the session's file; either all are saved or none.

        `stamp` identifies the state of the session to which they belong. No two tensors may share
        memory.
        """
        self._kv.save(tensors, stamp)

    def load_kv(self, stamp: str) -> dict[str, Tensor] | None:
        """Read the keys and values saved with this `stamp`; None if they are missing or damaged."""
        return self._kv.load(stamp)

    def drop_kv(self) -> None:
        """Delete the saved keys and values."""
        self._kv.drop()

    @contextmanager
    def _transaction(self, turns: int = 0, rows: int = 0) -> Iterator[sqlite3.Connection]:
        """Context manager: a transaction, committed at the end and rolled back on an error.

        The block may change only turns from index `turns` on, and rows from position `rows` on.
        """
        self.check_place()
        with explained(self.path), self._connection:
            self._connection.execute("BEGIN")
            yield self._connection
            put_sums(self._connection, turns, rows)
            self._connection.execute(f"PRAGMA user_version={FORMAT}")

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def _seen(self) -> int:
        """Number of ledger rows (one per token) that the file has."""
        found = self._all("SELECT seen FROM head")
        return int(found[0][0]) if found else 0

    def _put_turns(self, turns: Sequence[SavedTurn]) -> None:
        values = [(turn.index, turn.role, turn.text, turn.finish) for turn in turns]
        self._connection.executemany("INSERT INTO turns VALUES (?, ?, ?, ?)", values)

    def _put_rows(self, start: int, rows: NDArray[Any]) -> None:
        if not len(rows):
            return
        if self._about("row") is None:
            self._put_about("row", _fields(rows.dtype))
        data = rows.astype(_packed(rows.dtype)).tobytes()
        self._connection.execute("INSERT INTO rows VALUES (?, ?)", (start, data))

    def _add_columns(self, new: NDArray[Any]) -> None:
        """Give the saved ledger rows all fields that the rows `new` have; added values are NaN.

        Fields are missing if an older version of sirchat wrote the saved rows.
        """
        if not len(new) or (saved := self._saved_fields(new.dtype)) == _packed(new.dtype):
            return
        with self._transaction() as connection:
            for start, data in self._all("SELECT start, data FROM rows"):
                rows = _with_columns(np.frombuffer(data, saved), _packed(new.dtype))
                connection.execute(
                    "UPDATE rows SET data = ? WHERE start = ?", (rows.tobytes(), start)
                )
            self._put_about("row", _fields(new.dtype))

    def _put_head(self, head: Head) -> None:
        held = np.asarray(head.held, "<i8").tobytes()
        logits = None if head.logits is None else np.asarray(head.logits, "<f4").tobytes()
        values = (head.seen, held, logits, json.dumps(head.fields))
        self._connection.execute("INSERT OR REPLACE INTO head VALUES (0, ?, ?, ?, ?)", values)

    def _cut_last_rows(self, seen: int) -> None:
        """Shorten the last block of saved rows, so that it has only positions below `seen`."""
        for start, data in self._all("SELECT start, data FROM rows ORDER BY start DESC LIMIT 1"):
            kept = data[: (seen - start) * _dtype(self._about("row")).itemsize]
            self._connection.execute("UPDATE rows SET data = ? WHERE start = ?", (kept, start))

    def _about(self, name: str) -> Any:
        found = self._all("SELECT value FROM about WHERE name = ?", name)
        return json.loads(found[0][0]) if found else None

    def _put_about(self, name: str, value: object) -> None:
        values = (name, json.dumps(value))
        self._connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", values)

    def _saved_fields(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of the saved ledger rows.

        Its fields are those of `dtype`; some floats at the end may be missing. Raises SessionError
        if the saved rows have any other fields.
        """
        fields = _fields(dtype)
        written = self._about("row") or fields
        missing = fields[len(written) :]
        if [*written, *missing] != fields or not all(kind[1] == "f" for _, kind in missing):
            raise SessionError(
                f"{self.path} has ledger rows with fields that this sirchat does not know",
                hint="open the chat with the version of sirchat that wrote it",
            )
        return _dtype(written)

    def _finish_erasing(self) -> None:
        """Rewrite the file after text was deleted, so that no free space in it has this text.

        The transaction that deletes text also sets a mark, so that the file is rewritten even after
        a crash.
        """
        with explained(self.path):
            if self._about("erasing"):
                self._connection.execute("VACUUM")
                self._connection.execute("DELETE FROM about WHERE name = 'erasing'")


def _check_count(rows: NDArray[Any], expected: int) -> None:
    if len(rows) != expected:
        raise ValueError(f"{len(rows)} rows for {expected} tokens")


def _packed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype with the fields of `dtype`, little-endian and without padding between them.

    With padding, arbitrary contents of the memory would be written to the file.
    """
    return np.dtype([(name, dtype[name].newbyteorder("<")) for name in dtype.names or ()])


def _fields(dtype: np.dtype[Any]) -> list[list[str]]:
    """Name and type of each field of `dtype`, as lists, which a session's file has as JSON."""
    return [[name, dtype[name].newbyteorder("<").str] for name in dtype.names or ()]


def _dtype(fields: list[list[str]]) -> np.dtype[Any]:
    """The dtype, without padding, that has these fields; each is given by its name and type."""
    return np.dtype([(name, kind) for name, kind in fields])


def _with_columns(rows: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert ledger rows to `dtype`; fields that the rows do not have become NaN."""
    found = np.zeros(len(rows), dtype)
    for name in dtype.names or ():
        found[name] = rows[name] if name in (rows.dtype.names or ()) else np.nan
    return found


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _head(seen: int, held: bytes, logits: bytes | None, fields: str) -> Head:
    head = Head(
        seen=seen,
        held=np.frombuffer(held, "<i8").astype(np.int64),
        logits=None if logits is None else np.frombuffer(logits, "<f4").astype(np.float32),
        fields=json.loads(fields),
    )
    require(isinstance(seen, int) and isinstance(head.fields, dict))
    require(not len(head.held) or (head.held[0] >= 0 and head.held[-1] < seen))
    require(bool((head.held[1:] > head.held[:-1]).all()))
    # A model may rule out tokens by logits of minus infinity.
    require(head.logits is None or bool((head.logits < np.inf).all()))
    return head
