"""Runs and times the programs that sirchat is compared with: llama.cpp and SirLLM's released code.

Each program runs in its own process, with the Python of sirchat or another Python. llama.cpp loads
the same GGUF file as sirchat, through llama-cpp-python.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from sirchat.errors import SettingError
from sirchat.lab.bench.ratio import SHAPES, BenchOptions, some_ids
from sirchat.models.model import LoadedModel
from sirchat.models.names import locate


class Worker:
    """A program in a process of its own, which reads commands and answers each with a number.

    A command is a JSON list on one line. The worker is a context manager, which ends the process at
    the end of the block. Raises SettingError if the program can't be started.
    """

    def __init__(self, python: str, program: Path) -> None:
        self._command = [python, str(program)]
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            return subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True
            )
        except OSError as error:
            raise SettingError(f"{self._command[0]!r} can't be run: {error.strerror}") from None

    def ask(self, *command: object) -> float:
        """Send a command to the program, wait for its answer, and return this number.

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

    def restart(self) -> None:
        """End the process, and start the same program in a new process."""
        self.close()
        self._process = self._started()

    def close(self) -> None:
        """End the program's process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


_PROGRAM = Path(__file__).with_name("llama_cpp_worker.py")


class LlamaCpp(Worker):
    """A process in which llama.cpp has loaded a model; a context manager, which ends the process.

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
        super().__init__(python, _PROGRAM)
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
            self.restart()
            self.note = "llama.cpp without rearranged weights, with which it crashed here"
        self.close()
        raise SettingError(
            f"{python} can't run llama-cpp-python on {path.name}: {problem}",
            hint=f"{python} -m pip install llama-cpp-python",
        )

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


def gguf_of(name: str) -> Path | None:
    """The path of the GGUF file that the model name `name` stands for.

    Returns None if the model is not a GGUF file.
    """
    folder, options = locate(name)
    return Path(folder) / options["gguf_file"] if options else None


def peer_for(name: str, python: str | None, rows: int) -> AbstractContextManager[LlamaCpp | None]:
    """Context manager: yields a process of llama.cpp with the model `name`, or None."""
    path = gguf_of(name) if name not in SHAPES else None
    if python is None and (path is None or find_spec("llama_cpp") is None):
        return nullcontext()
    if path is None:
        raise SettingError(
            f"--llama-cpp needs a GGUF model, not {name!r}", hint="try --model smollm2"
        )
    return LlamaCpp(path, rows + 8, python or sys.executable)


DECAY = 0.9
_SIRLLM_PROGRAM = Path(__file__).with_name("sirllm_worker.py")
# The fields of a model's config on which its speed depends, and which transformers 4.33 has
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)


class SirLLM(Worker):
    """A process that runs SirLLM's released code; a context manager, which ends the process.

    The model in the process has random weights, because the time does not depend on the weights.
    Raises SettingError if this Python can't be run.
    """

    def __init__(self, python: str) -> None:
        super().__init__(python, _SIRLLM_PROGRAM)
        self._python = python

    def load(self, model: LoadedModel, held: int) -> None:
        """Let SirLLM's process make a model of the same shape and on the same device as `model`.

        Raises SettingError if `model` is not a Llama, or SirLLM's code can't be run.
        """
        config = model.module.config
        if config.model_type != "llama":
            raise SettingError(
                f"--sirllm can't compare a {config.model_type} model: SirLLM reads Llama models",
                hint="choose --model smollm2, 135m or tiny",
            )
        sizes = {name: getattr(config, name) for name in _SIZES}
        try:
            where = str(model.device), str(model.dtype).removeprefix("torch.")
            self.ask("load", sizes, *where, torch.get_num_threads(), held, DECAY)
        except ChildProcessError as error:
            raise SettingError(
                f"{self._python} can't run SirLLM's code: {error}",
                hint=f"{self._python} -m pip install transformers==4.33.0 'numpy<2' rouge FOLDER, "
                "where FOLDER is SirLLM's code",
            ) from None

    def time_reading(self, model: LoadedModel, options: BenchOptions) -> Iterator[float]:
        """Time how SirLLM's code reads turns into a full cache; yields seconds per token, forever.

        The method `load` must have been called before.
        """
        self.ask("read", turns(model, options, options.cache))
        while True:
            yield self.ask("read", turns(model, options, options.block)) / options.block


def turns(model: LoadedModel, options: BenchOptions, count: int) -> list[list[int]]:
    """Make turns for a benchmark: `count` random token ids, split into lists of at most 32 ids."""
    size = min(32, options.block)
    ids = some_ids(model, count)
    return [ids[start : start + size] for start in range(0, count, size)]


def sirllm_by(python: str | None) -> AbstractContextManager[SirLLM | None]:
    """Context manager: yields a process in which the Python `python` runs SirLLM's code.

    If `python` is None, the context manager yields None.
    """
    return nullcontext() if python is None else SirLLM(python)
