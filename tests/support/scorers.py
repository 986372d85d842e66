"""Scorers with random weights, and what they predict, computed from transformers' hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sirchat.models.model import LoadedModel
from sirchat.models.scorer import Scorer


def random_scorer(model: LoadedModel, layers: tuple[int, ...]) -> Scorer:
    size = model.module.config.get_text_config(decoder=True).hidden_size
    generator = torch.Generator().manual_seed(5)
    return Scorer(layers, torch.randn(len(layers) * size, generator=generator) / size**0.5, -0.7)


def predicted(model: LoadedModel, ids: Sequence[int]) -> list[float]:
    """The scores of ids [n] that are read without a cache, in one pass."""
    scorer = model.scorer
    with torch.inference_mode():
        found = model.module(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    total = torch.full((len(ids),), scorer.bias, dtype=torch.float64)
    for number, weight in zip(
        scorer.layers, scorer.weight.view(len(scorer.layers), -1), strict=True
    ):
        total += found.hidden_states[number][0].double() @ weight.double()
    scores: list[float] = total.tolist()
    return scores
