"""The search index of all saved chats, with their names and texts: SQLite's FTS5.

The index is one private file in the folder of the chats, and is made anew if it is deleted. Each
use first reads the chats whose file has changed in time or size, so saving a turn need not update
the index.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from sirchat import paths
from sirchat.errors import SessionError
from sirchat.saved.database import (
    SUFFIX,
    UNDECODABLE,
    as_session_errors,
    check_format,
    connect,
    result_code,
)
from sirchat.saved.older_format import split_reasoning

INDEX_NAME = "search.index"  # the file's name
# Stand around each match in a snippet; Unicode has no such characters.
MATCH_MARKS = "\ufdd0", "\ufdd1"

_TABLES = (
    """CREATE TABLE chats (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL,
    changed INTEGER NOT NULL, size INTEGER NOT NULL, name TEXT NOT NULL, family TEXT NOT NULL)""",
    # Not the tokenizer `trigram`: it finds no word of two letters, as Tokyo is in Japanese, it
    # finds Rome in chromed, and before SQLite 3.45 it takes no e for an é.
    """CREATE VIRTUAL TABLE said USING fts5 (name, text,
    tokenize = "unicode61 remove_diacritics 2 categories 'L* N* Co Mn Mc'")""",
)
_SELECT_MATCHES = """SELECT number, id FROM said JOIN chats ON number = said.rowid
WHERE said MATCH ? ORDER BY said.rank, changed DESC"""  # the rank is bm25
_SELECT_SNIPPET = """SELECT snippet(said, 1, ?, ?, '…', 24) FROM said
WHERE said MATCH ? AND rowid = ?"""

# A word with one of these is found only as it is written: C++ is not C.
_SIGNS = re.compile(r"[+#*&@$%]")
_SELECT_AS_WRITTEN = """SELECT rowid FROM said
WHERE said MATCH ? AND instr(lower(name || ' ' || text), ?)"""

_LOCK_TIMEOUT_S = 20.0  # seconds to wait while another process writes the index
_CLOCK_STEP_NS = 100_000_000  # ns: within this time, a file may change without a new time
_UNKNOWN_SIZE = -1  # stands for a file's size: read the file again at the next search
_DAMAGE_CODES = (0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

# A character of a script without spaces between words, such as Chinese. Each is a word of the
# index, where a zero-width space stands on both sides of it.
_SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
    "\uf900-\ufaff\U00020000-\U0003ffff]"
)
_ZERO_WIDTH_SPACE = "\u200b"

_Result = TypeVar("_Result")


class IndexedChat(NamedTuple):
    """A chat in the index. `family` is the id of the chat that it was branched from, or its own."""

    id: str
    name: str  # empty if it has none
    family: str


class Matches(NamedTuple):
    """The chats that have all words, best first, and all chats of the index."""

    ids: list[str]
    snippets: list[str]  # of the first chats, with the words in `MATCH_MARKS`
    chats: list[IndexedChat]


def list_chats(folder: Path) -> list[IndexedChat]:
    """All chats of `folder`, of which only changed files are read; raises SessionError."""
    return _with_index(folder, _chats)


def find_matches(folder: Path, words: str, limit: int) -> Matches:
    """Find the chats of `folder` with all `words`; of the last word, a beginning is enough.

    At most `limit` chats get a snippet. Raises SessionError if the index can't be used.
    """
    query = _query(words)

    def search(connection: sqlite3.Connection) -> Matches:
        with connection:
            connection.execute("BEGIN")  # other processes change nothing between the queries
            chats = connection.execute(_SELECT_MATCHES, (query,)).fetchall() if query else []
            for word in filter(_SIGNS.search, words.split()):
                values = query, word.casefold()
                has = {number for (number,) in connection.execute(_SELECT_AS_WRITTEN, values)}
                chats = [chat for chat in chats if chat[0] in has]
            snippets = [
                connection.execute(_SELECT_SNIPPET, (*MATCH_MARKS, query, number)).fetchone()[0]
                for number, _ in chats[:limit]
            ]
            every = _chats(connection)
        plain = [snippet.replace(_ZERO_WIDTH_SPACE, "") for snippet in snippets]
        return Matches([ident for _, ident in chats], plain, every)

    return _with_index(folder, search)


def saved_text(path: Path) -> str:
    """The messages of the chat in the file `path`, open or not; empty if damaged."""
    return _read_chat(path)[2]


def has_words(text: str) -> bool:
    """Whether a text has letters or digits, by which chats can be found."""
    return bool(_query(text))


def remove_from_index(path: Path) -> None:
    """Remove the text of the chat in the file `path` until the file is read again.

    If this fails, the whole index is deleted. Raises SessionError if that fails, too.
    """
    index = path.parent / INDEX_NAME
    if not index.exists():
        return
    with as_session_errors(index):
        try:
            with _open_index(index) as connection:
                with _write_transaction(connection):
                    is_removed = _remove(connection, path.stem)
                if is_removed:
                    _overwrite_removed(connection)
        except sqlite3.Error:
            _delete(index)


def _query(words: str) -> str:
    """The FTS5 query for texts with all `words`; empty if there is no word."""
    text = re.sub('[\x00-\x1f"]', " ", words.encode(errors="replace").decode())
    found = [word for word in text.split() if re.search(r"[^\W_]", word)]
    quoted = [f'"{_separate_characters(word)}"' for word in found]
    return f"{' '.join(quoted)} *" if quoted else ""


def _separate_characters(text: str) -> str:
    if text.isascii():
        return text
    spaced = rf"{_ZERO_WIDTH_SPACE}\g<0>{_ZERO_WIDTH_SPACE}"
    return _SPACELESS.sub(spaced, unicodedata.normalize("NFKC", text))


def _chats(connection: sqlite3.Connection) -> list[IndexedChat]:
    return [IndexedChat(*row) for row in connection.execute("SELECT id, name, family FROM chats")]


def _with_index(folder: Path, use: Callable[[sqlite3.Connection], _Result]) -> _Result:
    """Bring the index of `folder` up to date, and call `use`; a damaged index is made anew."""
    if not folder.is_dir():
        with closing(sqlite3.connect(":memory:")) as nothing:
            _create(nothing)
            return use(nothing)
    path = folder / INDEX_NAME

    def up_to_date() -> _Result:
        with _open_index(path) as connection:
            _refresh(connection, folder)
            return use(connection)

    with as_session_errors(path):
        try:
            return up_to_date()
        except sqlite3.DatabaseError as error:
            if result_code(error) not in _DAMAGE_CODES:
                raise
            _delete(path)
            return up_to_date()


def _delete(index: Path) -> None:
    index.unlink(missing_ok=True)
    index.with_name(f"{INDEX_NAME}-journal").unlink(missing_ok=True)  # which a crash may leave


@contextmanager
def _open_index(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.exists():
        with suppress(FileExistsError):
            paths.open_private(path, "xb").close()
    with closing(connect(path, timeout=_LOCK_TIMEOUT_S)) as connection:
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA temp_store = MEMORY")  # no text in a temporary folder
        if not _tables(connection):
            with _write_transaction(connection):
                if not _tables(connection):  # no other process has made them
                    _create(connection)
        if _tables(connection) != list(_TABLES):
            raise sqlite3.DatabaseError("made by another version")
        yield connection


def _tables(connection: sqlite3.Connection) -> list[str]:
    query = "SELECT sql FROM sqlite_master WHERE name IN ('chats', 'said') ORDER BY name"
    return [sql for (sql,) in connection.execute(query)]


def _create(connection: sqlite3.Connection) -> None:
    for table in _TABLES:
        connection.execute(table)


@contextmanager
def _write_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    with connection:  # commits, or rolls back after an error
        connection.execute("BEGIN IMMEDIATE")
        yield


def _refresh(connection: sqlite3.Connection, folder: Path) -> None:
    present = set(_file_stamps(folder))
    known = set(connection.execute("SELECT id, changed, size FROM chats"))
    if present == known:
        return
    stale = sorted(present - known)
    gone = {ident for ident, *_ in known - present} - {ident for ident, *_ in stale}
    is_removed = False
    with _write_transaction(connection):
        for ident in gone:
            is_removed |= _remove(connection, ident)
        for ident, changed, size in stale:
            is_removed |= _update(connection, folder / f"{ident}{SUFFIX}", changed, size)
    if is_removed:
        _overwrite_removed(connection)


def _file_stamps(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Each chat's id, and the time (ns) and size (bytes) of its file, which show changes."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and entry.name.isprintable():  # UTF-8, too
                with suppress(OSError):  # the file was just removed, or is a link to itself
                    if entry.is_file():  # opening a pipe would block
                        state = entry.stat()
                        yield entry.name[: -len(SUFFIX)], state.st_mtime_ns, state.st_size


def _update(connection: sqlite3.Connection, path: Path, changed: int, size: int) -> bool:
    """Read the chat in the file `path` again; returns whether text was removed from the index."""
    if time.time_ns() - changed < _CLOCK_STEP_NS:
        size = _UNKNOWN_SIZE
    name, family, text = _read_chat(path)
    texts = _separate_characters(name), _separate_characters(text)
    former = connection.execute(
        "SELECT said.name, text FROM said JOIN chats ON number = said.rowid WHERE id = ?",
        (path.stem,),
    ).fetchone()
    if former == texts:
        values = (changed, size, path.stem)
        connection.execute("UPDATE chats SET changed = ?, size = ? WHERE id = ?", values)
        return False
    _remove(connection, path.stem)
    insert = "INSERT INTO chats (id, changed, size, name, family) VALUES (?, ?, ?, ?, ?)"
    number = connection.execute(insert, (path.stem, changed, size, name, family)).lastrowid
    insert = "INSERT INTO said (rowid, name, text) VALUES (?, ?, ?)"
    connection.execute(insert, (number, *texts))
    return former is not None and not all(map(str.startswith, texts, former))


def _remove(connection: sqlite3.Connection, ident: str) -> bool:
    """Remove the chat with the id `ident`; returns whether the index had it."""
    record = connection.execute("SELECT number FROM chats WHERE id = ?", (ident,)).fetchone()
    if record is not None:
        connection.execute("DELETE FROM said WHERE rowid = ?", record)
        connection.execute("DELETE FROM chats WHERE number = ?", record)
    return record is not None


def _overwrite_removed(connection: sqlite3.Connection) -> None:
    """Overwrite removed text in the file, which FTS5 only marks as deleted until it merges."""
    connection.execute("INSERT INTO said (said) VALUES ('optimize')")  # merges
    connection.execute("VACUUM")


def _read_chat(path: Path) -> tuple[str, str, str]:
    """A chat's name, family and text, also if another process has it open; empty if damaged."""
    for options in ("mode=ro", "immutable=1"):
        try:
            with closing(connect(path, options, timeout=0)) as connection:
                is_older = check_format(connection, path)
                about = dict(connection.execute("SELECT name, value FROM about"))
                columns = "role, text" if is_older else "thinking, text"
                turns = connection.execute(f"SELECT {columns} FROM turns ORDER BY turn").fetchall()
                if is_older:
                    turns = [split_reasoning(role, written) for role, written in turns]
                text = "\n".join(f"{thinking} {said}".lstrip() for thinking, said in turns)
            family = json.loads(about["meta"]).get("family", path.stem)
            return str(json.loads(about.get("name", '""'))), str(family), text
        except (sqlite3.Error, SessionError, AttributeError, *UNDECODABLE):
            continue
    return "", "", ""
