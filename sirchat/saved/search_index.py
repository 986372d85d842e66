"""The search index of the texts of all saved chats: an SQLite FTS5 table in a private file.

The file is in the folder of the chats. It can be deleted at any time: the next search then builds
it again from the chats. Each search first reads new chats, and chats whose file has another time or
size than before. So the index need not be updated when a turn is saved. Text that is removed from a
chat (erased, undone, deleted) is removed from the index at once, and overwritten in its file.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from sirchat import paths
from sirchat.errors import SessionError
from sirchat.saved.database import (
    SUFFIX,
    UNDECODABLE,
    check_format,
    connect,
    explained,
    result_code,
)

NAME = "search.index"
"""The name of the index's file, in the folder of the chats."""

_TABLES = (
    """CREATE TABLE chats (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL,
    changed INTEGER NOT NULL, size INTEGER NOT NULL, name TEXT NOT NULL)""",
    """CREATE VIRTUAL TABLE said USING fts5 (name, text,
    tokenize = "unicode61 remove_diacritics 2 categories 'L* N* Co Mn Mc'")""",
)
_FIND = """SELECT id FROM said JOIN chats ON number = said.rowid
WHERE said MATCH ? ORDER BY said.rank, changed DESC"""

_TIMEOUT = 20.0  # seconds to wait while another process writes the index
_BATCH = 500  # chats in a transaction: others wait for it, and Ctrl-C loses its work
_JUST_NOW = 100_000_000  # ns: within this time, a file may change without a new time
_UNKNOWN = -1  # stands for a file's size: read the file again at the next search
_OF_DAMAGE = (0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_Result = TypeVar("_Result")


class Matches(NamedTuple):
    """The result of a search in the index of saved chats.

    `names` has the name of each chat that has one, by the chat's id; `found` has the ids of the
    chats with the searched words, the best first.
    """

    names: dict[str, str]
    found: list[str]


def matches(folder: Path, words: str, notice: Callable[[str], object]) -> Matches:
    """Find the chats of `folder` that have each of `words` in their text or their name.

    The last of the words may be only the beginning of a word in the chat. `notice` is called with a
    message if many chats must be read first. Raises SessionError if the index can't be used.
    """

    def search(connection: sqlite3.Connection) -> Matches:
        _bring_up_to_date(connection, folder, notice)
        names = dict(connection.execute("SELECT id, name FROM chats WHERE name != ''"))
        query = _query(words)
        found = connection.execute(_FIND, (query,)).fetchall() if query else []
        return Matches(names, [ident for (ident,) in found])

    return _with_index(folder, search) if folder.is_dir() else Matches({}, [])


def remove_from_index(path: Path) -> None:
    """Remove the text of the chat in the file `path` from the search index.

    A later search may add the chat again. If the text can't be removed, the whole index is deleted.
    Raises SessionError if the index can't be deleted either.
    """
    index = path.parent / NAME
    if not index.exists():
        return
    with explained(index):
        try:
            with _opened(index) as connection:
                with _writing(connection):
                    is_removed = _remove(connection, path.stem)
                if is_removed:
                    _overwrite_removed(connection)
        except sqlite3.Error:
            _delete(index)


_ALONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
SPACELESS = re.compile(f"[{_ALONE}]")
"""Matches a character of a script without spaces between words, such as Chinese.

In the index, each of these characters counts as a word.
"""


def _spaced(text: str) -> str:
    if text.isascii():
        return text
    return SPACELESS.sub(r" \g<0> ", unicodedata.normalize("NFKC", text))


def _query(words: str) -> str:
    """The query for SQLite FTS5 that finds texts with all `words`; empty if `words` has no word."""
    text = re.sub('[\x00-\x1f"]', " ", words.encode(errors="replace").decode())
    quoted = [f'"{_spaced(word)}"' for word in text.split() if re.search(r"[^\W_]", word)]
    return f"{' '.join(quoted)} *" if quoted else ""


def _with_index(folder: Path, use: Callable[[sqlite3.Connection], _Result]) -> _Result:
    """Open the search index of `folder`, call `use` with the connection, and return its result.

    A damaged index is deleted, and `use` is called again with a new, empty one.
    """
    path = folder / NAME
    with explained(path):
        try:
            with _opened(path) as connection:
                return use(connection)
        except sqlite3.DatabaseError as error:
            if result_code(error) not in _OF_DAMAGE:
                raise
            _delete(path)
        with _opened(path) as connection:
            return use(connection)


def _delete(index: Path) -> None:
    for path in (index, index.with_name(f"{NAME}-journal")):  # a crash may have left a journal
        path.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.exists():
        with suppress(FileExistsError):
            paths.open_private(path, "xb").close()
    with closing(connect(path, timeout=_TIMEOUT)) as connection:
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA temp_store = MEMORY")  # no text in a temporary folder
        names = "SELECT sql FROM sqlite_master WHERE name IN ('chats', 'said') ORDER BY name"
        if not (found := connection.execute(names).fetchall()):
            with _writing(connection):
                if not (found := connection.execute(names).fetchall()):  # no other process has
                    for table in _TABLES:
                        connection.execute(table)
                    found = connection.execute(names).fetchall()
        if [sql for (sql,) in found] != list(_TABLES):
            raise sqlite3.DatabaseError("made by another version")
        yield connection


@contextmanager
def _writing(connection: sqlite3.Connection) -> Iterator[None]:
    """Context manager: begins a transaction that writes; commits it at the end of the block.

    An error in the block rolls the transaction back.
    """
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


_State = tuple[str, int, int]
"""A chat's id, the time of its file's last change (in ns), and the file's size in bytes.

If one of these values differs from what the index has, the chat has changed.
"""


def _bring_up_to_date(
    connection: sqlite3.Connection, folder: Path, notice: Callable[[str], object]
) -> None:
    present = set(_states(folder))
    known = set(connection.execute("SELECT id, changed, size FROM chats"))
    stale = sorted(present - known)
    gone = {ident for ident, *_ in known - present} - {ident for ident, *_ in stale}
    if len(stale) > _BATCH:
        notice(f"reading {len(stale):,} saved chats, so that later searches are fast")
    is_removed = False
    if gone:
        with _writing(connection):
            for ident in gone:
                is_removed |= _remove(connection, ident)
    for start in range(0, len(stale), _BATCH):
        with _writing(connection):
            for ident, changed, size in stale[start : start + _BATCH]:
                path = folder / f"{ident}{SUFFIX}"
                is_removed |= _update(connection, path, changed, size)
    if is_removed:
        _overwrite_removed(connection)


def _states(folder: Path) -> Iterator[_State]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and entry.name.isprintable():  # UTF-8, too
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    yield entry.name[: -len(SUFFIX)], found.st_mtime_ns, found.st_size


def _update(connection: sqlite3.Connection, path: Path, changed: int, size: int) -> bool:
    """Write the present text and name of the chat in the file `path` to the index.

    `changed` is the time of the file's last change in ns, `size` its size in bytes. Returns whether
    this removed text from the index; the removed text must then be overwritten on disk, so that
    nobody can restore it.
    """
    if time.time_ns() - changed < _JUST_NOW:
        size = _UNKNOWN
    name, text = _read(path)
    indexed = _spaced(name), _spaced(text)
    former = connection.execute(
        "SELECT said.name, text FROM said JOIN chats ON number = said.rowid WHERE id = ?",
        (path.stem,),
    ).fetchone()
    if former == indexed:
        values = (changed, size, path.stem)
        connection.execute("UPDATE chats SET changed = ?, size = ? WHERE id = ?", values)
        return False
    _remove(connection, path.stem)
    row = (path.stem, changed, size, name)
    insert = "INSERT INTO chats (id, changed, size, name) VALUES (?, ?, ?, ?)"
    number = connection.execute(insert, row).lastrowid
    insert = "INSERT INTO said (rowid, name, text) VALUES (?, ?, ?)"
    connection.execute(insert, (number, *indexed))
    return former is not None and not all(map(str.startswith, indexed, former))


def _remove(connection: sqlite3.Connection, ident: str) -> bool:
    """Remove the chat with the id `ident` from the index; returns whether the index had it."""
    found = connection.execute("SELECT number FROM chats WHERE id = ?", (ident,)).fetchone()
    if found is not None:
        connection.execute("DELETE FROM said WHERE rowid = ?", found)
        connection.execute("DELETE FROM chats WHERE number = ?", found)
    return found is not None


def _overwrite_removed(connection: sqlite3.Connection) -> None:
    """Overwrite, in the index's file, the texts that were deleted from the index.

    FTS5 only marks words as deleted until it merges its data. This function makes it merge;
    SQLite's `secure_delete` overwrites the space that becomes free, and VACUUM makes the file
    smaller.
    """
    connection.execute("INSERT INTO said (said) VALUES ('optimize')")
    connection.execute("VACUUM")


def _read(path: Path) -> tuple[str, str]:
    """Read the name and the text of a chat, even if another process has the chat open.

    Both are empty if the chat's file can't be read.
    """
    for options in ("mode=ro", "immutable=1"):
        try:
            with closing(connect(path, options, timeout=0)) as connection:
                check_format(connection, path)
                query = "SELECT value FROM about WHERE name = 'name'"
                name = connection.execute(query).fetchone()
                turns = connection.execute("SELECT text FROM turns ORDER BY turn")
                return (
                    str(json.loads(name[0])) if name else "",
                    "\n".join(text for (text,) in turns),
                )
        except (sqlite3.Error, SessionError, *UNDECODABLE):
            continue
    return "", ""


def lines_of(path: Path) -> Sequence[str]:
    """The lines of all messages of a chat, even if another process has the chat open.

    The result is empty if the chat's file can't be read.
    """
    return _read(path)[1].splitlines()
