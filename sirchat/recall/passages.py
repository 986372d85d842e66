"""The passages of a chat, a sentence or two of one turn each, and those that fit a message.

Short sentences are joined with the next one, and long ones are divided evenly. No passage has
tokens of the chat template or of a reply's reasoning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.recall.word_index import DISCOUNT, MIN_POPULATION, WordIndex, word_weights, words_of
from sirchat.text.detokenizer import QUESTION_MARKS, Texts, sentence_bounds

MIN_PASSAGE_TOKENS, MAX_PASSAGE_TOKENS = 8, 48  # with 16 and 96, 0.01 less of LoCoMo is found

PASSAGE = np.dtype([("start", np.int64), ("end", np.int64), ("turn", np.int32), ("role", np.int8)])

_TEXTLESS = np.uint8(Flag.ERASED | Flag.THINKING)

# The unit vector [D] of the tokens from one stream position to another; None if it is not known
VectorOf = Callable[[int, int], Tensor | None]

# Chosen on LoCoMo's conversations and half a of the questions of `facts-in-dialogue`. Without
# CHANCE_SCORE, passages that share a frequent word displace those that say it in other words.
MIN_SCORE = 2.0  # least score of a passage that comes back; half of it for a message that asks
CHANCE_SCORE = MIN_SCORE / 2  # what z(words) reaches by chance
MIN_WORD_DEVIATION, MIN_COSINE_DEVIATION = 0.9, 0.1  # least standard deviations of the scores

# Passages of a turn that are few. Chosen on the first five chats of BEAM; with 3, less of LoCoMo's
# evidence is found (0.02 to 0.04), and without this, less of BEAM's (0.15).
MAX_FULL_SCORE_PASSAGES = 4

_MAX_QUERY_SENTENCES = 4  # most sentences of a message that are looked for

Scores = NDArray[np.float64]
Numbers = Sequence[int] | NDArray[np.int64]  # of turns


class Passages:
    """The passages of one chat, in stream order, with a vector of each."""

    def __init__(self, texts: Texts) -> None:
        self.token_texts = texts
        self._end = 0  # all tokens before this stream position are in passages
        # Their first n rows are in use; they grow by doubling.
        self._row_buffer = np.zeros(0, PASSAGE)
        self._vector_buffer = np.zeros((0, 0), np.float16)
        self._count = 0

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
        spans = list[tuple[int, int]]()
        for start, end in _runs(ledger, self._end):
            pieces = texts_at(ledger, self.token_texts, np.arange(start, end))
            spans += ((start + first, start + last) for first, last in divided(pieces))
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
        return int(np.argmin(np.append(same, False)))

    def erase(self, ledger: Ledger) -> None:
        """Delete vectors of passages with torn sentences, and passages of torn sentences alone."""
        first, last = (ledger.torn.searchsorted(self.rows[name]) for name in ("start", "end"))
        lost = last - first
        self.vectors[lost > 0] = np.nan
        stays = lost < self.rows["end"] - self.rows["start"]
        self._replace(self.rows[stays], self.vectors[stays], self._end)

    def texts(self, ledger: Ledger, start: int = 0, stop: int | None = None) -> list[str]:
        """The texts of passages number `start` to `stop` - 1, without torn sentences."""
        numbers = range(*slice(start, stop).indices(len(self)))
        shown = (self.shown_tokens(ledger, number) for number in numbers)
        return ["".join(texts_at(ledger, self.token_texts, at)) for at in shown]

    def shown_tokens(self, ledger: Ledger, number: int) -> Positions:
        """Positions of a passage's tokens, without torn sentences."""
        first, end = (int(self.rows[name][number]) for name in ("start", "end"))
        flags = ledger.column("flags")[first:end]
        torn = slice(*ledger.torn.searchsorted((first, end)))
        shown: Positions = first + (flags & _TEXTLESS == 0).nonzero()[0]
        return np.setdiff1d(shown, ledger.torn[torn], assume_unique=True)

    def vector_of(self, start: int, end: int) -> NDArray[np.float16] | None:
        """The vector of the passage from one stream position to another; None without any."""
        number = int(self.rows["start"].searchsorted(start))
        is_equal = number < len(self) and self.rows[["start", "end"]][number].item() == (start, end)
        vector = self.vectors[number] if is_equal and self.vectors.shape[1] else None
        return None if vector is None or np.isnan(vector).any() else vector

    def state(self) -> dict[str, NDArray[np.generic]]:
        """The passages as arrays, to be saved."""
        return {"rows": self.rows, "vectors": self.vectors, "until": np.array([self._end])}

    def load(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        rows = np.asarray(state["rows"]).astype(PASSAGE)
        vectors = np.asarray(state["vectors"]).astype(np.float16)
        self._replace(rows, vectors, int(state["until"][0]))

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


def note_torn_sentences(ledger: Ledger, texts: Texts) -> None:
    """Add the sentences with erased words to `ledger.torn`; call this after words were erased."""
    is_erased = ledger.column("flags") & np.uint8(Flag.ERASED) != 0
    turns = np.unique(ledger.column("turn")[is_erased]).tolist()
    said = (positions for turn in turns for positions, _ in sentences_of(ledger, texts, turn))
    torn = (positions for positions in said if is_erased[positions].any())
    ledger.torn = np.unique(np.concatenate([ledger.torn, *torn]))


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


def _runs(ledger: Ledger, start: int) -> Iterator[tuple[int, int]]:
    """The (start, end) of each run of text tokens with one turn and role, from `start` on."""
    turn, role, flags = (ledger.column(name)[start:] for name in ("turn", "role", "flags"))
    has_text = (role != Role.TEMPLATE) & (flags & _TEXTLESS == 0)
    has_text[ledger.torn[ledger.torn.searchsorted(start) :] - start] = False
    changes = (np.diff(turn) != 0) | (np.diff(role) != 0) | (np.diff(has_text) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(turn)]
    for first, end in pairwise(bounds):
        if end > first and has_text[first]:
            yield start + first, start + end


@dataclass(frozen=True)
class PassageQuery:
    """What is searched for: the sentences of a message, and their vectors."""

    sentences: tuple[str, ...]
    vector: NDArray[np.float32] | None = None  # [D]; None: meaning does not count
    model_vector: NDArray[np.float32] | None = None  # [D], by which the model recognizes questions
    excluded_turns: tuple[int, ...] = ()  # whose passages are not found

    @property
    def text(self) -> str:
        return "".join(self.sentences)


class PassageSearch:
    """Scores the passages of one chat for messages. Callers may read `passages` and `index`."""

    def __init__(self, texts: Texts, tokenizer: Any) -> None:
        self.passages = Passages(texts)
        self._word_weight = word_weights(tokenizer)
        self.index = WordIndex(self._word_weight)

    def update(
        self, ledger: Ledger, vector_of: VectorOf = lambda start, end: None, with_words: bool = True
    ) -> None:
        """Add the passages of the complete turns that were read since the last update.

        With `with_words` False, the next update with words indexes the words of these passages.
        """
        self.passages.update(ledger, vector_of)
        self.index.truncate(len(self.passages))
        if not with_words:
            return
        known = len(self.index)
        turns = self.passages.rows["turn"][known:].tolist()
        for text, turn in zip(self.passages.texts(ledger, known), turns, strict=True):
            self.index.add(text, turn)

    def truncate(self, seen: int) -> None:
        """Drop the passages of all but the first `seen` tokens of the stream."""
        self.passages.truncate(seen)
        self.index.truncate(len(self.passages))

    def reorder(self, ledger: Ledger, rank: NDArray[np.int64]) -> None:
        """Move the passages along with their tokens; see `Passages.reorder`."""
        self.index.truncate(min(len(self.index), self.passages.reorder(ledger, rank)))

    def erase(self, ledger: Ledger) -> None:
        """Drop the words of erased tokens, and the vectors of their passages."""
        self.passages.erase(ledger)
        self.index = WordIndex(self._word_weight)

    def by_words(self, sentences: Sequence[str]) -> Scores:
        """The score [n] of each passage by the words of the sentences, above chance."""
        scores = _z_scores(self.index.scores(sentences), 0.0, MIN_WORD_DEVIATION)
        return np.maximum(scores - CHANCE_SCORE, 0)

    def tool_result_scores(self, sentences: Sequence[str], which: NDArray[np.bool_]) -> Scores:
        """Scores [k] of the passages `which` [n] of a tool's result, for the user's sentences.

        Unlike `by_words`, a score does not depend on how many other passages have the same words.
        """
        scores = self.index.scores(sentences)[which]
        best = scores.max(initial=0.0)
        return np.where(scores > best / 2, MIN_SCORE + scores, 0.0)

    def scores(
        self, query: PassageQuery, generated: Numbers = (), by_words: Scores | None = None
    ) -> Scores:
        """The score [n] of each passage for the message, by words and meaning.

        Passages of the turns `generated`, which the model wrote, count less. `by_words` [n] passes
        scores of the sentences' words, if the caller has computed them already.
        """
        scores = self.by_words(query.sentences) if by_words is None else by_words
        if query.vector is not None and self.passages.vectors.shape[1] == len(query.vector):
            # Undefined cosines count as usual ones: these passages can be found by words.
            wanted = torch.from_numpy(query.vector).half()
            cosines = torch.mv(torch.from_numpy(self.passages.vectors), wanted).double().numpy()
            usual = float(np.nansum(cosines) / max(1, np.isfinite(cosines).sum()))
            cosines = np.nan_to_num(cosines, nan=usual)
            fits = np.maximum(_z_scores(cosines, usual, MIN_COSINE_DEVIATION), 0)
            scores = scores + self.index.with_block(fits)
        counted = self._discounted(scores, generated, query)
        if query.vector is not None:
            return counted
        return self._with_newest_statements(counted, scores, generated, query)

    def second_hop_scores(
        self, ledger: Ledger, first: int, query: PassageQuery, generated: Numbers = ()
    ) -> Scores:
        """Scores [n] by the words of passage `first` that the message lacks; 0 for `first`."""
        known, text = set(words_of(query.text)), self.passages.texts(ledger, first, first + 1)[0]
        new = " ".join(word for word in words_of(text) if word not in known)
        scores = self.by_words((new,))
        scores[first] = 0
        return self._discounted(scores, generated, query)

    def _with_newest_statements(
        self, scores: Scores, by_words: Scores, generated: Numbers, query: PassageQuery
    ) -> Scores:
        """Raise the newest that the user told with each word that the best statement shares.

        If the model wrote that statement itself, what the user told comes before all else.
        """
        # Words alone do not tell a correction from other text, so it comes with what it corrects.
        rows, top = self.passages.rows, scores.max(initial=0.0)
        stated = ~np.array(self.index.asks, bool) & ~np.isin(rows["turn"], query.excluded_turns)
        having = [self.index.with_word(word) for word in self.index.informative_words(query.text)]
        if top <= 0 or not having:
            return scores
        fits: Scores = np.where(np.any(having, axis=0) & stated, by_words, 0)
        if not fits.any():
            return scores
        best, raised = int(np.argmax(fits)), scores.copy()
        by_user = [each & stated & (rows["role"] == Role.USER) for each in having if each[best]]
        is_generated = rows["role"][best] == Role.ASSISTANT and rows["turn"][best] in generated
        level = np.nextafter(top, np.inf) if is_generated else np.nextafter(scores[best], 0)
        for is_match in by_user:
            newest = np.flatnonzero(is_match)[-1:]
            raised[newest] = np.maximum(raised[newest], level)
        if is_generated and (either := np.any(by_user, axis=0)).any():
            raised[np.argmax(np.where(either, scores, -np.inf))] = np.nextafter(level, np.inf)
        return raised

    def _discounted(self, scores: Scores, generated: Numbers, query: PassageQuery) -> Scores:
        """Lower the scores of the model's own text, and drop it if other text fits better."""
        # The message that a reply answers is no other text. A question that only asks for what the
        # message asks for, and the reply to it, must fit four times as well as other text.
        turns, roles = self.passages.rows["turn"], self.passages.rows["role"]
        count = int(turns.max(initial=0)) + 1
        left_out = np.isin(turns, query.excluded_turns) | np.array(self.index.greets, bool)
        scores = np.where(left_out, -np.inf, scores)
        written = np.bincount(np.asarray(generated, np.int64), minlength=count + 1) > 0
        is_generated = written[turns] & (roles == Role.ASSISTANT)
        if not is_generated.any():
            return scores
        is_asked = self.index.only_ask(query.text) & ~is_generated & written[turns + 1]
        is_reply = is_generated & np.isin(turns - 1, turns[is_asked])
        told = np.where(is_generated | is_asked, -np.inf, scores)
        best_by_turn = np.full(count + 1, -np.inf)  # place 0: no turn
        np.maximum.at(best_by_turn, turns + 1, told)
        order = np.argsort(-best_by_turn)[:2]
        best, second = best_by_turn[order[0]], best_by_turn[order[-1]]
        # Place t + 1 is turn t: the one before.
        elsewhere = np.where(turns == order[0], second, best)
        counted = np.where(is_generated, DISCOUNT * scores, scores)
        least = np.where(is_asked | is_reply, DISCOUNT**2, DISCOUNT) * scores
        is_worse = (is_generated | is_asked) & (least <= elsewhere)
        return np.where(is_worse, -np.inf, counted)


def query_spans(pieces: Sequence[str]) -> list[tuple[int, int]]:
    """Spans (start, end) of the sentences to search for, in a message given as its token texts.

    A message of many sentences is searched by its last questions, or by its first and last
    sentence.
    """
    spans = divided(pieces)
    if len(spans) <= _MAX_QUERY_SENTENCES:
        return spans
    asks = [one for one in spans if "".join(pieces[slice(*one)]).rstrip().endswith(QUESTION_MARKS)]
    return asks[-_MAX_QUERY_SENTENCES:] or [spans[0], spans[-1]]


def best_first(scores: Scores, floor: float, turns: Numbers) -> NDArray[np.int64]:
    """Numbers of the passages with a score of at least `floor`, best first, then newest first.

    Passages of long turns count less, except the best of all. From number `MAX_FULL_SCORE_PASSAGES`
    of a turn on, each counts half of the one before, so that facts of several turns come first.
    """
    turns = np.asarray(turns)
    lengths = np.bincount(turns)[turns] / MAX_FULL_SCORE_PASSAGES
    worth = np.maximum(scores, 0) / np.sqrt(np.maximum(lengths, 1))
    above = np.flatnonzero((scores >= floor) & (scores > -np.inf))[::-1]
    above = above[np.lexsort((-worth[above], turns[above]))]  # by turn, its best one first
    _, starts, counts = np.unique(turns[above], return_index=True, return_counts=True)
    better = np.arange(len(above)) - np.repeat(starts, counts)  # in the same turn
    worth[above] *= DISCOUNT ** np.maximum(better + 1 - MAX_FULL_SCORE_PASSAGES, 0)
    above = np.sort(above)[::-1]
    if len(above):
        worth[above[np.argmax(scores[above])]] = np.inf
    return above[np.argsort(-worth[above], kind="stable")]


def rows_of(passages: NDArray[np.void]) -> Positions:
    """Stream positions of the tokens of `passages`, in the order of the passages."""
    spans = [np.arange(start, end) for start, end in passages[["start", "end"]].tolist()]
    return np.concatenate([np.zeros(0, np.int64), *spans])


def _z_scores(values: Scores, usual: float, least: float) -> Scores:
    """The values [n] as distances from their mean, in standard deviations of at least `least`."""
    missing = max(0, MIN_POPULATION - len(values))  # values that count as `usual`
    count = len(values) + missing
    mean = (values.sum() + missing * usual) / count
    variance = (((values - mean) ** 2).sum() + missing * (usual - mean) ** 2) / count
    standard: Scores = (values - mean) / math.sqrt(variance + least**2)
    return standard
