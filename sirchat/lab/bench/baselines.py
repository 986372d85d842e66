"""Baselines that decoding is compared with.

They are generation with a static cache, decoding without prompt lookup, and reading the model's
weights from memory once.
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
from sirchat.engine.records import TurnRef
from sirchat.engine.sampling import PromptLookup, Sampler, Sampling
from sirchat.lab.bench.ratio import BenchOptions, some_ids, timed
from sirchat.memory.ledger import Role
from sirchat.models.model import LoadedModel


class _Clock(BaseStreamer):  # type: ignore[misc]  # transformers is untyped there
    """A streamer that records when transformers hands over the prompt and then each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def static_blocks(model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Time greedy generation with a static cache; yield seconds per token, endlessly.

    Each value is from one run of transformers' `generate`, which fills its static cache. The times
    of the prompt and of the first token do not count. On a GPU, transformers compiles the decode
    step by itself.
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
    """Time replies that repeat a text that was just read; yield seconds per token, endlessly.

    `engine` must be new: it reads the text, which fills a quarter of the cache. `lookup` says
    whether prompt lookup is on, which guesses the next tokens from the text.
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
        super().pick(logits, said_ids, position)  # its result is not used: only its time counts
        return next(self._ids)


_COLUMNS = 1024


def weight_bytes(model: LoadedModel) -> int:
    """Number of bytes, as stored, of the weights that a decode step reads.

    Embeddings count only if the output head shares them. All other weights count, also every
    expert of a mixture-of-experts model.
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
    """Time how long the device takes to read `size` bytes; yield these seconds, endlessly.

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
