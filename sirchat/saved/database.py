"""The SQLite file of a session: its lock, how a commit lasts, and what its errors mean.

The journal is rolled back and not written ahead, and truncated after every commit, with full
synchronisation. A commit syncs the journal, then the file, then the truncated journal: once it
returns, neither a kill nor a power loss takes it back. And then all is in one file: no log holds
turns that a reader could not see, or text that should be gone. (Under an exclusive lock the mode
DELETE would keep the old pages in the journal and only spoil its header.)

Open a session's file through SQLite only: a process that holds it under its lock, and closes it in
any other way, drops that lock.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sirchat.errors import SessionError

APPLICATION = 0x53495243
"""`SIRC`, in the header of every file."""

FORMAT = 1
"""Which tables there are, and what is in them; in the header, too."""

UNDECODABLE = (ValueError, TypeError, LookupError, OverflowError)
"""What damaged values raise."""

_PATIENCE = 0.5  # seconds: outlasts a reader that lists, not a chat


def connect(path: Path, options: str = "mode=rw", timeout: float = _PATIENCE) -> sqlite3.Connection:
    """A connection to a file that exists; transactions are begun and ended by hand."""
    uri = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None)


def lock(connection: sqlite3.Connection) -> None:
    """Begin a transaction and shut out every other process until the connection is closed.

    Exclusive and not merely immediate, which would let a reader hold up a later commit.
    """
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")


@contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection in its first transaction, under `lock`; closed if anything here fails."""
    connection = connect(path)
    try:
        lock(connection)
        yield connection
    except BaseException:
        connection.close()
        raise


def make_durable(connection: sqlite3.Connection) -> None:
    """End the first transaction; every later one lasts, as the head of this module says."""
    connection.execute("COMMIT")
    connection.execute("PRAGMA journal_mode=TRUNCATE")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA fullfsync=ON")  # where a plain sync leaves data in the drive's cache
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA temp_store=MEMORY")  # no text in a temporary folder


def is_session(connection: sqlite3.Connection) -> bool:
    """Whether a file says that it is a session, of whatever version."""
    return bool(_pragma(connection, "application_id") == APPLICATION)


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raise SessionError for a file that is no session, or one of a newer format."""
    if not is_session(connection):
        raise no_session(path)
    version = _pragma(connection, "user_version")
    if version > FORMAT:
        raise SessionError(
            f"{path} has format {version}, and this sirchat reads formats up to {FORMAT}",
            hint="use a newer sirchat",
        )


def check_whole(connection: sqlite3.Connection, path: Path) -> None:
    """Raise SessionError for a file whose pages don't fit together."""
    if _pragma(connection, "quick_check(1)") != "ok":
        raise _damaged(path)


def refuse_missing(path: Path) -> None:
    """Raise SessionError where there is no such file."""
    if not path.is_file():
        raise SessionError(f"there is no saved session {path}")


def no_session(path: Path) -> SessionError:
    """The refusal of a file that sirchat did not write."""
    return SessionError(f"{path} is not a saved session of sirchat")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what SQLite and the system refuse into a SessionError of one line."""
    try:
        yield
    except sqlite3.Error as error:
        raise session_error(path, error) from None
    except OSError as error:
        raise SessionError(f"{path} can't be used: {error.strerror}") from None


def session_error(path: Path, error: sqlite3.Error) -> SessionError:
    """What an error of SQLite means for a session."""
    match result_code(error):
        case sqlite3.SQLITE_BUSY:
            return SessionError(
                f"{path} is in use by another process", hint="close the other chat first"
            )
        case sqlite3.SQLITE_NOTADB:
            return no_session(path)
        case sqlite3.SQLITE_CORRUPT:
            return _damaged(path)
        case 0 if isinstance(error, sqlite3.OperationalError):  # Python's: text that is not UTF-8
            return _damaged(path)
    return SessionError(f"{path} can't be used: {error}")


def result_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 for an error that Python itself raised."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def decoding(path: Path) -> Iterator[None]:
    """As `explained`; a value that can't be decoded is damage."""
    with explained(path):
        try:
            yield
        except UNDECODABLE:
            raise _damaged(path) from None


def _damaged(path: Path) -> SessionError:
    return SessionError(f"{path} is damaged", hint="restore it from a backup, or remove it")


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]
