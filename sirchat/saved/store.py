"""The file of a saved session: its turns, one ledger row per token, and its current state.

One transaction writes a turn's text, its rows and the new state; undo removes all three. Deleted
data is overwritten. The file is an SQLite database, locked while it is open.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from sirchat.errors import DamagedSessionError, SessionError, SessionInUseError
from sirchat.saved.database import (
    APPLICATION_ID,
    FORMAT_VERSION,
    SUFFIX,
    TABLES,
    as_damage_errors,
    as_session_errors,
    check_contents,
    check_format,
    connect,
    create_session_file,
    insert_record,
    locked,
    make_durable,
    refuse_missing,
    require,
    sync,
)
from sirchat.saved.keys_values import KeysAndValues
from sirchat.text.transcript import RoleName

_ROLES = get_args(RoleName)
_NO_LIMIT = 2**62  # larger than every index
_ROWS_PER_RECORD = 1024  # at most: ledger rows in a record
_MAX_COPY_TRIES = 20  # to copy a session that is being written
_COPY_PAUSE_S = 0.05  # seconds between two tries


@dataclass(frozen=True, slots=True)
class SavedTurn:
    """A saved message: its index, and the fields of `chat.state.Turn`."""

    index: int  # from 0
    role: str
    text: str  # without reasoning
    finish: str  # the reason why it ended
    thinking: str = ""  # the reasoning of a reply
    time: int | None = field(default=None, compare=False)  # UNIX seconds when it began, if known
    is_summary: bool = False
    is_left_out: bool = False
    torn: tuple[str, ...] = ()


# The tokens of a passage, by stream position, and its turn and role, as recall has them.
PASSAGE = np.dtype([("start", "<i8"), ("end", "<i8"), ("turn", "<i4"), ("role", "i1")])


@dataclass(frozen=True, slots=True, eq=False)
class SavedPassages:
    """The passages of a chat, in stream order."""

    rows: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, PASSAGE))  # [n]
    # [n, D]; NaN for an unknown vector
    vectors: NDArray[np.float16] = field(default_factory=lambda: np.zeros((0, 0), np.float16))


@dataclass(frozen=True, slots=True, eq=False)
class StateRecord:
    """The state of a session after its last turn: the record in the table `head` of its file."""

    seen: int  # tokens of the stream so far; each has one ledger row
    held: NDArray[np.int64]  # [n], stream positions of the tokens in the cache, ascending
    logits: NDArray[np.float32] | None  # [vocabulary], raw, after the last token
    fields: dict[str, Any]  # all other values of the state, as JSON values
    # [n], `held` and the tokens that recall holds, to be written; None in a record that was read
    cached: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """A leading part of a session's file: all of it, or what a change leaves as it is."""

    turns: int = _NO_LIMIT  # number of turns
    rows: int = _NO_LIMIT  # number of ledger rows
    passages: int = _NO_LIMIT  # stream position at which the passages end
    held: int = _NO_LIMIT  # number of turns after which the file says which tokens were held


_EVERYTHING, _NO_PASSAGES = Extent(), SavedPassages()


class SessionStore:
    """The file of one saved session, open and locked; made by `create`, `open` or `read`.

    When a method that writes has returned, a power loss can't undo the change. After a SessionError
    the chat in the file is as before or after the change; its keys and values may be gone.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._connection = path, connection
        self.kv = KeysAndValues(path)
        with as_damage_errors(path):
            self._file = path.stat()
            self.meta: dict[str, Any] = dict(self._about_value("meta"))
            require(all(isinstance(value, str) for value in self.meta.values()))
            self.name = str(self._about_value("name") or "")
            self.created = float(self._about_value("created") or 0)

    @classmethod
    def create(cls, folder: Path, meta: Mapping[str, Any]) -> Self:
        """Create the file of a new session in `folder`; SessionError if that fails.

        `meta` are facts as JSON values. They are never erased, so no text of the chat may be in
        them.
        """
        about = {"meta": dict(meta), "created": time.time()}
        path = create_session_file(folder, SUFFIX)
        try:
            with as_session_errors(path), locked(path) as connection:
                connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
                for table in TABLES.values():
                    connection.execute(table)
                for name, value in about.items():
                    insert_record(connection, "about", name, json.dumps(value))
                make_durable(connection)
                sync(folder)
                return cls(path, connection)
        except SessionError:
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a saved session; a change that a crash interrupted is completed or undone.

        Raises SessionError if the file is missing, no session, of a newer sirchat, in use, or
        damaged.
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

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open a saved session only to read it; one in use is copied as it was last saved."""
        try:
            return cls.open(path)
        except SessionInUseError as error:
            refused = error
        for _ in range(_MAX_COPY_TRIES):
            copy = sqlite3.connect(":memory:", isolation_level=None)
            with (
                suppress(DamagedSessionError),
                as_damage_errors(path),
                closing(connect(path, "immutable=1")) as saved,
            ):
                before = _file_times(path)
                saved.backup(copy)
                if before and before == _file_times(path):
                    check_format(copy, path)
                    check_contents(copy, path)
                    return cls(path, copy)
            copy.close()
            time.sleep(_COPY_PAUSE_S)  # the other process was writing
        raise refused

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
        self._connection.close()

    def check_not_removed(self) -> None:
        """Raise SessionError if the file was removed, because later writes would be lost."""
        try:
            is_there = os.path.samestat(self._file, self.path.stat())
        except OSError:
            is_there = False
        if not is_there:
            raise SessionError(f"{self.path} was removed while it was in use")

    @property
    def size(self) -> Extent:
        with as_session_errors(self.path):
            ((turns,),) = self._fetch("SELECT max(turn) + 1 FROM turns")
            ends = self._fetch("SELECT end FROM passages ORDER BY start DESC LIMIT 1")
            return Extent(turns or 0, self._count_rows(), ends[0][0] if ends else 0, turns or 0)

    def append(
        self,
        turns: Sequence[SavedTurn],
        rows: NDArray[Any],
        record: StateRecord,
        passages: SavedPassages = _NO_PASSAGES,
        extent: Extent = _EVERYTHING,
        flags: Mapping[int, int] = MappingProxyType({}),
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Delete all that is not in `extent`; then add turns, ledger rows [k] and passages.

        `record` replaces the old state, and `meta`, if given, the old one. `flags` are new flags of
        older rows, by position; nothing else of saved rows ever changes. If no turn stays, the old
        contents stay in no file.
        """
        size = self.size
        is_cut = extent.turns < size.turns or extent.rows < size.rows
        is_erased = is_cut and not extent.turns
        if is_cut:
            self.kv.drop()
        with self._transaction():
            self._write_flags(flags)
            self._write(turns, rows, record, passages, extent)
            if is_erased:
                self._write_about("erasing", True)
            if meta is not None:
                self._write_about("meta", dict(meta))
        self.meta = self.meta if meta is None else dict(meta)
        if is_erased:
            self._finish_erasing()

    def rename(self, name: str) -> None:
        """Set the user's name for the session; "" removes it."""
        with self._transaction():
            self._write_about("name", name)
        self.name = name

    def become_branch(self, name: str, origin: SessionStore) -> None:
        """Mark this copy of `origin` as a branch called `name`."""
        meta = {"family": origin.id, **self.meta}
        with self._transaction():
            for key, value in (("meta", meta), ("name", name), ("created", time.time())):
                self._write_about(key, value)
        self.meta, self.name = meta, name

    def copy_to(self, path: Path) -> None:
        with as_session_errors(path), closing(connect(path)) as copy:
            self._connection.backup(copy)

    def turns(self) -> list[SavedTurn]:
        with as_damage_errors(self.path):
            turns = list[SavedTurn]()
            for record in self._fetch("SELECT * FROM turns ORDER BY turn"):
                *values, is_summary, is_left_out, torn, _ = record
                values += [bool(is_summary), bool(is_left_out), tuple(json.loads(torn))]
                turns.append(SavedTurn(*values))
            for number, turn in enumerate(turns):
                require(turn.index == number and turn.role in _ROLES)
                texts = turn.text, turn.finish, turn.thinking, *turn.torn
                require(all(isinstance(text, str) for text in texts))
                require(turn.time is None or isinstance(turn.time, int))  # of a wrong clock, too
            return turns

    def rows(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The ledger rows [seen] of `dtype`; SessionError if the saved rows have other fields."""
        with as_damage_errors(self.path):
            parts = self._fetch("SELECT data FROM rows ORDER BY start")
            saved = np.frombuffer(b"".join(data for (data,) in parts), self._file_dtype(dtype))
            _check_count(saved, self._count_rows())
            return saved.astype(dtype)

    def passages(self) -> SavedPassages:
        with as_damage_errors(self.path):
            query = "SELECT start, end, turn, role, vector FROM passages ORDER BY start"
            records, seen = self._fetch(query), self._count_rows()
            rows = np.array([tuple(record[:4]) for record in records], PASSAGE)
            saved = [np.frombuffer(data or b"", "<f2") for *_, data in records]
            size = max(map(len, saved), default=0)
            vectors = np.full((len(rows), size), np.nan, np.float16)
            for index, vector in enumerate(saved):
                require(len(vector) in (0, size))
                vectors[index] = vector if len(vector) else np.nan
            bounds = rows[["start", "end"]].tolist()
            require(all(0 <= start < end <= seen for start, end in bounds))
            require(bool((rows["start"][1:] >= rows["end"][:-1]).all()))
            require(not np.isinf(vectors).any())
            return SavedPassages(rows, vectors)

    def held_by_turn(self) -> dict[int, NDArray[np.int64]]:
        """Stream positions [n] of the tokens held after each saved turn, by the turn's number."""
        with as_damage_errors(self.path):
            held, seen = dict[int, NDArray[np.int64]](), self._count_rows()
            for turn, data in self._fetch("SELECT turn, positions FROM held ORDER BY turn"):
                steps = np.frombuffer(zlib.decompressobj().decompress(data, 4 * seen + 4), "<i4")
                held[turn] = np.cumsum(steps, dtype=np.int64) - 1
                require(bool((steps > 0).all()) and held[turn][-1:].sum() < seen)
            return held

    def state_record(self) -> StateRecord | None:
        """The session's state after its last turn; None for a session without turns."""
        with as_damage_errors(self.path):
            records = self._fetch("SELECT seen, held, logits, fields FROM head LIMIT 1")
            require(bool(records) or not self.size.turns)
            if not records:
                return None
            seen, positions, numbers, text = records[0]
            held = np.frombuffer(positions, "<i8").astype(np.int64)
            logits = None if numbers is None else np.frombuffer(numbers, "<f4").astype(np.float32)
            fields = json.loads(text)
            require(isinstance(seen, int) and isinstance(fields, dict))
            require(not len(held) or (held[0] >= 0 and held[-1] < seen))
            require(bool((held[1:] > held[:-1]).all()))
            # A model may rule out tokens by logits of minus infinity.
            require(logits is None or bool((logits < np.inf).all()))
            return StateRecord(seen, held, logits, fields)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self.check_not_removed()
        with as_session_errors(self.path), self._connection:
            self._connection.execute("BEGIN")
            yield

    def _fetch(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def _count_rows(self) -> int:
        records = self._fetch("SELECT seen FROM head")
        return int(records[0][0]) if records else 0

    def _write(
        self,
        turns: Sequence[SavedTurn],
        rows: NDArray[Any],
        record: StateRecord,
        passages: SavedPassages,
        extent: Extent,
    ) -> None:
        """Write what `append` describes, within a transaction."""
        connection, start = self._connection, min(extent.rows, self._count_rows())
        _check_count(rows, record.seen - start)
        connection.execute("DELETE FROM turns WHERE turn >= ?", (extent.turns,))
        connection.execute("DELETE FROM passages WHERE start >= ?", (extent.passages,))
        for turn in turns:
            texts = turn.role, turn.text, turn.finish, turn.thinking
            flags = int(turn.is_summary), int(turn.is_left_out)
            values = turn.index, *texts, turn.time, *flags, json.dumps(turn.torn)
            insert_record(connection, "turns", *values)
        for values, vector in zip(passages.rows.tolist(), passages.vectors, strict=True):
            data = None if np.isnan(vector).any() else vector.astype("<f2").tobytes()
            insert_record(connection, "passages", *values, data)
        self._cut_rows(start)
        if len(rows) and not start:
            self._write_about("row", _packed(rows.dtype).descr)
        for first in range(0, len(rows), _ROWS_PER_RECORD):
            block = rows[first : first + _ROWS_PER_RECORD].astype(self._file_dtype(rows.dtype))
            insert_record(connection, "rows", start + first, block.tobytes())
        connection.execute("DELETE FROM head")
        held = np.asarray(record.held, "<i8").tobytes()
        logits = None if record.logits is None else np.asarray(record.logits, "<f4").tobytes()
        insert_record(connection, "head", 0, record.seen, held, logits, json.dumps(record.fields))
        last_turn = self.size.turns - 1
        connection.execute("DELETE FROM held WHERE turn >= ?", (min(extent.held, last_turn),))
        if last_turn >= 0:
            cached = record.held if record.cached is None else record.cached
            steps = np.diff(cached, prepend=-1).astype("<i4").tobytes()  # small numbers, mostly 1
            insert_record(connection, "held", last_turn, zlib.compress(steps, 1))

    def _write_flags(self, flags: Mapping[int, int]) -> None:
        remaining = sorted(flags, reverse=True)
        while remaining:
            start, rows = self._row_record(remaining[-1])
            while remaining and remaining[-1] < start + len(rows):
                position = remaining.pop()
                rows["flags"][position - start] = flags[position]
            self._connection.execute("DELETE FROM rows WHERE start = ?", (start,))
            insert_record(self._connection, "rows", start, rows.tobytes())

    def _cut_rows(self, seen: int) -> None:
        if seen < self._count_rows():
            start, rows = self._row_record(seen)
            self._connection.execute("DELETE FROM rows WHERE start >= ?", (start,))
            if seen > start:
                insert_record(self._connection, "rows", start, rows[: seen - start].tobytes())

    def _row_record(self, position: int) -> tuple[int, NDArray[Any]]:
        """The record that has this row: its first position, and a copy of its rows."""
        query = "SELECT start, data FROM rows WHERE start <= ? ORDER BY start DESC LIMIT 1"
        ((start, data),) = self._fetch(query, position)
        fields = np.dtype([(name, kind) for name, kind in self._about_value("row")])
        return start, np.frombuffer(data, fields).copy()

    def _about_value(self, name: str) -> Any:
        records = self._fetch("SELECT value FROM about WHERE name = ?", name)
        return json.loads(records[0][0]) if records else None

    def _write_about(self, name: str, value: object) -> None:
        self._connection.execute("DELETE FROM about WHERE name = ?", (name,))
        insert_record(self._connection, "about", name, json.dumps(value))

    def _file_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """`dtype` as its rows are saved; SessionError if the saved rows have other fields."""
        packed = _packed(dtype)
        if self._about_value("row") not in (None, [list(field) for field in packed.descr]):
            raise SessionError(
                f"{self.path} has ledger rows with fields that this sirchat does not know",
                hint="open the chat with the version of sirchat that wrote it",
            )
        return packed

    def _finish_erasing(self) -> None:
        """Rewrite the file after text was deleted; a mark has this done even after a crash."""
        with as_session_errors(self.path):
            if self._about_value("erasing"):
                self._connection.execute("VACUUM")
                self._connection.execute("DELETE FROM about WHERE name = 'erasing'")


def _file_times(path: Path) -> tuple[int, ...]:
    """Size and time of a session's file, and of its journal, if any; empty during a write."""
    file, journal = path.stat(), Path(f"{path}-journal")
    stats = [file, journal.stat()] if journal.exists() else [file]
    if any(stat.st_size for stat in stats[1:]):
        return ()
    return tuple(number for stat in stats for number in (stat.st_size, stat.st_mtime_ns))


def _check_count(rows: NDArray[Any], expected: int) -> None:
    if len(rows) != expected:
        raise ValueError(f"{len(rows)} rows for {expected} tokens")


def _packed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in little-endian and without padding, which would write arbitrary memory."""
    return np.dtype([(name, dtype[name].newbyteorder("<")) for name in dtype.names or ()])
