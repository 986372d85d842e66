"""The file of a saved session: its turns, one ledger row per token, and the state after all turns.

One transaction writes a turn's text, its rows and the new state (the head); undo removes all three.
Deleted data is overwritten. The file is an SQLite database, locked while it is open.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from sirchat.errors import SessionError
from sirchat.saved.database import (
    APPLICATION,
    FORMAT,
    SUFFIX,
    TABLES,
    as_damage_errors,
    as_session_errors,
    check_contents,
    check_format,
    format_of,
    locked,
    make_durable,
    new_file,
    put_sums,
    refuse_missing,
    remove_holder_file,
    require,
    sync,
    upgrade,
)
from sirchat.saved.index import remove_from_index
from sirchat.saved.keys_values import KeysAndValues
from sirchat.saved.segments import SavedSegments
from sirchat.text.transcript import CLOSE, OPEN, RoleName, split_tagged

_ROLES = get_args(RoleName)
ALL = 2**62  # larger than every index, so that no turn or row is changed

# A reply with reasoning, in which the end of each `think>` is escaped.
_TAGGED = re.compile(f"{OPEN}(.*?){CLOSE}(.*)", re.DOTALL)
_TAG, _ESCAPED_TAG = re.compile(r"think(\\*)>"), re.compile(r"think\\(\\*)>")


@dataclass(frozen=True, slots=True)
class SavedTurn:
    """A saved message."""

    index: int  # from 0
    role: str
    text: str  # without reasoning
    finish: str  # the reason why it ended
    thinking: str = ""  # the reasoning of a reply
    time: int | None = field(default=None, compare=False)  # UNIX seconds when it began, if known


# The tokens of a passage, by stream position, and its turn and role, as recall has them.
PASSAGE = np.dtype([("start", "<i8"), ("end", "<i8"), ("turn", "<i4"), ("role", "i1")])


@dataclass(frozen=True, slots=True, eq=False)
class SavedPassages:
    """The passages of a chat in stream order: `rows` [n] of `PASSAGE`, and `vectors` [n, D].

    A vector that is not known is NaN.
    """

    rows: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, PASSAGE))
    vectors: NDArray[np.float16] = field(default_factory=lambda: np.zeros((0, 0), np.float16))


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The head of a session's file: the record of the session's state after its last turn."""

    seen: int  # tokens of the stream so far; each has one ledger row
    held: NDArray[np.int64]  # [n], stream positions of the tokens in the cache, ascending
    logits: NDArray[np.float32] | None  # [vocabulary], raw, after the last token
    fields: dict[str, Any]  # all other values of the state, as JSON values


_NO_PASSAGES = SavedPassages()


class SessionStore:
    """The file of one saved session, open and locked; use `create` or `open` to make a store.

    Once a method that writes has returned, a power loss can't undo the change. If the file can't be
    written, it raises SessionError, and nothing is changed. `kv` is the file of keys and values,
    `segments` are those of evicted tokens.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self.kv = KeysAndValues(path)
        self.segments = SavedSegments(path)
        with as_damage_errors(path):
            self._file = path.stat()
            self.meta: dict[str, Any] = dict(self._about("meta"))
            require(all(isinstance(value, str) for value in self.meta.values()))
            self.name = str(self._about("name") or "")
            self.created = float(self._about("created") or 0)

    @classmethod
    def create(cls, folder: Path, meta: Mapping[str, Any]) -> Self:
        """Create the file of a new session in `folder`.

        `meta` are facts as JSON values, without text of the chat: they are not erased. Raises
        SessionError if no file can be created.
        """
        about = {"meta": dict(meta), "created": time.time()}
        values = [(name, json.dumps(value)) for name, value in about.items()]
        path = new_file(folder, SUFFIX)
        try:
            with as_session_errors(path), locked(path) as connection:
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

        Raises SessionError if it is missing, no session, of a newer sirchat, in use, or damaged.
        """
        refuse_missing(path)
        with as_damage_errors(path), locked(path) as connection:
            check_format(connection, path)
            check_contents(connection, path)
            make_durable(connection)
            store = cls(path, connection)
            store.kv.drop_unfinished()
            store._finish_erasing()
            return store

    @property
    def id(self) -> str:
        """The minute in which the session was created, and four random letters."""
        return self.path.stem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and release its lock; a second call does nothing."""
        with suppress(sqlite3.Error):  # an empty journal left behind does no harm
            self._connection.execute("PRAGMA journal_mode=DELETE")
            remove_holder_file(self.path)
        self._connection.close()

    def check_place(self) -> None:
        """Raise SessionError if the file was removed: later writes to it would be lost."""
        try:
            is_there = os.path.samestat(self._file, self.path.stat())
        except OSError:
            is_there = False
        if not is_there:
            raise SessionError(f"{self.path} was removed while it was in use")

    def append(
        self,
        turns: Sequence[SavedTurn],
        rows: NDArray[Any],
        head: Head,
        passages: SavedPassages = _NO_PASSAGES,
        kept: int = ALL,
    ) -> None:
        """Add turns, ledger rows [k] of the k tokens read since the last call, passages and a head.

        Of the saved passages only those that begin before stream position `kept` stay.
        Saved rows never change: what can change, such as which rows are held, is in the head.
        """
        self._add_columns(rows)
        first = min((turn.index for turn in turns), default=ALL)
        # A check sum goes on after what is saved, so where passages go, all are summed anew.
        passage = int(passages.rows["start"].min(initial=ALL)) if kept == ALL else 0
        with self._transaction(first, head.seen - len(rows), passage):
            seen = self._count_rows()
            _check_count(rows, head.seen - seen)
            self._put_turns(turns)
            self._put_rows(seen, rows)
            self._connection.execute("DELETE FROM passages WHERE start >= ?", (kept,))
            self._put_passages(passages)
            self._put_head(head)

    def save_state(self, head: Head) -> None:
        """Replace the head, which has the state, and nothing else.

        Raises ValueError if tokens were read since ledger rows were last saved.
        """
        with self._transaction(ALL, ALL, ALL):
            if head.seen != self._count_rows():
                raise ValueError(
                    f"the state has {head.seen} tokens, but {self._count_rows()} rows are saved"
                )
            self._put_head(head)

    def rename(self, name: str) -> None:
        """Set the user's name for the session; an empty text removes it."""
        with self._transaction(ALL, ALL, ALL):
            self._put_about("name", name)
        self.name = name
        remove_from_index(self.path)

    def branch(self, name: str, origin: str) -> None:
        """Mark this copy of the session `origin` (an id) as a branch called `name`."""
        meta = {"family": origin, **self.meta}
        with self._transaction(ALL, ALL, ALL):
            for key, value in (("meta", meta), ("name", name), ("created", time.time())):
                self._put_about(key, value)
        self.meta, self.name = meta, name

    def turns(self) -> list[SavedTurn]:
        with as_damage_errors(self.path):
            column = "time" if format_of(self._connection) >= 3 else "NULL"
            query = f"SELECT turn, role, text, finish, {column} FROM turns ORDER BY turn"
            records = self._all(query)
            for number, (index, role, text, finish, begun) in enumerate(records):
                require(index == number and role in _ROLES)
                require(isinstance(text, str) and isinstance(finish, str))
                require(begun is None or isinstance(begun, int))  # by a clock that may be wrong
            return [_turn(*record) for record in records]

    def rows(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The ledger rows [seen] as an array of `dtype`, whose last fields, if not saved, are NaN.

        Raises SessionError if the saved rows have other fields.
        """
        with as_damage_errors(self.path):
            saved = self._saved_fields(dtype)
            parts = self._all("SELECT data FROM rows ORDER BY start")
            rows = np.frombuffer(b"".join(data for (data,) in parts), saved)
            _check_count(rows, self._count_rows())
            return _with_columns(rows, dtype)

    def passages(self) -> SavedPassages:
        """The passages of the chat; none in a file of an older format."""
        if format_of(self._connection) < 4:
            return _NO_PASSAGES
        with as_damage_errors(self.path):
            query = "SELECT start, end, turn, role, vector FROM passages ORDER BY start"
            records, seen = self._all(query), self._count_rows()
            rows = np.array([tuple(record[:4]) for record in records], PASSAGE)
            known = [np.frombuffer(data or b"", "<f2") for *_, data in records]
            size = max((len(one) for one in known), default=0)
            vectors = np.full((len(rows), size), np.nan, np.float16)
            for at, one in enumerate(known):
                require(len(one) in (0, size))
                vectors[at] = one if len(one) else np.nan
            bounds = rows[["start", "end"]].tolist()
            require(all(0 <= start < end <= seen for start, end in bounds))
            require(bool((rows["start"][1:] >= rows["end"][:-1]).all()))
            require(not np.isinf(vectors).any())
            return SavedPassages(rows, vectors)

    def head(self) -> Head | None:
        """The session's state after its last turn; None for a session without turns."""
        with as_damage_errors(self.path):
            records = self._all("SELECT seen, held, logits, fields FROM head LIMIT 1")
            return _head(*records[0]) if records else None

    def truncate(self, turns: int, seen: int, head: Head) -> None:
        """Delete all turns and rows from an index on; `head` is the state after those that stay."""
        self.segments.truncate(seen)
        with self._transaction() as connection:
            if not head.seen == seen <= self._count_rows():
                count = self._count_rows()
                raise ValueError(
                    f"can't cut {count} tokens to {seen}: the new state has {head.seen}"
                )
            connection.execute("DELETE FROM turns WHERE turn >= ?", (turns,))
            connection.execute("DELETE FROM rows WHERE start >= ?", (seen,))
            connection.execute("DELETE FROM passages WHERE end > ?", (seen,))
            self._cut_last_rows(seen)
            self._put_head(head)
        remove_from_index(self.path)

    def replace(
        self,
        turns: Sequence[SavedTurn],
        rows: NDArray[Any],
        head: Head,
        meta: Mapping[str, Any] | None = None,
        passages: SavedPassages = _NO_PASSAGES,
    ) -> None:
        """Replace all contents, and `meta` if given; the old contents stay in no file.

        Keys and values, which were computed from the old text, are deleted, too.
        """
        _check_count(rows, head.seen)
        self._add_columns(rows)
        self.kv.drop()
        self.segments.drop()
        with self._transaction() as connection:
            for table in ("turns", "rows", "head", "passages"):
                connection.execute(f"DELETE FROM {table}")
            self._put_turns(turns)
            self._put_rows(0, rows)
            self._put_passages(passages)
            self._put_head(head)
            self._put_about("erasing", True)
            if meta is not None:
                self._put_about("meta", dict(meta))
                self.meta = dict(meta)
        self._finish_erasing()
        remove_from_index(self.path)

    @contextmanager
    def _transaction(
        self, turns: int = 0, rows: int = 0, passages: int = 0
    ) -> Iterator[sqlite3.Connection]:
        """A transaction, rolled back on an error; it may change only what `put_sums` says."""
        self.check_place()
        with as_session_errors(self.path), self._connection:
            self._connection.execute("BEGIN")
            if upgrade(self._connection):
                turns = rows = passages = 0
            yield self._connection
            put_sums(self._connection, turns, rows, passages)

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def _count_rows(self) -> int:
        """The number of ledger rows (one per token) in the file."""
        records = self._all("SELECT seen FROM head")
        return int(records[0][0]) if records else 0

    def _put_turns(self, turns: Sequence[SavedTurn]) -> None:
        values = [(turn.index, turn.role, _written(turn), turn.finish, turn.time) for turn in turns]
        self._connection.executemany("INSERT INTO turns VALUES (?, ?, ?, ?, ?)", values)

    def _put_rows(self, start: int, rows: NDArray[Any]) -> None:
        if not len(rows):
            return
        if self._about("row") is None:
            self._put_about("row", _packed(rows.dtype).descr)
        data = rows.astype(_packed(rows.dtype)).tobytes()
        self._connection.execute("INSERT INTO rows VALUES (?, ?)", (start, data))

    def _put_passages(self, passages: SavedPassages) -> None:
        values = [
            (*row, None if np.isnan(vector).any() else vector.astype("<f2").tobytes())
            for row, vector in zip(passages.rows.tolist(), passages.vectors, strict=True)
        ]
        self._connection.executemany("INSERT INTO passages VALUES (?, ?, ?, ?, ?)", values)

    def _add_columns(self, new: NDArray[Any]) -> None:
        """Give saved rows of an older sirchat the fields that they lack, as NaN."""
        if not len(new) or (saved := self._saved_fields(new.dtype)) == _packed(new.dtype):
            return
        with self._transaction() as connection:
            for start, data in self._all("SELECT start, data FROM rows"):
                rows = _with_columns(np.frombuffer(data, saved), _packed(new.dtype))
                connection.execute(
                    "UPDATE rows SET data = ? WHERE start = ?", (rows.tobytes(), start)
                )
            self._put_about("row", _packed(new.dtype).descr)

    def _put_head(self, head: Head) -> None:
        held = np.asarray(head.held, "<i8").tobytes()
        logits = None if head.logits is None else np.asarray(head.logits, "<f4").tobytes()
        values = (head.seen, held, logits, json.dumps(head.fields))
        self._connection.execute("INSERT OR REPLACE INTO head VALUES (0, ?, ?, ?, ?)", values)

    def _cut_last_rows(self, seen: int) -> None:
        """Shorten the last block of rows to the positions below `seen`."""
        for start, data in self._all("SELECT start, data FROM rows ORDER BY start DESC LIMIT 1"):
            size = np.dtype([(name, kind) for name, kind in self._about("row")]).itemsize
            kept = data[: (seen - start) * size]
            self._connection.execute("UPDATE rows SET data = ? WHERE start = ?", (kept, start))

    def _about(self, name: str) -> Any:
        records = self._all("SELECT value FROM about WHERE name = ?", name)
        return json.loads(records[0][0]) if records else None

    def _put_about(self, name: str, value: object) -> None:
        values = (name, json.dumps(value))
        self._connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", values)

    def _saved_fields(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of the saved rows: that of `dtype`, maybe without floats at its end.

        Raises SessionError if it has other fields.
        """
        fields = [list(field) for field in _packed(dtype).descr]  # as JSON has them
        written = self._about("row") or fields
        missing = fields[len(written) :]
        if [*written, *missing] != fields or not all(kind[1] == "f" for _, kind in missing):
            raise SessionError(
                f"{self.path} has ledger rows with fields that this sirchat does not know",
                hint="open the chat with the version of sirchat that wrote it",
            )
        return np.dtype([(name, kind) for name, kind in written])

    def _finish_erasing(self) -> None:
        """Rewrite the file after text was deleted; a mark has this done even after a crash."""
        with as_session_errors(self.path):
            if self._about("erasing"):
                self._connection.execute("VACUUM")
                self._connection.execute("DELETE FROM about WHERE name = 'erasing'")


def _turn(index: int, role: str, written: str, finish: str, begun: int | None) -> SavedTurn:
    """The turn with the saved text `written`; that of older versions has tags as models wrote."""
    if role != "assistant":
        return SavedTurn(index, role, written, finish, time=begun)
    match = _TAGGED.fullmatch(written)
    thinking, text = match.groups() if match else split_tagged(written)
    return SavedTurn(index, role, text, finish, _ESCAPED_TAG.sub(r"think\1>", thinking), begun)


def _written(turn: SavedTurn) -> str:
    """The text to save for a turn: its reasoning, if any, in tags that it does not contain."""
    if turn.role != "assistant" or (not turn.thinking and split_tagged(turn.text)[1] == turn.text):
        return turn.text
    thinking = _TAG.sub(r"think\\\1>", turn.thinking)
    return f"{OPEN}{thinking}{CLOSE}{turn.text}"


def _check_count(rows: NDArray[Any], expected: int) -> None:
    if len(rows) != expected:
        raise ValueError(f"{len(rows)} rows for {expected} tokens")


def _packed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Little-endian and without padding, which would write arbitrary memory to the file."""
    return np.dtype([(name, dtype[name].newbyteorder("<")) for name in dtype.names or ()])


def _with_columns(rows: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert ledger rows to `dtype`; fields that they lack become NaN."""
    converted = np.zeros(len(rows), dtype)
    for name in dtype.names or ():
        converted[name] = rows[name] if name in (rows.dtype.names or ()) else np.nan
    return converted


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
