"""Times three baselines with which sirchat's decoding is compared.

The baselines are generation by transformers with a static cache, decoding without prompt lookup,
and reading the model's weights from memory once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from sirchat.engine.engine import Engine
from sirchat.engine.sampling import PromptLookup, Sampler, Sampling
from sirchat.engine.types import TurnRef
from sirchat.lab.bench.ratio import BenchOptions, some_ids, timed
from sirchat.memory.ledger import Role
from sirchat.models.model import LoadedModel


class _Clock(BaseStreamer):  # type: ignore[misc]  # transformers is untyped there
    """A streamer for transformers' `generate`, which records the time of each generated token.

    `times` has the time of the prompt first, then that of each new token.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def static_blocks(model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Time transformers' generation with a static cache; yields seconds per token, forever."""
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
    """Time replies that repeat a text just read; yields the seconds per token of each, forever."""
    text = some_ids(model, options.cache // 4)
    for _ in engine.prefill(text, [Role.USER] * len(text), _TURN):
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
    """A sampler that ignores the logits: it picks the ids of a given text, again and again."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(Sampling())
        self._ids = cycle(ids)

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        super().pick(logits, said_ids, position)  # its result is not used: only its time counts
        return next(self._ids)


_COLUMNS = 1024


def weight_bytes(model: LoadedModel) -> int:
    """The size in bytes, as stored in memory, of the model's weights that a decode step reads."""
    module = model.module
    head = module.get_output_embeddings()
    in_head = set() if head is None else set(_sizes(head))
    rows_only = set(_sizes(module.get_input_embeddings())) - in_head
    return sum(size for start, size in _sizes(module).items() if start not in rows_only)


def _sizes(module: nn.Module) -> dict[int, int]:
    """The size in bytes of each parameter and buffer of a module, by the tensor's address."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    return {one.data_ptr(): one.numel() * one.element_size() for one in tensors}


def reading(size: int, model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Time how long the model's device takes to read `size` bytes of memory once."""
    rows = max(1, size // (4 * _COLUMNS))
    matrix = torch.ones(rows, _COLUMNS, device=model.device)
    vector = torch.ones(_COLUMNS, device=model.device)

    @torch.inference_mode()
    def block() -> None:
        for _ in range(options.block):
            torch.mv(matrix, vector)

    while True:
        yield timed(block, model) / options.block
