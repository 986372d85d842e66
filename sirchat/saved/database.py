"""The SQLite file of a session: its lock, durability, check sums and errors.

A commit syncs SQLite's rollback journal, then the file, then the truncated journal. Once a commit
has returned, neither a killed process nor a power loss undoes it. Between commits, all data is in
one file. With a write-ahead log (WAL), a second file would have the newest turns, or text that was
erased from the first file. With journal mode DELETE, an exclusive lock would leave old data in the
journal, because only the journal's header would be overwritten.

Open a session's file through SQLite only: if the process that locked the file opens and closes it
in any other way, the lock is lost.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from sirchat import paths
from sirchat.errors import DamagedSessionError, SessionError

SUFFIX = ".sqlite"
"""The ending of every session file's name."""

APPLICATION = 0x53495243
"""SQLite's application id in the header of every session file: `SIRC`."""

FORMAT = 2
"""Version of the tables and their contents, stored as SQLite's user version in the file's header.

Files of format 1 have no check sums.
"""

TABLES = (
    "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE turns
    (turn INTEGER PRIMARY KEY, role TEXT NOT NULL, text TEXT NOT NULL, finish TEXT NOT NULL)""",
    "CREATE TABLE rows (start INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    """CREATE TABLE head (id INTEGER PRIMARY KEY,
    seen INTEGER NOT NULL, held BLOB NOT NULL, logits BLOB, fields TEXT NOT NULL)""",
)
"""The SQL of all tables of a session's file; a file with other tables, or views, is damaged."""

UNDECODABLE = (ValueError, TypeError, LookupError, OverflowError, RecursionError)
"""The exceptions that can be raised when damaged values are decoded."""

_TIMEOUT = 0.5  # seconds: longer than a listing takes, shorter than a chat


def connect(path: Path, options: str = "mode=rw", timeout: float = _TIMEOUT) -> sqlite3.Connection:
    """Open a connection to an existing SQLite file; callers must begin transactions explicitly.

    `timeout` is the longest wait for a lock, in seconds. Several threads may use the connection,
    one after the other.
    """
    uri = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(
        uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False
    )


def lock(connection: sqlite3.Connection) -> None:
    """Begin a transaction, and lock the connection's file against all other processes.

    The lock lasts until the connection is closed. The transaction is exclusive: during an immediate
    transaction, a reader could block a later commit.
    """
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")


@contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """Context manager: opens a connection, locks its file, and begins a transaction.

    The `with` block gets the connection, which stays open after the block. If the block raises an
    error, the connection is closed.
    """
    connection = connect(path)
    try:
        lock(connection)
        try:
            _sign(path)
            yield connection
        except BaseException:
            unsign(path)
            raise
    except BaseException:
        connection.close()
        raise


HOLDER = ".open"
"""The ending of a file beside a session's file that says which process has the session open.

This file is for messages only; SQLite's lock decides whether the session is open. After a crash,
the file may exist though no process has the session open.
"""


def _sign(path: Path) -> None:
    """Write a file beside a locked session's file that says which process has the session open.

    If this file can't be written, no error is raised.
    """
    holder = {"pid": os.getpid(), "host": platform.node(), "since": time.time()}
    with suppress(OSError):
        unsign(path)
        with paths.open_private(path.with_suffix(HOLDER), "x") as file:
            json.dump(holder, file)


def unsign(path: Path) -> None:
    """Remove the file that says which process has the session at `path` open.

    Call this while the session is still locked.
    """
    with suppress(OSError):
        path.with_suffix(HOLDER).unlink(missing_ok=True)


def _holder(path: Path) -> str:
    """Text, for an error message, that says which process has the session at `path` open.

    The text is empty if the process is not known.
    """
    file = path.with_suffix(HOLDER)
    try:
        said = json.loads(file.read_bytes()[:1000]) if file.is_file() else {}
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(said["since"])))
        return f", {int(said['pid'])} on {str(said['host'])[:60]}, since {since}"
    except (OSError, *UNDECODABLE):
        return ""


def make_durable(connection: sqlite3.Connection) -> None:
    """Commit the open transaction; set the connection up so that commits survive a power loss."""
    connection.execute("COMMIT")
    connection.execute("PRAGMA journal_mode=TRUNCATE")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA fullfsync=ON")  # a plain sync can leave data in the drive's cache
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA temp_store=MEMORY")  # no text in a temporary folder


def is_session(connection: sqlite3.Connection) -> bool:
    """Whether an SQLite file is a session of any version of sirchat.

    The header of every session file has the application id `APPLICATION`.
    """
    return bool(_pragma(connection, "application_id") == APPLICATION)


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raise SessionError if the file is not a session, or has a newer format, or wrong tables."""
    if not is_session(connection):
        raise no_session(path)
    version = _pragma(connection, "user_version")
    if version > FORMAT:
        raise SessionError(
            f"{path} has format {version}, but this sirchat reads formats up to {FORMAT}",
            hint="install a newer version of sirchat",
        )
    found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
    if sorted(str(sql) for (sql,) in found) != sorted(TABLES):
        raise DamagedSessionError(path)


def check_whole(connection: sqlite3.Connection, path: Path) -> None:
    """Raise DamagedSessionError for a file that fails SQLite's integrity check."""
    if _pragma(connection, "quick_check(1)") != "ok":
        raise DamagedSessionError(path)


def check_sums(connection: sqlite3.Connection, path: Path) -> None:
    """Raise DamagedSessionError for a file whose contents do not match its check sums."""
    if not sums_match(connection, required=_pragma(connection, "user_version") > 1):
        raise DamagedSessionError(path)


def refuse_missing(path: Path) -> None:
    """Raise SessionError if the session file `path` does not exist."""
    if not path.is_file():
        raise SessionError(f"there is no saved session {path}")


def no_session(path: Path) -> SessionError:
    """Make the SessionError for a file that is not a session of sirchat."""
    return SessionError(f"{path} is not a saved session of sirchat")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Context manager: turns errors of SQLite and the operating system into a SessionError.

    The SessionError names the file `path`.
    """
    try:
        yield
    except sqlite3.Error as error:
        raise session_error(path, error) from None
    except OSError as error:
        raise SessionError(f"{path} can't be used: {error.strerror}") from None


def session_error(path: Path, error: sqlite3.Error) -> SessionError:
    """Make the SessionError that explains SQLite's `error` about the file `path`."""
    match result_code(error):
        case sqlite3.SQLITE_BUSY:
            other = f"close the other chat first, or go on in a copy: sirchat --resume {path.stem}"
            return SessionError(
                f"{path} is in use by another process{_holder(path)}",
                hint=f"{other} --branch NAME" if path.suffix == SUFFIX else "try again later",
            )
        case sqlite3.SQLITE_NOTADB:
            return no_session(path)
        case sqlite3.SQLITE_CORRUPT:
            return DamagedSessionError(path)
        case 0 if isinstance(error, sqlite3.OperationalError):  # from Python: text not in UTF-8
            return DamagedSessionError(path)
    return SessionError(f"{path} can't be used: {error}")


def result_code(error: sqlite3.Error) -> int:
    """The primary result code of an SQLite error; 0 for an error that Python itself raised."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def decoding(path: Path) -> Iterator[None]:
    """Context manager: raises DamagedSessionError if data of the file `path` can't be decoded.

    Errors of SQLite and the operating system become a SessionError, as in `explained`.
    """
    with explained(path):
        try:
            yield
        except UNDECODABLE:
            raise DamagedSessionError(path) from None


def require(condition: bool) -> None:
    """Raise ValueError if the condition is false; `decoding` then reports a damaged file."""
    if not condition:
        raise ValueError


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


_LETTERS = "23456789bcdfghjkmnpqrstvwxz"  # no letters that look alike; no vowels, so no words


def new_file(folder: Path, suffix: str) -> Path:
    """Create an empty file, readable by its owner only, with a name that no other session has.

    Returns the file's path. Raises SessionError if the file can't be created.
    """
    created = time.strftime("%Y%m%d-%H%M")
    try:
        paths.private_dir(folder)
        while True:
            letters = "".join(secrets.choice(_LETTERS) for _ in range(4))
            path = folder / f"{created}-{letters}{suffix}"
            try:
                paths.open_private(path, "xb").close()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise SessionError(f"no session can be saved in {folder}: {error.strerror}") from None


def sync(path: Path) -> None:
    """Flush a file or folder to the drive, so that a power loss does not undo its changes."""
    if os.name == "nt" and path.is_dir():  # Windows can't open folders
        return
    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


_NAME = "sums"  # of the entry in the table `about`
_QUERIES = {
    "about": "SELECT name, value FROM about WHERE name NOT IN ('sums', 'erasing') ORDER BY name",
    "turns": "SELECT turn, role, text, finish FROM turns WHERE turn >= ? ORDER BY turn",
    "rows": "SELECT start, data FROM rows WHERE start >= ? ORDER BY start",
    "head": "SELECT id, seen, held, logits, fields FROM head",
}


def put_sums(connection: sqlite3.Connection, turns: int = 0, rows: int = 0) -> None:
    """Compute the check sums of all tables after a change, and write them to the file.

    Only turns from index `turns` on, and rows from position `rows` on, may have changed. Earlier
    turns and rows are not read again.
    """
    since = {"turns": turns, "rows": rows}
    before = _written(connection)
    if before is None:  # a file of the first format has no sums
        since, before = {}, {}
    sums = {
        table: _sum(connection, table, since.get(table, 0), before.get(table, 0))
        for table in _QUERIES
    }
    values = (_NAME, json.dumps(sums))
    connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", values)


def sums_match(connection: sqlite3.Connection, *, required: bool) -> bool:
    """Whether the contents of a session's file match the check sums that the file has.

    If the file has no check sums, returns the opposite of `required`.
    """
    written = _written(connection)
    if written is None:
        return not required
    return written == {table: _sum(connection, table) for table in _QUERIES}


def _written(connection: sqlite3.Connection) -> dict[str, int] | None:
    found = connection.execute("SELECT value FROM about WHERE name = ?", (_NAME,)).fetchone()
    return None if found is None else dict(json.loads(found[0]))


def _sum(connection: sqlite3.Connection, table: str, since: int = 0, before: int = 0) -> int:
    """Compute the check sum (CRC-32) of a database table.

    If `since` is not 0, only records with an index or position from `since` on are read; `before`
    is the check sum of the earlier records.
    """
    query = _QUERIES[table]
    total = before if since else 0
    for values in connection.execute(query, (since,) if "?" in query else ()):
        for value in values:
            data = _bytes_of(value)
            total = crc32(data, crc32(b"%d:" % len(data), total))
    return total


def _bytes_of(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
