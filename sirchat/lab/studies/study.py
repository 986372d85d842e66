"""The interface of a study, and `Grid`, the base class of studies that compare settings.

A study consists of units: runs that do not depend on each other, such as one conversation under one
setting. Each unit has a key, and its result is a record: a dict. The function `run` runs the units,
in order or several at once, and makes a report of their records.

`run` can write the records to a results log, to resume an interrupted study. The log's first line
has the parameters that all units share. A later run can add units only if these parameters are the
same. A unit's name in the log contains everything else that the unit's record depends on. So a
study can be extended by further settings, seeds and units, and finished units are not run again.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed
from sirchat.errors import SettingError, nearest
from sirchat.lab.studies.intervals import mean_interval, wilson
from sirchat.lab.studies.report import Estimate, Report, setting_names
from sirchat.lab.studies.results_log import Record
from sirchat.memory.policies import policy_class
from sirchat.models.model import LoadedModel
from sirchat.text.anchors import Per
from sirchat.text.text_file import read_regular

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RunUnit = Callable[[str], Record]
"""A function that takes the key of a unit (independent run), runs it, and returns its record."""


class Study(Protocol):
    """The methods of a study that the function `run` needs.

    A unit is one run of the study that does not depend on other runs.
    """

    @property
    def name(self) -> str:
        """The study's name; the names of its result files begin with it."""

    def parameters(self) -> Record:
        """The study's parameters, by name: all that its results depend on, except the model."""

    def keys(self) -> list[str]:
        """The key of each unit (independent run), in the order in which the units are run."""

    def worker(self, model: LoadedModel) -> RunUnit:
        """Create a function that runs a unit (independent run), given its key.

        The function returns the unit's record.
        """

    def report(self, found: Mapping[str, Record]) -> Report:
        """Tables and plots of the results; `found` has the record of each unit (run), by key."""


@dataclass(frozen=True)
class Cell:
    """A row of a study's table: one setting, with the seeds that it is run with.

    Attributes:
        name: the row's name.
        setting: the profile.
        seeds: the setting is run once with each seed; only random policies have several.
        shots: number of demonstrations, in studies that have some.
        per: where anchor tokens are placed; None for the places that the model was trained with.
    """

    name: str
    setting: Profile
    seeds: tuple[int, ...]
    shots: int = 0
    per: Per | None = None


@dataclass(frozen=True)
class Findings:
    """The results of one setting: for each of its seeds, the records of all units (runs)."""

    name: str
    by_seed: list[list[Record]]

    @property
    def records(self) -> list[Record]:
        """The records of all units (runs) under this setting, with all seeds, in one list."""
        return [one for records in self.by_seed for one in records]

    def share(self, key: str, **wanted: object) -> Estimate:
        """The share of this setting's records in which `key` is true, with its 95 % interval.

        `wanted` has keys with values: only records that have all of these values are counted.
        """
        return share_over_seeds(
            [
                [one[key] for one in records if all(one[k] == v for k, v in wanted.items())]
                for records in self.by_seed
            ]
        )


ON_SCREEN = ("panel", "theme", "markdown", "thinking", "attention", "save", "save_kv")
"""Names of settings for what a chat shows on the screen and saves; no study depends on them."""

SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "repetition_window", "max_new_tokens", "lookup"),
)
"""Names of settings for generating replies.

They change nothing in a study that generates no replies.
"""

GREEDY = ("temperature", "top_k", "top_p", "min_p")
"""Names of settings for random replies.

They change nothing in a study whose replies always take the likeliest token.
"""

WITHOUT_SESSION = (
    *ON_SCREEN,
    *SAMPLING,
    *("system", "pin_system", "evict_thinking", "archive", "archive_limit"),
    *("recall", "recall_n", "recall_weight", "recall_soft", "recall_span"),
    *("recall_scope", "recall_query"),
)
"""Names of settings of a chat session.

They change nothing in a study that uses an engine directly, without a session.
"""

UNLOGGED = ("description", *ON_SCREEN, "threads", "compile", "lookup")
"""Names of settings that change no results, or only by rounding; `setting_key` leaves them out."""


@dataclass(frozen=True)
class Grid(ABC):
    """A study that runs the same units (independent runs) under each of several settings.

    Attributes:
        settings: profiles, one for each row of the table.
        limit: how much to run for each setting; each study says what `limit` counts.
        seed: random seed of the texts that are read; every setting reads the same ones.
        repeats: number of seeds that a setting is run with, if its policy chooses at random.
    """

    settings: tuple[Profile, ...]
    limit: int
    seed: int = 0
    repeats: int = 1

    needs_hub: ClassVar[bool] = False
    """Whether the study needs the model's module and tokenizer from transformers.

    They are then loaded for every kind of model file, also for a GGUF file.
    """

    longest_reply: ClassVar[int] = 64
    """The largest number of tokens that a generated reply may have."""

    extends: ClassVar[tuple[str, ...]] = ("settings", "limit", "repeats")
    """Names of fields that only decide which units (runs) are run.

    Runs that differ only in these fields can share a results log.
    """

    without_effect: ClassVar[tuple[str, ...]] = (*ON_SCREEN, "max_new_tokens")
    """Names of settings that change nothing in this study; the commands refuse these settings."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The study's name; the names of its result files begin with it."""

    @abstractmethod
    def units(self) -> Sequence[str]:
        """The names of the units (independent runs) under each setting; they contain no slash."""

    @abstractmethod
    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Run one unit (independent run) in a session that was just reset; returns its record."""

    @abstractmethod
    def report(self, found: Mapping[str, Record]) -> Report:
        """Tables and plots of the results; `found` has the record of each unit (run), by key."""

    def parameters(self) -> Record:
        """Every field of the study, by name: all that its results depend on, except the model."""
        return fields_of(self) | {
            "settings": [one.model_dump(mode="json") for one in self.settings]
        }

    def cells(self) -> list[Cell]:
        """The rows of the study's result table: one for each setting."""
        names = setting_names(self.settings)
        return [
            Cell(name, setting, self._seeds(setting))
            for name, setting in zip(names, self.settings, strict=True)
        ]

    def keys(self) -> list[str]:
        """The keys of all units (independent runs): `ROW/SEED/UNIT`, where ROW is a row's index."""
        return [
            f"{row}/{seed}/{unit}"
            for row, cell in enumerate(self.cells())
            for seed in cell.seeds
            for unit in self.units()
        ]

    def shared(self) -> Record:
        """The parameters that must be equal in all runs that write to the same results log.

        They are all fields except those named in `extends`.
        """
        return without(self.parameters(), self.extends)

    def log_key(self, key: str) -> str:
        """The name that the unit (independent run) with this key has in the results log.

        It is `SETTING HASH/SEED/UNIT`, where SETTING and HASH are the setting's name and hash.
        """
        row, _, rest = key.partition("/")
        return f"{self._row_keys[int(row)]}/{rest}"

    @cached_property
    def _row_keys(self) -> list[str]:
        """For each row, the name that its setting has in the results log: `SETTING HASH`.

        The name does not depend on the study's other rows.
        """
        reply = {"longest_reply": self.longest_reply}
        return [
            setting_key(cell.setting, shots=cell.shots, per=cell.per, **reply)
            for cell in self.cells()
        ]

    def worker(self, model: LoadedModel) -> RunUnit:
        """Create a function that runs a unit (independent run), given its key.

        The function returns the unit's record. Units of the same row and seed use one session,
        which is reset before each unit.
        """
        cells, sessions = self.cells(), dict[str, Session]()

        def work(key: str) -> Record:
            run, _, unit = key.rpartition("/")
            row, _, seed = run.partition("/")
            cell = cells[int(row)]
            if run not in sessions:
                sessions.clear()
                reply = {"seed": int(seed), "max_new_tokens": self.longest_reply}
                sessions[run] = Session(model, changed(cell.setting, "eval", **reply))
            sessions[run].reset()
            return self.run_unit(sessions[run], unit, cell)

        return work

    def findings(self, found: Mapping[str, Record]) -> list[Findings]:
        """The results of each setting: the records in `found`, grouped by setting and seed.

        The settings are in the order of `cells`.
        """
        return [
            Findings(cell.name, [self._records(found, row, seed) for seed in cell.seeds])
            for row, cell in enumerate(self.cells())
        ]

    def _records(self, found: Mapping[str, Record], row: int, seed: int) -> list[Record]:
        return [found[f"{row}/{seed}/{unit}"] for unit in self.units()]

    def _seeds(self, setting: Profile) -> tuple[int, ...]:
        is_random = "seed" in policy_class(setting.policy).uses
        return tuple(setting.seed + i for i in range(self.repeats if is_random else 1))


def fields_of(study: DataclassInstance) -> Record:
    """The value of every field of a study, by the field's name."""
    return {field.name: getattr(study, field.name) for field in fields(study)}


def share(right: Iterable[bool]) -> Estimate:
    """The share of true values in `right`, with Wilson's 95 % interval; NaN if `right` is empty."""
    ones = list(right)
    value = sum(ones) / len(ones) if ones else math.nan
    return Estimate(value, *wilson(sum(ones), len(ones)))


def share_over_seeds(answers: Sequence[Sequence[bool]]) -> Estimate:
    """The share of right answers, with its 95 % interval.

    `answers` has a list for each seed: whether each answer was right. With one seed the interval is
    Wilson's. With several, the share is the mean of the seeds' shares, and the interval covers two
    intervals: Wilson's over all answers, and Student's over the seeds' shares, which shows how much
    the random choices matter. The share of no answers is NaN.
    """
    pooled = share([one for of_seed in answers for one in of_seed])
    shares = [sum(of_seed) / len(of_seed) for of_seed in answers if of_seed]
    if len(answers) == 1 or not shares:
        return pooled
    over_seeds = mean(shares)
    low = max(0.0, min(pooled.low, over_seeds.low))
    high = min(1.0, max(pooled.high, over_seeds.high))
    return Estimate(over_seeds.value, low, high)


def mean(values: Sequence[float]) -> Estimate:
    """The mean of `values`, with its 95 % interval by Student's t.

    The interval is infinite for fewer than two values, and the mean of no values is NaN.
    """
    return Estimate(*mean_interval(values))


def refuse_unknown(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise SettingError for the first name in `given` that is not in `known`.

    `what` is the kind of name, such as `retriever`, for the error message.
    """
    for name in given:
        if name not in known:
            raise SettingError(
                f"there is no {what} {name!r}; there are {', '.join(known)}",
                hint=nearest(name, known),
            )


@runtime_checkable
class Extensible(Protocol):
    """A study whose results log can be extended: a later run may add further results to it."""

    def shared(self) -> Record:
        """The parameters that must be equal in all runs that write to the same results log."""

    def log_key(self, key: str) -> str:
        """The name that the unit (independent run) with this key has in the results log.

        The name contains all that the unit's results depend on, except the parameters in `shared`.
        """


class ExtendedByLimit:
    """A study of `limit` numbered units (independent runs): a greater `limit` only adds units."""

    def parameters(self) -> Record:
        """The study's parameters, by name: all that its results depend on, except the model."""
        raise NotImplementedError

    def shared(self) -> Record:
        """The parameters that must be equal in all runs with one results log: all but `limit`."""
        return without(self.parameters(), ("limit",))

    def log_key(self, key: str) -> str:
        """The name that the unit (independent run) with this key has in the results log.

        It is the key itself, which is the unit's number.
        """
        return key


def without(parameters: Record, names: tuple[str, ...]) -> Record:
    """A copy of `parameters` that leaves out the entries named in `names`."""
    return {name: value for name, value in parameters.items() if name not in names}


def setting_key(setting: Profile, **more: object) -> str:
    """A setting's name, such as `entropy 256`, and a hash of all values that change its results.

    `more` has values that are not part of the setting but also go into the hash.
    """
    depends = without(setting.model_dump(mode="json"), UNLOGGED) | more
    text = json.dumps(depends, sort_keys=True)
    return f"{setting_names([setting])[0]} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def data_name(path: Path) -> str:
    """The name of a data file or folder, followed by a hash of its contents to detect a change.

    Raises SettingError for a file that can't be read.
    """
    files = [one for one in path.rglob("*.json*") if one.is_file()] if path.is_dir() else [path]
    digest = hashlib.sha256()
    try:
        for file in sorted(files):
            digest.update(hashlib.sha256(read_regular(file)).digest())
    except OSError as error:
        raise SettingError(f"data {str(path)!r} can't be read: {error.strerror}") from None
    return f"{path.name} {digest.hexdigest()[:12]}"
