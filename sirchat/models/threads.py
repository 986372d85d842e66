"""Sets the number of CPU threads of the process.

If other programs use the CPU, one thread for each core is several times slower than one thread
alone: every step waits for the thread that was interrupted. So the number of threads is the number
of physical cores that this process may use, minus those that are busy. The user's choice always
wins.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")

_SYS = Path("/sys")


def in_ending_thread(work: Callable[[], Result]) -> Result:
    """Call `work` in a thread of its own, which then ends; returns its result or raises its error.

    Use this function to load a model in one thread if another thread will generate. OpenMP gives
    each thread that computes its own worker threads, until the computing thread ends. If there are
    more worker threads than cores, GNU's OpenMP lets threads that wait for each other sleep at
    once, and a token takes up to four times as long.
    """
    found: Future[Result] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found.result()


def use_threads(wanted: int, environment: Mapping[str, str] = os.environ) -> None:
    """Set torch's number of CPU threads to `wanted`, if `wanted` is above 0.

    If `wanted` is 0, the environment variable SIRCHAT_THREADS or OMP_NUM_THREADS gives the number;
    if neither is set, torch gets one thread for each free core.
    """
    told = environment.get("SIRCHAT_THREADS", "").strip()
    if wanted == 0 and told.isdecimal():
        wanted = int(told)
    if wanted == 0 and not environment.get("OMP_NUM_THREADS"):
        wanted = free_threads()
    if wanted:
        torch.set_num_threads(wanted)


def free_threads() -> int:
    """The number of CPU threads for which physical cores are free on this machine; at least 1."""
    everywhere, load = range(os.cpu_count() or 1), 0.0
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(everywhere)
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
    return threads_for(
        physical_cores(set(everywhere) | allowed), physical_cores(allowed), cpu_quota(), load
    )


def threads_for(cores: int, allowed: int, quota: float | None, load: float) -> int:
    """Compute for how many CPU threads physical cores are free; at least one.

    Args:
        cores: physical cores of the machine.
        allowed: physical cores that this process may use.
        quota: CPU time that the process may take, in cores; None for no limit.
        load: load average of the last minute, in busy cores.
    """
    most = allowed if quota is None else min(allowed, int(quota))
    return max(1, min(most, cores - round(load)))


def physical_cores(cpus: set[int], sys: Path = _SYS) -> int:
    """Count the physical cores of the logical CPUs `cpus`; two logical CPUs may share a core."""
    siblings = set[str]()
    for cpu in cpus:
        path = sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            siblings.add(path.read_text("ascii").strip())
        except OSError:  # not Linux, or not stated: count each CPU as a core
            siblings.add(f"{cpu}")
    return len(siblings)


def cpu_quota(sys: Path = _SYS) -> float | None:
    """CPU time, in cores, that a Linux control group (version 2 or 1) allows; None for no limit."""
    try:
        quota, period = (sys / "fs/cgroup/cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:
            folder = sys / "fs/cgroup/cpu"
            quota = (folder / "cpu.cfs_quota_us").read_text("ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text("ascii").strip()
        except OSError:
            return None
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None  # "max", or -1
    return int(quota) / int(period)


def threads_in_words(device: torch.device) -> str:
    """torch's number of CPU threads as text, such as `2 threads`; empty if `device` is no CPU."""
    if device.type != "cpu":
        return ""
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"
