"""The indices of words behind `bm25` and `words`, against their definitions with loops."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from chatting import tiny
from sirchat.models.load import load_model
from sirchat.recall import wide_index
from sirchat.recall.wide_index import WideIndex
from sirchat.recall.word_index import WordIndex, terms_of, words_of
from sirchat.recall.word_vectors import WordVectors

TEXTS = [
    "Hello! My zebra is called Quix.",
    "What a lovely name for a zebra.",
    "Did you adopt her last year? I did.",
    "",
    "Which animals are like zebras? Horses?",
    "Horses and donkeys are like zebras, in many ways.\nFoals, too.",
    "I moved to Lisbon by train.",
]

SOME = ["a", "in", "zebra", "zebras", "adopt", "adopted", "horse", "我住", "x", "Did", "lisbon"]
sentences = st.builds(
    lambda words, end: " ".join(words) + end,
    st.lists(st.sampled_from(SOME), max_size=5),
    st.sampled_from(["", ".", "?", "! "]),
)
questions = st.lists(sentences, max_size=3).map(" ".join)
texts = st.lists(questions, max_size=7)


def by_the_formula(texts: list[str], wanted: str) -> list[float]:
    """Lucene's BM25 with k1 1.5 and b 0.75; a document is a turn with those beside it."""
    turns = [terms_of(text) for text in texts]
    documents = [
        [term for near in turns[max(0, n - 1) : n + 2] for term in near] for n in range(len(turns))
    ]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for term in terms_of(wanted):
            having = sum(term in other for other in documents)
            rarity = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            count = document.count(term)
            length = len(document) / mean if mean else 0
            score += rarity * count / (count + 1.5 * (0.25 + 0.75 * length)) if count else 0
        scores.append(score)
    return with_those_beside(scores)


def with_those_beside(scores: list[float]) -> list[float]:
    """Each score, plus half of those right before and after."""
    padded = [0.0, *scores, 0.0]
    return [
        score + before / 2 + after / 2
        for before, score, after in zip(padded, scores, padded[2:], strict=False)
    ]


def by_the_library(texts: list[str], wanted: str) -> list[float]:
    """The same by bm25s, which counts all words of all turns."""
    turns, asked = [terms_of(text) for text in texts], terms_of(wanted)
    numbers = {term: n for n, term in enumerate({term: 0 for turn in turns for term in turn})}
    known = [numbers[term] for term in asked if term in numbers]
    if not known:
        return [0.0] * len(texts)
    passages = [
        [numbers[term] for near in turns[max(0, n - 1) : n + 2] for term in near]
        for n in range(len(turns))
    ]
    index = bm25s.BM25()
    index.index((passages, numbers), show_progress=False, create_empty_token=False)
    scores: list[float] = index.get_scores_from_ids(known).tolist()
    return with_those_beside(scores)


@settings(max_examples=200, deadline=None)
@given(texts=texts, wanted=questions)
def test_the_scores_are_the_librarys_to_the_last_bit(texts: list[str], wanted: str) -> None:
    assert WordIndex().scores(texts, wanted).tolist() == by_the_library(texts, wanted)


def test_a_turn_is_split_once_and_a_search_counts_the_words_asked_for_alone() -> None:
    texts = [f"{n} some words of a turn, {n * n} of them and {n // 7}" for n in range(4000)]
    known = WordIndex()
    known.scores(texts, "words")
    started = time.process_time()
    for n in range(10):
        texts.append(f"one more turn, {n}")
        known.scores(texts, "the words of turn 49, and some 77 more")
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("wanted", ["", "?!", "jazz"])
def test_without_a_common_word_every_score_is_zero(wanted: str) -> None:
    assert WordIndex().scores(TEXTS, wanted).tolist() == [0.0] * len(TEXTS)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Zebras!", ["_zeb", "zebr", "ebra", "bras", "ras_"]),
        ("I am", ["_i_", "_am_"]),
        ("naïve Maß", ["_naï", "naïv", "aïve", "ïve_", "_mas", "mass", "ass_"]),
        ("我住在里斯本", ["_我", "我住", "住在", "在里", "里斯", "斯本", "本_"]),
        ("... 👋", []),
    ],
)
def test_terms_are_groups_of_letters_in_any_language(text: str, terms: list[str]) -> None:
    assert terms_of(text) == terms


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("adoption", "adopted"),
        ("zebras", "a zebra"),
        ("wohnt", "Ich wohnte"),
        ("里斯本", "在里斯本"),
    ],
)
def test_other_forms_of_a_word_are_found(asked: str, told: str) -> None:
    scores = WordIndex().scores([told, "", "", "something else, 完全不同"], asked)
    assert scores[0] > scores[3] == 0


class Some(WordVectors):
    """Vectors of four dimensions, drawn for each word; some words are close to each other."""

    def __init__(self) -> None:
        pass

    @property
    def dims(self) -> int:
        return 4

    def of(self, words: Sequence[str]) -> NDArray[np.float32]:
        return np.array([_drawn(word) for word in words], np.float32).reshape(-1, 4)


@cache
def _drawn(word: str) -> tuple[float, ...]:
    seed = int.from_bytes(word.encode()[:3].ljust(8, b"."), "little")  # as others that begin so
    vector = np.random.default_rng(seed).normal(size=4)
    vector += np.random.default_rng(len(word)).normal(size=4) / 3
    return tuple((vector / np.linalg.norm(vector)).astype(np.float32).tolist())


def pairs_of(words: list[str]) -> list[str]:
    return [f"{one} {other}" for one, other in pairwise(words)]


def by_the_definition(texts: list[str], wanted: str) -> list[float]:
    """What the docstring of `WideIndex` says, turn by turn and term by term."""
    turns = [
        [(one, one.rstrip().endswith("?")) for one in re.findall(r"[^.!?\n]+[.!?]*", text)]
        for text in texts
    ]
    known = {word for text in texts for word in words_of(text)}

    def counts(terms: dict[str, float]) -> list[list[float]]:
        """For each turn, how often its statements and its questions have any of the terms."""
        found = []
        for turn in turns:
            sides = [0.0, 0.0]
            for text, is_question in turn:
                words = words_of(text)
                for term in (*words, *pairs_of(words), *(f"#{one}" for one in terms_of(text))):
                    sides[is_question] += terms.get(term, 0.0)
            found.append(sides)
        return found

    def pooled(sides: list[list[float]]) -> list[float]:
        padded = [[0.0, 0.0], *sides, [0.0, 0.0]]
        return [
            now[0] + now[1] / 2 + before[0] / 2 + before[1] + after[0] / 2 + after[1] / 2
            for before, now, after in zip(padded, padded[1:], padded[2:], strict=False)
        ]

    def length(turn: list[tuple[str, bool]], of_questions: bool) -> float:
        return float(sum(len(words_of(text)) for text, asks in turn if asks is of_questions))

    lengths = pooled([[length(turn, False), length(turn, True)] for turn in turns])
    mean = sum(lengths) / len(lengths)
    norms = [0.25 + 0.75 * one / max(mean, 1e-9) for one in lengths]
    total = [0.0] * len(texts)
    for sentence in re.findall(r"[^.!?\n]+[.!?]*", wanted):
        words = words_of(sentence)
        if not words:
            continue
        found = [0.0] * len(texts)
        asked: list[tuple[dict[str, float], float]] = [
            ({term: 1.0}, 1.0)
            for term in dict.fromkeys(
                [*(f"#{one}" for one in terms_of(sentence)), *pairs_of(words)]
            )
        ]
        for word in dict.fromkeys(words):
            cosines = {one: float(np.dot(_drawn(one), _drawn(word))) for one in known}
            near = sorted((c, one) for one, c in cosines.items() if c >= 0.25)[-20:]
            asked.append(({one: 1.0 if one == word else c for c, one in near}, 4.0))
        for terms, weight in asked:
            count = pooled(counts(terms))
            having = sum(min(1.0, one) for one in count)
            rarity = math.log(1 + max(0.0, len(texts) - having + 0.5) / (having + 0.5)) ** 1.5
            for at, (one, norm) in enumerate(zip(count, norms, strict=True)):
                found[at] += weight * rarity * one / (one + norm) if one else 0.0
        padded = [0.0, *found, 0.0]
        for at in range(len(texts)):
            total[at] += (padded[at] / 2 + padded[at + 1] + padded[at + 2] / 2) ** 2
    return [math.sqrt(one) for one in total]


Index = Callable[[], WordIndex | WideIndex]
Oracle = Callable[[list[str], str], Any]
INDICES: list[tuple[Index, Oracle]] = [
    (WordIndex, lambda texts, wanted: pytest.approx(by_the_formula(texts, wanted), rel=1e-5)),
    (
        lambda: WideIndex(Some()),
        lambda texts, wanted: pytest.approx(by_the_definition(texts, wanted), rel=1e-4, abs=1e-5),
    ),
]
indices = pytest.mark.parametrize(("index", "oracle"), INDICES, ids=["bm25", "words"])


@pytest.mark.parametrize(
    "wanted",
    [
        "Where is my zebra?",
        "ADOPTION",
        "zebra zebra",
        "a lovely name",
        "Quix! By train, in Lisbon?",
        "?",
    ],
)
@indices
def test_turns_are_scored_as_defined(index: Index, oracle: Oracle, wanted: str) -> None:
    found = index().scores(TEXTS, wanted)
    assert found.tolist() == oracle(TEXTS, wanted)
    assert found.any() == (wanted != "?")


@indices
@settings(max_examples=80, deadline=None)
@given(texts=texts, wanted=questions)
def test_any_turns_are_scored_as_defined(
    index: Index, oracle: Oracle, texts: list[str], wanted: str
) -> None:
    assert index().scores(texts, wanted).tolist() == (oracle(texts, wanted) if texts else [])


@indices
@settings(max_examples=60, deadline=None)
@given(first=texts, then=texts, kept=st.integers(0, 7), wanted=sentences)
def test_what_was_read_before_makes_no_difference(
    index: Index, oracle: Oracle, first: list[str], then: list[str], kept: int, wanted: str
) -> None:
    """Turns are added, undone and erased between two searches."""
    known = index()
    known.scores(first, wanted)
    now = first[:kept] + then
    assert known.scores(now, wanted).tolist() == index().scores(now, wanted).tolist()


def test_of_too_many_turns_the_rarest_terms_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*TEXTS, *["a zebra"] * 50]
    every, rare = (WideIndex(Some()).scores(texts, wanted) for wanted in ("zebra", "Quix"))
    monkeypatch.setattr(wide_index, "_MOST", 20)
    some, same = (WideIndex(Some()).scores(texts, wanted) for wanted in ("zebra", "Quix"))
    assert same.tolist() == rare.tolist()
    assert every[-1] > 0 == some[-1]


def test_words_of_similar_meaning_have_close_vectors() -> None:
    vectors = WordVectors(tiny())
    one, same, other = vectors.of(["dog", "dog", "Tuesday"])
    assert vectors.dims == len(one)
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
    assert one.tolist() == pytest.approx(same.tolist(), abs=1e-6)
    assert one @ other < 0.5
    assert vectors.of([]).shape == (0, vectors.dims)


@pytest.mark.real
@pytest.mark.slow
def test_a_real_model_knows_what_is_similar() -> None:
    vectors = WordVectors(load_model("smollm2", device="cpu"))
    dog, puppy, cat, truth = vectors.of(["dog", "puppy", "cat", "truth"])
    assert min(dog @ puppy, dog @ cat) > 0.25 > dog @ truth
