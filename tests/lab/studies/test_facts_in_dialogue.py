"""The study `facts-in-dialogue`: its conversations, and what it finds of a small model."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from chatting import tiny
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.facts_in_dialogue.dialogue import (
    TOLD,
    AskedFact,
    Dialogue,
    Woven,
    draw_told_fact,
    load_dialogues,
    weave,
)
from sirchat.lab.studies.facts_in_dialogue.kinds import KINDS
from sirchat.lab.studies.facts_in_dialogue.study import FactsInDialogue, says

TALKS: list[Dialogue] = [
    [(f"Question {n} of talk {talk}?", f"Reply {n}, and so on.") for n in range(6)]
    for talk in range(5)
]


def words(user: str, reply: str) -> int:
    return len(user.split()) + len(reply.split())


def dialogue(seed: int, count: int = 5, length: int = 400) -> tuple[list[AskedFact], Woven]:
    rng = Random(seed)
    facts = [draw_told_fact(rng, kind) for kind in rng.sample(KINDS, count)]
    return facts, weave(rng, TALKS, facts, length, words)


def test_each_fact_is_told_once_in_the_first_three_quarters_and_never_answered_in_advance() -> None:
    for seed in range(200):
        facts, one = dialogue(seed)
        users = [user for user, _ in one.rounds]
        assert len({fact.kind for fact in facts}) == 5
        for fact, rounds in zip(facts, one.places, strict=True):
            for said, round in zip(fact.told, rounds, strict=True):
                assert [n for n, user in enumerate(users) if said.text in user] == [round]
                assert said.value in said.text
                assert round < 0.8 * len(users)
            assert fact.asked[TOLD] not in users


def test_the_right_option_is_one_of_four_with_the_value_and_the_others_lack_it() -> None:
    for seed in range(200):
        for fact in dialogue(seed)[0]:
            assert len(set(fact.replies)) == 4
            assert fact.values[0] in fact.replies[fact.right]


def test_a_correction_comes_after_the_value_that_it_corrects() -> None:
    corrected = [
        (fact, rounds)
        for seed in range(200)
        for facts, one in [dialogue(seed)]
        for fact, rounds in zip(facts, one.places, strict=True)
        if len(rounds) > 1
    ]
    assert len(corrected) > 20
    for fact, (before, after) in corrected:
        assert before < after
        old, new = fact.told
        assert (fact.needed, new.value) == ((1,), fact.values[0])
        assert any(old.value in one for n, one in enumerate(fact.replies) if n != fact.right)


def test_a_conversation_is_as_long_as_it_should_be_and_the_same_for_the_same_seed() -> None:
    assert dialogue(3) == dialogue(3) != dialogue(4)
    for length in (200, 400, 800):
        sizes = [
            sum(words(*one) for one in dialogue(seed, 3, length)[1].rounds) for seed in range(20)
        ]
        assert length - 40 < min(sizes) <= max(sizes) <= length


def test_dailydialog_is_read_with_the_replies_that_were_given(tmp_path: Path) -> None:
    def line(name: str, stem: str, *choices: str, key: str) -> str:
        options = [{"label": "AB"[n], "text": text} for n, text in enumerate(choices)]
        question = {"stem": stem, "choices": options}
        return json.dumps({"id": name, "question": question, "answerKey": key})

    path = tmp_path / "dailydialog.jsonl"
    path.write_text(
        line("0_1", "Is it far ?", "No .", "It 's near , really . ", key="B")
        + "\n"
        + line("1_1", " Hi !", "Hello , you .", "No .", key="A")
    )
    assert load_dialogues(path) == [
        [("Is it far?", "It's near, really.")],
        [("Hi!", "Hello, you.")],
    ]


@pytest.mark.parametrize("name", ["dailydialog.jsonl", "locomo_dialogues_0_3.json"])
def test_real_talk_is_read(data: Path, name: str) -> None:
    dialogues = load_dialogues(data / name)
    assert sum(map(len, dialogues)) > 500
    assert all(user and reply for one in dialogues for user, reply in one)


def test_a_file_without_talk_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SettingError, match="no rounds of talk"):
        load_dialogues(tmp_path / "empty.jsonl")
    with pytest.raises(SettingError, match="can't be read"):
        load_dialogues(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("reply", "value", "is_said"),
    [
        ("It is Rex.", "rex", True),
        ("rex", "Rex", True),
        ("Rexford", "Rex", False),
        ("room 17", "7", False),
        ("at 7:30, I think", "7:30", True),
        ("", "Rex", False),
    ],
)
def test_a_value_is_said_in_whole_words(reply: str, value: str, is_said: bool) -> None:
    assert says(reply, value) is is_said


def test_a_summary_is_searched_for_the_values_and_changes_nothing_else(
    talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few: dict[str, Any] = {"limit": 2, "facts": 2, "reply_tokens": 0, "lengths": (250,)}
    setting = Profile(policy="sink", budget=128)
    plain = FactsInDialogue((setting,), data=str(talk), **few)
    study = FactsInDialogue((setting,), data=str(talk), summary=("extract",), **few)
    template = Session(tiny(), setting).template
    (value,), (other,) = (fact.values for fact in study.woven(template, TOLD, 250, 0)[0])
    assert value != other
    monkeypatch.setattr(
        "sirchat.lab.studies.facts_in_dialogue.study.make_summary", lambda *_: f"It is {value}."
    )
    (key,) = study.keys()
    found, usual = study.worker(tiny())(key), plain.worker(tiny())(key)
    table, _ = study.report({key: found}).tables
    assert "in the summary" in table.columns
    assert [answer.pop("summed") for answer in found["answers"]] == [1, 0]
    assert found == usual
    with pytest.raises(SettingError, match="there is no summary 'modle'"):
        FactsInDialogue((setting,), data=str(talk), summary=("modle",), **few)
