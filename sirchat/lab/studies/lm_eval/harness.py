"""Runs tasks with lm-eval: looks up tasks, runs one, and returns its scores as plain data."""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from sirchat.errors import SettingError, SirchatError, UsageError, format_value, nearest
from sirchat.lab.studies.results_log import Record

_BOOTSTRAPS = 1000
"""Bootstrap samples for the standard error of a metric that is not a mean."""

_SEED, _OTHER_SEED = 0, 1234
"""Lm-eval's defaults, so that the few-shot examples are the usual ones."""


@dataclass(frozen=True)
class Harness:
    """How tasks are run.

    Attributes:
        shots: number of examples before each question; None for the task's own number.
        limit: number of documents of each task; None for all.
        folder: a folder with further task files.
        chat: whether contexts are rendered by the chat template, with examples as turns.
    """

    shots: int | None = None
    limit: int | None = None
    folder: str | None = None
    chat: bool = False

    def check(self, tasks: tuple[str, ...]) -> None:
        """Raise UsageError without lm-eval, SettingError for an unknown folder or task."""
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
        """The scores of a language model on a task, or on each task of a group.

        Raises SirchatError for a task that can't be loaded, UsageError for one that runs code.
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
                hint="its data set must be at hand, or the network",
            ) from error
        for task in loaded["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False):
                raise UsageError(f"task {name} runs code that a model wrote; that's not done here")
            own = task.get_config("num_fewshot")
            if own != 0:  # a task with 0 in its file has no examples to draw
                shots = own or 0 if self.shots is None else self.shots
                task.set_config(key="num_fewshot", value=shots)
            task.set_fewshot_seed(seed=_OTHER_SEED)
        return loaded


@contextmanager
def _silenced() -> Iterator[None]:
    """Suppress lm-eval's output and progress bars, and keep it from starting processes."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        yield


def harness_version() -> str:
    """The version of lm-eval."""
    return version("lm-eval")


@cache
def _index(folder: str | None) -> Any:
    """The index of lm-eval's tasks and those of `folder`; building it takes seconds."""
    # It would warn about settings that were made on purpose.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder)


def _scores(results: Record) -> Iterator[Record]:
    """A record for each task and metric; `stderr` is None if lm-eval gives none."""
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
    """The value as a finite number, or None."""
    number = float(value) if isinstance(value, float | int | np.number) else math.nan
    return number if math.isfinite(number) else None
