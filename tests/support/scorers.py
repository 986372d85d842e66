"""Scorers and encoders with random weights, and what transformers' hidden states make of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sirchat.models.encoder import Encoder
from sirchat.models.model import LoadedModel
from sirchat.models.scorer import Scorer


def random_scorer(model: LoadedModel, layers: tuple[int, ...]) -> Scorer:
    size = model.module.config.get_text_config(decoder=True).hidden_size
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(len(layers) * size, generator=generator) / size**0.5
    return Scorer(layers, weight, torch.tensor(-0.7))


def predicted(model: LoadedModel, ids: Sequence[int]) -> list[float]:
    """The scores of ids [n] that are read without a cache, in one pass."""
    scorer = model.scorer
    with torch.inference_mode():
        found = model.module(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    total = torch.full((len(ids),), float(scorer.bias), dtype=torch.float64)
    for number, weight in zip(
        scorer.layers, scorer.weight.view(len(scorer.layers), -1), strict=True
    ):
        total += found.hidden_states[number][0].double() @ weight.double()
    scores: list[float] = total.tolist()
    return scores


def random_encoder(model: LoadedModel, layers: tuple[int, ...], size: int = 5) -> Encoder:
    inputs = len(layers) * model.module.config.get_text_config(decoder=True).hidden_size
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(inputs, size, generator=generator) / inputs**0.5
    return Encoder(layers, weight, torch.randn(size, generator=generator))


def encoded(model: LoadedModel, ids: Sequence[int]) -> Tensor:
    """The encoder's numbers [n, D] for ids [n] that are read without a cache, in one pass."""
    with torch.inference_mode():
        found = model.module(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    states = [found.hidden_states[number][0].double() for number in model.encoder.layers]
    return (torch.cat(states, 1) @ model.encoder.weight.double()).float()
