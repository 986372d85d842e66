"""`sirchat eval recall`: the same conversations for every setting, scored word for word."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest.mock import ANY

import pytest

from chatting import babbler, tiny
from command import run
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.intervals import wilson
from sirchat.lab.studies.recall import KIND_NAMES, RecallDialogue, RecallStudy
from sirchat.lab.studies.report import markdown, provenance, record_of
from sirchat.lab.studies.run import run_units
from sirchat.lab.synthetic.dialogue import UNTOLD
from sirchat.lab.training.probe import PROBED

FULL = Profile(policy="full")


def conversations(limit: int, **options: Any) -> list[RecallDialogue]:
    study = RecallStudy((FULL,), limit, **options)
    return [study.conversation(int(unit)) for unit in study.units()]


def test_conversations_depend_on_the_seed_alone() -> None:
    one = conversations(30, between=(2,))
    assert one == conversations(30, between=(2,))
    assert one != conversations(30, between=(2,), seed=2)
    assert one[:10] == conversations(10, between=(2,))


def test_kinds_take_turns_and_every_answer_is_known() -> None:
    made = conversations(40, between=(3,))
    assert [one.kind for one in made] == [*KIND_NAMES, *KIND_NAMES]
    assert all(one.quizzes == (False, True, True, True) for one in made)
    assert all(one.answer not in ("", UNTOLD) for one in made)


def test_distances_take_turns_and_rounds_may_go_before() -> None:
    made = conversations(8, between=(0, 4), before=2, kinds=("name", "city"))
    assert [one.between for one in made] == [0, 0, 4, 4, 0, 0, 4, 4]
    assert all(one.quizzes == (True, True, False, *[True] * one.between) for one in made)


def test_of_a_corrected_fact_the_newer_value_is_expected() -> None:
    made = conversations(60, between=(4,), ask="corrected")
    assert {one.kind for one in made} == {key for key, kind in PROBED.items() if kind.updates}
    for one in made:
        assert one.quizzes == (False, True, True, False, True, True)
        value = re.fullmatch(
            re.escape(PROBED[one.kind].answer)
            .replace(re.escape("{v}"), "(.+)")
            .replace(re.escape("{s}"), ".+"),
            one.answer,
        )
        assert value
        (old, _), (new, _) = (one.rounds[i] for i in (0, 3))
        assert value[1] in new
        assert value[1] not in old


def test_the_right_answer_about_an_untold_fact_says_so() -> None:
    made = conversations(20, between=(1,), ask="untold")
    assert {one.answer for one in made} == {UNTOLD}
    assert len({one.question for one in made}) > 10


@pytest.mark.parametrize(
    ("wrong", "hint"), [({"kinds": ("grocerys",)}, "groceries"), ({"ask": "tell"}, "told")]
)
def test_an_unknown_word_is_refused_with_the_nearest(wrong: dict[str, Any], hint: str) -> None:
    with pytest.raises(SettingError, match=hint):
        RecallStudy((FULL,), 1, **wrong)


@pytest.mark.slow
def test_a_fact_outside_the_window_is_not_recalled_and_one_inside_is() -> None:
    window = Profile(policy="window", budget=64, recent=8)
    study = RecallStudy((FULL, window), 6, between=(3,), kinds=("name", "city", "code"))
    full, lost = study.findings(run_units(study, tiny()))
    assert sum(one["right"] for one in full.records) >= 5
    assert sum(one["right"] for one in lost.records) == 0
    assert all(
        one["right"] == (one["said"] == one["expected"]) for one in full.records + lost.records
    )
    assert [one["expected"] for one in full.records] == [one["expected"] for one in lost.records]


def test_a_share_of_no_questions_is_a_dash_and_null_in_json() -> None:
    study = RecallStudy((FULL,), 1, between=(0, 3), kinds=("name", "city"), generate=True)
    report = study.report(run_units(study, babbler()))
    recall, by_kind = record_of(report, {})["tables"].values()
    assert recall["rows"][0][4:] == [{"value": 0.0, "low": 0.0, "high": ANY}, None, None]
    assert by_kind["rows"] == [["name", 0.0], ["city", None]]
    text = markdown(report, provenance(tiny(), "recall", ""))
    assert re.search(r"\| full \|.*\) \| - \| - \|\n", text)
    assert "| name | 0.00 |\n| city | - |\n" in text


def test_generated_rounds_are_scored() -> None:
    study = RecallStudy((FULL,), 2, between=(3,), kinds=("name",), generate=True)
    found = run_units(study, babbler()).values()
    assert [one["quizzes"] for one in found] == [3, 3]
    assert sum(one["quizzes right"] for one in found) == 0


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0), (285, 300, 0.919, 0.969)],
)
def test_the_interval_is_wilsons(right: int, asked: int, low: float, high: float) -> None:
    assert wilson(right, asked) == pytest.approx((low, high), abs=5e-4)


@pytest.mark.slow
def test_the_command_prints_shares_with_intervals_and_how_to_repeat_them() -> None:
    flags = ("--limit", "2", "--between", "1", "--kinds", "name,city", "--budgets", "64,128")
    done = run("eval", "recall", "--policies", "full,sink", *flags, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["command"].endswith(" ".join(flags) + " --json")
    table = record["tables"]["Recall"]
    assert [row[0] for row in table["rows"]] == ["full", "sink 64", "sink 128"]
    for name, share, held, reduction in table["rows"]:
        assert held <= (int(name.rpartition(" ")[2]) if name != "full" else 10_000)
        assert reduction >= 0
        assert name != "full" or reduction == 0
        assert share["low"] <= share["value"] <= share["high"]
        assert len(record["wrong"][name]) == 2 - 2 * share["value"]
    table = run("eval", "recall", "--policies", "full", *flags).stdout
    assert "2 conversations" in table
    assert "name" in table


def test_wrong_values_are_refused_in_one_line() -> None:
    done = run("eval", "recall", "--policies", "entropie")
    assert done.returncode == 2
    assert "entropy" in done.stderr
