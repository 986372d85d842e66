"""SirLLM's released code, which reads the same turns, as the other side of a ratio.

The paper is SirLLM (arXiv 2405.12528); the code, github.com/Zoeyyao27/SirLLM, needs transformers
4.33, so it runs in a Python of its own. It has no loop that generates token by token: it reads
whole turns, with the surprisal of each token, and evicts before each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from sirchat.errors import SettingError
from sirchat.lab.bench.ratio import BenchOptions, some_ids
from sirchat.lab.bench.worker import Worker
from sirchat.models.model import LoadedModel

DECAY = 0.9
_PROGRAM = Path(__file__).with_name("sirllm_worker.py")
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""Settings of transformers 4.33, too, on which time depends."""


class SirLLM(Worker):
    """SirLLM's code in a process of its own, with a model of random weights; a context manager.

    Time doesn't depend on the weights.

    Args:
        python: a Python in which transformers 4.33 and a checkout of SirLLM are installed.

    Raises SettingError if that Python can't be run.
    """

    def __init__(self, python: str) -> None:
        super().__init__(python, _PROGRAM)
        self._python = python

    def load(self, model: LoadedModel, held: int) -> None:
        """Make a model of the same shape, on the same device, which holds so many tokens.

        Raises SettingError if the model is no Llama, or SirLLM can't be run.
        """
        config = model.module.config
        if config.model_type != "llama":
            raise SettingError(
                f"--sirllm can't compare a {config.model_type} model: SirLLM reads Llama models",
                hint="--model smollm2, 135m and tiny are some",
            )
        sizes = {name: getattr(config, name) for name in _SIZES}
        try:
            where = str(model.device), str(model.dtype).removeprefix("torch.")
            self.ask("load", sizes, *where, torch.get_num_threads(), held, DECAY)
        except ChildProcessError as error:
            raise SettingError(
                f"{self._python} can't run SirLLM's code: {error}",
                hint="pip install transformers==4.33.0 'numpy<2' rouge CHECKOUT there",
            ) from None

    def reading(self, model: LoadedModel, options: BenchOptions) -> Iterator[float]:
        """Seconds per token of blocks of turns, read at a full cache, without end; after `load`."""
        self.ask("read", turns(model, options, options.cache))
        while True:
            yield self.ask("read", turns(model, options, options.block)) / options.block


def turns(model: LoadedModel, options: BenchOptions, count: int) -> list[list[int]]:
    """So many ids, in turns of at most 32."""
    size = min(32, options.block)
    ids = some_ids(model, count)
    return [ids[start : start + size] for start in range(0, count, size)]


def sirllm_by(python: str | None) -> AbstractContextManager[SirLLM | None]:
    """SirLLM's code, run by `python`; None without one."""
    return nullcontext() if python is None else SirLLM(python)
