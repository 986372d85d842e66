"""The folder of saved sessions: lists, names, finds, copies, removes and exports them."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from sirchat import paths
from sirchat.errors import SessionError, did_you_mean, format_value
from sirchat.saved.database import (
    SUFFIX,
    UNDECODABLE,
    as_damage_errors,
    as_session_errors,
    check_format,
    connect,
    create_session_file,
    is_session,
    lock,
    not_a_session,
    refuse_missing,
    result_code,
)
from sirchat.saved.keys_values import KeysAndValues
from sirchat.saved.store import SessionStore
from sirchat.text.times import local_time
from sirchat.text.transcript import RoleName, TranscriptTurn, write_jsonl

MAX_NAME_CHARS = 40  # characters of a session's name
_MAX_EXCERPT_CHARS = 80  # characters
_SELECT_ABOUT = "SELECT name, value FROM about WHERE name IN ('meta', 'created', 'name')"
_SELECT_USER_TEXTS = "SELECT text FROM turns WHERE role = 'user' AND NOT is_summary ORDER BY turn"
_ID_PATTERN = r"[0-9]{1,8}|[0-9]{8}-[0-9]{0,4}|[0-9]{8}-[0-9]{4}-\w{0,4}"


@dataclass(frozen=True, slots=True)
class SavedSession:
    """One entry of the list of saved sessions. Texts are empty if the file can't be read.

    Control characters in the texts must be removed before they are shown.
    """

    id: str
    name: str
    path: Path
    created: datetime
    updated: datetime
    model: str
    turns: int  # number of messages
    first_message: str  # the beginning of the first user message that is no summary, on one line
    last_message: str  # the beginning of the last user message
    in_use: bool  # whether a process has the session open
    family: str  # the id of the chat from which it was branched, or its own


class Listing(NamedTuple):
    """The saved sessions of a folder, and an error for each file that can't be read."""

    sessions: list[SavedSession]
    errors: list[SessionError]


def list_sessions(folder: Path) -> Listing:
    """The saved sessions, last written first."""
    errors: list[SessionError] = []
    return Listing(list(_summaries(folder, session_files(folder), errors)), errors)


def key_value_bytes(folder: Path) -> int:
    """Size in bytes of the files of keys and values beside the sessions in a folder."""
    return sum(size for _, size, _ in _key_value_files(folder))


def make_room(folder: Path, limit: int) -> int:
    """Delete the oldest files of keys and values, until the others have at most `limit` bytes.

    Returns how many bytes were freed. A chat without its file reads its text again.
    """
    files, freed = _key_value_files(folder), 0
    over = sum(size for _, size, _ in files) - limit
    for _, size, file in files:
        if freed >= over:
            break
        with suppress(OSError):  # it was just removed, or its folder is read-only
            file.unlink()
            freed += size
    return freed


def _key_value_files(folder: Path) -> list[tuple[float, int, Path]]:
    """The files of keys and values: time of change, size, and path, oldest first."""
    found = list[tuple[float, int, Path]]()
    for file in folder.glob("*.safetensors"):
        with suppress(OSError):  # it was just removed
            state = file.stat()
            found.append((state.st_mtime, state.st_size, file))
    return sorted(found)


def find_session(folder: Path, ident: str, *, may_be_open: bool = False, own_id: str = "") -> Path:
    """The file of the session with the id, name, or beginning of an id `ident`; `last`: the newest.

    The newest is not `own_id`, the session open here. Raises SessionError if none or several match,
    or if the newest is open in another process and `may_be_open` is False.
    """
    if ident == "last":
        files = [name for name in session_files(folder) if name != f"{own_id}{SUFFIX}"]
        for chat in _summaries(folder, files, []):
            if chat.in_use and not may_be_open:
                raise SessionError(
                    f"the last chat, {chat.name or chat.id}, is open in another process",
                    hint="close it there, or name another chat: sirchat sessions lists all; "
                    "--branch NAME goes on in a copy",
                )
            return chat.path
        others = "no other saved session than this chat" if own_id else "no saved session"
        raise SessionError(f"there is {others} in {folder}")
    ids = sorted(name.removesuffix(SUFFIX) for name in session_files(folder))
    if ident in ids:
        return folder / f"{ident}{SUFFIX}"
    chats = list_sessions(folder).sessions
    by_name = [chat.id for chat in chats if names_match(chat.name, ident)]
    matches = by_name or [id for id in ids if ident and id.startswith(ident)]
    if len(matches) > 1:
        how = "are called" if by_name else "begin with"
        listed = ", ".join(matches[:5]) + (" and more" if len(matches) > 5 else "")
        raise SessionError(
            f"several sessions {how} {format_value(ident)}: {listed}",
            hint="give the id of one of them",
        )
    if not matches:
        newest = f"the newest session is {ids[-1]}" if ids else "no session is saved"
        raise SessionError(
            f"there is no saved session {format_value(ident)}",
            hint=did_you_mean(ident, [*ids, *(chat.name for chat in chats if chat.name)]) or newest,
        )
    return folder / f"{matches[0]}{SUFFIX}"


def copy_session(folder: Path, ident: str, name: str) -> SessionStore:
    """Copy the saved session `ident`, open or not, to a branch called `name`; returns its store.

    Raises SessionError if the name is not allowed or taken, or if the copy fails.
    """
    path, name = find_session(folder, ident, may_be_open=True), check_name(folder, name, "")
    with SessionStore.read(path) as saved:
        return create_branch(saved, name)


def create_branch(store: SessionStore, name: str) -> SessionStore:
    """Copy what is saved in `store` to a branch called `name`; returns its open store."""
    copy = create_session_file(store.path.parent, SUFFIX)
    try:
        store.copy_to(copy)
        with suppress(OSError):  # an incomplete file counts as none
            kv, kv_copy = store.path.with_suffix(".safetensors"), copy.with_suffix(".safetensors")
            with kv.open("rb") as old, paths.open_private(kv_copy, "xb") as new:
                shutil.copyfileobj(old, new)
        branch = SessionStore.open(copy)
        branch.become_branch(name, store)
        return branch
    except BaseException:
        with suppress(SessionError):
            remove_session(copy)
        raise


def check_name(folder: Path, text: str, own_id: str) -> str:
    """Normalize a name for the session with the id `own_id` (empty for a new session).

    Raises SessionError if the name is not allowed, or belongs to another session.
    """
    name = _normalize_name(text)
    chats = list_sessions(folder).sessions
    others = [chat.id for chat in chats if names_match(chat.name, name)]
    if (folder / f"{name}{SUFFIX}").is_file():
        others.append(name)
    for ident in others:
        if ident != own_id:
            raise SessionError(
                f"session {ident} is called {format_value(name)}; allowed: a name that no "
                "other session has",
                hint=f"choose another name, or delete that session: sirchat sessions rm {ident}",
            )
    return name


def branches_of(folder: Path, family: str) -> list[SavedSession]:
    """The entries of the chat `family` (an id) and of its branches, last written first."""
    return [chat for chat in list_sessions(folder).sessions if chat.family == family]


def remove_session(path: Path) -> None:
    """Delete all files of a session, damaged or not.

    Raises SessionError if it is missing, in use, or not a session.
    """
    refuse_missing(path)
    with as_session_errors(path), closing(connect(path)) as connection:
        _lock_to_remove(connection, path)
        # The session's own file is the last: its name leads to the others.
        KeysAndValues(path).drop()
        for suffix in (f"{SUFFIX}-journal", SUFFIX):
            path.with_suffix(suffix).unlink(missing_ok=True)


def export_session(path: Path, stream: BinaryIO) -> None:
    """Write the messages of a session, open or not, as JSON Lines; raises SessionError."""
    with SessionStore.read(path) as store:
        turns = store.turns()
    write_jsonl(
        (
            TranscriptTurn(cast(RoleName, turn.role), turn.text, line, thinking=turn.thinking)
            for line, turn in enumerate(turns, 1)
        ),
        stream,
    )


def read_summary(path: Path) -> SavedSession:
    """The list entry of a session's file; raises DamagedSessionError.

    A locked file, or one with an interrupted commit, is read without locks; if that fails, too, the
    entry has only what the file's name and its time tell.
    """
    with as_damage_errors(path):
        try:
            return _summary(path, "mode=ro", in_use=False)
        except sqlite3.OperationalError as error:
            if result_code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY):
                raise
            in_use = result_code(error) == sqlite3.SQLITE_BUSY
        try:
            return _summary(path, "immutable=1", in_use=in_use)
        except (sqlite3.Error, SessionError, *UNDECODABLE):
            return _fallback_summary(path, in_use)


def names_match(name: str, other: str) -> bool:
    """Whether two names are equal, apart from case, spaces and Unicode composition."""
    return bool(name) and _name_key(name) == _name_key(other)


def reveals_text(name: str, erased_text: str, *, is_whole_turn: bool) -> bool:
    """Whether a chat's name has the erased text in it, or is a part of a wholly erased turn."""
    name_key, text_key = _name_key(name), _name_key(erased_text)
    is_revealing = text_key in name_key or (is_whole_turn and name_key in text_key)
    return bool(name_key and text_key) and is_revealing


def session_files(folder: Path) -> list[str]:
    """The names of the session files in a folder, last written first."""
    files = list[tuple[float, str]]()
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # the file was just removed
                if entry.name.endswith(SUFFIX) and entry.is_file():
                    files.append((entry.stat().st_mtime, entry.name))
    return [name for _, name in sorted(files, reverse=True)]


def _summaries(
    folder: Path, files: Iterable[str], errors: list[SessionError]
) -> Iterator[SavedSession]:
    """Yield list entries, each read when it is needed; errors are appended to `errors`."""
    for path in map(folder.joinpath, files):
        try:
            yield read_summary(path)
        except SessionError as error:
            with suppress(OSError):  # it was just removed
                if path.stat().st_size:  # else a process was killed while it created the file
                    errors.append(error)


def _summary(path: Path, options: str, *, in_use: bool) -> SavedSession:
    with closing(connect(path, options, timeout=0)) as connection:
        check_format(connection, path)
        about = {name: json.loads(value) for name, value in connection.execute(_SELECT_ABOUT)}
        (turns,) = connection.execute("SELECT count(*) FROM turns").fetchone()
        first = connection.execute(f"{_SELECT_USER_TEXTS} LIMIT 1").fetchone()
        last = connection.execute(f"{_SELECT_USER_TEXTS} DESC LIMIT 1").fetchone()
    meta = dict(about["meta"])
    return SavedSession(
        id=path.stem,
        name=str(about.get("name", "")),
        path=path,
        created=local_time(about["created"]),
        updated=local_time(path.stat().st_mtime),
        model=str(meta.get("model", "")),
        turns=turns,
        first_message=_excerpt(first[0]) if first else "",
        last_message=_excerpt(last[0]) if last else "",
        in_use=in_use,
        family=str(meta.get("family", path.stem)),
    )


def _fallback_summary(path: Path, in_use: bool) -> SavedSession:
    updated = local_time(path.stat().st_mtime)
    try:
        created = datetime.strptime(path.stem[:13], "%Y%m%d-%H%M").astimezone()
    except ValueError:
        created = updated
    return SavedSession(path.stem, "", path, created, updated, "", 0, "", "", in_use, path.stem)


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_EXCERPT_CHARS else f"{line[: _MAX_EXCERPT_CHARS - 1]}…"


def _lock_to_remove(connection: sqlite3.Connection, path: Path) -> None:
    """Lock a session's file, even a damaged or empty one; SessionError if it is no session."""
    try:
        lock(connection)
        if path.stat().st_size and not is_session(connection):
            raise not_a_session(path)
    except sqlite3.DatabaseError as error:
        if result_code(error) != sqlite3.SQLITE_CORRUPT:
            raise


def _normalize_name(text: str) -> str:
    """The name with normalized spaces and Unicode composition; SessionError if not allowed."""
    name = re.sub(" +", " ", unicodedata.normalize("NFC", text).strip(" "))
    is_reserved = re.fullmatch(_ID_PATTERN, name) or _name_key(name) == "last"
    is_text = name.isprintable() and not name.startswith(("-", '"'))
    if is_reserved or not is_text or not 0 < len(name) <= MAX_NAME_CHARS:
        raise SessionError(
            f"a session can't be called {format_value(name)}; allowed: up to {MAX_NAME_CHARS} "
            "visible characters, but not the word last, nothing that looks like an id, and no "
            "dash or quote at the start",
            hint="for example /save my trip",
        )
    return name


def _name_key(name: str) -> str:
    return " ".join(unicodedata.normalize("NFC", name).casefold().split())
