"""From the start of a program to its first token, in fresh processes, against llama.cpp."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sirchat.bench.llama_cpp import LlamaCpp
from sirchat.bench.start_worker import StartFigures
from sirchat.errors import ModelError

SHORT, LONG = 32, 1_000
"""Tokens of the first message, and of a paste."""


@dataclass(frozen=True)
class StartMeasure:
    """One figure of a start.

    Attributes:
        name: what was measured.
        unit: seconds or MiB.
        ours, other: medians; `other` is llama.cpp's, or None.
        ratio: median of the pairs' ratios, or None.
    """

    name: str
    unit: str
    ours: float
    other: float | None
    ratio: float | None


_NAMES: dict[str, tuple[str, str, float]] = {
    "load": ("loading the model", "s", 1.0),
    "first": (f"from the start of the process to the first token after {SHORT}", "s", 1.0),
    "paste": (f"first token after {LONG:,} in an empty cache", "s", 1.0),
    "resident": ("memory after the first token", "MiB", 2.0**20),
}


def bench_start(
    model: str, device: str, dtype: str, quantize: str, rounds: int, peer: LlamaCpp | None
) -> list[StartMeasure]:
    """Start sirchat, and llama.cpp if there is a `peer`, in turn; `rounds` times after a first one.

    The first pair warms the disk's cache and does not count. Raises ModelError, in one line, when
    the model can't be started.
    """
    ours, other = list[StartFigures](), list[StartFigures]()
    for _ in range(rounds + 1):
        ours.append(_ours((model, device, dtype, quantize)))
        if peer is not None:
            other.append(_other(peer))
    return [_measure(key, ours[1:], other[1:]) for key in _NAMES]


def _ours(arguments: Sequence[str]) -> StartFigures:
    # -P: no module of the current folder is imported, unless this process has it on its path.
    worker = [sys.executable, "-P", "-m", "sirchat.bench.start_worker"]
    command = [*worker, *arguments, str(SHORT), str(LONG), str(time.time())]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ModelError(lines[-1] if lines else f"the process ended with {done.returncode}")
    figures: StartFigures = json.loads(done.stdout)
    return figures


def _other(peer: LlamaCpp) -> StartFigures:
    begun = time.perf_counter()
    with peer.again() as fresh:
        fresh.seconds("read", list(range(10, 10 + SHORT)))
        first = time.perf_counter() - begun
        resident = int(fresh.seconds("resident"))
        paste = fresh.seconds("read", list(range(10, 10 + LONG)))
        return StartFigures(load=fresh.load, first=first, paste=paste, resident=resident)


def _measure(key: str, ours: Sequence[StartFigures], other: Sequence[StartFigures]) -> StartMeasure:
    name, unit, size = _NAMES[key]
    mine = [float(one[key]) / size for one in ours]  # type: ignore[literal-required]
    theirs = [float(one[key]) / size for one in other]  # type: ignore[literal-required]
    ratios = [a / b for a, b in zip(mine, theirs, strict=False) if b]
    return StartMeasure(
        name=name,
        unit=unit,
        ours=statistics.median(mine),
        other=statistics.median(theirs) if theirs else None,
        ratio=statistics.median(ratios) if ratios else None,
    )
