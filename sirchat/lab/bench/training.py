"""Measures the time and the memory of an anchor training step with different attention masks.

The masks are those under which a model learns to compress text into anchor tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch.nn import functional as F

from sirchat.lab.bench.ratio import BenchOptions, Ratio, compare, measure_seconds, some_ids
from sirchat.lab.training.masks import anchor_mask, block_mask
from sirchat.models.model import LoadedModel

Mask = Literal["none", "dense", "blocks"]

_SEQUENCE = 20  # distance from one anchor token to the next in a training row, in tokens


def bench_training(model: LoadedModel, options: BenchOptions, tokens: int) -> Iterator[Ratio]:
    """Compare the time of training steps with the attention mask of anchors and without a mask."""
    model.module.float()  # as in `sirchat train anchor`
    on_gpu = model.device.type == "cuda"
    pairs: list[tuple[Mask, Mask]] = [("dense", "none")]
    pairs += [("blocks", "dense")] if on_gpu else []
    for ours, other in pairs:
        name = f"a training step of {tokens:,} tokens, mask {ours} against {other}"
        one, two = (partial(_steps, model, tokens, mask) for mask in (ours, other))
        found = compare(name, one, two, options)
        note = ""
        if on_gpu:
            peaks = [
                f"{mask} {_peak(model, tokens, mask) / 2**30:.1f} GiB" for mask in (ours, other)
            ]
            note = f"memory at its peak: {', '.join(peaks)}"
        yield replace(found, note=note)


def _steps(model: LoadedModel, tokens: int, mask: Mask) -> Iterator[float]:
    """Time one training step after another; yields the seconds per token of each step, forever."""
    module = model.module
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    ids = torch.tensor([some_ids(model, tokens)], device=model.device)
    is_anchor = (torch.arange(tokens, device=model.device) % _SEQUENCE == _SEQUENCE - 1)[None]

    def step() -> None:
        seen = None
        if mask == "dense":
            seen = anchor_mask(is_anchor, sinks=1)
        elif mask == "blocks":
            seen = block_mask(is_anchor, torch.zeros_like(ids), sinks=1)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            logits = module(input_ids=ids, attention_mask=seen, use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    while True:
        module.set_attn_implementation("flex_attention" if mask == "blocks" else "sdpa")
        yield measure_seconds(step, model) / tokens


def _peak(model: LoadedModel, tokens: int, mask: Mask) -> int:
    """The highest amount of GPU memory that one training step takes, in bytes."""
    torch.cuda.reset_peak_memory_stats()
    next(_steps(model, tokens, mask))
    return torch.cuda.max_memory_allocated()
