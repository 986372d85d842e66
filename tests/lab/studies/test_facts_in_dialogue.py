"""The study `facts-in-dialogue`: its conversations, and what it finds of a small model."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from sirchat.chat.events import TurnDone
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
from sirchat.lab.studies.facts_in_dialogue.study import FactsInDialogue, ask_facts, says
from sirchat.lab.studies.reading import read
from sirchat.models.load import load_model

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


@pytest.mark.slow
def test_held_is_the_share_of_the_tokens_that_spell_the_value(talk: Path) -> None:
    """Of the tokens whose text overlaps the value's, counted after the question was read."""
    model = load_model("tiny")
    setting = Profile(policy="entropy", budget=128, temperature=0)
    study = FactsInDialogue((setting,), limit=3, data=str(talk), lengths=(300,), reply_tokens=0)
    session = Session(model, setting)
    for unit in study.units():
        session.reset()
        facts, one = study.dialogue(session.template, 300, int(unit.split()[1]))
        found = study.run_unit(session, unit, study.cells()[0])
        own = Session(model, setting)
        for round in one.rounds:
            read(own, *round)
        pieces = [row.text for row in own.tokens(range(own.seen))]
        text, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces])
        assert found["tokens"] == own.seen
        for fact, answer in zip(facts, found["answers"], strict=True):
            list(own.read_user(fact.asked[TOLD]))
            held = {row.position for row in own.snapshot().rows}
            own.undo()
            told, value = fact.told[-1].text, fact.values[0]
            begin = text.index(told) + told.index(value)
            overlap = [
                at
                for at, piece in enumerate(pieces)
                if ends[at] > begin and ends[at] - len(piece) < begin + len(value)
            ]
            assert answer["held"] == pytest.approx(np.mean([at in held for at in overlap]))
            assert answer["said"] is None


@pytest.mark.slow
def test_a_question_is_asked_as_in_a_chat_with_recall_and_leaves_no_trace(talk: Path) -> None:
    model = load_model("tiny")
    setting = Profile(policy="entropy", budget=96, recall="words", recall_n=40)
    study = FactsInDialogue((setting,), limit=5, data=str(talk), lengths=(400,), reply_tokens=8)
    session = Session(model, study.settings[0])
    facts, one = study.dialogue(session.template, 400, 0)
    for round in one.rounds:
        read(session, *round)
    session.switch("eval", temperature=0.0, max_new_tokens=8)
    before = session.save().held.tolist()
    found, again = (ask_facts(session, facts, one, (TOLD,), generate=True) for _ in range(2))
    assert [one["nats"] for one in again] == [one["nats"] for one in found]
    assert session.save().held.tolist() == before
    for fact, answer in zip(facts, found, strict=True):
        replies = [event for event in session.ask(fact.asked[TOLD]) if isinstance(event, TurnDone)]
        assert answer["recalled"] == replies[0].recalled > 0
        assert answer["said"] == (fact.values[0].lower() in replies[1].text.lower())
        session.undo()


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


@pytest.mark.slow
def test_the_report_compares_with_entropy_and_with_full(talk: Path) -> None:
    settings = tuple(Profile(policy=policy, budget=96) for policy in ("full", "entropy", "sink"))
    few: dict[str, Any] = {"limit": 2, "facts": 2, "reply_tokens": 2}
    study = FactsInDialogue(settings, data=str(talk), lengths=(200, 250), **few)
    keys, work = study.keys(), study.worker(load_model("tiny"))
    found = {key: work(key) for key in keys}
    assert found[keys[0]] == work(keys[0])
    report = study.report(found)
    assert [table.name for table in report.tables] == ["200 tokens", "250 tokens"]
    for table in report.tables:
        rows = {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
        assert rows["entropy 96"]["less entropy"] is None
        assert rows["full"]["nats below full"] is None
        right = [
            [
                float(a["right"])
                for key in keys
                if key.startswith(f"{row}/") and found[key]["length"] == int(table.name.split()[0])
                for a in found[key]["answers"]
            ]
            for row in (1, 2)
        ]
        less = rows["sink 96"]["less entropy"]
        assert getattr(less, "value", None) == pytest.approx(np.mean(right[1]) - np.mean(right[0]))
        assert getattr(rows["full"]["value held"], "value", None) == 1
        assert getattr(rows["full"]["said"], "value", None) is not None
    assert report.header[0] == "seed 0"


@pytest.mark.slow
def test_summaries_are_made_after_the_questions_and_count_the_values_in_them(talk: Path) -> None:
    few: dict[str, Any] = {"limit": 2, "facts": 2, "reply_tokens": 0}
    setting, model = Profile(policy="sink", budget=128), load_model("tiny")
    plain = FactsInDialogue((setting,), data=str(talk), lengths=(250,), **few)
    study = FactsInDialogue((setting,), data=str(talk), lengths=(250,), summary=("extract",), **few)
    assert "summary" not in plain.shared()  # so results of before can be extended
    (key,) = study.keys()
    found, usual = study.worker(model)(key), plain.worker(model)(key)
    for answer, other in zip(found["answers"], usual["answers"], strict=True):
        ways = {way: answer.pop(f"in {way}") for way in study.summary}
        assert answer == other
        assert all(isinstance(one, bool) for one in ways.values())
        answer["in extract"] = True
    (table,) = study.report({key: found}).tables
    assert table.columns[-1] == "in extract"
    assert getattr(table.rows[0][-1], "value", None) == 1.0
    with pytest.raises(SettingError, match="there is no summary 'modle'"):
        FactsInDialogue((setting,), data=str(talk), summary=("modle",), **few)
