"""Baselines for decoding: a static cache, no prompt lookup, reading the weights once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from sirchat.engine.engine import Engine
from sirchat.engine.records import TurnRef
from sirchat.engine.sampling import PromptLookup, Sampler, Sampling
from sirchat.lab.bench.ratio import BenchOptions, some_ids, timed
from sirchat.memory.ledger import Role
from sirchat.models.model import LoadedModel


class _Clock(BaseStreamer):  # type: ignore[misc]  # transformers is untyped there
    """Records the time of each token; the first call of `put` is for the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def static_blocks(model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Yield, without end, the seconds per token of greedy generation until the cache is full.

    The cache is a static cache of transformers. The prompt and the first token do not count. On a
    GPU, transformers compiles the decode step by itself.
    """
    prompt = torch.tensor([some_ids(model, options.cache - options.block)], device=model.device)
    config = GenerationConfig(
        max_new_tokens=options.block + 1,
        min_new_tokens=options.block + 1,
        do_sample=False,
        cache_implementation="static",
        eos_token_id=None,
        pad_token_id=0,
    )
    while True:
        clock = _Clock()
        with torch.inference_mode():
            model.module.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                streamer=clock,
            )
        first, last = clock.times[1], clock.times[-1]
        yield (last - first) / (len(clock.times) - 2)


_TURN = TurnRef(turn=0, round=0)


def repeated_blocks(
    model: LoadedModel, options: BenchOptions, engine: Engine, *, lookup: bool
) -> Iterator[float]:
    """Yield, without end, the seconds per token of a reply that repeats the text just read.

    `engine` must be new. `lookup`: whether prompt lookup is on. The text fills 1/4 of the cache.
    """
    text = some_ids(model, options.cache // 4)
    for _ in engine.feed(text, [Role.USER] * len(text), _TURN):
        pass
    sampler = _Reciting(text)

    def block() -> None:
        guesses = PromptLookup() if lookup else None
        for _ in engine.generate(
            sampler, _TURN, stop_ids=frozenset(), max_new_tokens=len(text), lookup=guesses
        ):
            pass

    while True:
        yield timed(block, model) / len(text)


class _Reciting(Sampler):
    """A sampler that returns the ids of a text again and again, whatever the logits are."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(Sampling())
        self._ids = cycle(ids)

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        super().pick(logits, said_ids, position)  # only for the time it takes
        return next(self._ids)


_COLUMNS = 1024


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of the weights that a decode step reads, as they are stored.

    Embeddings count only if the output head shares them. All other weights count, and so all
    experts of a mixture-of-experts model.
    """
    module = model.module
    head = module.get_output_embeddings()
    in_head = set() if head is None else set(_sizes(head))
    rows_only = set(_sizes(module.get_input_embeddings())) - in_head
    return sum(size for start, size in _sizes(module).items() if start not in rows_only)


def _sizes(module: nn.Module) -> dict[int, int]:
    """Bytes of each tensor of a module, by the tensor's address; a shared tensor counts once."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    return {one.data_ptr(): one.numel() * one.element_size() for one in tensors}


def reading(size: int, model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Yield, without end, the seconds that the device takes to read `size` bytes.

    A float32 matrix of that size is multiplied with a vector, which reads the matrix once.
    """
    rows = max(1, size // (4 * _COLUMNS))
    matrix = torch.ones(rows, _COLUMNS, device=model.device)
    vector = torch.ones(_COLUMNS, device=model.device)

    @torch.inference_mode()
    def block() -> None:
        for _ in range(options.block):
            torch.mv(matrix, vector)

    while True:
        yield timed(block, model) / options.block
