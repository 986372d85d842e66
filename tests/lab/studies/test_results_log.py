"""A results log: an interrupted study resumes, and a finished one can be extended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chatting import babbler, tiny
from random_encoders import random_encoder
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.multiple_choice import MultipleChoice
from sirchat.lab.studies.perplexity import Perplexity
from sirchat.lab.studies.report import Record, Report
from sirchat.lab.studies.retrieval import Retrieval
from sirchat.lab.studies.run import ResultsLog, run_units
from sirchat.lab.studies.study import UNLOGGED, Cell, Grid, Study

SINK = Profile(policy="sink", budget=64)
RANDOM = Profile(policy="random", budget=64, seed=5)


class Noted(Grid):
    """A grid that notes which units it runs; `depth` changes them, `stop` interrupts one."""

    ran: list[str]
    depth = 1
    stop = ""
    name = "noted"

    def units(self) -> list[str]:
        return [str(number) for number in range(self.limit)]

    def run_unit(self, session: Any, unit: str, cell: Cell) -> Record:
        if unit == self.stop:
            raise KeyboardInterrupt
        setting = session.profile
        self.ran.append(f"{setting.policy} {setting.budget} {setting.seed} {unit}")
        return {"of": [setting.policy, setting.budget, setting.seed, unit, self.depth]}

    def parameters(self) -> Record:
        return super().parameters() | {"depth": self.depth}

    def report(self, found: Mapping[str, Record]) -> Report:
        return Report((), ())


def noted(
    *settings: Profile, limit: int = 2, repeats: int = 1, depth: int = 1, stop: str = ""
) -> Noted:
    study = Noted(settings, limit, repeats=repeats)
    vars(study).update(ran=[], depth=depth, stop=stop)
    return study


def test_an_interrupted_study_resumes_where_it_stopped(tmp_path: Path) -> None:
    straight, out = run_units(noted(SINK, limit=6), babbler()), tmp_path / "new"
    with pytest.raises(KeyboardInterrupt):
        run_units(noted(SINK, limit=6, stop="3"), babbler(), out)
    log = out / "noted.jsonl"
    with log.open("a") as file:
        file.write('{"key": "3", "fou')  # cut off in the middle of a write
    rest = noted(SINK, limit=6)
    assert run_units(rest, babbler(), out) == straight
    assert rest.ran == [f"sink 64 0 {number}" for number in (3, 4, 5)]
    whole = log.read_bytes()
    known = noted(SINK, limit=6, stop="0")
    assert run_units(known, babbler(), out) == straight
    assert log.read_bytes() == whole
    with pytest.raises(SettingError, match='another run: model is "babbler" there, not "tiny"'):
        run_units(known, tiny(), out)


def test_a_study_is_extended_by_units_settings_and_seeds_and_runs_only_what_is_new(
    tmp_path: Path,
) -> None:
    small, sink, random = Profile(policy="sink", budget=32), "sink 64 0", "random 64"
    for study, new in (
        (noted(SINK), {f"{sink} 0", f"{sink} 1"}),
        (noted(SINK, limit=3), {f"{sink} 2"}),
        (noted(RANDOM, SINK), {f"{random} 5 0", f"{random} 5 1"}),
        (noted(small, SINK, RANDOM), {"sink 32 0 0", "sink 32 0 1"}),
        (noted(RANDOM, repeats=2), {f"{random} 6 0", f"{random} 6 1"}),
        (noted(small, RANDOM, SINK, repeats=2), set()),
        (noted(SINK, limit=1), set()),
    ):
        found = run_units(study, babbler(), tmp_path)
        assert set(study.ran) == new
        assert found == run_units(study, babbler())  # as if there were no log


def test_no_setting_that_a_result_depends_on_is_left_out_of_its_name(tmp_path: Path) -> None:
    run_units(noted(SINK), babbler(), tmp_path)
    others = {"system": "Be brief.", "pin_system": False, "protect": False, "sinks": 2}
    others |= {"evict": "before-turn", "dtype": "bfloat16", "temperature": 0.5}
    for name, value in others.items():
        study = noted(SINK.model_copy(update={name: value}))
        run_units(study, babbler(), tmp_path)
        assert len(study.ran) == 2, name
    shown = {"description": "x", "panel": "off", "theme": "none", "markdown": False}
    for name, value in (shown | {"compile": "off", "lookup": False}).items():
        assert name in UNLOGGED
        study = noted(SINK.model_copy(update={name: value}))
        run_units(study, babbler(), tmp_path)
        assert not study.ran, name


def test_what_changes_every_unit_is_refused_by_name(tmp_path: Path) -> None:
    run_units(noted(SINK), babbler(), tmp_path)
    with pytest.raises(SettingError, match="another run: depth is 1 there, not 2"):
        run_units(noted(SINK, depth=2), babbler(), tmp_path)
    log = tmp_path / "noted.jsonl"
    lines = log.read_text("utf-8").splitlines()
    log.write_text('{"task": "noted", "settings": [], "limit": 2}\n', "utf-8")
    with pytest.raises(SettingError, match="by another version of sirchat"):
        run_units(noted(SINK), babbler(), tmp_path)
    names = [json.loads(line)["key"] for line in lines[1:]]
    assert [name.split()[:2] for name in names] == [["sink", "64"]] * 2  # for people, too


@pytest.mark.parametrize("kind", ["data of questions", "data of needles", "text"])
def test_results_of_a_file_whose_contents_were_others_are_refused(
    kind: str, tmp_path: Path
) -> None:
    file, log = tmp_path / "file.jsonl", tmp_path / "log.jsonl"

    def study(word: str) -> Study:
        turns = [f"Alice likes {word}.", "Bob likes tea.", "What does Alice like?"]
        line: dict[str, Any] = {
            "turns": turns,
            "reference": [word],
            "id": "answer_0",
            "answerKey": "A",
        }
        choices = [{"label": one, "text": one + word} for one in "AB"]
        line["question"] = {"stem": "Which?", "choices": choices}
        file.write_text(json.dumps(line) + "\n", "utf-8")
        if kind == "text":
            return Perplexity((SINK,), 8, text=str(file))
        if "needles" in kind:
            return Retrieval(SINK, data=str(file))
        return MultipleChoice((SINK,), 1, data=str(file))

    ResultsLog(log, study("fennel").shared())
    ResultsLog(log, study("fennel").shared())
    assert log.stat().st_mode & 0o077 == 0  # it may quote a conversation
    with pytest.raises(SettingError, match=f"another run: {kind.split()[0]} is .file.jsonl"):
        ResultsLog(log, study("dill").shared())


def test_results_with_another_encoder_are_refused(tmp_path: Path) -> None:
    run_units(noted(SINK), babbler(), tmp_path)
    learned = replace(babbler(), encoder=random_encoder(babbler(), (1,), 4))
    with pytest.raises(SettingError, match="another run: encoder is null there"):
        run_units(noted(SINK), learned, tmp_path)
