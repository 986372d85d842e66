"""Runs the units (independent runs) of a study in several processes, each with its own model.

On this machine the processes talk to the main process through pipes, so nothing listens on the
network.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sirchat.errors import SirchatError, UsageError
from sirchat.lab.studies.report import Record
from sirchat.lab.studies.study import RunUnit, Study
from sirchat.models.model import LoadedModel

# The study fails if processes die this many times and no unit is finished in between
_MOST_DEATHS = 3


def run_in_processes(
    study: Study, keys: Sequence[str], load: Callable[[], LoadedModel], workers: int
) -> Iterator[tuple[str, Record]]:
    """Run a study's units (independent runs) in `workers` processes, each with its own model.

    Raises the error that a unit raised, and SirchatError if processes keep dying.
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
            for key in list(left)[:workers]:  # these units were running; one may be the cause
                left[key] = left.pop(key)
            if deaths == _MOST_DEATHS:
                raise SirchatError(
                    f"the processes of the study died {deaths} times",
                    hint="use fewer --workers, which need less memory",
                ) from None


def _run_until_one_dies(
    shared: bytes, keys: list[str], workers: int
) -> Iterator[tuple[str, Record]]:
    """Run a study's units (independent runs) in new processes; yield (key, record) of each."""
    # A fork of this process would copy locks that torch's threads hold. The fork server has no
    # threads, and imports torch once for all processes.
    server = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
    server.set_forkserver_preload([__name__])
    usual = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # no module of the current folder is imported at their start
    pool = ProcessPoolExecutor(min(workers, len(keys)), server, initializer=_begin)
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


Load = Callable[[], LoadedModel]  # a function that loads the model in the worker's process

_ADDRESSES = (
    "--ray auto looks for a cluster, --ray local uses processes of this machine without Ray"
)


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that a study runs on."""

    address: str  # the cluster's address as Ray takes it, or `auto`, with which Ray finds a cluster
    workers: int  # number of workers, each with one CPU
    gpus: float = 0.0  # number of GPUs for each worker; it may be a fraction


def run_on_ray(
    study: Study, keys: Sequence[str], load: Load, cluster: Cluster
) -> Iterator[tuple[str, Record]]:
    """Run a study's units (independent runs) on Ray workers, each with its own model.

    Raises UsageError if Ray is not installed or the cluster can't be reached.
    """
    with _connected(cluster) as ray:
        retries = {"max_restarts": -1, "max_task_retries": -1}
        worker = ray.remote(num_cpus=1, num_gpus=cluster.gpus, **retries)(_Worker)
        idle = [worker.remote(study, load) for _ in range(min(cluster.workers, len(keys)))]
        waiting, running = list(reversed(keys)), dict[Any, tuple[str, Any]]()
        while waiting or running:
            while waiting and idle:
                key, one = waiting.pop(), idle.pop()
                running[one.run.remote(key)] = key, one
            finished = ray.wait(list(running))[0][0]
            key, one = running.pop(finished)
            idle.append(one)
            yield key, _result(ray, finished)


class _Worker:
    """A Ray actor (a process on the cluster) that runs a study's units with its own model."""

    def __init__(self, study: Study, load: Load) -> None:
        self._run_unit = study.worker(load())

    def run(self, key: str) -> Record:
        return self._run_unit(key)


@contextmanager
def _connected(cluster: Cluster) -> Iterator[Any]:
    """Context manager: gives the module `ray`, connected to the cluster within the `with` block."""
    try:
        import ray
    except ImportError:
        raise UsageError(
            "Ray is not installed", hint="pip install 'sirchat[ray]', or leave out --ray"
        ) from None
    _refuse_unreachable(cluster.address)
    try:
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, OSError) as error:
        raise UsageError(
            f"there is no Ray cluster at {cluster.address!r}: {error}", hint=_ADDRESSES
        ) from None
    try:
        with redirect_stdout(sys.stderr):  # Ray reports dead workers on stdout
            yield ray
    finally:
        ray.shutdown()


def _refuse_unreachable(address: str) -> None:
    """Raise UsageError if the address `[ray://]HOST:PORT` can't be reached."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise UsageError(
            f"there is no Ray cluster at {address!r}: {error.strerror or error}", hint=_ADDRESSES
        ) from None


def _result(ray: Any, finished: Any) -> Record:
    """The record of a finished unit; raises the error that the unit raised on its worker."""
    try:
        found: Record = ray.get(finished)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SirchatError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:  # the worker failed while it loaded the model
        raise SirchatError(
            f"a worker can't load the model: {str(error).splitlines()[-1]}"
        ) from None
    return found
