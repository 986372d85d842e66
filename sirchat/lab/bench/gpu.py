"""Runs the rows of `sirchat bench gpu` within a given time, the most important ones first.

They run in a process of their own. If a row takes too long, or breaks the GPU for its process, the
process is killed, and the next row runs in a new one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from sirchat.errors import SirchatError
from sirchat.lab.bench.gpu_value import Value

_STARTING = 120.0  # most seconds until a process is ready, with its imports


class RowWorker:
    """A process that measures rows on a device; `ask` starts another one after it was killed.

    `plan` has each row's name and the most seconds that it may take, `machine` says where it runs.
    Raises what `gpu_rows.Bench` raises.
    """

    def __init__(self, device: str, start_method: str = "spawn") -> None:
        self._device = device
        self._context: Any = get_context(start_method)
        self._start()

    def ask(self, row: str, seconds: float) -> Iterator[Value]:
        """Measure a row; after so many seconds, or if the process ends, the last value says why."""
        end = time.monotonic() + seconds
        try:
            if not self._process.is_alive():
                self._start()
            self._pipe.send(row)
            while self._pipe.poll(max(0.0, end - time.monotonic())):
                said = self._pipe.recv()
                if isinstance(said, bool):
                    if not said:
                        self.close()
                    return
                yield said._replace(row=row)
            why = f"stopped after {seconds:.0f} s, its share of the time"
        except (EOFError, OSError):
            self._process.join(5)
            why = f"its process ended with exit code {self._process.exitcode}"
        except Exception as error:  # whatever the start of another process raises
            why = str(error) or type(error).__name__
        self.close()
        yield Value("failed", None, note=why, row=row)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()

    def _start(self) -> None:
        self._pipe, other = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(self._device, other))
        self._process.start()
        other.close()
        said: Any = SirchatError("the process that measures does not start")
        with suppress(EOFError):
            if self._pipe.poll(_STARTING):
                said = self._pipe.recv()
        if isinstance(said, Exception):
            self.close()
            raise said
        self.plan, self.machine = said


def _serve(device: str, pipe: Any) -> None:
    """Measure each row that the pipe names; answer with its values, then whether the GPU is well.

    Once it is not, nothing more can be measured in this process.
    """
    from sirchat.lab.bench.gpu_rows import Bench

    try:
        bench = Bench(device)
    except Exception as error:
        pipe.send(error)
        return
    pipe.send((bench.plan, bench.machine))
    is_well = True
    with suppress(EOFError, BrokenPipeError):
        while is_well:
            for value in bench.measure(pipe.recv()):
                pipe.send(value)
            is_well = bench.is_well()
            pipe.send(is_well)


def measure(worker: RowWorker, end: float, only: str = "") -> Iterator[Value]:
    """Measure rows until `time.monotonic()` is `end`, those that have a word of `only` (by commas).

    A row of whose share of the time less than half is left becomes a value that says so.
    """
    for row, share in worker.plan:
        if any(word in row for word in only.split(",")):
            left = max(0.0, end - time.monotonic())
            if left < share / 2:
                why = f"{left:.0f} s are left, and it may take {share:.0f}"
                yield Value("left out", None, note=why, row=row)
            else:
                yield from worker.ask(row, min(left, share))


def bench_gpu(device: str, minutes: float, only: str, file: str | None) -> bool:
    """Measure in at most so many minutes, and print each number at once.

    Everything is also written as JSON to `file`, after each number; `-` stands for stdout, which
    then has nothing else. Returns whether anything could be measured.
    """
    begun = time.monotonic()
    console = Console(soft_wrap=True, highlight=False, markup=False, stderr=file == "-")
    worker, last = RowWorker(device), ""
    record: dict[str, Any] = {"machine": worker.machine, "minutes": minutes, "results": []}
    console.print(", ".join(f"{name} {value}" for name, value in worker.machine.items()))
    try:
        for value in measure(worker, begun + 60 * minutes, only):
            console.print(_line(value, value.row if value.row != last else ""))
            last = value.row
            record["results"].append(value._asdict())
            record["seconds"] = round(time.monotonic() - begun, 1)
            if file not in (None, "-"):  # whoever lends the machine may end this at any time
                Path(str(file)).write_text(json.dumps(record, indent=2), encoding="utf-8")
    finally:
        worker.close()
    console.print(f"{time.monotonic() - begun:.0f} s")
    if file == "-":
        Console(soft_wrap=True, highlight=False, markup=False).print(json.dumps(record, indent=2))
    return any(one["value"] is not None for one in record["results"])


def _line(value: Value, row: str) -> str:
    number = "" if value.value is None else f"{value.value:,.4g} {value.unit}"
    return f"{row:<20} {value.name:<44} {number:<16} {value.note}".rstrip()
