"""A program that loads a model, and prints the time and the memory of this start as JSON.

`start.py` runs it in a new process for each start.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TypedDict


class StartFigures(TypedDict):
    """The times, in seconds, and the memory, in bytes, of one start of a model in a new process."""

    load: float  # time to load the model
    # time from the start of the process to the first token of the reply to a short message
    first: float
    paste: float  # time to read a long text and generate the first token of a reply
    decode: float  # mean time for each further token of the reply to the long text
    resident: int  # memory of the process after the first token of the reply to the short message
    # the highest memory of the process until the first token of the reply to the short message
    peak: int
    most: int  # the highest memory of the process until its end


def main() -> None:
    """Load the model that the command line names, and time replies to a short and a long text.

    The times and the memory of the process are printed to stdout as JSON.
    """
    from sirchat.errors import SirchatError

    try:
        figures = _figures(*sys.argv[1:])
    except SirchatError as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(figures) + "\n")


def _figures(
    name: str,
    device: str,
    dtype: str,
    quantize: str,
    compile: str,
    short: str,
    long: str,
    reply: str,
    started: str,
) -> StartFigures:
    from sirchat.lab.bench.archive import most_memory, resident_memory
    from sirchat.lab.bench.decode import reply_times
    from sirchat.lab.bench.ratio import BenchOptions, bench_model
    from sirchat.models.compiling import use_compiled

    options = BenchOptions(cache=int(long) + int(reply) + 64)
    begun = time.perf_counter()
    model = bench_model(name, device, dtype, quantize)  # type: ignore[arg-type]
    loaded = time.perf_counter()
    reply_times(model, options, int(short), 0)
    first, resident, peak = time.time() - float(started), resident_memory(), most_memory()
    use_compiled(model, compile)  # type: ignore[arg-type]
    paste, decode = reply_times(model, options, int(long), int(reply))
    return StartFigures(
        load=loaded - begun,
        first=first,
        resident=resident,
        peak=peak,
        paste=paste,
        decode=decode,
        most=most_memory(),
    )


if __name__ == "__main__":
    main()
