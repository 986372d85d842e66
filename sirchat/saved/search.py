"""Searches saved chats for words."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sirchat.errors import SessionError, UsageError, did_you_mean, format_value
from sirchat.saved.database import SUFFIX
from sirchat.saved.index import MATCH_MARKS, find_matches, has_words
from sirchat.saved.session_list import SavedSession, names_match, read_summary

MAX_HITS = 20  # chats that a search returns

_MAX_LEAD_CHARS = 24  # characters of a line before its first match
_HINT = "fewer words find more; sirchat sessions lists all chats"


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
    ids_by_name: list[str]  # of chats whose name was searched for
    hint: str  # what to do if nothing was found


def search_sessions(folder: Path, words: str) -> ChatSearchResult:
    """Find the saved chats with all `words`: best (bm25) first, then newest first.

    Raises UsageError if `words` has no word, and SessionError if the index can't be used.
    """
    if not has_words(words):
        raise UsageError(
            f"{format_value(words)} has no word to search for; allowed: letters and digits",
            hint="sirchat sessions search green door",
        )
    ids, snippets, chats = find_matches(folder, words, MAX_HITS)
    hits = []
    for ident, snippet in zip(ids, snippets, strict=False):
        with suppress(SessionError):  # the chat was removed, or damaged, just now
            hits.append(Hit(read_summary(folder / f"{ident}{SUFFIX}"), _parse_snippet(snippet)))
    ids_by_name = [chat.id for chat in chats if names_match(chat.name, words)]
    hint = _HINT
    if not (ids_by_name or ids):
        hint = did_you_mean(words, (chat.name for chat in chats if chat.name)) or _HINT
    return ChatSearchResult(hits, max(0, len(ids) - MAX_HITS), ids_by_name, hint)


def nothing_found_error(words: str, found: ChatSearchResult) -> SessionError:
    """The SessionError for a search of `words` that found no chat; `found` is its result."""
    return SessionError(
        f"no saved chat is called {format_value(words)} or has all of these words", hint=found.hint
    )


def _parse_snippet(snippet: str) -> tuple[SnippetPart, ...]:
    begin, end = MATCH_MARKS
    before, *marked = " ".join(snippet.split()).split(begin)
    if len(before) > _MAX_LEAD_CHARS:
        last = before[-_MAX_LEAD_CHARS:]
        before = f"…{last[last.find(' ') + 1 :]}"
    parts = [SnippetPart(before, False)]
    for piece in marked:
        match, _, after = piece.partition(end)
        parts += [SnippetPart(match, True), SnippetPart(after, False)]
    return tuple(part for part in parts if part.text) if marked else ()
