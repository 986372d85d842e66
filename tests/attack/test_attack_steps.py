"""Native steps in which something happens: Ctrl-C, a stop, a fork, fewer processors, no memory.

`SIRCHAT_ATTACK=60` disturbs as many of each kind. After each, the tokens that follow have the same
bits as without it.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import torch

from attacking import MANY, apart, attack
from families import build
from native_library import has_library, loaded_library, read_in_native_code
from sirchat.memory.cache import BoundedCache
from sirchat.models.gguf.blocks import NativePacking
from sirchat.models.gguf.header import BLOCKS, GgufTensor
from sirchat.models.model import LoadedModel, wrap_model

pytestmark = has_library

Disturbance = Callable[[Random, LoadedModel, BoundedCache], None]

IDS = list(range(3, 11))
_INNER = 40_000  # so many numbers take memory that the system gives and takes back
_SECONDS = 20.0


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    made = wrap_model("wide", build("llama", {"intermediate_size": _INNER}), None)
    read_in_native_code(made)
    return made


def read(model: LoadedModel, cache: BoundedCache, ids: list[int]) -> torch.Tensor:
    logits = model.forward(ids, cache)
    cache.commit(len(ids))
    return logits


def begun(model: LoadedModel) -> BoundedCache:
    cache = model.new_cache(64)
    for one in IDS:
        read(model, cache, [one])
    return cache


def rest(model: LoadedModel, cache: BoundedCache) -> torch.Tensor:
    return torch.cat([read(model, cache, ids) for ids in ([7], [8], IDS[:5], [9])])


def data_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (size,) = (int(line.split()[1]) for line in status.splitlines() if "VmData" in line)
    return 1024 * size


@contextmanager
def little_memory(free: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def lack_memory(random: Random, model: LoadedModel, cache: BoundedCache) -> None:
    ids = [*IDS, *IDS][: random.choice((2, 7, 16))]
    for _ in range(3):
        with little_memory(random.randrange(2**23)), suppress(MemoryError, RuntimeError):
            model.forward(ids, cache)


def press_ctrl_c(random: Random, model: LoadedModel, cache: BoundedCache) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    me = os.getpid()
    with suppress(KeyboardInterrupt):
        threading.Timer(random.random() / 20, os.kill, (me, signal.SIGINT)).start()
        while True:
            model.forward(random.choice(([5], IDS[:4])), cache)


def stop(random: Random, model: LoadedModel, cache: BoundedCache) -> None:
    """Let another process stop this one again and again."""
    me, times = os.getpid(), [random.random() / 50 for _ in range(8)]
    if (other := os.fork()) == 0:
        for seconds in times:
            time.sleep(seconds)
            os.kill(me, signal.SIGSTOP)
            time.sleep(seconds / 2)
            os.kill(me, signal.SIGCONT)
        os._exit(0)
    while os.waitpid(other, os.WNOHANG) == (0, 0):
        model.forward([5], cache)


def fork_midway(random: Random, model: LoadedModel, cache: BoundedCache) -> None:
    """Fork while another thread reads; parent and child then read the same."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.is_set():
            model.forward([5], cache)

    thread = threading.Thread(target=go_on)
    thread.start()
    for _ in range(3 if MANY else 1):
        time.sleep(random.random() / 50)
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            found, wanted = rest(model, begun(model)), WANTED[0]
            os._exit(0 if torch.equal(found, wanted) else 9)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            is_over.set()
            raise ValueError(f"the fork ends with {code}")
    is_over.set()
    thread.join()


def change_processors(random: Random, model: LoadedModel, cache: BoundedCache) -> None:
    all_of_them = os.sched_getaffinity(0)
    for _ in range(9 if MANY else 3):
        os.sched_setaffinity(0, {random.choice(sorted(all_of_them))})
        torch.set_num_threads(random.choice((1, 2, 5)))
        model.forward([5], cache)
        os.sched_setaffinity(0, all_of_them)


DISTURBANCES: list[Disturbance] = [
    lack_memory, press_ctrl_c, stop, fork_midway, change_processors,
]  # fmt: skip
WANTED = list[torch.Tensor]()


@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_a_disturbed_step_gives_the_same_bits_when_it_is_done_again(
    disturb: Disturbance, model: LoadedModel
) -> None:
    WANTED[:] = [rest(model, begun(model))]

    def trial(random: Random) -> None:
        faulthandler.disable()
        torch.set_num_threads(random.choice((1, 2, 3)))
        cache = begun(model)
        disturb(random, model, cache)
        if not torch.equal(rest(model, cache), WANTED[0]):
            raise ValueError("other bits")

    attack(apart(trial, _SECONDS), few=1, seconds=2 * _SECONDS)


def test_weights_that_no_memory_is_free_to_pack_are_an_error_of_python() -> None:
    packing, shape = NativePacking(loaded_library()), (3, 2**23 + 256)  # a row takes new memory
    _, columns, size = BLOCKS["Q5_K"]
    content = np.random.default_rng(1).integers(0, 60, prod(shape) // columns * size, np.uint8)
    order, whole = torch.randperm(3), GgufTensor(shape, "Q5_K", content)
    wanted = packing.pack_eight_bits(whole, order)

    def trial(random: Random) -> None:
        faulthandler.disable()
        torch.set_num_threads(random.choice((1, 2, 5)))
        made = [torch.zeros(shape, dtype=torch.int8), torch.zeros(3, dtype=torch.bfloat16)]
        places = iter(made)
        limit, ours = random.choice((0, random.randrange(2**27))), lambda *_, **__: next(places)
        with patch.object(torch, "empty", ours), little_memory(limit), suppress(MemoryError):
            packing.pack_eight_bits(whole, order)
            if not torch.equal(made[0], wanted.q) or not torch.equal(made[1], wanted.scale):
                raise ValueError("other weights")

    attack(apart(trial, _SECONDS), few=4, seconds=2 * _SECONDS)
