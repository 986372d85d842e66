"""Runs tasks of lm-eval under several settings, with the same documents, examples and metrics.

A unit of the study is one task under one setting.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sirchat.chat.settings import check_budget
from sirchat.config.profile import Profile
from sirchat.config.values import short_number
from sirchat.errors import SettingError, SirchatError, UsageError, format_value, nearest
from sirchat.lab.studies.lm_eval.adapter import TextEncoder, TextReader, language_model
from sirchat.lab.studies.report import Record, Report, Table, Value, setting_names
from sirchat.lab.studies.study import RunUnit, Study, setting_key, without
from sirchat.models.model import LoadedModel


@dataclass(frozen=True)
class LmEval(Study):
    """The study that runs tasks of lm-eval under several settings.

    Raises UsageError if lm-eval is not installed, and SettingError for an unknown task and for a
    setting that has no effect in this study.
    """

    needs_hub: ClassVar[bool] = True

    settings: tuple[Profile, ...]  # profiles; each metric of a task has a row for each profile
    tasks: tuple[str, ...]  # names of tasks, groups or tags
    harness: Harness  # how the tasks are run
    piece: int | None = None  # number of tokens in a round; if None, a context is read as one round

    def __post_init__(self) -> None:
        for setting in self.settings:
            _refuse_without_effect(setting, self.piece)
        self.harness.check(self.tasks)

    name = "lm-eval"

    def parameters(self) -> Record:
        return {
            "settings": [one.model_dump(mode="json") for one in self.settings],
            "tasks": list(self.tasks),
            **asdict(self.harness),
            "piece": self.piece,
            "lm_eval": harness_version(),
        }

    def shared(self) -> Record:
        """The parameters that must be equal in all runs that write to the same results log.

        They are all parameters except `settings` and `tasks`.
        """
        return without(self.parameters(), ("settings", "tasks"))

    def log_key(self, key: str) -> str:
        """The name that the run with this key (one task under one setting) has in the results log.

        It is `SETTING HASH/TASK`, where SETTING and HASH are the setting's name and hash.
        """
        row, _, task = key.partition("/")
        return f"{setting_key(self.settings[int(row)])}/{task}"

    def keys(self) -> list[str]:
        """The key `ROW/TASK` of each task under each setting; ROW is the setting's index."""
        return [f"{row}/{task}" for row in range(len(self.settings)) for task in self.tasks]

    def worker(self, model: LoadedModel) -> RunUnit:
        """Create a function that runs, with `model`, the key's task under the key's setting.

        Raises SettingError for a budget above the model's context length.
        """
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
        """A report with one table: each metric of each task under every setting."""
        columns = ("task", "metric", "setting", "value", "stderr", "documents", "shots")
        rows = [row for task in self.tasks for row in self._rows(task, found)]
        truncated = sum(one["cut"] for one in found.values())
        header = (
            f"lm-eval {harness_version()}",
            f"at most {self.harness.limit:,} documents" if self.harness.limit else "",
            "chat template" if self.harness.chat else "",
            f"rounds of {self.piece} tokens" if self.piece else "",
            f"{truncated:,} texts were cut because they are longer than the model's context"
            if truncated
            else "",
        )
        details = self.parameters() | {"found": dict(found)}
        table = Table("lm-eval", columns, tuple(rows))
        return Report(tuple(one for one in header if one), (table,), details=details)

    def _rows(self, task: str, found: Mapping[str, Record]) -> list[tuple[Value, ...]]:
        """The table rows of a task: for each of its metrics, a row for each setting."""
        names = setting_names(self.settings)
        scores = [found[f"{row}/{task}"]["scores"] for row in range(len(names))]
        numbers = ("value", "stderr", "documents", "shots")
        return [
            (one["task"], one["metric"], name, *(one[key] for key in numbers))
            for metric in zip(*scores, strict=True)
            for name, one in zip(names, metric, strict=True)
        ]


def lm_eval_study(
    settings: tuple[Profile, ...],
    tasks: tuple[str, ...],
    num_fewshot: int | None,
    limit: int | None,
    include_path: Path | None,
    apply_chat_template: bool,
    piece: int | None,
) -> LmEval:
    """The study that the flags of `sirchat eval lm-eval` describe."""
    folder = None if include_path is None else str(include_path)
    harness = Harness(shots=num_fewshot, limit=limit, folder=folder, chat=apply_chat_template)
    return LmEval(settings, tasks=tasks, harness=harness, piece=piece)


def _refuse_without_effect(setting: Profile, piece: int | None) -> None:
    """Raise SettingError for a setting that has no effect in this study."""
    if setting.recall != "off":
        raise SettingError(
            f"recall is {setting.recall}, must be off: nothing is restored while a context is read",
            hint="--recall off",
        )
    if setting.decay != 1 and piece is None:
        raise SettingError(
            f"decay {short_number(setting.decay)} has no effect "
            "when a context is read as one round",
            hint="--piece 64 reads it in rounds of 64 tokens",
        )


# Number of bootstrap samples for the standard error of a metric that is not a mean
_BOOTSTRAPS = 1000

# lm-eval's own default seeds; with them, the few-shot examples are the same as in lm-eval
_SEED, _OTHER_SEED = 0, 1234


@dataclass(frozen=True)
class Harness:
    """The options with which lm-eval runs its tasks."""

    # number of examples before each question; None for the task's own number
    shots: int | None = None
    limit: int | None = None  # number of documents of each task; None for all
    folder: str | None = None  # a folder with task files besides lm-eval's own; None for no folder
    # whether contexts are rendered by the chat template, with few-shot examples as turns
    chat: bool = False

    def check(self, tasks: tuple[str, ...]) -> None:
        """Raise UsageError without lm-eval, SettingError if the folder or a task does not exist."""
        if find_spec("lm_eval") is None:
            raise UsageError("lm-eval is not installed", hint="pip install 'sirchat[lm-eval]'")
        if self.folder is not None and not Path(self.folder).is_dir():
            raise SettingError(f"include path {format_value(self.folder)} is not a folder")
        known = frozenset(_index(self.folder).all_tasks)
        for name in tasks:
            if name not in known:
                near = nearest(name, known) or "`lm-eval ls tasks` lists them"
                raise SettingError(f"lm-eval has no task {format_value(name)}", hint=near)

    def run(self, lm: Any, task: str, system: str | None) -> list[Record]:
        """Run a task, or each task of a group; returns a record for each metric of each task.

        Raises SirchatError for a task that can't be loaded, and UsageError for a task that runs
        code written by a model.
        """
        from lm_eval.evaluator import evaluate

        loaded = self._loaded(task)
        random.seed(_SEED)
        np.random.seed(_OTHER_SEED)
        with _silenced():
            results = evaluate(
                lm=lm,
                task_dict=loaded,
                limit=self.limit,
                bootstrap_iters=_BOOTSTRAPS,
                log_samples=False,
                system_instruction=system,
                apply_chat_template=self.chat,
                fewshot_as_multiturn=self.chat,
            )
        return list(_scores(results))

    def _loaded(self, name: str) -> Record:
        try:
            loaded: Record = _index(self.folder).load([name])
        except Exception as error:  # anything that its data set, file or code raises
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise SirchatError(
                f"task {name} can't be loaded: {reason}",
                hint="the task's data set must be on this machine or on a reachable network",
            ) from error
        for task in loaded["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False):
                raise UsageError(
                    f"task {name} runs code that a model wrote, which sirchat does not do"
                )
            own = task.get_config("num_fewshot")
            if own != 0:  # a task whose file says 0 has no examples to draw
                shots = own or 0 if self.shots is None else self.shots
                task.set_config(key="num_fewshot", value=shots)
            task.set_fewshot_seed(seed=_OTHER_SEED)
        return loaded


@contextmanager
def _silenced() -> Iterator[None]:
    """Context manager: hide lm-eval's output, and keep lm-eval from starting processes."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        yield


def harness_version() -> str:
    """The version of the installed lm-eval."""
    return version("lm-eval")


@cache
def _index(folder: str | None) -> Any:
    """The index of all tasks: lm-eval's own tasks and those in `folder`."""
    # Without this, lm-eval warns about settings that are made here on purpose.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder)


def _scores(results: Record) -> Iterator[Record]:
    """Yield a record for each metric of each task in lm-eval's results."""
    for task, found in results["results"].items():
        for key, value in found.items():
            metric, _, rest = key.partition(",")
            if not rest or metric.endswith("_stderr"):
                continue
            yield {
                "task": task,
                "metric": metric if rest == "none" else key,
                "value": _number(value),
                "stderr": _number(found.get(f"{metric}_stderr,{rest}")),
                "documents": found.get("sample_len"),
                "shots": results["n-shot"].get(task),
                "version": results["versions"].get(task),
            }


def _number(value: object) -> float | None:
    """The value as a float; None if it is not a finite number."""
    number = float(value) if isinstance(value, float | int | np.number) else math.nan
    return number if math.isfinite(number) else None
