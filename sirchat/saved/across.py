"""Finds passages of other saved chats that fit a text, and quotes them with chat and date.

They are read from the chats' files at each search, so nothing that was erased there is found.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from itertools import compress, pairwise
from math import log
from pathlib import Path

from sirchat.errors import SessionError
from sirchat.recall.word_index import (
    STOP_WORDS,
    letter_groups,
    terms_of,
    words_of,
)
from sirchat.saved.database import SUFFIX, UNDECODABLE, check_format, connect
from sirchat.saved.index import find_matches
from sirchat.text.detokenizer import SENTENCE_END

MOST = 3  # passages that are quoted

_CHATS = 24  # of the best by SQLite's bm25; only these are read
_WORDS = 4  # a shorter sentence stands with the next one
_LONGEST = 300  # characters of a passage that are quoted
_LEAST_SHARE = 0.6  # of the best passage's score
FLOOR = 0.5  # share of a message's words, below which nothing is quoted unasked
_HEAD = "From my other chats:"


@dataclass(frozen=True)
class Passage:
    """A sentence or two of a message in another chat; `time` is in UNIX seconds."""

    text: str
    role: str
    chat: str  # its name; empty if it has none
    time: float

    def __str__(self) -> str:
        date = datetime.fromtimestamp(self.time)
        chat = f", {json.dumps(self.chat, ensure_ascii=False)}" if self.chat else ""
        said = "" if self.role == "user" else "you said "
        text = self.text if len(self.text) <= _LONGEST else f"{self.text[:_LONGEST]}…"
        return f"- {date.day} {date:%b %Y}{chat}: {said}{text}"


def quote(passages: Sequence[Passage], text: str = "") -> str:
    """The passages as they stand in a message, before the user's own `text`."""
    return "\n\n".join(["\n".join([_HEAD, *map(str, passages)]), *([text] if text else [])])


def unquoted(text: str) -> str:
    """The message `text` without the passages that `quote` has put before it."""
    head, _, rest = text.partition("\n\n")
    return rest if head.startswith(f"{_HEAD}\n- ") else text


def find_passages(
    folder: Path,
    text: str,
    *,
    without: Collection[str] = (),
    known: Collection[str] = (),
    floor: float = 0.0,
    notice: Callable[[str], object] = lambda text: None,
) -> list[Passage]:
    """The passages of the chats in `folder` that fit `text` best by their words, best first.

    They have at least the share `floor` of its words. Chats of the families `without`, and passages
    in the texts `known`, are left out. What users said comes before what models said. Raises
    SessionError if the index can't be used.
    """
    wanted = [word for word in dict.fromkeys(words_of(text)) if word not in STOP_WORDS]
    if not wanted:
        return []
    matches = find_matches(folder, " ".join(wanted), 0, notice, any_word=True)
    families = {chat.id: chat.family for chat in matches.chats}
    ids = [ident for ident in matches.ids if families.get(ident, ident) not in without]
    passages = [
        passage for ident in ids[:_CHATS] for passage in _passages(folder / f"{ident}{SUFFIX}")
    ]
    scores = _scores(passages, wanted)
    least = max(floor, _LEAST_SHARE * max(scores, default=0.0), 1e-9)
    said = [" ".join(each.split()) for each in known]
    found = dict[str, Passage]()
    for at in sorted(range(len(scores)), key=lambda at: (-scores[at], -passages[at].time)):
        passage = passages[at]
        if scores[at] >= least and not any(passage.text in each for each in said):
            found.setdefault(passage.text.casefold(), passage)
    return sorted(found.values(), key=lambda passage: passage.role != "user")[:MOST]


def _scores(passages: Sequence[Passage], wanted: Sequence[str]) -> list[float]:
    """For each passage, the share of the `wanted` words that it has; rare ones count more."""
    terms = [set(terms_of(passage.text)) for passage in passages]
    groups = [letter_groups(word) for word in wanted]  # most of them: the word in another form
    has = [[2 * sum(term in has for term in word) > len(word) for word in groups] for has in terms]
    weights = [log((len(has) + 1) / (sum(having) + 0.5)) for having in zip(*has, strict=True)]
    return [sum(compress(weights, having)) / sum(weights) for having in has]


def _passages(path: Path) -> Iterator[Passage]:
    """The passages of a saved chat but its questions, also while a process has it open."""
    for options in ("mode=ro", "immutable=1"):
        try:
            with closing(connect(path, options, timeout=0)) as connection:
                check_format(connection, path)
                about = dict(connection.execute("SELECT name, value FROM about"))
                turns = connection.execute("SELECT * FROM turns ORDER BY turn").fetchall()
            name, created = str(json.loads(about.get("name", '""'))), json.loads(about["created"])
            break
        except (sqlite3.Error, SessionError, AttributeError, *UNDECODABLE):
            continue
    else:
        return
    for _, role, text, _, *times in turns:
        if role in ("user", "assistant"):
            time = times[0] if times and times[0] is not None else float(created)
            for sentences in _pieces(unquoted(text)):
                yield Passage(sentences, role, name, time)


def _pieces(text: str) -> Iterator[str]:
    """The statements of a text, short ones together."""
    piece = ""
    ends = [0, *(match.end() for match in SENTENCE_END.finditer(text)), len(text)]
    for sentence in (text[start:end] for start, end in pairwise(ends)):
        if not sentence.rstrip().endswith(("?", "？")):
            piece = " ".join(f"{piece} {sentence}".split())
            if len(words_of(piece)) < _WORDS:
                continue
        if piece:
            yield piece
        piece = ""
    if piece:
        yield piece
