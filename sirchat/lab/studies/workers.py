"""Runs the units (independent runs) of a study in several processes, each with its own model.

The processes talk to the main process through pipes, so nothing listens on the
network.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache

import torch

from sirchat.errors import SirchatError
from sirchat.lab.studies.report import Record
from sirchat.lab.studies.study import RunUnit, Study
from sirchat.models.model import LoadedModel


def run_in_processes(
    study: Study, keys: Sequence[str], load: Callable[[], LoadedModel], workers: int
) -> Iterator[tuple[str, Record]]:
    """Run a study's units (independent runs) in `workers` processes, each with its own model.

    Raises the error that a unit raised, and SirchatError if a process dies.
    """
    shared = pickle.dumps((study, load))
    # A fork of this process would copy locks that torch's threads hold. The fork server has no
    # threads, and imports torch once for all processes.
    server = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
    server.set_forkserver_preload([__name__])
    usual = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # no module of the current folder is imported at their start
    pool = ProcessPoolExecutor(min(workers, len(keys)), server, initializer=_begin)
    try:
        running = {pool.submit(_run_unit, shared, key): key for key in keys}
        died = False
        for future in as_completed(running):  # first all results that are there
            if isinstance(future.exception(), BrokenProcessPool):
                died = True
            else:
                yield running[future], future.result()
        if died:
            raise SirchatError(
                "a process of the study died",
                hint="use fewer --workers, which need less memory; --out goes on from there",
            )
    finally:
        if usual is None:
            del os.environ["PYTHONSAFEPATH"]
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


def _begin() -> None:
    """Set up a new worker process: it ignores Ctrl-C, and ends when its parent ends."""
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
    """Load this process's model once; returns the function that runs units."""
    study, load = pickle.loads(shared)
    model = load()
    torch.set_num_threads(1)
    run_unit: RunUnit = study.worker(model)
    return run_unit
