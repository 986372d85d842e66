"""Lm-eval as it is used here: its index of tasks, one of them run, and its scores as plain data."""

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
from sirchat.tasks.results_log import Record

_BOOTSTRAPS = 1000
"""Draws for the standard error of a metric that is no mean."""

_SEED, _OTHER_SEED = 0, 1234
"""Lm-eval's own, so that it draws the same few-shot examples as for others."""


@dataclass(frozen=True)
class Harness:
    """How tasks are run.

    Attributes:
        shots: examples before each question; None as each task says.
        limit: documents of each task; None for all.
        folder: where more task files are.
        chat: whether contexts go through the chat template, examples as turns.
    """

    shots: int | None = None
    limit: int | None = None
    folder: str | None = None
    chat: bool = False

    def check(self, tasks: tuple[str, ...]) -> None:
        """Raise UsageError without lm-eval, SettingError for a folder or a task it has not."""
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
        """The scores of a language model at a task, or at each of a group.

        Raises SirchatError for a task that can't be loaded, UsageError for one that isn't run here.
        """
        from lm_eval.evaluator import evaluate

        loaded = self._loaded(task)
        random.seed(_SEED)
        np.random.seed(_OTHER_SEED)
        with _alone():
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
        except Exception as error:  # whatever its data set, its file or its code raises
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise SirchatError(
                f"task {name} can't be loaded: {reason}",
                hint="its data set must be at hand, or the network",
            ) from error
        for task in loaded["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False):
                raise UsageError(f"task {name} runs code that a model wrote; that's not done here")
            own = task.get_config("num_fewshot")
            if own != 0:  # where a task's file says 0, there is nothing to draw examples from
                shots = own or 0 if self.shots is None else self.shots
                task.set_config(key="num_fewshot", value=shots)
            task.set_fewshot_seed(seed=_OTHER_SEED)
        return loaded


@contextmanager
def _alone() -> Iterator[None]:
    """Lm-eval prints among our results, draws bars over ours, and would start processes."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def harness_version() -> str:
    """Which lm-eval it is."""
    return version("lm-eval")


@cache
def _index(folder: str | None) -> Any:
    """Lm-eval's tasks and those of `folder`; it takes seconds."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what was asked for
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder)


def _scores(results: Record) -> Iterator[Record]:
    """A record for each task and metric; `stderr` is None where lm-eval gives none."""
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
    """A number as JSON knows it, else None."""
    number = float(value) if isinstance(value, float | int | np.number) else math.nan
    return number if math.isfinite(number) else None
