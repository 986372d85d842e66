"""Times the start of sirchat and llama.cpp in fresh processes, until prompt and first token."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sirchat.errors import ModelError
from sirchat.lab.bench.peers import LlamaCpp
from sirchat.lab.bench.ratio import SHAPES
from sirchat.lab.bench.start_worker import StartFigures

SHORT, LONG = 32, 1_000
"""Number of tokens in the first message, and in a long pasted text."""


@dataclass(frozen=True)
class StartMeasure:
    """One measurement of a start.

    Attributes:
        name: what was measured.
        unit: seconds, milliseconds or MiB.
        ours: median of sirchat's values.
        other: median of llama.cpp's values, or None.
        ratio: median of the ratios of ours to other, or None.
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
    "peak": ("most memory until then", "MiB", 2.0**20),
}
_AT_THE_PROMPT: dict[str, tuple[str, str, float]] = {
    "prompt": ("from the start of the process to the prompt", "s", 1.0),
    "ready": ("from the start of the process to the end of loading", "s", 1.0),
    "reply": ("from the start of the process to the first text of a reply", "s", 1.0),
    "echo": ("echo of a key while loading, median", "ms", 0.001),
    "echo_most": ("echo of a key while loading, longest", "ms", 0.001),
}


def bench_start(
    model: str, device: str, dtype: str, quantize: str, rounds: int, peer: LlamaCpp | None
) -> list[StartMeasure]:
    """Time the start of sirchat, and of llama.cpp if there is a `peer`, `rounds` times in turn.

    A first start of each, which fills the disk's cache, does not count. A chat is started, too, if
    the system has pseudo-terminals and the model a tokenizer. Raises ModelError, with a message of
    one line, if the model can't be started.
    """
    ours, other = list[StartFigures](), list[StartFigures]()
    for _ in range(rounds + 1):
        ours.append(_ours((model, device, dtype, quantize)))
        if peer is not None:
            other.append(_other(peer))
    measured = [_measure(key, of, ours[1:], other[1:]) for key, of in _NAMES.items()]
    if model in SHAPES or sys.platform == "win32":
        return measured
    from sirchat.lab.bench.start_prompt import time_prompt  # on a terminal

    flags = [f"--model={model}", f"--device={device}", f"--dtype={dtype}", f"--quantize={quantize}"]
    chats = [time_prompt(flags) for _ in range(rounds)]
    return measured + [_measure(key, of, chats, []) for key, of in _AT_THE_PROMPT.items()]


def _ours(arguments: Sequence[str]) -> StartFigures:
    # -P: no module of the current folder is imported, unless this process has it on its path.
    worker = [sys.executable, "-P", "-m", "sirchat.lab.bench.start_worker"]
    command = [*worker, *arguments, str(SHORT), str(LONG), str(time.time())]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ModelError(
            lines[-1] if lines else f"the process ended with exit code {done.returncode}"
        )
    figures: StartFigures = json.loads(done.stdout)
    return figures


def _other(peer: LlamaCpp) -> StartFigures:
    begun = time.perf_counter()
    with peer.again() as fresh:
        fresh.ask("read", list(range(10, 10 + SHORT)))
        first = time.perf_counter() - begun
        resident, peak = int(fresh.ask("resident")), int(fresh.ask("peak"))
        paste = fresh.ask("read", list(range(10, 10 + LONG)))
        return StartFigures(load=fresh.load, first=first, paste=paste, resident=resident, peak=peak)


def _measure(
    key: str,
    described: tuple[str, str, float],
    ours: Sequence[Mapping[str, object]],
    other: Sequence[Mapping[str, object]],
) -> StartMeasure:
    name, unit, size = described
    mine, theirs = ([float(str(one[key])) / size for one in side] for side in (ours, other))
    ratios = [a / b for a, b in zip(mine, theirs, strict=False) if b]
    return StartMeasure(
        name=name,
        unit=unit,
        ours=statistics.median(mine),
        other=statistics.median(theirs) if theirs else None,
        ratio=statistics.median(ratios) if ratios else None,
    )
