"""`generate` of transformers with a static cache, as the other side of a ratio."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from sirchat.lab.bench.ratio import BenchOptions, some_ids
from sirchat.models.model import LoadedModel


class _Clock(BaseStreamer):  # type: ignore[misc]  # transformers is untyped there
    """Notes when each token comes; the first call is for the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def static_blocks(model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Seconds per token of blocks of greedy generation that end at the cache's length.

    The prompt and the first token do not count. transformers compiles the step where it thinks that
    this pays: on a GPU.
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
