"""Runs and times llama.cpp in a process of its own, on the same GGUF file as sirchat."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path

import torch

from sirchat.errors import SettingError
from sirchat.lab.bench.ratio import SHAPES, BenchOptions, some_ids
from sirchat.models.model import LoadedModel
from sirchat.models.names import locate

_PROGRAM = Path(__file__).with_name("llama_cpp_worker.py")


class LlamaCpp:
    """A process in which llama.cpp has loaded a model, until `close` is called.

    Some builds of llama.cpp crash on CPUs with matrix instructions (AMX) if they rearrange the
    model's weights for these instructions. Raises SettingError if llama-cpp-python can't be run.
    """

    def __init__(
        self,
        path: Path,
        rows: int,
        python: str = sys.executable,
        tries: Sequence[bool] = (True, False),
    ) -> None:
        self._command = [python, str(_PROGRAM)]
        self._process = self._started()
        load = ["load", str(path), torch.get_num_threads(), rows]
        self._made = path, rows, python
        self.note = ""
        for self._rearranges in tries:
            try:
                self.load = self.ask(*load, self._rearranges)
                self.ask("read", [1, 2, 3])
                return
            except ChildProcessError as error:
                problem = str(error)
            self.close()
            self._process = self._started()
            self.note = "llama.cpp without rearranged weights, with which it crashed here"
        self.close()
        raise SettingError(
            f"{python} can't run llama-cpp-python on {path.name}: {problem}",
            hint=f"{python} -m pip install llama-cpp-python",
        )

    def _started(self) -> subprocess.Popen[str]:
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            return subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True
            )
        except OSError as error:
            raise SettingError(f"{self._command[0]!r} can't be run: {error.strerror}") from None

    def ask(self, *command: object) -> float:
        """Send a command, a JSON list on one line, and return the number that answers it.

        Raises ChildProcessError if the process ends before it answers.
        """
        pipes = self._process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        with suppress(BrokenPipeError):
            pipes.stdin.write(json.dumps(command) + "\n")
            pipes.stdin.flush()
        answer = pipes.stdout.readline()
        if not answer:
            raise ChildProcessError(f"it ended with exit code {pipes.wait()} during {command[0]!r}")
        return float(answer)

    def close(self) -> None:
        """End the program's process."""
        self._process.kill()
        self._process.communicate()

    def restarted(self) -> LlamaCpp:
        """Start a new process of llama.cpp with the same model, and return it.

        The model is loaded in the way that worked in this process.
        """
        return LlamaCpp(*self._made, tries=[self._rearranges])

    def time_decoding(self, model: LoadedModel, options: BenchOptions) -> Iterator[float]:
        """Time how llama.cpp decodes a block of tokens; yields seconds per token, forever."""
        ids = some_ids(model, options.cache)
        start, block = ids[: -options.block], ids[-options.block :]
        while True:
            self.ask("read", start)
            yield self.ask("decode", block) / options.block

    def time_reading(self, ids: Sequence[int]) -> Iterator[float]:
        """Time how llama.cpp reads `ids` into an empty cache; yields seconds per token, forever."""
        while True:
            yield self.ask("read", list(ids)) / len(ids)


def peer_for(name: str, python: str | None, rows: int) -> AbstractContextManager[LlamaCpp | None]:
    """Context manager: yields a process of llama.cpp with the model `name`, or None."""
    folder, gguf_file = locate(name) if name not in SHAPES else ("", "")
    path = Path(folder) / gguf_file if gguf_file else None
    if python is None and (path is None or find_spec("llama_cpp") is None):
        return nullcontext()
    if path is None:
        raise SettingError(
            f"--llama-cpp needs a GGUF model, not {name!r}", hint="try --model smollm2"
        )
    return closing(LlamaCpp(path, rows + 8, python or sys.executable))
