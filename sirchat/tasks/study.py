"""What a study is: units of work that need nothing of each other, and a report on what they found.

A grid is a study whose units are held under every one of several settings, the same units each
time. `run` does the units, in order or many at once, and goes on where an interrupted run stopped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Protocol

from sirchat.chat.session import Session
from sirchat.config.profile import Profile, changed
from sirchat.errors import SettingError, nearest
from sirchat.memory.policies import policy_class
from sirchat.models.model import LoadedModel
from sirchat.tasks.interval import mean_interval, wilson
from sirchat.tasks.report import Estimate, Report, setting_names
from sirchat.tasks.results_log import Record
from sirchat.text.anchors import Per

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RunUnit = Callable[[str], Record]


class Study(Protocol):
    """What `run` needs."""

    @property
    def name(self) -> str:
        """What it is called, and its files."""

    def parameters(self) -> Record:
        """All that its findings depend on, but the model."""

    def keys(self) -> list[str]:
        """The name of each unit of work, in order."""

    def worker(self, model: LoadedModel) -> RunUnit:
        """What does a unit, by its name, and tells what it found."""

    def report(self, found: Mapping[str, Record]) -> Report:
        """Tables of what all units found."""


@dataclass(frozen=True)
class Cell:
    """A row of the table: one setting, with the seeds under which it is run.

    `shots`, and where anchors are put (`per`, if not where the model has them), are for studies
    that hold the same units in another way, too.
    """

    name: str
    setting: Profile
    seeds: tuple[int, ...]
    shots: int = 0
    per: Per | None = None


@dataclass(frozen=True)
class Findings:
    """What was found under one setting: for each seed, one record for each unit."""

    name: str
    by_seed: list[list[Record]]

    @property
    def all(self) -> list[Record]:
        """The records of all seeds."""
        return [one for draw in self.by_seed for one in draw]

    def share(self, key: str, **wanted: object) -> Estimate:
        """How often `key` is true, of the records that have the `wanted` values."""
        return share_over_seeds(
            [
                [one[key] for one in draw if all(one[k] == v for k, v in wanted.items())]
                for draw in self.by_seed
            ]
        )


@dataclass(frozen=True)
class Grid(ABC):
    """A study of several settings.

    Attributes:
        settings: profiles, one for each row of the table.
        limit: units for each; each task says of what.
        seed: draws the units; every setting gets the same ones.
        repeats: how often a setting whose policy draws lots is run, with other lots each time.
    """

    settings: tuple[Profile, ...]
    limit: int
    seed: int = 0
    repeats: int = 1

    longest_reply: ClassVar[int] = 64  # tokens

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called, and its files."""

    @abstractmethod
    def units(self) -> Sequence[str]:
        """The name of each unit, in order; without a slash."""

    @abstractmethod
    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Hold a unit in a session that has just been reset."""

    @abstractmethod
    def report(self, found: Mapping[str, Record]) -> Report:
        """Tables of what all units found."""

    def parameters(self) -> Record:
        """All that the findings depend on: every field."""
        return fields_of(self) | {
            "settings": [one.model_dump(mode="json") for one in self.settings]
        }

    def cells(self) -> list[Cell]:
        """The rows of the table."""
        names = setting_names(self.settings)
        return [
            Cell(name, setting, self._seeds(setting))
            for name, setting in zip(names, self.settings, strict=True)
        ]

    def keys(self) -> list[str]:
        """Every unit under every setting."""
        return [
            f"{row}/{seed}/{unit}"
            for row, cell in enumerate(self.cells())
            for seed in cell.seeds
            for unit in self.units()
        ]

    def worker(self, model: LoadedModel) -> RunUnit:
        """Holds units in one session after another, one for each setting and seed."""
        cells, opened = self.cells(), dict[str, Session]()

        def work(key: str) -> Record:
            where, _, unit = key.rpartition("/")
            row, _, seed = where.partition("/")
            cell = cells[int(row)]
            if where not in opened:
                opened.clear()
                reply = {"seed": int(seed), "max_new_tokens": self.longest_reply}
                opened[where] = Session(model, changed(cell.setting, "eval", **reply))
            opened[where].reset()
            return self.run_unit(opened[where], unit, cell)

        return work

    def findings(self, found: Mapping[str, Record]) -> list[Findings]:
        """What was found under each setting."""
        return [
            Findings(cell.name, [self._of(found, row, seed) for seed in cell.seeds])
            for row, cell in enumerate(self.cells())
        ]

    def _of(self, found: Mapping[str, Record], row: int, seed: int) -> list[Record]:
        return [found[f"{row}/{seed}/{unit}"] for unit in self.units()]

    def _seeds(self, setting: Profile) -> tuple[int, ...]:
        draws = "seed" in policy_class(setting.policy).uses
        return tuple(setting.seed + i for i in range(self.repeats if draws else 1))


def fields_of(study: DataclassInstance) -> Record:
    """Every field of a study, by name."""
    return {field.name: getattr(study, field.name) for field in fields(study)}


def share(right: Iterable[bool]) -> Estimate:
    """The share that is true, NaN of no values, with its 95 % interval (Wilson's)."""
    ones = list(right)
    value = sum(ones) / len(ones) if ones else math.nan
    return Estimate(value, *wilson(sum(ones), len(ones)))


def share_over_seeds(draws: Sequence[Sequence[bool]]) -> Estimate:
    """The share that is true, over several draws of the lots or one.

    The interval is Wilson's of all answers together; or Student's over the draws, how far the lots
    matter, where that is wider.
    """
    pooled = share([one for draw in draws for one in draw])
    shares = [sum(one) / len(one) for one in draws if one]
    if len(draws) == 1 or not shares:
        return pooled
    spread = mean(shares)
    low, high = max(0.0, min(pooled.low, spread.low)), min(1.0, max(pooled.high, spread.high))
    return Estimate(spread.value, low, high)


def mean(values: Sequence[float]) -> Estimate:
    """The mean, with its 95 % interval (Student's); as wide as can be for one value."""
    return Estimate(*mean_interval(values))


def refuse_unknown(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise SettingError for the first that is not known."""
    for name in given:
        if name not in known:
            raise SettingError(
                f"there is no {what} {name!r}; there are {', '.join(known)}",
                hint=nearest(name, known),
            )
