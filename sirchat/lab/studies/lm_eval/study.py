"""Runs tasks of lm-eval under several settings, with the same documents, examples and metrics.

A unit is one task under one setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sirchat.chat.settings import check_budget
from sirchat.config.profile import Profile
from sirchat.config.values import short
from sirchat.errors import SettingError
from sirchat.lab.studies.lm_eval.adapter import language_model
from sirchat.lab.studies.lm_eval.harness import Harness, harness_version
from sirchat.lab.studies.lm_eval.reader import TextReader
from sirchat.lab.studies.lm_eval.text import TextEncoder
from sirchat.lab.studies.report import Report, Table, Value, setting_names
from sirchat.lab.studies.results_log import Record
from sirchat.lab.studies.reuse import setting_key, without
from sirchat.lab.studies.study import RunUnit
from sirchat.models.model import LoadedModel


@dataclass(frozen=True)
class LmEval:
    """The study.

    Attributes:
        settings: profiles, one for each row of a metric.
        tasks: names of tasks, groups or tags.
        harness: how the tasks are run.
        piece: number of tokens in a round; None reads a context as one round.

    Raises UsageError without lm-eval, SettingError for an unknown task and for a setting without
    effect.
    """

    settings: tuple[Profile, ...]
    tasks: tuple[str, ...]
    harness: Harness
    piece: int | None = None

    def __post_init__(self) -> None:
        for setting in self.settings:
            _refuse_without_effect(setting, self.piece)
        self.harness.check(self.tasks)

    @property
    def name(self) -> str:
        """The study's name, which also names its files."""
        return "lm-eval"

    def parameters(self) -> Record:
        """All that the findings depend on, except the model: fields and the version of lm-eval."""
        return {
            "settings": [one.model_dump(mode="json") for one in self.settings],
            "tasks": list(self.tasks),
            **asdict(self.harness),
            "piece": self.piece,
            "lm_eval": harness_version(),
        }

    def shared(self) -> Record:
        """The parameters that every unit depends on; see `reuse`."""
        return without(self.parameters(), ("settings", "tasks"))

    def log_key(self, key: str) -> str:
        """The name of a unit in the results log: the setting, its hash, and the task."""
        row, _, task = key.partition("/")
        return f"{setting_key(self.settings[int(row)])}/{task}"

    def keys(self) -> list[str]:
        """Every task under every setting."""
        return [f"{row}/{task}" for row in range(len(self.settings)) for task in self.tasks]

    def worker(self, model: LoadedModel) -> RunUnit:
        """A function that runs a task; raises SettingError for a budget above the context."""
        for setting in self.settings:
            check_budget(setting, model, "budget")
        encoder = TextEncoder(model.tokenizer, chat=self.harness.chat, anchors=model.anchors)

        def work(key: str) -> Record:
            row, _, task = key.partition("/")
            setting = self.settings[int(row)]
            lm = language_model(TextReader(model, setting, self.piece), encoder)
            return {"scores": self.harness.run(lm, task, setting.system), "cut": lm.truncated}

        return work

    def report(self, found: Mapping[str, Record]) -> Report:
        """One table with each metric of each task under every setting."""
        columns = ("task", "metric", "setting", "value", "stderr", "documents", "shots")
        rows = [row for task in self.tasks for row in self._rows(task, found)]
        truncated = sum(one["cut"] for one in found.values())
        header = (
            f"lm-eval {harness_version()}",
            f"at most {self.harness.limit:,} documents" if self.harness.limit else "",
            "chat template" if self.harness.chat else "",
            f"rounds of {self.piece} tokens" if self.piece else "",
            f"{truncated:,} texts beyond the model's length cut" if truncated else "",
        )
        details = self.parameters() | {"found": dict(found)}
        table = Table("lm-eval", columns, tuple(rows))
        return Report(tuple(one for one in header if one), (table,), details=details)

    def _rows(self, task: str, found: Mapping[str, Record]) -> list[tuple[Value, ...]]:
        """The rows of a task, grouped by metric."""
        names = setting_names(self.settings)
        scores = [found[f"{row}/{task}"]["scores"] for row in range(len(names))]
        numbers = ("value", "stderr", "documents", "shots")
        return [
            (one["task"], one["metric"], name, *(one[key] for key in numbers))
            for metric in zip(*scores, strict=True)
            for name, one in zip(names, metric, strict=True)
        ]


def _refuse_without_effect(setting: Profile, piece: int | None) -> None:
    """Raise SettingError for a setting that would have no effect."""
    if setting.recall != "off":
        raise SettingError(
            f"recall is {setting.recall}, must be off: nothing comes back while a context is read",
            hint="--recall off",
        )
    if setting.decay != 1 and piece is None:
        raise SettingError(
            f"decay {short(setting.decay)} changes nothing where a context is one round",
            hint="--piece 64 reads it in rounds of 64 tokens",
        )
