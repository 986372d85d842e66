"""Asks questions after demonstrations that are read once (Anchor-based LLMs, section 5, Table 1).

Demonstrations are questions of the project's question bank with their answers. They are read once,
and their tokens in the cache are reused for every question.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import get_args

from sirchat.chat.session import Session
from sirchat.errors import SettingError
from sirchat.lab.studies import generated
from sirchat.lab.studies.choice import Question, most_likely
from sirchat.lab.studies.reading import anchors_placed, read
from sirchat.lab.studies.report import Record, Report, Table, Value
from sirchat.lab.studies.study import Cell, Findings, Grid, RunUnit, mean, refuse_unknown, share
from sirchat.models.model import LoadedModel
from sirchat.text.anchors import CHANCE, EVERY, Per

OPTIONS = 5

_PLACES: dict[Per, str] = {
    "round": "anchors behind each",
    "sentence": "anchors behind each sentence",
    "tokens": f"anchors every {EVERY} tokens",
    "random": f"anchors by lot, {CHANCE}",
}


@dataclass(frozen=True)
class Demonstrations(Grid):
    """The study of demonstrations (questions with answers) that are read once for many questions.

    `limit` is the number of sets of demonstrations.
    """

    # numbers of demonstrations in a set; the table has a row for each number and setting
    shots: tuple[int, ...] = (0, 5)
    questions: int = 4  # number of questions asked after each set
    # ways to place anchor tokens among the demonstrations (the paper's section 7.1), compared with
    # the places that the model was trained with
    places: tuple[Per, ...] = ()

    def __post_init__(self) -> None:
        refuse_unknown("place of anchors", self.places, get_args(Per))

    name = "demonstrations"

    def cells(self) -> list[Cell]:
        """The rows of the table: one for every setting and every number of demonstrations."""
        cells: list[Cell] = []
        for n in self.shots:
            for cell in super().cells():
                name = f"{cell.name}, {n}-shot"
                cells.append(Cell(name, cell.setting, cell.seeds, shots=n))
                cells += [
                    Cell(f"{name}, {_PLACES[per]}", cell.setting, cell.seeds, shots=n, per=per)
                    for per in self.places
                    if n and cell.setting.policy == "anchor"
                ]
        return cells

    def worker(self, model: LoadedModel) -> RunUnit:
        """Create a function that runs the unit (independent run) with a given key, using `model`.

        Raises SettingError if there are `places` and the model has no anchor token.
        """
        if self.places and (model.anchors is None or model.anchors.token_id is None):
            raise SettingError(
                f"--places needs an anchor token, and model {model.name!r} has none",
                hint="choose tiny-anchor, or train a model with `sirchat train anchor`",
            )
        return super().worker(model)

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read one set of demonstrations, then ask and undo each of its questions."""
        rng = Random(f"demonstrations/{self.seed}/{unit}")
        every = [
            generated.question(rng, OPTIONS, "") for _ in range(max(self.shots) + self.questions)
        ]
        shots, questions = every[: cell.shots], every[-self.questions :]
        with anchors_placed(session, cell.per):
            for one in shots:
                read(session, one.text, one.answer)
        cached = session.resident
        found: Record = {"tokens": session.seen, "cached": cached, "right": [], "seconds": []}
        for one in questions:
            start = time.perf_counter()
            found["right"].append(_chosen(session, one) == one.right)
            found["seconds"].append(time.perf_counter() - start)
            session.undo()
        found["max"] = _peak_held(session, questions[0])
        if cell.setting.policy == "full":
            found["anew"] = self._uncached_seconds(session, shots, questions)
        return found

    def report(self, found: Mapping[str, Record]) -> Report:
        """A table of accuracy (Acc), evicted share (C), speed-up (T) and tokens held (MaxKV).

        The module docstring defines these columns, which are the paper's.
        """
        findings = self.findings(found)
        columns = (
            *("setting", "Acc", "demonstrations", "cached", "C", "MaxKV", "ms a question"),
            *("T, not cached", "T, full cache"),
        )
        rows = tuple(
            _row(one, self._of_full(findings, cell))
            for cell, one in zip(self.cells(), findings, strict=True)
        )
        header = (
            f"seed {self.seed}",
            f"{self.limit} sets of demonstrations, {self.questions} questions each",
            f"{OPTIONS} options",
        )
        return Report(
            header, (Table("Demonstrations", columns, rows, 2),), details=self.parameters()
        )

    def _of_full(self, findings: list[Findings], cell: Cell) -> Findings | None:
        """The results of `full` with as many demonstrations as `cell` has."""
        for other, one in zip(self.cells(), findings, strict=True):
            if other.setting.policy == "full" and other.shots == cell.shots:
                return one
        return None

    def _uncached_seconds(
        self, session: Session, shots: list[Question], questions: list[Question]
    ) -> list[float]:
        """The seconds that each question takes if the demonstrations are read again before it."""
        seconds = []
        for one in questions:
            session.reset()
            start = time.perf_counter()
            for shot in shots:
                read(session, shot.text, shot.answer)
            _chosen(session, one)
            seconds.append(time.perf_counter() - start)
        return seconds


def _chosen(session: Session, one: Question) -> int:
    for _ in session.read_user(one.text, before="assistant"):
        pass
    return most_likely(session.score_continuations(one.replies), "paper")


def _peak_held(session: Session, one: Question) -> int:
    """The largest number of tokens held while a question is answered; the question is undone."""
    peak = session.resident
    for _ in session.ask(one.text):
        peak = max(peak, session.resident)
    session.undo()
    return peak


def _row(one: Findings, full: Findings | None) -> tuple[Value, ...]:
    demonstrations = mean([each["tokens"] for each in one.records]).value
    cached = mean([each["cached"] for each in one.records]).value
    seconds = _seconds(one, "seconds")
    return (
        one.name,
        share(right for each in one.records for right in each["right"]),
        demonstrations,
        cached,
        1 - cached / demonstrations if demonstrations else None,
        mean([each["max"] for each in one.records]).value,
        1000 * seconds,
        _seconds(full, "anew") / seconds if full is not None else None,
        _seconds(full, "seconds") / seconds if full is not None else None,
    )


def _seconds(one: Findings, key: str) -> float:
    every: list[float] = [seconds for each in one.records for seconds in each[key]]
    return sum(every) / len(every)
