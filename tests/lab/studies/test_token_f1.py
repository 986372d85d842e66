"""LoCoMo's token F1, against values worked out by hand and a slow computation."""

from __future__ import annotations

import pytest

from sirchat.lab.studies.locomo import (
    NOT_MENTIONED,
    multi_answer_f1,
    reply_score,
    says_not_mentioned,
    stems,
    token_f1,
)
from sirchat.lab.studies.long_talk import TalkQuestion

pytest.importorskip("snowballstemmer")


def slow_f1(reply: str, answer: str) -> float:
    """By crossing out each word that is in both; the words are given as they are compared."""
    said, wanted, both = reply.split(), answer.split(), 0
    total = len(said), len(wanted)
    for word in said:
        if word in wanted:
            wanted.remove(word)
            both += 1
    if not both:
        return 0.0
    precision, recall = both / total[0], both / total[1]
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cats AND a dog.", ["cat", "dog"]),
        ("Painting, painted, paints!", ["paint", "paint", "paint"]),
        ("1,000 miles", ["1000", "mile"]),
        ("self-care", ["selfcar"]),
        ("another theory", ["anoth", "theori"]),
        ("as it is", ["as", "it", "is"]),
        ("", []),
    ],
)
def test_words_are_compared_in_lower_case_stemmed_without_articles_and_punctuation(
    text: str, words: list[str]
) -> None:
    assert stems(text) == words


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("green shed", "green shed"),
        ("green shed in town", "green shed"),
        ("red red red", "red red green"),
        ("blue", "red"),
        ("", "red"),
        ("red", ""),
        ("7 may 2021", "8 may 2021"),
    ],
)
def test_f1_is_that_of_the_words_counted_as_often_as_they_occur(reply: str, answer: str) -> None:
    assert token_f1(reply, answer) == pytest.approx(slow_f1(reply, answer))


def test_each_of_several_answers_is_scored_by_the_part_of_the_reply_that_fits_it_best() -> None:
    # seeds: 1; green shed: 2 * (1 * 1/2) / (1 + 1/2); tea: 0
    assert multi_answer_f1("a shed, seeds", "seeds, green shed, tea") == pytest.approx(
        (1 + 2 / 3 + 0) / 3
    )
    assert token_f1("a shed, seeds", "seeds, green shed, tea") != pytest.approx(5 / 9)


@pytest.mark.parametrize(
    ("category", "answer", "score"),
    [
        (1, "tea, milk", 0.5),  # tea: 1, milk: 0
        (4, "tea, milk", 2 / 3),  # one word, which is one of two
        (3, "tea; since she said so", 1.0),
        (2, "tea; since she said so", 1 / 3),  # one word, which is one of five
    ],
)
def test_the_category_decides_what_of_the_answer_counts(
    category: int, answer: str, score: float
) -> None:
    question = TalkQuestion(0, "What?", answer, category, ())
    assert reply_score(question, "Tea.") == pytest.approx(score)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("(a) Not mentioned in the conversation", True),
        ("There is No Information Available.", True),
        ("Fennel", False),
        ("a", True),
        ("(A)", True),
        ("b", False),
        ("(b)", False),
        ("yes", False),
        ("", False),
    ],
)
def test_an_adversarial_question_is_right_if_nothing_was_mentioned(reply: str, right: bool) -> None:
    assert says_not_mentioned(reply, (NOT_MENTIONED, "Fennel")) is right
    if reply in ("a", "b"):
        assert says_not_mentioned(reply, ("Fennel", NOT_MENTIONED)) is not right
