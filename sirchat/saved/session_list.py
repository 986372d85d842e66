"""The folder of saved sessions: lists, finds, copies, removes and exports them; checks names."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import time
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from sirchat import paths
from sirchat.errors import DamagedSessionError, SessionError, format_value, nearest
from sirchat.saved.database import (
    HOLDER,
    SUFFIX,
    UNDECODABLE,
    check_format,
    connect,
    decoding,
    explained,
    is_session,
    lock,
    new_file,
    no_session,
    refuse_missing,
    result_code,
)
from sirchat.saved.index import family_in, names_in, remove_from_index
from sirchat.saved.store import SessionStore
from sirchat.text.transcript import RoleName, TranscriptTurn, write_jsonl

_FIRST_LINE = 80  # characters
_COPIES = 20  # most tries to copy a session that is being written
_PAUSE = 0.05  # seconds between two tries
_ABOUT = "SELECT name, value FROM about WHERE name IN ('meta', 'created', 'name')"
_USERS = "SELECT text FROM turns WHERE role = 'user' ORDER BY turn"


@dataclass(frozen=True, slots=True)
class SavedSession:
    """One entry of the list of saved sessions.

    `name` is the user's name for the session, or empty. `first` and `last` are the beginnings of
    the first and the last user message, on one line. Control characters in these texts must be
    removed before they are shown. `turns` is the number of messages. `in_use` says whether a
    process has the session open. If the file can't be read, `name`, `model`, `first` and `last` are
    empty and `turns` is 0. `family` is the id of the original chat from which this session was
    branched, or its own id.
    """

    id: str
    name: str
    path: Path
    created: datetime
    updated: datetime
    model: str
    turns: int
    first: str
    last: str
    in_use: bool
    family: str


class Listing(NamedTuple):
    """The saved sessions of a folder, and an error for each file that can't be read."""

    sessions: list[SavedSession]
    refused: list[SessionError]


def list_sessions(folder: Path) -> Listing:
    """List the saved sessions in a folder; the session written last is the first in the list.

    No file is written or locked.
    """
    return newest_sessions(folder, None)[0]


def newest_sessions(folder: Path, most: int | None = 1000) -> tuple[Listing, int]:
    """List the `most` newest sessions in a folder, the last written one first; None lists all.

    Returns the list, and the number of files that were not read. No file is written or locked.
    """
    refused: list[SessionError] = []
    files = _files(folder)
    listing = Listing(list(_summaries(folder, files[:most], refused)), refused)
    return listing, len(files) - len(files[:most])


def find_session(folder: Path, ident: str) -> Path:
    """Find the file of a saved session; returns its path.

    `ident` is the session's id, its name, the beginning of its id, or `last`: the newest session
    that no process has open, or the newest of all if every session is open. Raises SessionError if
    no session or several sessions match.
    """
    if ident == "last":
        return _last(folder)
    found = {name.removesuffix(SUFFIX): folder / name for name in sorted(_files(folder))}
    if ident in found:
        return found[ident]
    names = _names(folder)
    by_name = [id for id, name in names.items() if same_name(name, ident)]
    matches = by_name or [id for id in found if ident and id.startswith(ident)]
    if len(matches) > 1:
        how = "are called" if by_name else "begin with"
        raise SessionError(
            f"several sessions {how} {format_value(ident)}: {_first_few(matches)}",
            hint="give the id of one of them",
        )
    if not matches:
        raise SessionError(
            f"there is no saved session {format_value(ident)}",
            hint=nearest(ident, [*found, *names.values()]) or _newest(found),
        )
    return found[matches[0]]


def begins_an_id(folder: Path, ident: str) -> bool:
    """Whether `ident` is the beginning of the id of any session in `folder`."""
    files = os.listdir(folder) if folder.is_dir() else []
    return any(file.endswith(SUFFIX) and file[: -len(SUFFIX)].startswith(ident) for file in files)


def open_saved_file(folder: Path, ident: str) -> tuple[SessionStore, list[DamagedSessionError]]:
    """Open a saved session; returns its store, and errors of damaged sessions.

    `ident` is the session's id, its name, the beginning of its id, or `last`. With `last`, damaged
    sessions are skipped; the list has an error for each skipped session that is newer than the
    opened one. Raises SessionError if no session or several sessions match, or if the session can't
    be opened.
    """
    if ident != "last":
        return SessionStore.open(find_session(folder, ident)), []
    refused: list[SessionError] = []
    for one in _unused_first(_summaries(folder, _files(folder), refused)):
        try:
            return SessionStore.open(one.path), _damaged(refused)
        except DamagedSessionError as error:
            refused.append(error)
    if damaged := _damaged(refused):
        raise damaged[-1]
    raise SessionError(f"there is no saved session in {folder}")


def _damaged(refused: Iterable[SessionError]) -> list[DamagedSessionError]:
    return [error for error in refused if isinstance(error, DamagedSessionError)]


def copy_session(folder: Path, ident: str, name: str) -> SessionStore:
    """Copy the saved session `ident`, even if another process has it open.

    Returns the open store of the copy. The copy is a branch called `name`, with all turns saved so
    far. This process must not have the session open. Raises SessionError if the name is not
    allowed, or belongs to another session, and if the session can't be copied.
    """
    path, name = find_session(folder, ident), free_name(folder, name, "")
    for _ in range(_COPIES):
        copy = new_file(folder, SUFFIX)
        try:
            with explained(path):
                _copy(path, copy)
            store = SessionStore.open(copy)
            store.branch(name, path.stem)
            return store
        except BaseException as error:
            with suppress(SessionError):
                remove_session(copy)
            if not isinstance(error, DamagedSessionError):
                raise
            time.sleep(_PAUSE)  # the other process was writing
    raise DamagedSessionError(path)


def _copy(path: Path, copy: Path) -> None:
    """Copy a session's file to the empty file `copy`; also copies the file of keys and values.

    If the file of keys and values can't be copied, no error is raised.
    """
    shutil.copyfile(path, copy)
    with (
        suppress(OSError),  # an incomplete file counts as none
        path.with_suffix(".safetensors").open("rb") as old,
        paths.open_private(copy.with_suffix(".safetensors"), "xb") as new,
    ):
        shutil.copyfileobj(old, new)


def free_name(folder: Path, text: str, own: str) -> str:
    """Check that a session may have the name `text`; returns the name in its normal form.

    Spaces and Unicode composition are normalized. `own` is the id of the session that will have the
    name; empty if it has no file yet. Raises SessionError if the name is not allowed, or belongs to
    another session.
    """
    name = checked_name(text)
    others = [ident for ident, other in _names(folder).items() if same_name(other, name)]
    if (folder / f"{name}{SUFFIX}").is_file():
        others.append(name)
    for ident in others:
        if ident != own:
            raise SessionError(
                f"session {ident} is called {format_value(name)}; allowed: a name that no "
                "other session has",
                hint=f"choose another name, or delete that session: sirchat sessions rm {ident}",
            )
    return name


def branches_of(folder: Path, family: str) -> list[SavedSession]:
    """The list entries of the chat `family` (an id) and of its branches, the last written first."""
    try:
        files = [f"{ident}{SUFFIX}" for ident in family_in(folder, family)]
    except SessionError:
        files = _files(folder)
    chats = [chat for chat in _summaries(folder, files, []) if chat.family == family]
    return sorted(chats, key=lambda chat: chat.updated, reverse=True)


def remove_session(path: Path) -> None:
    """Delete all files of a session, damaged or not, and its text in the search index.

    Raises SessionError for a file that is missing, in use, or not a session.
    """
    refuse_missing(path)
    with explained(path), closing(connect(path)) as connection:
        _lock_to_remove(connection, path)
        # The session's own file is the last: its name leads to the others.
        beside = (".safetensors", ".safetensors.new", f"{SUFFIX}-journal", HOLDER)
        for suffix in (*beside, SUFFIX):
            path.with_suffix(suffix).unlink(missing_ok=True)
    remove_from_index(path)


def export_session(path: Path, stream: BinaryIO) -> None:
    """Write a saved session's turns to `stream` as JSON Lines, one message in each line.

    Raises SessionError if the session can't be opened; see `SessionStore.open`.
    """
    with SessionStore.open(path) as store:
        turns = store.turns()
    write_jsonl(
        (
            TranscriptTurn(cast(RoleName, turn.role), turn.text, line)
            for line, turn in enumerate(turns, 1)
        ),
        stream,
    )


def _names(folder: Path) -> dict[str, str]:
    """The name of each session of `folder` that has one, by the session's id."""
    try:
        return names_in(folder)
    except SessionError:  # no index can be made there
        return {chat.id: chat.name for chat in list_sessions(folder).sessions if chat.name}


def _files(folder: Path) -> list[str]:
    """The names of the session files in a folder, the last written one first."""
    found = list[tuple[float, str]]()
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # the file was just removed
                if entry.name.endswith(SUFFIX) and entry.is_file():
                    found.append((entry.stat().st_mtime, entry.name))
    found.sort(reverse=True)
    return [name for _, name in found]


def _lock_to_remove(connection: sqlite3.Connection, path: Path) -> None:
    """Lock a session's file before it is deleted, even if the file is damaged or empty.

    Raises SessionError if the file is not a session, and an SQLite error if another process uses
    the file.
    """
    try:
        lock(connection)
        if path.stat().st_size and not is_session(connection):
            raise no_session(path)
    except sqlite3.DatabaseError as error:
        if result_code(error) != sqlite3.SQLITE_CORRUPT:
            raise


def _last(folder: Path) -> Path:
    for one in _unused_first(_summaries(folder, _files(folder), [])):
        return one.path
    raise SessionError(f"there is no saved session in {folder}")


def _summaries(
    folder: Path, files: Iterable[str], refused: list[SessionError]
) -> Iterator[SavedSession]:
    """Yield the list entries of saved sessions; each file is read only when its entry is needed.

    `files` are the names of the sessions' files in `folder`. Errors of files that can't be read are
    appended to `refused`.
    """
    for path in map(folder.joinpath, files):
        try:
            yield summary_of(path)
        except SessionError as error:
            # Else it was just removed, or a process was killed while it created the file.
            if _size(path):
                refused.append(error)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _unused_first(sessions: Iterable[SavedSession]) -> Iterator[SavedSession]:
    """Yield the entries of sessions that no process has open; if there are none, yield all."""
    others, is_found = list[SavedSession](), False
    for one in sessions:
        if one.in_use:
            others.append(one)
        else:
            is_found = True
            yield one
    yield from () if is_found else others


def _first_few(ids: list[str]) -> str:
    return ", ".join(ids[:5]) + (" and more" if len(ids) > 5 else "")


def _newest(found: dict[str, Path]) -> str:
    return f"the newest session is {max(found)}" if found else "no session is saved"


def summary_of(path: Path) -> SavedSession:
    """Read the list entry of the session in the file `path`.

    If another process has locked the file, or a crash interrupted a commit, the file is read
    without locks: its contents are consistent, unless a commit is running at this moment. If
    reading without locks fails, the entry is made from the file's name and time alone.
    """
    with decoding(path):
        try:
            return _summary(path, "mode=ro", in_use=False)
        except sqlite3.OperationalError as error:
            if result_code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY):
                raise
            in_use = result_code(error) == sqlite3.SQLITE_BUSY
        try:
            return _summary(path, "immutable=1", in_use=in_use)
        except (sqlite3.Error, SessionError, *UNDECODABLE):
            return _unread_summary(path, in_use)


def _summary(path: Path, options: str, *, in_use: bool) -> SavedSession:
    with closing(connect(path, options, timeout=0)) as connection:
        check_format(connection, path)
        about = {name: json.loads(value) for name, value in connection.execute(_ABOUT)}
        (turns,) = connection.execute("SELECT count(*) FROM turns").fetchone()
        first = connection.execute(f"{_USERS} LIMIT 1").fetchone()
        last = connection.execute(f"{_USERS} DESC LIMIT 1").fetchone()
    meta = dict(about["meta"])
    return SavedSession(
        id=path.stem,
        name=str(about.get("name", "")),
        path=path,
        created=_local_time(about["created"]),
        updated=_local_time(path.stat().st_mtime),
        model=str(meta.get("model", "")),
        turns=turns,
        first=_first_line(first[0]) if first else "",
        last=_first_line(last[0]) if last else "",
        in_use=in_use,
        family=str(meta.get("family", path.stem)),
    )


def _unread_summary(path: Path, in_use: bool) -> SavedSession:
    """Make the list entry of a session whose file can't be read, from the file's name and time."""
    updated = _local_time(path.stat().st_mtime)
    try:
        created = datetime.strptime(path.stem[:13], "%Y%m%d-%H%M").astimezone()
    except ValueError:
        created = updated
    return SavedSession(path.stem, "", path, created, updated, "", 0, "", "", in_use, path.stem)


def _local_time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds).astimezone()


def _first_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _FIRST_LINE else f"{line[: _FIRST_LINE - 1]}…"


LENGTH = 40
"""Maximum number of characters in a session's name."""

_LIKE_AN_ID = r"[0-9]{1,8}|[0-9]{8}-[0-9]{0,4}|[0-9]{8}-[0-9]{4}-\w{0,4}"


def checked_name(text: str) -> str:
    """Check a name for a session; returns it with spaces and Unicode composition normalized.

    Raises SessionError for a name that is not allowed. Ids, beginnings of ids and `last` are not
    allowed, because they already refer to a session. A name can't begin with a dash, because flags
    begin with one.
    """
    name = re.sub(" +", " ", unicodedata.normalize("NFC", text).strip(" "))
    is_reserved = re.fullmatch(_LIKE_AN_ID, name) or _key(name) == "last"
    is_text = name.isprintable() and not name.startswith(("-", '"')) and 0 < len(name) <= LENGTH
    if is_reserved or not is_text:
        raise SessionError(
            f"a session can't be called {format_value(name)}; allowed: up to {LENGTH} visible "
            "characters, but not the word last, nothing that looks like an id, and no dash or "
            "quote at the start",
            hint="for example /save my trip",
        )
    return name


def same_name(one: str, other: str) -> bool:
    """Whether two session names are equal, ignoring case, spaces and Unicode composition."""
    return bool(one) and _key(one) == _key(other)


def tells_of(name: str, said: str, *, whole: bool) -> bool:
    """Whether a session's name contains `said`, a text that is about to be erased.

    If `whole` is true, `said` is the text of a complete turn, and the result is also true if the
    name is a part of this text.
    """
    name_key, said_key = _key(name), _key(said)
    repeats = said_key in name_key or (whole and name_key in said_key)
    return bool(name_key and said_key) and repeats


def _key(name: str) -> str:
    return " ".join(unicodedata.normalize("NFC", name).casefold().split())
