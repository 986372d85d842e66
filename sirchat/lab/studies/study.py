"""What a study is, and `Grid`, the base class of studies that compare settings.

A study consists of units: runs that do not depend on each other, such as one conversation under one
setting. A unit has a key, and its result is a record, a dict; `run` runs them and makes a report.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import SettingError, did_you_mean
from sirchat.lab.studies.reading import read_data
from sirchat.lab.studies.report import Record, Report, setting_names
from sirchat.memory.policies import policy_class
from sirchat.models.model import LoadedModel

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LONGEST_REPLY = 64  # tokens of a reply that is generated in a study of settings

RunUnit = Callable[[str], Record]  # takes the key of a unit, returns its record

# Settings for what a chat shows and saves; no study depends on them.
ON_SCREEN = (
    *("panel", "theme", "markdown", "thinking", "attention"),
    *("save", "save_kv", "save_kv_limit"),
)
# Settings that change nothing where replies always take the likeliest token.
GREEDY = ("temperature", "top_k", "top_p", "min_p")
# Settings that change nothing where no replies are generated.
SAMPLING = (*GREEDY, "repetition_penalty", "repetition_window", "max_new_tokens", "lookup")
# Settings that change nothing where an engine reads without a session.
WITHOUT_SESSION = (
    *ON_SCREEN,
    *SAMPLING,
    *("system", "pin_system", "pin_instructions", "evict_thinking", "archive", "archive_limit"),
    *("recall", "recall_n", "focus", "recall_weight"),
    *("recall_query", "recall_encoder"),
)
# Settings that change no results, or only by rounding; `setting_key` leaves them out.
UNLOGGED = ("description", *ON_SCREEN, "threads", "compile", "lookup", "learn_encoder")


class Study(ABC):
    """A study: its units, how one is run, and the report of their records.

    A results log can be extended: it is read again if `shared` is equal, and the unit's `log_key`
    must then say all else that its record depends on.
    """

    without_effect: ClassVar[tuple[str, ...]] = ()  # settings that the commands refuse

    @property
    @abstractmethod
    def name(self) -> str:
        """The study's name, with which the names of its result files begin."""

    @abstractmethod
    def parameters(self) -> Record:
        """All that the results depend on, except the model."""

    @abstractmethod
    def keys(self) -> list[str]:
        """The key of each unit, in the order in which the units are run."""

    @abstractmethod
    def worker(self, model: LoadedModel) -> RunUnit:
        """A function that runs the unit with a given key."""

    @abstractmethod
    def report(self, found: Mapping[str, Record]) -> Report:
        """Tables of the records in `found`, by the units' keys."""

    def shared(self) -> Record:
        """The parameters that must be equal in all runs that write to one results log."""
        return self.parameters()

    def log_key(self, key: str) -> str:
        """The name of a unit in the results log."""
        return key


@dataclass(frozen=True)
class NumberedStudy(Study):
    """A study of `limit` numbered units under one profile; a greater limit only adds units."""

    profile: Profile
    limit: int

    def parameters(self) -> Record:
        return fields_of(self) | {"profile": self.profile.model_dump(mode="json")}

    def keys(self) -> list[str]:
        return [str(number) for number in range(self.limit)]

    def shared(self) -> Record:
        return without(self.parameters(), ("limit",))


@dataclass(frozen=True)
class Cell:
    """A row of a study's table: one setting, with the seeds that it is run with.

    `shots` is a number of examples before each question.
    """

    name: str
    setting: Profile
    seeds: tuple[int, ...]
    shots: int = 0


@dataclass(frozen=True)
class Findings:
    """The results of one setting: for each of its seeds, the records of all units."""

    name: str
    by_seed: list[list[Record]]

    @property
    def records(self) -> list[Record]:
        return [record for records in self.by_seed for record in records]

    @property
    def by_unit(self) -> list[tuple[Record, ...]]:
        """For each unit, its records under all seeds."""
        return list(zip(*self.by_seed, strict=True))


@dataclass(frozen=True)
class Grid(Study):
    """A study that runs the same units under each of several settings.

    `limit` says how much is run, in what the study counts; random policies run with `repeats`
    seeds. Runs that differ only in the fields `extends` can share a results log.
    """

    settings: tuple[Profile, ...]
    limit: int
    seed: int = 0
    repeats: int = 1

    extends: ClassVar[tuple[str, ...]] = ("settings", "limit", "repeats")
    without_effect: ClassVar[tuple[str, ...]] = (*ON_SCREEN, "max_new_tokens")

    @abstractmethod
    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Run one unit in a session that was just reset; returns its record."""

    def units(self) -> Sequence[str]:
        """The names of the units under each setting, without slashes: numbers up to `limit`."""
        return [str(number) for number in range(self.limit)]

    def parameters(self) -> Record:
        settings = [setting.model_dump(mode="json") for setting in self.settings]
        return fields_of(self) | {"settings": settings}

    def cells(self) -> list[Cell]:
        """The rows of the table: one for each setting."""
        names = setting_names(self.settings)
        return [
            Cell(name, setting, self._seeds(setting))
            for name, setting in zip(names, self.settings, strict=True)
        ]

    def keys(self) -> list[str]:
        """The keys `ROW/SEED/UNIT`, where ROW is a row's index."""
        return [
            f"{row}/{seed}/{unit}"
            for row, cell in enumerate(self.cells())
            for seed in cell.seeds
            for unit in self.units()
        ]

    def shared(self) -> Record:
        return without(self.parameters(), self.extends)

    def log_key(self, key: str) -> str:
        """The name `SETTING HASH/SEED/UNIT`, which does not depend on the other rows."""
        row, _, rest = key.partition("/")
        return f"{self._row_keys[int(row)]}/{rest}"

    def worker(self, model: LoadedModel) -> RunUnit:
        """A function that runs units; those of the same row and seed use one session."""
        cells, sessions = self.cells(), dict[str, Session]()

        def work(key: str) -> Record:
            run, _, unit = key.rpartition("/")
            row, _, seed = run.partition("/")
            cell = cells[int(row)]
            if run not in sessions:
                sessions.clear()
                reply = {"seed": int(seed), "max_new_tokens": LONGEST_REPLY}
                sessions[run] = Session(model, changed_profile(cell.setting, "eval", **reply))
            sessions[run].reset()
            return self.run_unit(sessions[run], unit, cell)

        return work

    def findings(self, found: Mapping[str, Record]) -> list[Findings]:
        """The records in `found`, grouped by row and seed."""
        return [
            Findings(
                cell.name,
                [[found[f"{row}/{seed}/{unit}"] for unit in self.units()] for seed in cell.seeds],
            )
            for row, cell in enumerate(self.cells())
        ]

    @cached_property
    def _row_keys(self) -> list[str]:
        more = {"longest_reply": LONGEST_REPLY}
        return [setting_key(one.setting, shots=one.shots, **more) for one in self.cells()]

    def _seeds(self, setting: Profile) -> tuple[int, ...]:
        is_random = "seed" in policy_class(setting.policy).uses
        return tuple(setting.seed + i for i in range(self.repeats if is_random else 1))


def fields_of(study: DataclassInstance) -> Record:
    """The values of a study's fields; of files of data, names with hashes of the contents."""
    found = {field.name: getattr(study, field.name) for field in fields(study)}
    files = {name: found[name] for name in ("data", "text") if found.get(name)}
    return found | {name: data_name(Path(file).expanduser()) for name, file in files.items()}


def without(parameters: Record, names: tuple[str, ...]) -> Record:
    return {name: value for name, value in parameters.items() if name not in names}


def setting_key(setting: Profile, **more: object) -> str:
    """A setting's name and a hash of all that changes its results, `more` included."""
    depends = without(setting.model_dump(mode="json"), UNLOGGED) | more
    text = json.dumps(depends, sort_keys=True)
    return f"{setting_names([setting])[0]} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def data_name(path: Path) -> str:
    """The name of a data file or folder, with a hash of its contents.

    Raises SettingError for a file that can't be read.
    """
    files = [file for file in path.rglob("*.json*") if file.is_file()] if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(hashlib.sha256(read_data(file)).digest())
    return f"{path.name} {digest.hexdigest()[:12]}"


def refuse_unknown(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise SettingError for the first name in `given` that is not in `known`."""
    for name in given:
        if name not in known:
            raise SettingError(
                f"there is no {what} {name!r}; there are {', '.join(known)}",
                hint=did_you_mean(name, known),
            )
