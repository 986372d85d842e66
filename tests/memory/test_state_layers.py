"""Recurrent and convolution layers in the cache: their state, beside the rows of attention."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from families import HYBRIDS, build
from sirchat.memory.cache import LayerRotation, row_layer_indices
from sirchat.memory.hub_cache import HubCache, layer_kinds
from sirchat.models.probe import cache_argument

IDS = [(37 * at + at // 3) % 120 + 3 for at in range(30)]
hybrids = pytest.mark.parametrize("name", HYBRIDS)


@cache
def model(name: str) -> Any:
    return build(name, HYBRIDS[name])


def new_cache(name: str) -> HubCache:
    kinds = layer_kinds(model(name).config)
    return HubCache([LayerRotation(None)] * len(row_layer_indices(kinds)), 64, kinds=kinds)


@torch.inference_mode()
def write(name: str, kv_cache: Any, ids: list[int]) -> Tensor:
    """Logits [m, V] of a pass that has not been committed."""
    if isinstance(kv_cache, HubCache):
        kv_cache.begin_pass()
    start = kv_cache.get_seq_length()
    given = cache_argument(model(name), kv_cache)
    # Bamba does not count what the cache holds: without positions each pass would begin at 0
    given["position_ids"] = torch.arange(start, start + len(ids))[None]
    logits: Tensor = model(name)(input_ids=torch.tensor([ids]), use_cache=True, **given).logits[0]
    return logits


def read(name: str, kv_cache: HubCache, ids: list[int]) -> Tensor:
    logits = write(name, kv_cache, ids)
    kv_cache.commit(len(ids))
    return logits


@hybrids
def test_logits_equal_those_over_transformers_own_cache(name: str) -> None:
    ours, theirs = new_cache(name), DynamicCache(config=model(name).config)
    assert ours.state, "the model has recurrent or convolution layers"
    for start, end in ((0, 20), (20, 27), (27, 28), (28, 29)):
        expected = write(name, theirs, IDS[start:end])
        torch.testing.assert_close(read(name, ours, IDS[start:end]), expected, rtol=1e-5, atol=1e-5)


def test_eviction_leaves_the_state_as_it_is() -> None:
    kv_cache = new_cache("lfm2")
    read("lfm2", kv_cache, IDS)
    before = [{key: one.clone() for key, one in layer.items()} for layer in kv_cache.state]
    kv_cache.keep(torch.tensor([0, 3, 29]))
    for layer, then in zip(kv_cache.state, before, strict=True):
        assert all(torch.equal(layer[key], then[key]) for key in then)
    assert len(kv_cache.row_layers) == 2, "of four layers; only these are counted"
    assert kv_cache.layer_keys(1).shape[2] == kv_cache.length == 3


def test_part_of_a_pass_can_not_be_committed() -> None:
    kv_cache = new_cache("lfm2")
    write("lfm2", kv_cache, IDS[:5])
    with pytest.raises(RuntimeError, match="as a whole"):
        kv_cache.commit(4)
