"""Log-probabilities of a reply by one plain forward pass."""

from __future__ import annotations

import torch

from sirchat.models.model import LoadedModel


def log_probability(model: LoadedModel, before: list[int], reply: list[int]) -> list[float]:
    """Of each id of the reply, by one forward pass without a cache."""
    ids = torch.tensor([[*before, *reply]])
    with torch.inference_mode():
        logits = model.module(input_ids=ids, use_cache=False).logits[0].double()
    scores = torch.log_softmax(logits, -1)
    return [float(scores[len(before) + at - 1, token]) for at, token in enumerate(reply)]
