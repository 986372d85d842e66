"""Runs the units of a study in several processes of this machine, each with its own model.

They talk to this process through pipes, so nothing listens on the network. If one dies, all are
started again, and the units that were running are run again, after the others.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache

import torch

from sirchat.errors import SirchatError
from sirchat.lab.studies.results_log import Record
from sirchat.lab.studies.study import RunUnit, Study
from sirchat.models.model import LoadedModel

_MOST_DEATHS = 3
"""How often in a row processes may die before any unit is finished."""


def run_in_processes(
    study: Study, keys: Sequence[str], load: Callable[[], LoadedModel], workers: int
) -> Iterator[tuple[str, Record]]:
    """Run units; yields (key, record) as they finish. Each process calls `load` once.

    Raises the error that a unit raised, and SirchatError where processes keep dying.
    """
    shared = pickle.dumps((study, load))
    left, deaths = dict.fromkeys(keys), 0
    while left:
        try:
            for key, record in _run_until_one_dies(shared, list(left), workers):
                del left[key]
                deaths = 0
                yield key, record
        except BrokenProcessPool:
            deaths += 1
            for key in list(left)[:workers]:  # those that were running, among them the deadly one
                left[key] = left.pop(key)
            if deaths == _MOST_DEATHS:
                raise SirchatError(
                    f"the processes of the study died {deaths} times",
                    hint="fewer --workers need less memory",
                ) from None


def _run_until_one_dies(
    shared: bytes, keys: list[str], workers: int
) -> Iterator[tuple[str, Record]]:
    """Run units in new processes; raises BrokenProcessPool, after what is done, if one dies."""
    spawn = multiprocessing.get_context("spawn")  # a fork would share locks of torch's threads
    usual = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # no module of the current folder is imported at their start
    pool = ProcessPoolExecutor(min(workers, len(keys)), spawn, initializer=_begin)
    try:
        running: dict[Future[Record], str] = {
            pool.submit(_run_unit, shared, key): key for key in keys
        }
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda one: one.exception() is not None):
                yield running.pop(future), future.result()
    finally:
        if usual is None:
            del os.environ["PYTHONSAFEPATH"]
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


def _begin() -> None:
    """In a new process: Ctrl-C is for the parent, and the process ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_unit(shared: bytes, key: str) -> Record:
    return _prepared(shared)(key)


@cache
def _prepared(shared: bytes) -> RunUnit:
    """The study with the model of this process, which computes with one thread."""
    study, load = pickle.loads(shared)
    model = load()
    torch.set_num_threads(1)
    run_unit: RunUnit = study.worker(model)
    return run_unit
