"""The SQLite file of a session: its lock, durability, check sums and errors.

A commit syncs the rollback journal, the file, and the truncated journal. A write-ahead log, or a
journal that is not truncated, would leave new turns or erased text in a second file. Open a
session's file through SQLite only: closing it in any other way loses this process's lock.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32, error

from sirchat import paths
from sirchat.errors import DamagedSessionError, SessionError, SessionInUseError

SUFFIX = ".sqlite"  # of a session's file
APPLICATION_ID = 0x53495243  # SQLite's application id of every session file: `SIRC`
FORMAT_VERSION = 7  # of the tables, as SQLite's user version
# All tables of a session's file; a file with other tables, or views, is damaged. The last column of
# each is the `record_checksum` of the others.
TABLES = {
    "about": "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL, sum INTEGER)",
    "turns": """CREATE TABLE turns (turn INTEGER PRIMARY KEY, role TEXT NOT NULL,
    text TEXT NOT NULL, finish TEXT NOT NULL, thinking TEXT NOT NULL, time INTEGER,
    is_summary INTEGER NOT NULL, is_left_out INTEGER NOT NULL, torn TEXT NOT NULL, sum INTEGER)""",
    "rows": "CREATE TABLE rows (start INTEGER PRIMARY KEY, data BLOB NOT NULL, sum INTEGER)",
    "head": """CREATE TABLE head (id INTEGER PRIMARY KEY, seen INTEGER NOT NULL, held BLOB NOT NULL,
    logits BLOB, fields TEXT NOT NULL, sum INTEGER)""",
    "passages": """CREATE TABLE passages (start INTEGER PRIMARY KEY, end INTEGER NOT NULL,
    turn INTEGER NOT NULL, role INTEGER NOT NULL, vector BLOB, sum INTEGER)""",
    "held": "CREATE TABLE held (turn INTEGER PRIMARY KEY, positions BLOB NOT NULL, sum INTEGER)",
}
# What can be raised when damaged values are decoded.
UNDECODABLE = (ValueError, TypeError, LookupError, OverflowError, RecursionError, error)

_ID_LETTERS = "23456789bcdfghjkmnpqrstvwxz"  # no letters that look alike; no vowels, so no words
_LOCK_TIMEOUT_S = 0.5  # seconds: longer than a listing takes, shorter than a chat


def connect(
    path: Path, options: str = "mode=rw", timeout: float = _LOCK_TIMEOUT_S
) -> sqlite3.Connection:
    """Open a connection to an existing SQLite file, in which transactions begin explicitly.

    `timeout` is the longest wait for a lock, in seconds. Threads may take turns in using it.
    """
    uri = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(
        uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False
    )


def lock(connection: sqlite3.Connection) -> None:
    """Begin a transaction, and lock the file against other processes until it is closed."""
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    # During an immediate transaction, a reader could block a later commit.
    connection.execute("BEGIN EXCLUSIVE")


@contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """Context manager: locks a file, and yields its connection, in a transaction.

    The connection stays open after the block, unless the block fails.
    """
    connection = connect(path)
    try:
        lock(connection)
        yield connection
    except BaseException:
        connection.close()
        raise


def make_durable(connection: sqlite3.Connection) -> None:
    """Commit the open transaction, and let later commits survive a power loss."""
    connection.execute("COMMIT")
    connection.execute("PRAGMA journal_mode=TRUNCATE")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA fullfsync=ON")  # a plain sync can leave data in the drive's cache
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA temp_store=MEMORY")  # no text in a temporary folder


def is_session(connection: sqlite3.Connection) -> bool:
    """Whether an SQLite file is a session of any version of sirchat."""
    return bool(_pragma(connection, "application_id") == APPLICATION_ID)


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raise SessionError for a file of another user, in another format, or with wrong tables."""
    if hasattr(os, "getuid") and path.stat().st_uid not in (os.getuid(), path.parent.stat().st_uid):
        raise SessionError(f"{path} belongs to another user", hint="a copy of it would be yours")
    if not is_session(connection):
        raise not_a_session(path)
    version = int(_pragma(connection, "user_version"))
    age = "a newer" if version > FORMAT_VERSION else "an older"
    if version != FORMAT_VERSION:
        raise SessionError(
            f"{path} has format {version}, but this sirchat reads {FORMAT_VERSION}",
            hint=f"install {age} version of sirchat",
        )
    found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
    if sorted(_words(sql) for (sql,) in found) != sorted(map(_words, TABLES.values())):
        raise DamagedSessionError(path)


def check_contents(connection: sqlite3.Connection, path: Path) -> None:
    """Raise DamagedSessionError if SQLite, or a record's check sum, finds damage."""
    if _pragma(connection, "quick_check(1)") != "ok":
        raise DamagedSessionError(path)
    for table in TABLES:
        for *values, total in connection.execute(f"SELECT * FROM {table}"):
            if total != record_checksum(values):
                raise DamagedSessionError(path)


def insert_record(connection: sqlite3.Connection, table: str, *values: object) -> None:
    """Write a new record, and its check sum."""
    marks = ", ".join("?" * (len(values) + 1))
    record = (*values, record_checksum(values))
    connection.execute(f"INSERT INTO {table} VALUES ({marks})", record)


def record_checksum(values: Iterable[object]) -> int:
    total = 0
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        total = crc32(data, crc32(b"%d:" % len(data), total))
    return total


def refuse_missing(path: Path) -> None:
    if not path.is_file():
        raise SessionError(f"there is no saved session {path}")


def not_a_session(path: Path) -> SessionError:
    return SessionError(f"{path} is not a saved session of sirchat")


@contextmanager
def as_session_errors(path: Path) -> Iterator[None]:
    """Context manager: turns errors of SQLite and the system into a SessionError about `path`."""
    try:
        yield
    except sqlite3.Error as error:
        raise _session_error(path, error) from None
    except OSError as error:
        raise SessionError(f"{path} can't be used: {error.strerror}") from None


def result_code(error: sqlite3.Error) -> int:
    """The primary result code of an SQLite error; 0 for an error that Python raised."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def as_damage_errors(path: Path) -> Iterator[None]:
    """As `as_session_errors`, but turns errors of decoding into DamagedSessionError."""
    with as_session_errors(path):
        try:
            yield
        except UNDECODABLE:
            raise DamagedSessionError(path) from None


def require(condition: bool) -> None:
    """Raise ValueError, which `as_damage_errors` takes for damage, if the condition is false."""
    if not condition:
        raise ValueError


def create_session_file(folder: Path, suffix: str) -> Path:
    """Create a private empty file with a new session id as its name; raises SessionError."""
    created = time.strftime("%Y%m%d-%H%M")
    try:
        paths.make_private_dir(folder)
        while True:
            letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(4))
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


def _session_error(path: Path, error: sqlite3.Error) -> SessionError:
    match result_code(error):
        case sqlite3.SQLITE_BUSY:
            other = f"close the other chat first, or go on in a copy: sirchat --resume {path.stem}"
            return SessionInUseError(
                f"{path} is in use by another process",
                hint=f"{other} --branch NAME" if path.suffix == SUFFIX else "try again later",
            )
        case sqlite3.SQLITE_NOTADB:
            return not_a_session(path)
        case sqlite3.SQLITE_CORRUPT:
            return DamagedSessionError(path)
        case 0 if isinstance(error, sqlite3.OperationalError):  # from Python: text not in UTF-8
            return DamagedSessionError(path)
    return SessionError(f"{path} can't be used: {error}")


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _words(sql: object) -> list[str]:
    return str(sql).split()  # blanks and line breaks differ between formats
