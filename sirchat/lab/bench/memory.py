"""Compares the memory that `sirchat models fit` states for a model with the memory it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sirchat.config.profile import Profile
from sirchat.errors import UsageError
from sirchat.lab.bench.archive import resident_memory
from sirchat.models.fit import fit_of
from sirchat.models.listing import find_model
from sirchat.models.load import load_model_of
from sirchat.models.model import LoadedModel


@dataclass(frozen=True)
class MemoryMeasure:
    """The stated and the measured memory of a part of a model, in bytes."""

    name: str  # the name of the part: weights, KV cache, or both
    said: int  # the memory that `sirchat models fit` states for the part
    tensors: int  # the sum of the sizes of the part's tensors
    grew: int  # how much the memory of the process grew when the part was loaded or filled


@torch.inference_mode()
def bench_memory(profile: Profile) -> list[MemoryMeasure]:
    """Measure the memory that the weights and the full KV cache of a profile's model take.

    Raises ModelError if the model is not on this machine or can't be loaded, and UsageError if its
    files do not state its sizes.
    """
    said = fit_of(find_model(profile.model), profile, None).choices[0]
    budget, cache_said = max(said.caches.items())
    if cache_said is None:
        raise UsageError(f"the files of model {profile.model!r} do not state its sizes")
    torch.ones(64, 64) @ torch.ones(64, 64)  # loads libraries that every model needs
    before = resident_memory()
    model = load_model_of(profile)
    cache = model.new_cache(budget)
    model.forward([0], cache)  # reads all weights, allocates the cache
    after_weights = resident_memory()
    for layer in cache.row_layers:
        for tensor in layer.tensors:
            if tensor.buffer is not None:
                tensor.buffer.fill_(0)  # the system gives memory when it is first written
    full = resident_memory()
    weights = _tensor_bytes(model)
    return [
        MemoryMeasure("weights", said.weights, weights, after_weights - before),
        MemoryMeasure(f"KV cache at {budget:,}", cache_said, cache.nbytes, full - after_weights),
        MemoryMeasure("both", said.weights + cache_said, weights + cache.nbytes, full - before),
    ]


def _tensor_bytes(model: LoadedModel) -> int:
    """The size in bytes of all parameters and buffers of a model, as stored in memory."""
    tensors = (*model.module.parameters(), *model.module.buffers())
    return sum({one.data_ptr(): one.numel() * one.element_size() for one in tensors}.values())
