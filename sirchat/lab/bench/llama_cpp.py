"""llama.cpp on the same GGUF file, as the other side of a ratio.

llama-cpp-python runs in a process of its own, with this Python or another one that has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch

from sirchat.errors import SettingError
from sirchat.lab.bench.ratio import BenchOptions, some_ids
from sirchat.lab.bench.shapes import SHAPES
from sirchat.lab.bench.worker import Worker
from sirchat.models.model import LoadedModel
from sirchat.models.names import locate

_PROGRAM = Path(__file__).with_name("llama_cpp_worker.py")


class LlamaCpp(Worker):
    """One process of llama-cpp-python with a loaded model; a context manager.

    Some builds crash in the matrix instructions (AMX) of CPUs that have them; then it runs without
    the rearranged weights that need these, and `note` says so.

    Args:
        path: a GGUF file.
        rows: room in its cache.
        python: a Python that has llama-cpp-python.
        tries: whether to load with rearranged weights; what is tried, in turn.

    Raises SettingError if it can't be run.

    Attributes:
        note: what is unusual about it, as text.
        load: seconds that loading took.
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
            hint="pip install llama-cpp-python there",
        )

    def again(self) -> LlamaCpp:
        """A new process with the same model, loaded in the way that worked."""
        return LlamaCpp(*self._made, tries=[self._rearranges])

    def decoding(self, model: LoadedModel, options: BenchOptions) -> Iterator[float]:
        """Seconds per token of blocks that end at the cache's length, without end."""
        ids = some_ids(model, options.cache)
        start, block = ids[: -options.block], ids[-options.block :]
        while True:
            self.ask("read", start)
            yield self.ask("decode", block) / options.block

    def reading(self, ids: Sequence[int]) -> Iterator[float]:
        """Seconds per token of reading ids into an empty cache, without end."""
        while True:
            yield self.ask("read", list(ids)) / len(ids)


def gguf_of(name: str) -> Path | None:
    """The file of a GGUF model; None for any other model."""
    folder, options = locate(name)
    return Path(folder) / options["gguf_file"] if options else None


def peer_for(name: str, python: str | None, rows: int) -> AbstractContextManager[LlamaCpp | None]:
    """llama.cpp with a model, run by `python`; None if that is None and this Python lacks it.

    Raises SettingError when a Python is named but the model is no GGUF file.
    """
    path = gguf_of(name) if name not in SHAPES else None
    if python is None and (path is None or find_spec("llama_cpp") is None):
        return nullcontext()
    if path is None:
        raise SettingError(
            f"--llama-cpp needs a GGUF model, and {name!r} is none", hint="--model smollm2 is one"
        )
    return LlamaCpp(path, rows + 8, python or sys.executable)
