"""Policies side by side: facts asked for at several distances, topics, and all in one study."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from chatting import babbler, session, tiny
from command import run
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.facts import Facts
from sirchat.lab.studies.policies import Policies, without_each
from sirchat.lab.studies.reading import ask, read
from sirchat.lab.studies.report import Estimate
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


@pytest.mark.slow
def test_there_are_as_many_questions_as_the_limit() -> None:
    study = Facts((SINK,), 10, facts=(1, 4), between=(1,))
    found = run_units(study, tiny())
    counts = {
        facts: sum(len(one["right"]["1"]) for one in found.values() if one["facts"] == facts)
        for facts in (1, 4)
    }
    assert counts == {1: 10, 4: 12}
    right, follows = study.report(found).tables
    assert right.columns == ("setting", "1 told, 1 rounds", "4 told, 1 rounds")
    nats = np.mean([one["nats"] for one in found.values()])
    assert follows.rows[0][2] == pytest.approx(math.exp(nats))


@pytest.mark.parametrize("facts", [(0,), (1, 99)])
def test_facts_are_of_different_kinds(facts: tuple[int, ...]) -> None:
    with pytest.raises(SettingError, match="facts is"):
        Facts((SINK,), 1, facts=facts)


def value(one: object) -> float:
    assert isinstance(one, Estimate)
    return one.value


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


@pytest.mark.slow
def test_the_command_resumes_where_it_stopped(tmp_path: Path) -> None:
    flags = (
        "--policies sink,salience --budgets 64 --at 64 --limit 2 --facts 1 --between 1 --recent 8"
    )
    out = ("--parts", "facts", "--out", str(tmp_path), "--json")
    command = ("eval", "policies", *flags.split(), *out)
    first = run(*command)
    assert first.returncode == 0, first.stderr
    log = tmp_path / "policies.jsonl"
    lines = log.read_text("utf-8").splitlines(keepends=True)
    log.write_text("".join(lines[:-2]), "utf-8")
    again = run(*command)
    assert json.loads(again.stdout)["tables"] == json.loads(first.stdout)["tables"]


def test_an_unknown_part_is_refused() -> None:
    done = run("eval", "policies", "--parts", "fact")
    assert done.returncode == 2
    assert "did you mean facts" in done.stderr
