"""Questions behind demonstrations that are read once (Anchor-based LLMs, section 5, Table 1).

Demonstrations are questions of the project's bank with their answers. What is held of them is
cached and used again for every question: so C, how much smaller the cache is than the
demonstrations; and T, how much faster a question is answered than by reading all of it anew, and
than with the full cache. `max` is the most that was held while a reply was generated (MaxKV).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import get_args

from sirchat.chat.session import Session
from sirchat.errors import SettingError
from sirchat.models.model import LoadedModel
from sirchat.tasks import generated
from sirchat.tasks.asking import anchors_placed, read
from sirchat.tasks.choice import Question, most_likely
from sirchat.tasks.report import Report, Table, Value
from sirchat.tasks.results_log import Record
from sirchat.tasks.study import Cell, Findings, Grid, RunUnit, mean, refuse_unknown, share
from sirchat.text.anchor_placement import CHANCE, EVERY
from sirchat.text.anchors import Per

OPTIONS = 5

_PLACES: dict[Per, str] = {
    "round": "anchors behind each",
    "sentence": "anchors behind each sentence",
    "tokens": f"anchors every {EVERY} tokens",
    "random": f"anchors by lot, {CHANCE}",
}


@dataclass(frozen=True)
class Demonstrations(Grid):
    """The study; `limit` is sets of demonstrations.

    Attributes:
        shots: how many demonstrations, for each row; 0 for none.
        questions: asked behind each set.
        places: where anchors are put among the demonstrations (section 7.1), beside where the
            model has them.
    """

    shots: tuple[int, ...] = (0, 5)
    questions: int = 4
    places: tuple[Per, ...] = ()

    def __post_init__(self) -> None:
        refuse_unknown("place of anchors", self.places, get_args(Per))

    @property
    def name(self) -> str:
        """What it is called."""
        return "demonstrations"

    def cells(self) -> list[Cell]:
        """Every setting with every number of shots; policies that gather with every place, too."""
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

    def units(self) -> list[str]:
        """Sets, by number."""
        return [str(number) for number in range(self.limit)]

    def worker(self, model: LoadedModel) -> RunUnit:
        """As any grid; raises SettingError for a model without a token that could be put."""
        if self.places and (model.anchors is None or model.anchors.token_id is None):
            raise SettingError(
                f"model {model.name!r} has no anchor token that could be put elsewhere",
                hint="tiny-anchor has; `sirchat train anchor` gives one to another",
            )
        return super().worker(model)

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read the demonstrations, ask each question behind them, and take it back."""
        rng = Random(f"demonstrations/{self.seed}/{unit}")
        every = [
            generated.question(rng, OPTIONS, "") for _ in range(max(self.shots) + self.questions)
        ]
        shown, asked = every[: cell.shots], every[-self.questions :]
        with anchors_placed(session, cell.per):
            for one in shown:
                read(session, one.text, one.answer)
        cached = session.resident
        found: Record = {"tokens": session.seen, "cached": cached, "right": [], "seconds": []}
        for one in asked:
            start = time.perf_counter()
            found["right"].append(_takes(session, one) == one.right)
            found["seconds"].append(time.perf_counter() - start)
            list(session.undo())
        found["max"] = _most_held(session, asked[0])
        if cell.setting.policy == "full":
            found["anew"] = self._anew(session, shown, asked)
        return found

    def report(self, found: Mapping[str, Record]) -> Report:
        """The paper's Acc, C and T, and MaxKV."""
        held = self.findings(found)
        columns = (
            *("setting", "Acc", "demonstrations", "cached", "C", "MaxKV", "ms a question"),
            *("T, not cached", "T, full cache"),
        )
        rows = tuple(
            _row(one, self._full(held, cell)) for cell, one in zip(self.cells(), held, strict=True)
        )
        facts = (
            f"seed {self.seed}",
            f"{self.limit} sets of demonstrations, {self.questions} questions each",
            f"{OPTIONS} options",
        )
        return Report(
            facts, (Table("Demonstrations", columns, rows, 2),), details=self.parameters()
        )

    def _full(self, held: list[Findings], cell: Cell) -> Findings | None:
        """What `full` did with as many shots, if it was asked for."""
        for other, one in zip(self.cells(), held, strict=True):
            if other.setting.policy == "full" and other.shots == cell.shots:
                return one
        return None

    def _anew(self, session: Session, shown: list[Question], asked: list[Question]) -> list[float]:
        """Seconds a question, when demonstrations and question are read for each."""
        seconds = []
        for one in asked:
            session.reset()
            start = time.perf_counter()
            for shot in shown:
                read(session, shot.text, shot.answer)
            _takes(session, one)
            seconds.append(time.perf_counter() - start)
        return seconds


def _takes(session: Session, one: Question) -> int:
    for _ in session.read_user(one.text):
        pass
    return most_likely([session.score_continuation(reply) for reply in one.replies], "paper")


def _most_held(session: Session, one: Question) -> int:
    """The most tokens held while the question is answered."""
    most = session.resident
    for _ in session.ask(one.text):
        most = max(most, session.resident)
    list(session.undo())
    return most


def _row(one: Findings, full: Findings | None) -> tuple[Value, ...]:
    demonstrations = mean([each["tokens"] for each in one.all]).value
    cached = mean([each["cached"] for each in one.all]).value
    seconds = _seconds(one, "seconds")
    return (
        one.name,
        share(right for each in one.all for right in each["right"]),
        demonstrations,
        cached,
        1 - cached / demonstrations if demonstrations else None,
        mean([each["max"] for each in one.all]).value,
        1000 * seconds,
        _seconds(full, "anew") / seconds if full is not None else None,
        _seconds(full, "seconds") / seconds if full is not None else None,
    )


def _seconds(one: Findings, key: str) -> float:
    every: list[float] = [seconds for each in one.all for seconds in each[key]]
    return sum(every) / len(every)
