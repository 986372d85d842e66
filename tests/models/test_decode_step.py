"""The short way to decode one token: which models have it, and that it gives the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from families import HELD, build, loaded
from sirchat.memory.cache import BoundedCache
from sirchat.models.decode_step import DecodeStep
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.packing import pack_module

SHORT = ["llama", "llama3-rope", "yarn-rope", "qwen2", "qwen3"]


def test_models_of_these_shapes_have_it_and_no_others() -> None:
    assert [name for name in HELD if DecodeStep.supports(loaded(name).module)] == SHORT


def test_mistral_has_it_without_a_sliding_window() -> None:
    assert DecodeStep.supports(build("mistral", {"sliding_window": None}))
    assert not DecodeStep.supports(build("mistral", {"sliding_window": 24}))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None, "head_dim": 32}),
        ("qwen2", {"rms_norm_eps": 1e-2}),
        ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ],
)
def test_logits_equal_those_of_transformers(kind: str, options: dict[str, Any]) -> None:
    model = made(build(kind, options))
    assert DecodeStep.supports(model.module)
    found, wanted = decoded(model), by_transformers(model.module)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_it_is_as_near_to_the_truth_as_transformers() -> None:
    truth = decoded(made(build("llama", {})))
    module = build("llama", {}).bfloat16()
    error = (decoded(made(module)) - truth).norm()
    assert error < 1.1 * (by_transformers(module).float() - truth).norm()


@pytest.mark.parametrize(
    ("kind", "options", "bits"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, None),
        ("mistral", {"sliding_window": None, "num_key_value_heads": 1}, None),
        ("qwen2", {"tie_word_embeddings": True}, None),
        ("qwen3", {"head_dim": 32}, None),
        ("llama", {"attention_bias": True}, 4),
        ("qwen2", {}, 8),
    ],
)
@torch.inference_mode()
def test_the_next_tokens_of_several_conversations_are_read_in_one_pass(
    kind: str, options: dict[str, Any], bits: int | None
) -> None:
    model = made(build(kind, options))
    if bits is not None:
        pack_module(model.module, bits)
    step = DecodeStep(model.module, model.cache_dtype, wanted=(1, 4))
    tokens, apart = list[tuple[int, int, BoundedCache]](), []
    for count in (1, 5, 12, 2, 3, 4, 6, 7, 8):
        cache = model.new_cache(count + 1)
        model.forward(IDS[:count], cache)
        cache.commit(count)
        tokens.append((40 + count, 2 * count, cache))
        read = step.read(*tokens[-1])
        apart.append((*read, *(one.clone() for one in written(cache))))
    for _, _, cache in tokens:
        for one in written(cache):
            one.zero_()
    together = step.read_together(tokens)
    error = 1e-5 if bits is None else 0.05
    for at, (_, _, cache) in enumerate(tokens):
        found = [*(one[at : at + 1] for one in together), *written(cache)]
        for one, wanted in zip(found, apart[at], strict=True):
            torch.testing.assert_close(one, wanted, rtol=error, atol=error)


def written(cache: BoundedCache) -> list[Tensor]:
    """The last layer's keys and values in the row after the held ones."""
    buffers = (one.buffer for one in cache.row_layers[-1].tensors)
    return [one[:, :, :, cache.length] for one in buffers if one is not None]


IDS = [1, *range(20, 60)]


def made(module: Any) -> LoadedModel:
    """With every bias and norm's weight something else than at the beginning of training."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in module.named_parameters():
        if "norm" in name or name.endswith("bias"):
            with torch.no_grad():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.3 * noise.to(parameter.dtype))
    return wrap_model("made", module, None)


def decoded(model: LoadedModel) -> Tensor:
    """Logits [n, V] of `IDS`, read one at a time."""
    cache, out = model.new_cache(len(IDS)), []
    for token_id in IDS:
        out.append(model.forward([token_id], cache)[0])
        cache.commit(1)
    return torch.stack(out)


def by_transformers(module: Any) -> Tensor:
    with torch.inference_mode():
        cache = DynamicCache(config=module.config)
        ids = torch.tensor([IDS])
        logits: Tensor = module(input_ids=ids, past_key_values=cache).logits[0]
    return logits
