"""A program that loads a model, and prints the time and the memory of this start as JSON.

`start.py` runs it in a new process for each start.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

# The times, in seconds, and the memory, in bytes, of one start of a model in a new process:
# load: to load the model
# first: from the start of the process to the first token of the reply to a short message
# resident, peak: memory of the process then, and the most until then
# paste N: to read a text of N tokens, and generate the first token of a reply
# decode: mean of each further token of the reply to the last of these texts
# most: the highest memory of the process until its end
StartFigures = dict[str, float]


@contextmanager
def fresh_home() -> Iterator[str]:
    """Make a folder for SIRCHAT_HOME with the user's own models and the library in C++ alone."""
    from sirchat.paths import compiled_dir, models_dir

    with TemporaryDirectory() as home:
        if models_dir().exists():
            (Path(home) / "data").mkdir()
            (Path(home) / "data" / "models").symlink_to(models_dir())
        if compiled_dir().exists():
            shutil.copytree(compiled_dir(), Path(home) / "state" / "compiled")
        yield home


def resident_memory() -> int:
    """The resident memory of this process in bytes; 0 if the system does not report it."""
    gc.collect()
    return _memory("VmRSS")


def most_memory() -> int:
    """The highest resident memory of this process since its start, as `resident_memory`."""
    return _memory("VmHWM")


def _memory(name: str) -> int:
    try:
        status = Path("/proc/self/status").read_text("ascii", "replace")
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def main() -> None:
    """Load the model that the command line names, and time replies to a short and to long texts.

    The times and the memory of the process are printed to stdout as JSON.
    """
    from sirchat.errors import SirchatError
    from sirchat.models.torch_imports import defer_parts_of_torch

    defer_parts_of_torch()  # as the commands do
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
    longs: str,
    reply: str,
    started: str,
) -> StartFigures:
    from sirchat.cli.flags import without_garbage_collection

    texts = [int(count) for count in longs.split(",") if count]
    with without_garbage_collection():
        from sirchat.lab.bench.decode import reply_times
        from sirchat.lab.bench.ratio import BenchOptions, bench_model
        from sirchat.models.devices import use_threads

        use_threads(0)  # those that SIRCHAT_THREADS names
        options = BenchOptions(cache=max([int(short), *texts]) + int(reply) + 64)
        begun = time.perf_counter()
        model = bench_model(name, device, dtype, quantize, compile=compile)  # type: ignore[arg-type]
        loaded = time.perf_counter()
    reply_times(model, options, int(short), 0)
    figures: StartFigures = {"load": loaded - begun, "first": time.time() - float(started)}
    figures |= {"resident": resident_memory(), "peak": most_memory()}
    for count in texts:
        figures[f"paste {count}"], figures["decode"] = reply_times(
            model, options, count, int(reply)
        )
    return figures | {"most": most_memory()}


if __name__ == "__main__":
    main()
