"""Starts a model in a new process, and prints time and memory as JSON; `start.py` runs it."""

from __future__ import annotations

import json
import sys
import time
from typing import TypedDict


class StartFigures(TypedDict):
    """Times, in seconds, and memory, in bytes, of one start.

    Attributes:
        load: time to load the model.
        first: time from the start of the process to the first token after a short message.
        paste: time to the first token after a long text.
        resident: memory after the first token.
        peak: the most memory until then.
    """

    load: float
    first: float
    paste: float
    resident: int
    peak: int


def main() -> None:
    """Load the model named by the arguments, answer a short message, then read a long paste."""
    from sirchat.errors import SirchatError

    try:
        figures = _figures(*sys.argv[1:])
    except SirchatError as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(figures) + "\n")


def _figures(
    name: str, device: str, dtype: str, quantize: str, short: str, long: str, started: str
) -> StartFigures:
    from sirchat.lab.bench.archive import most_memory, resident_memory
    from sirchat.lab.bench.decode import first_token
    from sirchat.lab.bench.ratio import BenchOptions, bench_model

    options = BenchOptions(cache=int(long) + 64)
    begun = time.perf_counter()
    model = bench_model(name, device, dtype, quantize)  # type: ignore[arg-type]
    loaded = time.perf_counter()
    first_token(model, options, int(short))
    return StartFigures(
        load=loaded - begun,
        first=time.time() - float(started),
        resident=resident_memory(),
        peak=most_memory(),
        paste=first_token(model, options, int(long)),
    )


if __name__ == "__main__":
    main()
