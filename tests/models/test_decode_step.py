"""The short way to decode one token: which models have it, and that it gives the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from families import HELD, build, loaded
from sirchat.models.decode_step import DecodeStep
from sirchat.models.model import LoadedModel, wrap_model

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
