"""Finds passages of other saved chats that fit a text, and quotes them with chat and date.

They are read from the chats' files at each search, so nothing that was erased there is found.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sirchat.errors import SessionError
from sirchat.memory.ledger import ROW, Role
from sirchat.recall.passage_search import FLOOR, PassageSearch, Sought, best_first
from sirchat.recall.passages import PASSAGE, divided
from sirchat.saved.database import SUFFIX, UNDECODABLE, check_format, connect
from sirchat.saved.index import find_matches
from sirchat.saved.store import SavedTurn, SessionStore
from sirchat.text.times import local_time

MOST = 3  # passages that are quoted

_CHATS = 24  # the best by SQLite's bm25, then the newest; only these are read
_WORDS = 2  # least words of a longer message that a passage has, unless it fits by meaning
_LONGEST = 300  # characters of a passage that are quoted
_HEAD = "From my other chats:"
_NO_VECTOR = np.zeros(0, np.float16)

VectorsOf = tuple[str, int]  # a model's name, and the check sum of its encoder
_Part = tuple[str, int, NDArray[np.float16]]  # text, turn and vector of a passage


@dataclass(frozen=True)
class Passage:
    """A sentence or two of a message in another chat; `time` is in UNIX seconds."""

    text: str
    role: str
    chat: str  # its name; empty if it has none
    time: float

    def __str__(self) -> str:
        date = local_time(self.time)
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
    message: Sought,
    search: PassageSearch,
    vectors_of: VectorsOf,
    *,
    without: Collection[str] = (),
    known: Collection[str] = (),
    notice: Callable[[str], object] = lambda text: None,
) -> list[Passage]:
    """The passages of the chats in `folder` that fit `message`, best first, as recall scores them.

    Chats of the families `without`, and passages in the texts `known`, are left out. `search` is
    empty, and of the model in `vectors_of`. Raises SessionError if the index can't be used.
    """
    wanted = search.telling_words(message.text)
    if not wanted:
        return []
    matches = find_matches(folder, " ".join(wanted), 0, notice, any_word=True)
    families = {chat.id: chat.family for chat in matches.chats}
    # A chat without such a word can be found by meaning; an id begins with the time.
    others = sorted(families, reverse=True) if message.vector is not None else []
    ids = [one for one in dict.fromkeys([*matches.ids, *others]) if families[one] not in without]
    said = [" ".join(each.split()) for each in known]
    found, numbers = list[Passage](), dict[tuple[str, int], int]()  # of each chat's turns
    rows, vectors = list[tuple[int, int, int, int]](), list[NDArray[np.float16]]()
    for ident in ids[:_CHATS]:
        for passage, turn, vector in _passages(folder / f"{ident}{SUFFIX}", search, vectors_of):
            if any(passage.text in each for each in said):
                continue
            found.append(passage)
            role = Role.USER if passage.role == "user" else Role.ASSISTANT
            rows.append((0, 1, numbers.setdefault((ident, turn), len(numbers)), role))
            vectors.append(vector)
    search.take(np.array(rows, PASSAGE), vectors, [passage.text for passage in found])
    generated = [turn for *_, turn, role in rows if role == Role.ASSISTANT]
    scores, alone = search.scores(message, generated), np.zeros(len(rows))
    by_meaning, needed = search.scores(message, generated, alone), min(_WORDS, len(set(wanted)))
    best = [
        at
        for at in best_first(scores, FLOOR).tolist()
        # What only stands beside a hit, or has one rare word, tells little in another chat.
        if by_meaning[at] >= FLOOR / 2
        or len(search.shared_words(found[at].text, message)) >= needed
    ]
    unique = {found[at].text.casefold(): found[at] for at in reversed(best)}
    return list(unique.values())[::-1][:MOST]


def _passages(
    path: Path, search: PassageSearch, vectors_of: VectorsOf
) -> Iterator[tuple[Passage, int, NDArray[np.float16]]]:
    """The passages of a saved chat but its questions, with their turns and vectors.

    Also while another process has it open.
    """
    for options in ("mode=ro", "immutable=1"):
        try:
            with closing(connect(path, options, timeout=0)) as connection:
                check_format(connection, path)
                store = SessionStore(path, connection)
                turns, saved, created = (
                    store.turns(),
                    _saved(store, search, vectors_of),
                    store.created,
                )
            break
        except (sqlite3.Error, SessionError, AttributeError, *UNDECODABLE):
            continue
    else:
        return
    for text, index, vector in saved or _divided(turns):
        turn, text = turns[index], " ".join(text.split())
        is_said = text and text in " ".join(unquoted(turn.text).split())
        if is_said and not text.endswith(("?", "\uff1f")):
            time = created if turn.time is None else turn.time
            yield Passage(text, turn.role, store.name, time), index, vector


def _saved(store: SessionStore, search: PassageSearch, vectors_of: VectorsOf) -> list[_Part]:
    """The saved passages with their vectors; none unless they are of this model and encoder."""
    head, saved = store.head(), store.passages()
    if head is None or (store.meta.get("model"), head.fields.get("encoder")) != vectors_of:
        return []
    texts = search.passages.texts_of(saved.rows, store.rows(ROW))
    return list(zip(texts, saved.rows["turn"].tolist(), saved.vectors, strict=True))


def _divided(turns: Sequence[SavedTurn]) -> Iterator[_Part]:
    """The turns' texts, divided as recall does it, each word as a token; without vectors."""
    for index, turn in enumerate(turns):
        if turn.role in ("user", "assistant"):
            words = re.findall(r"\s*\S+", unquoted(turn.text))
            for start, end in divided(words):
                yield "".join(words[start:end]), index, _NO_VECTOR
