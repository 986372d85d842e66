"""Encoders with random weights, and what transformers' hidden states make of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sirchat.models.encoder import Encoder
from sirchat.models.model import LoadedModel


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
