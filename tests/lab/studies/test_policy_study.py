"""Policies side by side: facts asked for at several distances, and all parts in one study."""

from __future__ import annotations

import pytest

from chatting import babbler, session, tiny
from sirchat.config.profile import Profile
from sirchat.lab.studies.facts import Facts
from sirchat.lab.studies.policies import Policies, without_each
from sirchat.lab.studies.reading import ask, read
from sirchat.lab.studies.run import run_units

FULL = Profile(policy="full")
SINK, ENTROPY, SALIENCE = (
    Profile(policy=policy, budget=64, recent=8) for policy in ("sink", "entropy", "salience")
)


@pytest.mark.slow
def test_a_fact_is_right_where_a_chat_answers_word_for_word() -> None:
    study = Facts((FULL, SINK), 4, facts=(2,), between=(1, 3))
    found = run_units(study, tiny())
    for number in range(2):
        talk, chat = study.conversation(2, number), session(budget=512)
        for user, reply in (*talk.facts, *talk.small_talk):
            read(chat, user.text, reply.text)
        for (question, answer), right in zip(
            talk.questions, found[f"0/0/2 {number}"]["right"]["3"], strict=True
        ):
            assert right == (ask(chat, question.text) == answer.text)
            list(chat.undo())
    assert [one["right"]["3"] for one in found.values()] == 2 * [[True] * 2] + 2 * [[False] * 2]


@pytest.mark.slow
def test_questions_leave_no_trace() -> None:
    """The surprisal of the text that follows is the same with and without questions."""
    asked = Facts((ENTROPY,), 2, facts=(2,), between=(2, 4, 8))
    only = Facts((ENTROPY,), 2, facts=(2,), between=(8,))
    one, other = run_units(asked, tiny())["0/0/2 0"], run_units(only, tiny())["0/0/2 0"]
    assert one["nats"] == other["nats"]
    assert one["tokens"] == other["tokens"]
    assert one["right"]["8"] == other["right"]["8"]


def test_the_ablation_turns_off_each_switch_of_a_policy() -> None:
    names = [next(iter(one.policy_options)) for one in without_each(SALIENCE)]
    assert names == ["whole_words", "neighbours", "template"]
    assert not any(without_each(ENTROPY))


@pytest.mark.slow
def test_one_study_has_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sirchat.lab.studies.policies._ROUNDS", 4)
    study = Policies((SALIENCE, SINK), 2, facts=(1,), between=(1, 2), at=64)
    found = run_units(study, babbler())
    report = study.report(found)
    names = [table.name for table in report.tables]
    for part in ("ablation: Facts recalled", "facts: Facts recalled", "grocery: grocery"):
        assert part in names
    assert any(name.startswith("rock-paper-scissors") for name in names)
    ablation = next(t for t in report.tables if t.name == "ablation: Facts recalled")
    assert [row[0] for row in ablation.rows][:2] == [
        "salience 64 whole_words off",
        "salience 64 neighbours off",
    ]


def test_lists_and_games_are_for_one_budget() -> None:
    other = SALIENCE.model_copy(update={"budget": 96})
    study = Policies((SALIENCE, other, SINK), 4, facts=(1,), between=(1,), at=64)
    assert len(study.studies["grocery"].settings) == 2
    assert len(study.studies["facts"].settings) == 3
    assert "ablation" not in Policies((SINK,), 4, at=64).studies
