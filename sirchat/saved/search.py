"""Searches saved chats for words; for each chat found, gives the line with most of the words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sirchat.errors import SessionError, UsageError, format_value, nearest
from sirchat.saved.database import SUFFIX
from sirchat.saved.search_index import SPACELESS, lines_of, matches
from sirchat.saved.session_list import SavedSession, same_name, summary_of

MOST = 20
"""Maximum number of chats that a search returns."""

_HINT = "fewer words find more; sirchat sessions lists all chats"
_BEFORE, _LENGTH = 24, 300  # characters of a line: before the first match, and in all


class Part(NamedTuple):
    """A piece of a line of text; `is_match` says whether the piece is one of the searched words."""

    text: str
    is_match: bool


class Hit(NamedTuple):
    """A chat that a search has found, and the line of the chat to show.

    `line` is the line with the most of the searched words, or the first of several such lines,
    split into parts that match and parts that don't. `line` is empty if the words are only in the
    chat's name.
    """

    session: SavedSession
    line: tuple[Part, ...]


class Found(NamedTuple):
    """The result of a search in saved chats.

    `hits` are the best chats; `more` is the number of further chats that were found. `named` are
    the ids of the chats whose name is exactly the searched text. `hint` says what to do if nothing
    was found.
    """

    hits: list[Hit]
    more: int
    named: list[str]
    hint: str


def search_sessions(
    folder: Path, words: str, notice: Callable[[str], object] = lambda text: None
) -> Found:
    """Find the saved chats of `folder` in which all `words` occur, the best chats first.

    Chats are sorted by their BM25 score; of equal chats, the newest comes first. Case and accents
    don't matter. The last of the words may be only the beginning of a word in the chat. `notice` is
    called with a message before long work. Raises UsageError if `words` has no word, and
    SessionError if the index can't be used.
    """
    patterns = _patterns(words)
    if not patterns:
        raise UsageError(
            f"{format_value(words)} has no word to search for; allowed: letters and digits",
            hint="sirchat sessions search green door",
        )
    names, said = matches(folder, words, notice)
    hits = []
    for ident in said[:MOST]:
        path = folder / f"{ident}{SUFFIX}"
        with suppress(SessionError):  # the chat was removed, or damaged, just now
            hits.append(Hit(summary_of(path), _best_line(lines_of(path), patterns)))
    named = [ident for ident, name in names.items() if same_name(name, words)]
    hint = "" if named or said else nearest(words, names.values())
    return Found(hits, max(0, len(said) - MOST), named, hint or _HINT)


def nothing_found(words: str, found: Found) -> SessionError:
    """Make the SessionError for a search of `words` that found no chat; `found` is its result."""
    return SessionError(
        f"no saved chat is called {format_value(words)} or has all of these words", hint=found.hint
    )


def _patterns(words: str) -> list[re.Pattern[str]]:
    """Make one regular expression for each word, which finds the word as the search index does.

    The text to search must be without case and accents (see `_folded`).
    """
    found = [parts for word in words.split() if (parts := _runs(_folded(word)))]
    patterns = []
    for number, parts in enumerate(found, 1):
        body = r"[\W_]+".join(map(re.escape, parts))
        is_whole = not SPACELESS.search(body)
        before = r"(?<![^\W_])" if is_whole else ""
        after = r"(?![^\W_])" if is_whole and number < len(found) else ""
        patterns.append(re.compile(f"{before}{body}{after}"))
    return patterns


def _runs(text: str) -> list[str]:
    """Split a text into runs of letters, digits and accents; all other characters are left out."""
    return "".join(
        char if char.isalnum() or unicodedata.category(char)[0] == "M" else " " for char in text
    ).split()


def _best_line(lines: Sequence[str], patterns: Sequence[re.Pattern[str]]) -> tuple[Part, ...]:
    """Find the line that matches most patterns, the first of several, and split it into parts.

    Returns the parts that match and those that don't; an empty tuple if no line matches.
    """
    best, most = "", 0
    for line in lines:
        folded = _folded(line)
        count = sum(1 for pattern in patterns if pattern.search(folded))
        if count > most:
            best, most = line, count
        if most == len(patterns):
            break
    shown = unicodedata.normalize("NFC", " ".join(best.split()))
    return tuple(_parts(shown, patterns)) if most else ()


def _parts(line: str, patterns: Sequence[re.Pattern[str]]) -> list[Part]:
    """Split a line into parts that match a pattern and parts that don't.

    If the first match is far from the line's start, a part `…` replaces most of the text before it.
    The line is cut after 300 characters.
    """
    folded, origin = "", []
    for index, char in enumerate(line):
        letters = _folded(char)
        folded += letters
        origin += [index] * len(letters)
    marked = set[int]()
    for pattern in patterns:
        for match in pattern.finditer(folded):
            marked |= set(range(origin[match.start()], origin[match.end() - 1] + 1))
    first = min(marked, default=0)
    start = 0 if first <= _BEFORE else line.find(" ", first - _BEFORE, first) + 1 or first
    parts = [Part("…", False)] if start else []
    for index, char in enumerate(line[start : start + _LENGTH], start):
        is_match = index in marked
        if parts and parts[-1].is_match == is_match:
            parts[-1] = Part(parts[-1].text + char, is_match)
        else:
            parts.append(Part(char, is_match))
    return parts


def _folded(text: str) -> str:
    """The text in lower case and without accents, so that such texts can be compared."""
    if text.isascii():
        return text.lower()
    bare = re.sub("[\u0300-\u036f]+", "", unicodedata.normalize("NFKD", text).casefold())
    return unicodedata.normalize("NFC", bare)
