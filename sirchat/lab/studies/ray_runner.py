"""Runs the units of a study on a Ray cluster: several workers, each with its own model.

A worker that dies is restarted, and its current unit is run again.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from sirchat.errors import SirchatError, UsageError
from sirchat.lab.studies.results_log import Record
from sirchat.lab.studies.study import Study
from sirchat.models.model import LoadedModel

Load = Callable[[], LoadedModel]
"""Loads the model, on a worker."""

_ADDRESSES = "auto finds one, local uses processes of this machine without Ray"


@dataclass(frozen=True)
class Cluster:
    """The cluster that a study runs on.

    Attributes:
        address: Ray's address of it, or `auto`.
        workers: number of workers, each with one CPU.
        gpus: number of GPUs for each worker, which may be a fraction.
    """

    address: str
    workers: int
    gpus: float = 0.0


def run_on_ray(
    study: Study, keys: Sequence[str], load: Load, cluster: Cluster
) -> Iterator[tuple[str, Record]]:
    """Run units; yields (key, record) as they finish. Each worker calls `load` once.

    Raises UsageError where Ray is not installed or the cluster can't be reached.
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
    """An actor on the cluster, with its own model."""

    def __init__(self, study: Study, load: Load) -> None:
        self._run_unit = study.worker(load())

    def run(self, key: str) -> Record:
        return self._run_unit(key)


@contextmanager
def _connected(cluster: Cluster) -> Iterator[Any]:
    """Ray, connected to the cluster within this block."""
    try:
        import ray
    except ImportError:
        raise UsageError(
            "Ray is not installed", hint="pip install 'sirchat[ray]', or go on without --ray"
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
    """Try to connect to `[ray://]HOST:PORT` first, since Ray itself would try for minutes."""
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
    """The record of a finished unit; raises the error that it raised on its worker."""
    try:
        found: Record = ray.get(finished)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SirchatError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:  # it failed while it loaded the model
        raise SirchatError(f"a worker can't start: {str(error).splitlines()[-1]}") from None
    return found
