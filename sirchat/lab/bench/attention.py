"""Decode while attention weights are recorded, against decode while they are not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sirchat.errors import ModelError
from sirchat.lab.bench.decode import generated_blocks
from sirchat.lab.bench.ratio import BenchOptions, Ratio, compare
from sirchat.memory.policies.base import Policy
from sirchat.memory.policies.h2o import H2o
from sirchat.memory.policies.snapkv import Snapkv
from sirchat.models.model import LoadedModel, no_attention_reason


def bench_attention(model: LoadedModel, options: BenchOptions) -> Iterator[Ratio]:
    """Measure decode under policies that use attention weights, against one that does not.

    Raises ModelError for a model that does not expose its attention weights.
    """
    if not model.exposes_attention:
        raise ModelError(no_attention_reason(model), hint="try another model")
    policies: dict[str, Policy] = {
        "attention of 4 layers": H2o(),
        "attention of all layers": H2o(layers=0),
        "the last 32 queries of 4 layers": Snapkv(),
    }
    for name, policy in policies.items():
        ours = partial(generated_blocks, model, options, policy=policy)
        without = partial(generated_blocks, model, options)
        yield compare(f"{name}, against none", ours, without, options)
