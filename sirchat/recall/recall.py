"""Recall of one chat: before each turn, restores the archived tokens that fit the turn.

The passage retrievers search by words and meaning. For other retrievers, the model reads the turn
once, which is then undone; with `recall_query: recent`, it need not.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.engine import Engine
from sirchat.engine.types import RecallSettings, TurnRef
from sirchat.memory.key_values import EXACT, LostTokensError, Positions
from sirchat.memory.ledger import Flag, Role, State
from sirchat.models.model import LoadedModel
from sirchat.recall import RecalledTurn
from sirchat.recall.passages import (
    MIN_SCORE,
    PassageQuery,
    PassageSearch,
    Scores,
    best_first,
    query_spans,
    rows_of,
    texts_at,
)
from sirchat.recall.retrievers import retriever
from sirchat.recall.retrievers.base import Candidates, PassageRetriever
from sirchat.recall.word_index import DISCOUNT, is_greeting, words_of
from sirchat.text.detokenizer import QUESTION_MARKS, Texts, text_with_gaps

# Most tokens from which a question is answered under `focus: auto`. With SmolLM2 and half of the
# questions of `facts-in-dialogue`, 64 find less, and 128 nothing more.
MAX_FOCUS_TOKENS = 96
# Passages with less than this share of a search's best score are left out of them. Chosen on that
# half, too: beside others, the model says the fact that was asked for less often.
MIN_SHARE_OF_BEST = 0.4

_NO_POSITIONS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class SearchResult:
    """Archived tokens and their scores."""

    positions: Positions  # [n], ascending
    scores: NDArray[np.float64]  # [n]


@dataclass(frozen=True)
class FoundPassages(SearchResult):
    """The passages that fit a message, held or archived, and how well they fit."""

    passages: tuple[int, ...]  # numbers, best first
    reasons: tuple[str, ...]  # why each was found, if it shares no word with the message
    query: PassageQuery
    best_score: float  # the highest of any passage, in standard deviations
    is_question: bool  # whether the message is answered from these passages alone


@dataclass(frozen=True)
class NewTurn:
    """A turn that is read next, for which recall searches passages."""

    ids: Sequence[int]
    roles: Sequence[Role]
    generated_turns: Sequence[int] = ()  # turns that the model wrote itself
    excluded_turns: tuple[int, ...] = ()  # turns in which nothing is looked for
    tool_result_turn: int = -1  # a turn that a tool has just returned for the message


@dataclass(frozen=True)
class RecallResult:
    """What recall did for a turn; scores and turns are `Recall.scores` and `Recall.turns`."""

    positions: Positions  # of the restored tokens; if `focused`, of the held ones that fit, too
    released: Positions  # of the tokens that were restored for the turn before
    seconds: float
    problem: str = ""  # why the retriever could not search
    focused: bool = False  # whether the turn is answered from these tokens alone


@dataclass(frozen=True)
class _Fit:
    """How well each of the n passages of a chat fits a message."""

    query: PassageQuery
    generated: NDArray[np.int64]  # turns that the model wrote itself
    by_words: Scores  # [n]
    scores: Scores  # [n], by words and by meaning


class Recall:
    """Restores archived tokens that fit a new turn to the KV cache of one engine."""

    def __init__(self, engine: Engine, model: LoadedModel, texts: Texts) -> None:
        self._engine, self._model, self._texts = engine, model, texts
        # What was restored for the last turn: scores by stream position, and turns in order
        self.scores: dict[int, float] = {}
        self.turns: tuple[RecalledTurn, ...] = ()
        self.found: FoundPassages | None = None  # by the last search for passages
        self.nothing_restored_reason = ""  # for the user's last message; empty if that was not so
        self.passage_search = PassageSearch(texts, model.tokenizer)

    @property
    def by_meaning(self) -> bool:
        """Whether passages are searched by meaning, and not by words alone."""
        recall: RecallSettings | None = self._engine.settings.recall
        found = None if recall is None else retriever(recall.retriever)
        return (
            isinstance(found, PassageRetriever)
            and found.by_meaning
            and self._model.passage_encoder.size > 0
        )

    def undo(self) -> None:
        """Forget the last recall and the passages read since, because the turn was undone."""
        self.scores, self.turns, self.found, self.nothing_restored_reason = {}, (), None, ""
        self.passage_search.truncate(self._engine.ledger.seen)

    def erase_words(self) -> None:
        """Drop the words and vectors of erased tokens; the next search reads the texts again."""
        self.passage_search.erase(self._engine.ledger)
        self.undo()

    def update(self) -> None:
        """Add the passages of the complete turns that were read since the last update."""
        ledger, encoder = self._engine.ledger, self._model.encoder
        own = self._model.sentence_encoder

        def vector_of(start: int, end: int) -> Tensor | None:
            if own is not None:
                text = "".join(texts_at(ledger, self._texts, np.arange(start, end)))
                return own.vectors([text])[0]
            mean = ledger.token_vectors.mean(start, end)
            return None if mean is None else encoder.unit_vectors(mean.cpu())

        self.passage_search.update(ledger, vector_of, self._engine.settings.recall is not None)
        ledger.token_vectors.drop_before(ledger.seen)

    def restore_for_turn(
        self, turn: NewTurn, ref: TurnRef, asked: Sequence[int] = ()
    ) -> RecallResult | None:
        """Restore the archived tokens that fit a new turn, in place of those for the turn before.

        The new turn is read after this call, as `ref`. Tokens at positions `asked` are restored,
        too. Returns None if recall is off and `asked` has nothing to restore.
        """
        engine, recall = self._engine, self._engine.settings.recall
        self.update()
        requested = self._requested(asked, len(turn.ids))
        if recall is None and not len(requested):
            self.undo()
            return None
        start, problem, restored, scores = time.perf_counter(), "", _NO_POSITIONS, np.zeros(0)
        released = np.fromiter(self.scores, np.int64)
        is_all_held = engine.resident == engine.ledger.seen
        has_room = engine.evictor.recall_room(len(turn.ids)) > 0
        result, self.found = None, None
        try:
            result = self._search(turn, ref, len(requested))
        except LostTokensError as error:
            problem = str(error)
        if len(requested):
            result = with_requested(result, requested)
        elif isinstance(result, FoundPassages):
            self.found = result
        is_focused = self.found is not None and self.found.is_question
        if result is not None:
            engine.evictor.begin_recall(
                result.positions, result.scores, incoming=len(turn.ids), focused=is_focused
            )
            restored = result.positions if is_focused else engine.store.placement.recalled
            scores = result.scores[np.searchsorted(result.positions, restored)]
        self.scores = dict(zip(restored.tolist(), scores.tolist(), strict=True))
        self.turns = self._described(restored, with_gaps=True)
        if turn.tool_result_turn < 0:  # a reason is kept for the user's messages alone
            unfit = "nothing evicted fits it" if has_room else "there was no room beside it"
            reason = "all was held" if is_all_held else problem or unfit
            self.nothing_restored_reason = reason if recall and not len(restored) else ""
        seconds = time.perf_counter() - start
        return RecallResult(restored, released, seconds, problem, focused=is_focused)

    def _requested(self, asked: Sequence[int], incoming: int) -> Positions:
        """The positions in `asked` that can be restored: the newest, for half the free budget."""
        if not len(asked):
            return _NO_POSITIONS
        positions: Positions = np.intersect1d(asked, self._engine.store.recallable())
        room = self._engine.choice.free_budget(incoming) // 2
        return positions[max(0, len(positions) - room) :]

    def _search(self, turn: NewTurn, ref: TurnRef, requested: int) -> SearchResult | None:
        """The tokens that fit a turn, beside so many that the user has `requested`."""
        engine, recall = self._engine, self._engine.settings.recall
        passages = self.passage_search.passages
        if recall and not isinstance(retriever(recall.retriever), PassageRetriever):
            # This reads the turn first, which may evict tokens, so the room is known after it.
            result = score_by_reading_turn(engine, self._model, turn.ids, turn.roles, ref)
            room = engine.evictor.recall_room(len(turn.ids)) - requested
            return None if result is None else best_tokens(result, room, engine.ledger.torn)
        is_all_held = engine.resident == engine.ledger.seen
        if recall and len(passages) and (self._focus() or not is_all_held):
            return self.find(turn, max(0, engine.evictor.recall_room(len(turn.ids)) - requested))
        return None

    def find(self, turn: NewTurn, room: int) -> FoundPassages:
        """Find the passages that fit a new turn, of at most `room` tokens together.

        If it asks for something, passages that fit the best one or fit less well take the rest.
        """
        recall, fit = self._engine.settings.recall, self._fit(turn)
        best, least, asks = float(fit.scores.max(initial=0.0)), 0.0, self._asks_back(fit.query)
        if is_question := asks and room > 0 and self._is_focused(fit.query, best):
            room, least = min(room, self._focus()), MIN_SHARE_OF_BEST
        if is_auto := recall is None or recall.n is None:
            chosen = self._take(fit.scores, max(MIN_SCORE, least * best), room)
            if asks:
                left = room - sum(len(rows) for rows, _ in chosen.values())
                further = self._further_scores(fit, chosen, least)
                chosen |= self._take(further, DISCOUNT * MIN_SCORE, left, whole=bool(chosen))
        else:  # passages with any score are found; each has at least one token
            most = min(room, len(fit.scores) - 1)
            chosen = self._take(fit.scores, -float(np.partition(-fit.scores, most)[most]), room)
        other = "its meaning" if fit.query.vector is not None else ""
        reasons = (
            "words of the best"
            if is_auto and fit.scores[number] < DISCOUNT * MIN_SCORE
            else "words beside it"
            if fit.by_words[number] > 0
            else other
            for number in chosen
        )
        about = tuple(chosen), tuple(reasons), fit.query, best, is_question
        positions, scores = _tokens_of(chosen)
        return FoundPassages(positions, scores, *about)

    def _fit(self, turn: NewTurn) -> _Fit:
        """Score all passages for a turn."""
        search = self.passage_search
        query = replace(self.query_of(turn.ids, turn.roles), excluded_turns=turn.excluded_turns)
        generated = np.array(turn.generated_turns, np.int64)
        by_words = search.by_words(query.sentences)
        scores = search.scores(query, generated, by_words)
        of_result = search.passages.rows["turn"] == turn.tool_result_turn
        if of_result.any():
            scores[of_result] += search.tool_result_scores(query.sentences, of_result)
        return _Fit(query, generated, by_words, scores)

    def _is_focused(self, query: PassageQuery, best: float) -> bool:
        """Whether a message that asks back is answered from what fits it alone."""
        is_told = query.model_vector is not None and len(self._model.encoder.question) > 0
        has_mark = any(mark in query.text for mark in QUESTION_MARKS)
        return (is_told or has_mark) and self._focus() > 0 and best >= DISCOUNT * MIN_SCORE

    def _further_scores(self, fit: _Fit, chosen: Collection[int], least: float) -> Scores:
        """The scores [n] by which more passages follow the `chosen` ones, which are best first.

        If words found the best, passages that fit it count, too. Scores below the share `least` of
        the highest are 0.
        """
        further: Scores = np.where(fit.scores < least * fit.scores.max(initial=0.0), 0, fit.scores)
        if chosen and fit.by_words[first := next(iter(chosen))]:
            search, ledger = self.passage_search, self._engine.ledger
            again = search.second_hop_scores(ledger, first, fit.query, fit.generated)
            again[again < least * again.max()] = 0
            further = np.maximum(further, again)
        further[list(chosen)] = -np.inf
        return further

    def passages_containing(self, text: str) -> list[Positions]:
        """Tokens of each passage with all informative words of a text; [] if the chat lacks one.

        If no passage has all words, the best passages that have them together.
        """
        self.update()
        search, ledger = self.passage_search, self._engine.ledger
        search.update(ledger)  # with the words, as recall may be off
        wanted = set(search.index.informative_words(text) or words_of(text))
        having = [wanted & set(words_of(one)) for one in search.passages.texts(ledger)]
        scores, left, chosen = search.by_words((text,)), set(wanted), list[Positions]()
        for number in sorted(range(len(having)), key=lambda n: (-len(having[n]), -scores[n])):
            if having[number] & left or having[number] == wanted:
                chosen.append(rows_of(search.passages.rows[number : number + 1]))
                left -= having[number]
        return chosen if wanted and not left else []

    def found_but_held(self) -> tuple[dict[int, float], tuple[RecalledTurn, ...]]:
        """Scores by position of the found tokens that were held already, and their turns."""
        if self.found is None:
            return {}, ()
        positions, scores = self.found.positions, self.found.scores
        is_held = ~np.isin(positions, list(self.scores))
        held = positions[is_held]
        scores_held = dict(zip(held.tolist(), scores[is_held].tolist(), strict=True))
        return scores_held, self._described(held)

    def _described(
        self, restored: Positions, *, with_gaps: bool = False
    ) -> tuple[RecalledTurn, ...]:
        """The turns of these tokens, with the text and shared words of each one's best passage.

        `with_gaps`: with … for what is not held now.
        """
        ledger, search, found = self._engine.ledger, self.passage_search, self.found
        best = dict[int, tuple[tuple[str, ...], str, str]]()
        for number, reason in zip(found.passages, found.reasons, strict=True) if found else ():
            assert found is not None
            text = search.passages.texts(ledger, number, number + 1)[0]
            words = search.index.shared_words(text, found.query.text)
            rows = search.passages.shown_tokens(ledger, number)
            pieces = texts_at(ledger, self._texts, rows)
            is_held = ledger.column("state")[rows] == State.HELD
            shown = text_with_gaps(pieces, is_held | (not with_gaps))
            turn = int(search.passages.rows["turn"][number])
            best.setdefault(turn, (words, shown, "" if words else reason))
        described, of_tokens = list[RecalledTurn](), ledger.column("turn")[restored]
        bits = self._engine.store.archive.bits(restored)
        for turn in sorted({*of_tokens.tolist()}):  # `np.unique` imports a part of numpy
            own = bits[of_tokens == turn]
            words, shown, reason = best.get(turn, ((), "", ""))
            fewest = min(set(own.tolist()) - {EXACT}, default=0)
            described.append(RecalledTurn(turn, len(own), words, shown, fewest, reason))
        return tuple(described)

    def _focus(self) -> int:
        """Most tokens from which a question is answered; 0 to answer from all held tokens."""
        recall, encoder = self._engine.settings.recall, self._model.encoder
        if recall is None or not self._engine.settings.policy.bounded:  # nothing can be restored
            return 0
        if recall.focus is not None:
            return recall.focus
        tells = self.by_meaning and len(encoder.question) > 0
        return MAX_FOCUS_TOKENS if tells and encoder.about.get("focus") == "on" else 0

    def _asks_back(self, query: PassageQuery) -> bool:
        """Whether the message asks for something told before; True if no encoder can tell."""
        encoder = self._model.encoder
        if query.model_vector is None or not len(encoder.question):
            return True
        return encoder.asks_about_past(torch.from_numpy(query.model_vector))

    def query_of(self, ids: Sequence[int], roles: Sequence[Role]) -> PassageQuery:
        """The search query for a turn; a message without informative words gives an empty query."""
        said = [number for number, role in enumerate(roles) if role != Role.TEMPLATE]
        pieces = self._texts([ids[number] for number in said], said)
        spans = query_spans(pieces)
        sentences = tuple("".join(pieces[start:end]) for start, end in spans)
        index = self.passage_search.index
        text = "".join(sentences)
        if is_greeting(text) or not index.informative_words(text):  # such as "Would there?"
            return PassageQuery(())
        if not self.by_meaning:
            return PassageQuery(sentences)
        asked = [ids[number] for start, end in spans for number in said[start:end]]
        header = list(ids[: said[0]])
        own, model_vector = self._model.sentence_encoder, None
        if self._model.encoder.layers:
            model_vector = self._model.encode([*header, *asked], len(header)).numpy()
        vector = model_vector if own is None else own.vectors(["".join(sentences)])[0].numpy()
        return PassageQuery(sentences, vector, model_vector)

    def _take(
        self, scores: Scores, floor: float, room: int, whole: bool = False
    ) -> dict[int, tuple[Positions, float]]:
        """The best passages that fit into `room`: tokens and score, by passage number."""
        taken = dict[int, tuple[Positions, float]]()
        passages = self.passage_search.passages.rows
        for number in best_first(scores, floor, passages["turn"]).tolist():
            if room <= 0:
                break
            rows = self._can_be_held(rows_of(passages[number : number + 1]))
            # Of the first passage, the beginning is taken if the whole does not fit.
            if len(rows) > room and (taken or whole):
                continue
            if len(rows):
                taken[number] = rows[:room], float(scores[number])
                room -= len(taken[number][0])
        return taken

    def _can_be_held(self, rows: Positions) -> Positions:
        """The positions in `rows` whose tokens are held or may be restored."""
        flags = self._engine.ledger.column("flags")[rows]
        is_there = flags & np.uint8(Flag.EXCLUDED | Flag.ERASED) == 0
        there: Positions = rows[is_there & ~np.isin(rows, self._engine.ledger.torn)]
        return there


def score_by_reading_turn(
    engine: Engine, model: LoadedModel, ids: Sequence[int], roles: Sequence[Role], ref: TurnRef
) -> SearchResult | None:
    """Score the archived tokens for a turn of m `ids`; the engine's state is the same afterwards.

    Returns None if no token can be restored.
    """
    recall, start = engine.settings.recall, engine.ledger.seen
    room = engine.evictor.recall_room(len(ids))
    if recall is None or not room:
        return None
    needs = retriever(recall.retriever)
    longest = engine.budget  # of a longer turn only the end is read
    fits = engine.resident + len(ids) <= longest
    if fits and not engine.ledger.archived_count:
        return None
    if not needs.needs_turn or recall.query == "recent":
        recent = _recent_rows(engine) if needs.needs_turn else np.zeros(0, np.int64)
        return _score_archived(engine, model, recent, start)
    checkpoint = engine.checkpoint()
    with engine.store.without_limit():
        try:
            for _ in engine.prefill(ids[-longest:], roles[-longest:], ref):
                pass
            turn = np.flatnonzero(engine.ledger.held_positions >= start)
            return _score_archived(engine, model, turn, start)
        finally:
            engine.undo(checkpoint)


def weighted(scores: Tensor, surprisal: NDArray[np.float64]) -> Tensor:
    """Scores [layers, n], less the lowest of each layer, times the `surprisal` [n] in nats."""
    lowest = scores.min(dim=1, keepdim=True).values
    return (scores - lowest) * torch.from_numpy(surprisal).to(scores.dtype)


def _tokens_of(chosen: dict[int, tuple[Positions, float]]) -> tuple[Positions, NDArray[np.float64]]:
    """The positions of the passages' tokens, ascending, and the score of each one's passage."""
    positions = np.concatenate([_NO_POSITIONS, *(rows for rows, _ in chosen.values())])
    scores = [np.full(len(rows), score) for rows, score in chosen.values()]
    order = np.argsort(positions)
    return positions[order], np.concatenate([np.zeros(0), *scores])[order]


def best_tokens(result: SearchResult, n: int, but: Positions) -> SearchResult:
    """The n tokens with the best scores but those at `but`; of equal scores, the newer one wins."""
    is_whole = ~np.isin(result.positions, but)
    positions, scores = result.positions[is_whole], result.scores[is_whole]
    best = np.sort(np.lexsort((positions, scores))[::-1][: max(0, n)])
    return SearchResult(positions[best], scores[best])


def with_requested(result: SearchResult | None, asked: Positions) -> SearchResult:
    """The found tokens, and the tokens at `asked` with a higher score than all others."""
    found = result or SearchResult(_NO_POSITIONS, np.zeros(0))
    is_other = ~np.isin(found.positions, asked)
    positions, others = np.concatenate([found.positions[is_other], asked]), found.scores[is_other]
    scores = np.concatenate([others, np.full(len(asked), 1 + others.max(initial=0.0))])
    order = positions.argsort()
    return SearchResult(positions[order], scores[order])


def _score_archived(
    engine: Engine, model: LoadedModel, rows: NDArray[np.int64], start: int
) -> SearchResult | None:
    """Score the archived tokens before `start` against the cache's `rows`; None if none are."""
    ledger, recall, archive = engine.ledger, engine.settings.recall, engine.store.archive
    archived = engine.store.archived()
    archived = archived[archived < start]
    archived = archived[archive.has(archived)]
    if recall is None or not len(archived):
        return None
    positions = ledger.held_positions[rows]
    of_query = engine.cache.first_written_rows(torch.from_numpy(rows), positions)
    candidates = Candidates(archive, archived, of_query, model.rotations)
    scores = retriever(recall.retriever).score(candidates)
    if recall.weight == "surprisal":
        scores = weighted(scores, ledger.surprisal_of(archived))
    return SearchResult(archived, scores.mean(0).double().numpy())


def _recent_rows(engine: Engine) -> NDArray[np.int64]:
    """Cache rows of the newest tokens, as many as the policy's `recent`, without sinks."""
    held, seen = engine.ledger.held_positions, engine.ledger.seen
    window = int(getattr(engine.settings.policy, "recent", 0)) or seen
    return np.flatnonzero((held >= seen - window) & (held >= engine.settings.sinks))
