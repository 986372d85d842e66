"""Passages of a chat, and how well they fit a message, against the definition written out."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from chatting import babbler
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.recall import word_index
from sirchat.recall.passages import (
    CHANCE_SCORE,
    MAX_FULL_SCORE_PASSAGES,
    MAX_PASSAGE_TOKENS,
    MIN_PASSAGE_TOKENS,
    MIN_WORD_DEVIATION,
    PassageQuery,
    Passages,
    PassageSearch,
    best_first,
    divided,
    note_torn_sentences,
    query_spans,
    texts_at,
)
from sirchat.recall.word_index import DISCOUNT, WordIndex, letter_groups, word_weights, words_of
from sirchat.text.detokenizer import TokenTexts, tokens_matching

TEXTS = [
    "My name is Priya. I live in Lisbon, near the river. Do you know it?",
    "Yes, I do!",
    "What a rainy day it is in Lisbon. " * 9,
    "I work as a carpenter and build tables from walnut wood.",
    "Is walnut expensive? And who buys your tables?",
    "Mostly restaurants.\nThey like dark wood.",
]

turns = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6)


def texts() -> TokenTexts:
    return TokenTexts(babbler().tokenizer)


def read(ledger: Ledger, said: Sequence[str], first: int = 0) -> None:
    """Read turns, in turn of the user and the assistant, each after a token of the template."""
    for number, text in enumerate(said, first):
        ids = babbler().tokenizer.encode(text, add_special_tokens=False)
        role = Role.ASSISTANT if number % 2 else Role.USER
        count = len(ids) + 1
        ledger.append(
            [1, *ids],
            [0.0] * count,
            turn=number,
            round=number // 2,
            roles=[Role.TEMPLATE, *[role] * len(ids)],
            flags=[0] * count,
        )


def vector_of(start: int, end: int) -> Tensor:
    """A direction that belongs to these tokens."""
    return torch.nn.functional.normalize(torch.tensor([start + 1.0, end, 3.0, 1.0]), dim=0)


def search(ledger: Ledger) -> PassageSearch:
    made = PassageSearch(texts(), babbler().tokenizer)
    made.update(ledger, vector_of)
    return made


def same(one: PassageSearch, other: PassageSearch, text: str = "Who has walnut tables?") -> bool:
    mine, theirs = one.passages.state(), other.passages.state()
    arrays = all(
        np.array_equal(mine[name], theirs[name], equal_nan=name == "vectors") for name in mine
    )
    message = PassageQuery((text,))
    return arrays and np.array_equal(one.scores(message), other.scores(message))


@given(pieces=st.lists(st.sampled_from(["a", " b", ".", "?", "\n", " long", "7", "。"])))
def test_passages_are_all_of_a_text_in_order_and_none_is_long(pieces: list[str]) -> None:
    spans = divided(pieces)
    assert [at for start, end in spans for at in range(start, end)] == list(range(len(pieces)))
    assert all(end - start <= MAX_PASSAGE_TOKENS for start, end in spans)
    assert all(end - start >= MIN_PASSAGE_TOKENS for start, end in spans[:-1])


def test_a_passage_ends_with_its_sentence_but_not_with_a_title_or_in_a_number() -> None:
    pieces = [*"Mr. Ng is 7", ".", *"5 and ten long.", *" Then another sentence follows it."]
    assert ["".join(pieces[slice(*one)]) for one in divided(pieces)] == [
        "Mr. Ng is 7.5 and ten long.",
        " Then another sentence follows it.",
    ]


@given(said=turns, cuts=st.sets(st.integers(0, 6)))
def test_taken_in_piece_by_piece_they_are_as_at_once(said: list[str], cuts: set[int]) -> None:
    whole, ledger = Ledger(), Ledger()
    read(whole, said)
    made, bounds = PassageSearch(texts(), babbler().tokenizer), [0, *sorted(cuts), len(said)]
    for start, end in pairwise(bounds):
        read(ledger, said[start:end], start)
        made.update(ledger, vector_of)
    assert same(made, search(whole))


@given(said=turns, gone=turns)
def test_an_undone_turn_leaves_nothing(said: list[str], gone: list[str]) -> None:
    ledger = Ledger()
    read(ledger, said)
    before, seen = search(ledger), ledger.seen
    made = search(ledger)
    read(ledger, gone, len(said))
    made.update(ledger, vector_of)
    ledger.truncate(seen, 0.0)
    made.truncate(ledger.seen)
    assert same(made, before)


def test_new_passages_seldom_copy_the_earlier_ones() -> None:
    ledger = Ledger()
    made = search(ledger)
    copies = 0
    for number in range(64):
        before = made.passages.vectors
        read(ledger, TEXTS[:1], number)
        made.update(ledger, vector_of)
        copies += not np.shares_memory(before, made.passages.vectors)
    assert len(made.passages) >= 64
    assert copies <= 8, "as the arrays double"


def test_what_is_erased_is_in_no_vector_and_found_by_no_word() -> None:
    ledger = Ledger()
    read(ledger, TEXTS)
    made = search(ledger)
    message = PassageQuery(("walnut",))
    assert (made.scores(message) > 1).any()
    count, whole = len(made.passages), made.passages.texts(ledger)
    pieces = texts_at(ledger, texts(), np.arange(ledger.seen))
    ledger.erase(np.flatnonzero(tokens_matching(re.compile("walnut|Priya"), pieces)))
    note_torn_sentences(ledger, texts())
    made.erase(ledger)
    made.update(ledger, vector_of)
    left = made.passages.texts(ledger)
    has_vector = [not np.isnan(vector).any() for vector in made.passages.vectors]
    rest = " I live in Lisbon, near the river. Do you know it?"
    assert len(left) == count - 2, "two had one sentence, with the word"
    assert set(left) - set(whole) == {rest}
    assert [text for text, is_there in zip(left, has_vector, strict=True) if not is_there] == [rest]
    assert not (made.scores(message) > 1).any()


def test_the_template_and_reasoning_are_in_no_passage() -> None:
    ledger = Ledger()
    read(ledger, TEXTS[:2])
    ledger.flag(Flag.THINKING, range(3, 9), True)
    made = Passages(texts())
    made.update(ledger)
    covered = {
        at for start, end in made.rows[["start", "end"]].tolist() for at in range(start, end)
    }
    assert not covered & {0, *range(3, 9)}
    assert 9 in covered


def bm25(said: Sequence[tuple[str, int]], sentence: str) -> list[float]:
    """The scores of passages, given with their turns, with loops over each block and term."""
    blocks = list[int]()
    for number, (_, turn) in enumerate(said):
        block = blocks[-1] if number else -1
        is_new = not number or turn != said[number - 1][1] or blocks.count(block) == 8
        blocks.append(block + is_new)
    terms = [Counter(t for w in words_of(text) for t in letter_groups(w)) for text, _ in said]
    asks = [text.rstrip().endswith("?") for text, _ in said]
    shares = {0: 1.0, 1: 0.5, 2: 0.25}

    def counted(block: int, of: Sequence[float]) -> float:
        total = 0.0
        for number, own in enumerate(blocks):
            share = shares.get(abs(block - own), 0.0)
            if asks[number]:
                share = 1.0 if block == own + 1 else share / 2
            total += share * of[number]
        return total

    every = range(blocks[-1] + 1)
    sizes = [counted(block, [sum(each.values()) for each in terms]) for block in every]
    mean = sum(sizes) / len(sizes)
    telling, found = word_weights(babbler().tokenizer), [0.0] * len(said)
    weights = dict[str, float]()
    for word in words_of(sentence):
        groups = letter_groups(word)
        for term in groups:
            weights[term] = max(weights.get(term, 0), telling(word) / math.sqrt(len(groups)))
    for term, weight in weights.items():
        times = [float(each[term]) for each in terms]
        if not any(times) or not weight:
            continue
        counts = [counted(block, times) for block in every]
        having = sum(min(1.0, count) for count in counts)
        rarity = math.log(1 + max(0.0, max(100, len(counts)) - having + 0.5) / (having + 0.5))
        for number, block in enumerate(blocks):
            norm = 0.9 * (0.6 + 0.4 * sizes[block] / mean)
            found[number] += weight * rarity * counts[block] / (counts[block] + norm)
            found[number] += 0.001 * weight * rarity * (times[number] > 0)
    return found


@given(
    said=st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(0, 1)), min_size=1, max_size=14),
    asked=st.lists(
        st.sampled_from(["Who buys walnut tables?", "Is Lisbon rainy?", "Priya", "and"]),
        min_size=1,
        max_size=2,
    ),
)
def test_each_sentence_is_scored_as_bm25_is_defined(
    said: list[tuple[str, int]], asked: list[str]
) -> None:
    turn, passages, index = 0, list[tuple[str, int]](), WordIndex(word_weights(babbler().tokenizer))
    for text, step in said:
        turn += step
        passages.append((text, turn))
        index.add(text, turn)
    each = [bm25(passages, sentence) for sentence in asked]
    wanted = [math.hypot(*scores) for scores in zip(*each, strict=True)]
    assert index.scores(asked) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


class Ranked:
    """A tokenizer with a token for these words, by rank; `blank` is what it wants before them."""

    ranks: ClassVar[dict[str, int]] = {
        "and": 270,
        "which": 527,
        "time": 660,
        "walnut": 40_000,
        "3": 35,
    }

    def __init__(self, blank: str = " ", size: int = 49_152) -> None:
        self.blank, self.size = blank, size

    def __len__(self) -> int:
        return self.size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        word = text.removeprefix(self.blank)
        known = word in self.ranks and text == self.blank + word
        return [self.ranks[word]] if known else [5, 6]


@pytest.mark.parametrize("blank", [" ", ""])
def test_words_that_are_frequent_in_the_language_tell_nothing(blank: str) -> None:
    telling = word_weights(Ranked(blank))
    assert telling("and") == 0
    assert telling("quixbert") == telling("3") == 1  # its rank says nothing of a digit
    ranks = (
        math.log((40_000 - 256) / word_index.COMMON_WORD_RANK),
        math.log(49_152 / word_index.COMMON_WORD_RANK),
    )
    assert telling("walnut") == pytest.approx(ranks[0] / ranks[1])
    assert 0 < telling("which") < telling("time") < telling("walnut")


def test_words_of_grammar_tell_nothing_by_themselves_but_count_beside_others() -> None:
    index = WordIndex(word_weights(Ranked()))
    turns = ["Which of these walnuts?", "Which way?", "I like walnuts."]
    for number, text in enumerate(turns):
        index.add(text, 3 * number)  # of turns that are not beside each other
        index.add("So it goes.", 3 * number + 1)
        index.add("So it went.", 3 * number + 2)
    assert not index.informative_words("And which? Would there really be something?")
    assert not index.scores(["And?"]).any()
    both, alone = index.scores(["Which walnuts?"]), index.scores(["Walnuts!"])
    assert both[0] > alone[0]
    assert both[6] == pytest.approx(alone[6])
    assert both[3] < min(both[0], both[6])
    assert index.informative_words("And which walnut?") == ["walnut"]


def test_a_score_is_z_by_words_and_z_by_meaning() -> None:
    ledger = Ledger()
    read(ledger, TEXTS)
    made = search(ledger)
    vector = made.passages.vectors[3].astype(np.float32)
    words = made.index.scores(["walnut"])
    cosines = [
        float(sum(a * b for a, b in zip(one, vector.tolist(), strict=True)))
        for one in made.passages.vectors.tolist()
    ]

    def z(values: Sequence[float], usual: float, least: float) -> list[float]:
        filled = [*values, *[usual] * max(0, 100 - len(values))]
        mean = sum(filled) / len(filled)
        variance = sum((one - mean) ** 2 for one in filled) / len(filled)
        return [(one - mean) / math.sqrt(variance + least**2) for one in values]

    fits = [max(0.0, one) for one in z(cosines, sum(cosines) / len(cosines), 0.1)]
    by_meaning = made.index.with_block(np.array(fits))
    chance = CHANCE_SCORE
    by_words = np.array(
        [max(0.0, one - chance) for one in z(words.tolist(), 0.0, MIN_WORD_DEVIATION)]
    )
    assert by_words.max() > 0 == by_words.min()
    scores = made.scores(PassageQuery(("walnut",), vector))
    assert scores == pytest.approx(by_words + by_meaning, abs=2e-2)
    assert made.scores(PassageQuery(("walnut",))) == pytest.approx(by_words)


def test_what_the_model_wrote_itself_comes_after_what_was_told() -> None:
    """Unless nothing told elsewhere than in the message it answered fits better."""
    ledger = Ledger()
    other = "What a rainy day it is."
    read(ledger, ["I am called Priya Quixbert.", "Fine.", other, other, "Who is Priya Quixbert?"])
    read(ledger, ["You are called Priya Ashton Quixbert."], 5)
    made = search(ledger)
    message = PassageQuery(("Who is Priya Quixbert?",))
    wrote = np.flatnonzero(made.passages.rows["turn"] == 5)
    told = np.flatnonzero(made.passages.rows["turn"] == 0)
    given, own = made.scores(message), made.scores(message, [1, 3, 5])
    assert np.isfinite(given).all()
    assert own[told].max() > own[wrote].max()


def test_what_was_told_in_several_messages_is_found_before_much_of_a_long_one() -> None:
    scores = np.array([1.0, 3.0, 1.0, 0.0])
    assert best_first(scores, 0.5, np.arange(4)).tolist() == [1, 2, 0]  # the newer of equal ones
    assert best_first(np.array([-np.inf, 0.0, 1.0]), -np.inf, np.arange(3)).tolist() == [2, 1]
    # By an oracle: one after another, the best for its turn and for what was taken of it.
    rng = np.random.default_rng(5)
    for _ in range(20):
        scores, turns = rng.normal(2, 1, 60), np.sort(rng.integers(0, 6, 60))
        sizes, left = np.bincount(turns), set(np.flatnonzero(scores >= 1).tolist())
        order = [int(scores.argmax())]  # the very best, whose message may be long
        left.remove(order[0])
        while left:
            taken = Counter(turns[order].tolist())
            worth = {
                n: scores[n]
                * DISCOUNT ** max(0, taken[turns[n]] + 1 - MAX_FULL_SCORE_PASSAGES)
                / math.sqrt(max(1, sizes[turns[n]] / MAX_FULL_SCORE_PASSAGES))
                for n in left
            }
            order.append(max(left, key=worth.__getitem__))
            left.remove(order[-1])
        assert best_first(scores, 1.0, turns).tolist() == order


def test_of_a_long_message_its_questions_are_looked_for() -> None:
    pieces = [*["A long line of a file.\n"] * 9, *"Where is my train? Here is a file:", "\n"]
    pieces += [*"It is a file with many words.\n"] * 9
    asked = ["".join(pieces[slice(*one)]) for one in query_spans(pieces)]
    assert len(asked) == 1
    assert "Where is my train?" in asked[0]
