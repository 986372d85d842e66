"""Does the units of a study on a Ray cluster: several workers, each with a model of its own.

A worker that is lost is started anew, and what it was at is done again.
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
from sirchat.models.model import LoadedModel
from sirchat.tasks.results_log import Record
from sirchat.tasks.study import Study

Load = Callable[[], LoadedModel]

LOCAL = "local"
"""The address of a cluster that is started here and ends with the study."""

_ADDRESSES = f"{LOCAL} starts one here, auto finds one"


@dataclass(frozen=True)
class Cluster:
    """Where a study runs.

    Attributes:
        address: as Ray knows it, or LOCAL.
        workers: how many, each on a CPU of its own.
        gpus: for each worker; a part of one is allowed.
    """

    address: str
    workers: int
    gpus: float = 0.0


def run_on_ray(
    study: Study, keys: Sequence[str], load: Load, cluster: Cluster
) -> Iterator[tuple[str, Record]]:
    """What units found, as they end; each worker calls `load` once.

    Raises UsageError where Ray is not installed or the cluster can't be reached.
    """
    with _connected(cluster) as ray:
        lasting = {"max_restarts": -1, "max_task_retries": -1}
        worker = ray.remote(num_cpus=1, num_gpus=cluster.gpus, **lasting)(_Worker)
        idle = [worker.remote(study, load) for _ in range(min(cluster.workers, len(keys)))]
        left, under_way = list(reversed(keys)), dict[Any, tuple[str, Any]]()
        while left or under_way:
            while left and idle:
                key, one = left.pop(), idle.pop()
                under_way[one.do.remote(key)] = key, one
            ended = ray.wait(list(under_way))[0][0]
            key, one = under_way.pop(ended)
            idle.append(one)
            yield key, _found(ray, ended)


class _Worker:
    """Lives on the cluster."""

    def __init__(self, study: Study, load: Load) -> None:
        self._work = study.worker(load())

    def do(self, key: str) -> Record:
        return self._work(key)


@contextmanager
def _connected(cluster: Cluster) -> Iterator[Any]:
    """Ray, connected to the cluster; one that is started here ends with this block."""
    try:
        import ray
    except ImportError:
        raise UsageError(
            "Ray is not installed", hint="pip install 'sirchat[ray]', or go on without --ray"
        ) from None
    _refuse_unreachable(cluster.address)
    own: dict[str, Any] = {"num_cpus": cluster.workers, "include_dashboard": False}
    try:
        ray.init(
            address=cluster.address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            **(own if cluster.address == LOCAL else {}),
        )
    except (ConnectionError, ValueError, OSError) as error:
        raise UsageError(
            f"there is no Ray cluster at {cluster.address!r}: {error}", hint=_ADDRESSES
        ) from None
    try:
        with redirect_stdout(sys.stderr):  # Ray tells of lost workers on stdout
            yield ray
    finally:
        ray.shutdown()


def _refuse_unreachable(address: str) -> None:
    """Knock at `HOST:PORT` or `ray://HOST:PORT` first: Ray would try again for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise UsageError(
            f"there is no Ray cluster at {address!r}: {error.strerror or error}", hint=_ADDRESSES
        ) from None


def _found(ray: Any, ended: Any) -> Record:
    """A unit's result, or the error that it raised where it ran."""
    try:
        found: Record = ray.get(ended)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SirchatError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:  # it could not even start
        raise SirchatError(f"a worker can't start: {str(error).splitlines()[-1]}") from None
    return found
