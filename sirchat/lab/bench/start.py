"""Measures the start of sirchat, and of llama.cpp, in new processes.

It measures the time until the model is loaded, until the first token, and until the prompt of a
chat appears, and the memory of the process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.lab.bench.peers import LlamaCpp
from sirchat.lab.bench.ratio import SHAPES
from sirchat.lab.bench.start_worker import StartFigures, fresh_home

# Number of tokens in the short message that is read first, and in the reply to the long text
SHORT, REPLY = 32, 64


@dataclass(frozen=True)
class StartMeasure:
    """A time or an amount of memory that was measured at several starts of a model.

    Each start of sirchat is paired with a start of llama.cpp, and each pair has a ratio: sirchat's
    value divided by llama.cpp's value.
    """

    name: str  # what was measured
    unit: str  # the unit of the values: s, ms or MiB
    ours: float  # median of sirchat's values
    other: float | None  # median of llama.cpp's values; None if llama.cpp was not measured
    ratio: float | None  # median of the pairs' ratios; None if llama.cpp was not measured
    # lower and upper quartile of the ratios; None if there are fewer than two
    low: float | None = None
    high: float | None = None


_FIRST = f"from the start of the process to the first token after {SHORT}"
_WITH_NOTHING: dict[str, tuple[str, str, float]] = {
    "load": ("loading the model the first time", "s", 1.0),
    "first": (f"the first time, {_FIRST}", "s", 1.0),
}


def _names(longs: Sequence[int]) -> dict[str, tuple[str, str, float]]:
    return {
        "load": ("loading the model", "s", 1.0),
        "first": (_FIRST, "s", 1.0),
        "resident": ("memory after the first token", "MiB", 2.0**20),
        "peak": ("most memory until the first token", "MiB", 2.0**20),
        **{f"paste {n}": (f"first token after {n:,} in an empty cache", "s", 1.0) for n in longs},
        "decode": (f"each of the next {REPLY} tokens", "ms", 0.001),
        "most": ("most memory until the end", "MiB", 2.0**20),
    }


_AT_THE_PROMPT: dict[str, tuple[str, str, float]] = {
    "prompt": ("from the start of the process to the prompt", "s", 1.0),
    "ready": ("from the start of the process to the end of loading", "s", 1.0),
    "reply": ("from the start of the process to the first text of a reply", "s", 1.0),
    "echo": ("echo of a key while loading, median", "ms", 0.001),
    "echo_most": ("echo of a key while loading, longest", "ms", 0.001),
}


def bench_start(
    profile: Profile, rounds: int, peer: LlamaCpp | None, longs: Sequence[int], *, with_chat: bool
) -> list[StartMeasure]:
    """Measure `rounds` starts of sirchat with a profile's model, each in a new process.

    Each reads texts of `longs` tokens. As many first starts find nothing that others have kept,
    but for the library in C++. Raises ModelError, of one line, if the model can't be started.
    """
    ours, first, other = list[StartFigures](), list[StartFigures](), list[StartFigures]()
    model, how = profile.model, (profile.device, profile.dtype, profile.quantize)
    for _ in range(rounds + 1):
        ours.append(_ours((model, *how, profile.compile), longs))
        with fresh_home() as home:
            first.append(_ours((model, *how, profile.compile), (), SIRCHAT_HOME=home))
        if peer is not None:
            other.append(_other(peer, longs))
    measured = [
        *(_measure(key, of, first[1:], other[1:]) for key, of in _WITH_NOTHING.items()),
        *(_measure(key, of, ours[1:], other[1:]) for key, of in _names(longs).items()),
    ]
    if not with_chat or model in SHAPES or sys.platform == "win32":
        return measured
    from sirchat.lab.bench.start_prompt import time_prompt  # needs termios, which Windows lacks

    names = ("model", "device", "dtype", "quantize", "compile")
    flags = [f"--{name}={getattr(profile, name)}" for name in names]
    flags.append(f"--threads={torch.get_num_threads()}")
    chats = [time_prompt(flags) for _ in range(rounds)]
    return measured + [_measure(key, of, chats, []) for key, of in _AT_THE_PROMPT.items()]


def _ours(arguments: Sequence[str], longs: Sequence[int], **variables: str) -> StartFigures:
    # -P: no module is imported from the current folder, unless that folder is on sys.path here.
    worker = [sys.executable, "-P", "-m", "sirchat.lab.bench.start_worker"]
    numbers = [str(SHORT), ",".join(map(str, longs)), str(REPLY), str(time.time())]
    command = [*worker, *arguments, *numbers]
    variables |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environ = os.environ | variables | {"SIRCHAT_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ModelError(
            lines[-1] if lines else f"the process ended with exit code {done.returncode}"
        )
    figures: StartFigures = json.loads(done.stdout)
    return figures


def _other(peer: LlamaCpp, longs: Sequence[int]) -> StartFigures:
    begun = time.perf_counter()
    with closing(peer.restarted()) as fresh:
        fresh.ask("read", list(range(10, 10 + SHORT)))
        figures = {"load": fresh.load, "first": time.perf_counter() - begun}
        figures |= {name: fresh.ask(name) for name in ("resident", "peak")}
        for count in longs:
            figures[f"paste {count}"] = fresh.ask("read", list(range(10, 10 + count)))
            figures["decode"] = fresh.ask("decode", list(range(10, 10 + REPLY))) / REPLY
        return figures | {"most": fresh.ask("peak")}


def _measure(
    key: str,
    described: tuple[str, str, float],
    ours: Sequence[StartFigures],
    other: Sequence[StartFigures],
) -> StartMeasure:
    name, unit, size = described
    mine, theirs = ([one[key] / size for one in side] for side in (ours, other))
    ratios = [a / b for a, b in zip(mine, theirs, strict=False) if b]
    low, high = None, None
    if len(ratios) > 1:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    beside, ratio = (statistics.median(some) if some else None for some in (theirs, ratios))
    return StartMeasure(name, unit, statistics.median(mine), beside, ratio, low, high)
