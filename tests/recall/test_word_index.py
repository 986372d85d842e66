"""BM25 over the turns of a conversation, against its formula written out."""

from __future__ import annotations

import math
import time

import bm25s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirchat.recall.word_index import WordIndex, terms_of

TEXTS = [
    "Hello! My zebra is called Quix.",
    "What a lovely name for a zebra.",
    "I adopted her last year, in Lisbon.",
    "",
    "Which animals are like zebras?",
    "Horses and donkeys are like zebras, in many ways.",
]

SOME = ["a", "in", "zebra", "zebras", "adopt", "adopted", "horse", "我住", "x"]
words = st.lists(st.sampled_from(SOME), max_size=6)
texts = st.lists(words.map(" ".join), max_size=7)


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


@pytest.mark.parametrize("wanted", ["Where is my zebra?", "ADOPTION", "zebra zebra", "Quix!"])
def test_a_turn_is_scored_with_its_neighbours(wanted: str) -> None:
    found = WordIndex().scores(TEXTS, wanted)
    assert found.tolist() == pytest.approx(by_the_formula(TEXTS, wanted), rel=1e-5)
    assert found.max() > 0


@settings(max_examples=100, deadline=None)
@given(texts=texts, wanted=words.map(" ".join))
def test_any_texts_are_scored_by_the_formula(texts: list[str], wanted: str) -> None:
    found = WordIndex().scores(texts, wanted).tolist()
    assert found == pytest.approx(by_the_formula(texts, wanted) if texts else [], rel=1e-5)


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
@given(texts=texts, wanted=words.map(" ".join))
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


@settings(max_examples=60, deadline=None)
@given(first=texts, then=texts, kept=st.integers(0, 7), wanted=words.map(" ".join))
def test_what_was_read_before_makes_no_difference(
    first: list[str], then: list[str], kept: int, wanted: str
) -> None:
    """Turns are added, undone and erased between two searches."""
    known = WordIndex()
    known.scores(first, "zebra")
    now = first[:kept] + then
    assert known.scores(now, wanted).tolist() == WordIndex().scores(now, wanted).tolist()


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
