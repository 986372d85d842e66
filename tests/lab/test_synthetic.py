"""The generator of synthetic dialogues, and its bank of questions."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest

from sirchat.lab.synthetic import bank
from sirchat.lab.synthetic.dialogue import Dialogue, Mix, dialogue, draw_fact
from sirchat.lab.synthetic.facts import KINDS, STORY, FactKind
from sirchat.lab.synthetic.rounds import Style, quiz

MIX = Mix(tell=0.4, ask=0.3, repeat=0.1)


def test_dialogues_alternate_and_follow_an_optional_system_message() -> None:
    for seed in range(50):
        roles = [message.role for message in dialogue(Random(seed), 6, MIX)]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize("kind", [*KINDS, STORY], ids=lambda kind: kind.key)
@pytest.mark.parametrize("seed", range(5))
def test_a_told_fact_is_the_answer_of_its_question(kind: FactKind, seed: int) -> None:
    rng = Random(seed)
    talk = Dialogue(rng, MIX)
    fact = draw_fact(rng, kind, Style())
    told, _ = talk.tell_one(fact, Style())
    between = [talk.small_talk() for _ in range(5)]
    question, answer = talk.ask((kind.key, fact.subject))
    assert len(between) == 5
    assert fact.value in told.text
    assert fact.value in answer.text
    assert fact.subject in answer.text or kind.key == "thing"
    assert fact.value not in question.text
    assert answer.recall == kind.key


def test_every_answer_was_told_before_it_was_asked() -> None:
    """A name in an answer is also in an earlier message."""
    checked = 0
    for seed in range(30):
        said = ""
        for message in dialogue(Random(seed), 30, MIX):
            if message.recall == "name":
                name = re.fullmatch(r"Your name is (.+)\.", message.text)
                assert name is not None
                assert name[1] in said
                checked += 1
            said += message.text + "\n"
    assert checked > 10


def test_every_kind_of_round_comes_up() -> None:
    kinds = Counter(
        message.recall for seed in range(120) for message in dialogue(Random(seed), 30, MIX)
    )
    assert set(kinds) == {
        *(kind.key for kind in (*KINDS, STORY)),
        "repeat",
        "untold",
        "two",
        "quiz",
        None,
    }


def test_the_bank_has_300_facts_and_no_thing_has_two_answers() -> None:
    assert sum(len(topic.known) for topic in bank.TOPICS) >= 300
    for topic in bank.TOPICS:
        things = [thing for thing, _ in topic.known]
        assert len(things) == len(set(things)), topic.key
        assert len(topic.answers) >= 3, topic.key


@pytest.mark.parametrize("count", [None, 5])
def test_a_quiz_offers_the_right_answer_once_and_names_its_letter(count: int | None) -> None:
    known = {answer: topic for topic in bank.TOPICS for answer in topic.answers}
    for seed in range(300):
        question, reply = quiz(Random(seed), count)
        options = re.findall(r"(?<=[:,] )([^,:]+) \(([A-E])\)", question.text)
        found = re.fullmatch(r"The answer is (.+) \(([A-E])\)\.", reply.text)
        assert found
        assert options.count(found.groups()) == 1
        assert 3 <= len({text for text, _ in options}) == len(options)
        assert [letter for _, letter in options] == list("ABCDE"[: len(options)])
        assert all(text in known for text, _ in options)
        largest = max(len(topic.answers) for topic in bank.TOPICS if topic is known[found[1]])
        assert count is None or len(options) >= min(count, largest - 1)
