"""Finds saved chats by what was said in them, by SQLite's FTS5.

Each search reads all chats into a table in memory, so that no text is on disk twice.
"""

from __future__ import annotations

import json
import re
import sqlite3
import unicodedata
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from sirchat.errors import SessionError, UsageError, format_value
from sirchat.saved.database import UNDECODABLE, check_format, connect
from sirchat.saved.session_list import SavedSession, read_summary, session_files

MAX_HITS = 20  # chats that a search returns

_MAX_LEAD_CHARS = 24  # characters of a line before its first match
_MATCH_MARKS = "\ufdd0", "\ufdd1"  # around a match in a snippet; Unicode has no such characters
# Not the tokenizer `trigram`: it finds no word of two letters, as Tokyo is in Japanese, it finds
# Rome in chromed, and before SQLite 3.45 it takes no e for an é.
_TABLE = """CREATE VIRTUAL TABLE said USING fts5 (name, text,
    tokenize = "unicode61 remove_diacritics 2 categories 'L* N* Co Mn Mc'")"""
# The rank is bm25; chats are numbered from the newest on.
_SELECT_MATCHES = "SELECT rowid FROM said WHERE said MATCH ? ORDER BY rank, rowid"
_INSERT = "INSERT INTO said (rowid, name, text) VALUES (?, ?, ?)"
_SELECT_SNIPPET = """SELECT snippet(said, 1, ?, ?, '…', 24) FROM said
WHERE said MATCH ? AND rowid = ?"""
# A word with one of these is found only as it is written: C++ is not C.
_SIGNS = re.compile(r"[+#*&@$%]")
# A character of a script without spaces between words, such as Chinese. Each is a word of the
# table, where a zero-width space stands on both sides of it.
_SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
    "\uf900-\ufaff\U00020000-\U0003ffff]"
)
_ZERO_WIDTH_SPACE = "\u200b"


class SnippetPart(NamedTuple):
    """A piece of a line of text. `is_match` says whether it is one of the searched words."""

    text: str
    is_match: bool


class Hit(NamedTuple):
    """A found chat, and one line of it, which is empty if only the chat's name has the words."""

    session: SavedSession
    snippet: tuple[SnippetPart, ...]


class ChatSearchResult(NamedTuple):
    hits: list[Hit]
    more_count: int  # of found chats that are not in `hits`


def search_sessions(folder: Path, words: str, except_id: str = "") -> ChatSearchResult:
    """Find the saved chats with all `words`: best (bm25) first, then newest first.

    Of the last word, a beginning is enough. Raises UsageError if `words` has no word.
    """
    if not (query := _query(words)):
        raise UsageError(
            f"{format_value(words)} has no word to search for; allowed: letters and digits",
            hint="sirchat sessions search green door",
        )
    paths = [path for path in map(folder.joinpath, session_files(folder)) if path.stem != except_id]
    chats = [_read_chat(path) for path in paths]
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(_TABLE)
        rows = (map(_separate_characters, chat) for chat in chats)
        connection.executemany(_INSERT, ((number, *row) for number, row in enumerate(rows)))
        found = [number for (number,) in connection.execute(_SELECT_MATCHES, (query,))]
        for word in filter(_SIGNS.search, words.split()):
            found = [n for n in found if word.casefold() in " ".join(chats[n]).casefold()]
        hits = list[Hit]()
        for number in found[:MAX_HITS]:
            values = (*_MATCH_MARKS, query, number)
            ((snippet,),) = connection.execute(_SELECT_SNIPPET, values)
            with suppress(SessionError):  # the chat was removed, or damaged, just now
                hits.append(Hit(read_summary(paths[number]), _parse_snippet(snippet)))
    return ChatSearchResult(hits, max(0, len(found) - MAX_HITS))


def saved_text(path: Path) -> str:
    """The messages of the chat in the file `path`, open or not; empty if damaged."""
    return _read_chat(path)[1]


def _read_chat(path: Path) -> tuple[str, str]:
    """A chat's name and text, also if another process has it open; empty if damaged."""
    for options in ("mode=ro", "immutable=1"):
        try:
            with closing(connect(path, options, timeout=0)) as connection:
                check_format(connection, path)
                turns = connection.execute("SELECT thinking, text FROM turns ORDER BY turn")
                text = "\n".join(f"{thinking} {said}".lstrip() for thinking, said in turns)
                name = connection.execute("SELECT value FROM about WHERE name = 'name'").fetchone()
            return str(json.loads(name[0])) if name else "", text
        except (sqlite3.Error, SessionError, AttributeError, *UNDECODABLE):
            continue
    return "", ""


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


def _parse_snippet(snippet: str) -> tuple[SnippetPart, ...]:
    begin, end = _MATCH_MARKS
    line = " ".join(snippet.replace(_ZERO_WIDTH_SPACE, "").split())
    before, *marked = line.split(begin)
    if len(before) > _MAX_LEAD_CHARS:
        last = before[-_MAX_LEAD_CHARS:]
        before = f"…{last[last.find(' ') + 1 :]}"
    parts = [SnippetPart(before, False)]
    for piece in marked:
        match, _, after = piece.partition(end)
        parts += [SnippetPart(match, True), SnippetPart(after, False)]
    return tuple(part for part in parts if part.text) if marked else ()
