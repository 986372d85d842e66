"""The passages of a chat, which are the units of recall: a sentence or two of one turn.

Short sentences are joined with the next one, and long ones are divided evenly. No passage has
tokens of the chat template or of a reply's reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.text.detokenizer import Texts, sentence_bounds

MIN_PASSAGE_TOKENS, MAX_PASSAGE_TOKENS = 8, 48  # with 16 and 96, 0.01 less of LoCoMo is found

PASSAGE = np.dtype([("start", np.int64), ("end", np.int64), ("turn", np.int32), ("role", np.int8)])

_TEXTLESS = np.uint8(Flag.ERASED | Flag.THINKING)

# The unit vector [D] of the tokens from one stream position to another; None if it is not known
VectorOf = Callable[[int, int], Tensor | None]


class Passages:
    """The passages of one chat, in stream order, with a vector of each."""

    def __init__(self, texts: Texts) -> None:
        self.token_texts = texts
        self._end = 0  # all tokens before this stream position are in passages
        # Their first n rows are in use; they grow by doubling.
        self._row_buffer = np.zeros(0, PASSAGE)
        self._vector_buffer = np.zeros((0, 0), np.float16)
        self._count = 0
        self.torn = np.zeros(0, bool)  # [seen], see `torn_sentences`

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> NDArray[np.void]:
        """The place of each passage [n]: a view with the fields of `PASSAGE`."""
        return self._row_buffer[: self._count]

    @property
    def vectors(self) -> NDArray[np.float16]:
        """The unit vector of each passage: a view [n, D]; NaN for a passage without a vector."""
        return self._vector_buffer[: self._count]

    def update(self, ledger: Ledger, vector_of: VectorOf = lambda start, end: None) -> None:
        """Add the passages of the complete turns that were read since the last update."""
        self.truncate(ledger.seen)
        if not len(self.torn):
            self.torn = torn_sentences(ledger, self.token_texts)
        self.torn = np.pad(self.torn, (0, ledger.seen - len(self.torn)))
        self.torn[ledger.torn] = True
        runs = list(_runs(ledger, self._end, self.torn))
        spans = [span for start, end in runs for span in self._divided(ledger, start, end)]
        rows = np.zeros(len(spans), PASSAGE)
        if spans:
            rows["start"], rows["end"] = np.array(spans).T
            for name in ("turn", "role"):
                rows[name] = ledger.column(name)[rows["start"]]
        self._append(rows, [vector_of(start, end) for start, end in spans])
        self._end = ledger.seen

    def truncate(self, seen: int) -> None:
        """Keep only the passages of the first `seen` tokens of the stream."""
        if seen < self._end:
            self._count, self._end = int(self.rows["end"].searchsorted(seen, side="right")), seen
        self.torn = self.torn[:seen]

    def reorder(self, ledger: Ledger, rank: NDArray[np.int64]) -> int:
        """Move the passages along with their tokens, whose new stream positions are `rank` [seen].

        Passages that have lost tokens are dropped. Returns how many of the first passages are
        unchanged.
        """
        rows = self.rows.copy()
        rows["start"], rows["end"] = rank[rows["start"]], rank[rows["end"] - 1] + 1
        is_whole = rows["end"] - rows["start"] == self.rows["end"] - self.rows["start"]
        kept = np.flatnonzero(is_whole & (rows["start"] >= 0))
        kept = kept[np.argsort(rows["start"][kept])]
        rows = rows[kept]
        rows["turn"] = ledger.column("turn")[rows["start"]]
        same = rows == self.rows[: len(rows)]
        self._replace(rows, self.vectors[kept], ledger.seen)
        self.torn = torn_sentences(ledger, self.token_texts)
        return int(np.argmin(np.append(same, False)))

    def erase(self, ledger: Ledger) -> None:
        """Delete vectors of passages with torn sentences, and passages of torn sentences alone."""
        self.torn = torn_sentences(ledger, self.token_texts)
        counts = np.concatenate([[0], np.cumsum(self.torn)])
        lost = counts[self.rows["end"]] - counts[self.rows["start"]]
        self.vectors[lost > 0] = np.nan
        stays = lost < self.rows["end"] - self.rows["start"]
        self._replace(self.rows[stays], self.vectors[stays], self._end)

    def texts(self, ledger: Ledger, start: int = 0, stop: int | None = None) -> list[str]:
        """The texts of passages number `start` to `stop` - 1, without torn sentences."""
        flags, found = ledger.column("flags"), list[str]()
        for first, end in self.rows[start:stop][["start", "end"]].tolist():
            has_text = (flags[first:end] & _TEXTLESS == 0) & ~self.torn[first:end]
            pieces = texts_at(ledger, self.token_texts, first + has_text.nonzero()[0])
            found.append("".join(pieces))
        return found

    def state(self) -> dict[str, NDArray[np.generic]]:
        """The passages as arrays, to be saved."""
        return {"rows": self.rows, "vectors": self.vectors, "until": np.array([self._end])}

    def load(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        rows = np.asarray(state["rows"]).astype(PASSAGE)
        vectors = np.asarray(state["vectors"]).astype(np.float16)
        self._replace(rows, vectors, int(state["until"][0]))
        self.torn = np.zeros(0, bool)  # not known yet

    def _replace(self, rows: NDArray[np.void], vectors: NDArray[np.float16], end: int) -> None:
        self._row_buffer, self._vector_buffer = rows, vectors
        self._count, self._end = len(rows), end

    def _append(self, rows: NDArray[np.void], vectors: Sequence[Tensor | None]) -> None:
        count, dims = self._count + len(rows), self._vector_buffer.shape[1]
        dims = next((len(vector) for vector in vectors if vector is not None), dims)
        if self._vector_buffer.shape[1] != dims:  # the first vectors of the chat
            self._vector_buffer = np.full((len(self._row_buffer), dims), np.nan, np.float16)
        if missing := max(0, count - len(self._row_buffer)):
            missing = max(missing, len(self._row_buffer))
            self._row_buffer = np.pad(self._row_buffer, (0, missing))
            self._vector_buffer = np.pad(self._vector_buffer, ((0, missing), (0, 0)))
        self._row_buffer[self._count : count] = rows
        for number, vector in enumerate(vectors, self._count):
            self._vector_buffer[number] = np.nan if vector is None else vector.numpy()
        self._count = count

    def _divided(self, ledger: Ledger, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The passages in a run of tokens, each as (start, end) in the stream."""
        pieces = texts_at(ledger, self.token_texts, np.arange(start, end))
        for first, last in divided(pieces):
            yield start + first, start + last


def texts_at(ledger: Ledger, texts: Texts, positions: Positions) -> list[str]:
    """The texts of the tokens at these stream positions."""
    return texts(ledger.column("token_id")[positions].tolist(), positions.tolist())


def sentences_of(ledger: Ledger, texts: Texts, turn: int) -> Iterator[tuple[Positions, list[str]]]:
    """The sentences of a turn: the stream positions of the tokens, and the texts of the tokens.

    The text of an erased token is a blank, or a line's end if the token ended a sentence.
    """
    positions = ledger.of_turn(turn)
    positions = positions[ledger.column("role")[positions] != Role.TEMPLATE]
    pieces = texts_at(ledger, texts, positions)
    flags = ledger.column("flags")[positions]
    for number in np.flatnonzero(flags & np.uint8(Flag.ERASED)).tolist():
        pieces[number] = "\n" if flags[number] & Flag.ANCHOR else " "
    for start, end in pairwise(sentence_bounds(pieces)):
        yield positions[start:end], pieces[start:end]


def torn_sentences(ledger: Ledger, texts: Texts) -> NDArray[np.bool_]:
    """Mask [seen] of the tokens in torn sentences, which are sentences with erased words."""
    # The rest of a torn sentence says what nobody said, so recall does not restore it.
    is_erased: NDArray[np.bool_] = ledger.column("flags") & np.uint8(Flag.ERASED) != 0
    is_torn = is_erased.copy()
    for turn in np.unique(ledger.column("turn")[is_erased]).tolist():
        for positions, _ in sentences_of(ledger, texts, turn):
            is_torn[positions] = is_erased[positions].any()
    is_torn[ledger.torn] = True
    return is_torn


def divided(pieces: Sequence[str]) -> list[tuple[int, int]]:
    """Divide a text, given as its token texts, into passages (start, end) of whole sentences."""
    found, start = list[tuple[int, int]](), 0
    for end in sentence_bounds(pieces):
        size = end - start
        if not size or (size < MIN_PASSAGE_TOKENS and end < len(pieces)):
            continue
        if size < MIN_PASSAGE_TOKENS and found and end - found[-1][0] <= MAX_PASSAGE_TOKENS:
            start, size = found[-1][0], end - found.pop()[0]
        count = -(-size // MAX_PASSAGE_TOKENS)
        found += pairwise([start + size * part // count for part in range(count + 1)])
        start = end
    return found


def _runs(ledger: Ledger, start: int, torn: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The (start, end) of each run of text tokens with one turn and role, from `start` on."""
    turn, role, flags = (ledger.column(name)[start:] for name in ("turn", "role", "flags"))
    has_text = (role != Role.TEMPLATE) & (flags & _TEXTLESS == 0) & ~torn[start:]
    changes = (np.diff(turn) != 0) | (np.diff(role) != 0) | (np.diff(has_text) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(turn)]
    for first, end in pairwise(bounds):
        if end > first and has_text[first]:
            yield start + first, start + end
