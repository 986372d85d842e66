"""How far two memories let a model foretell the same: KL divergence, token by token.

A model is watched while it reads. What it foretells with the full cache is kept for one round, and
compared with what it foretells under a budget as that comes; so the logits of one round are all
that is ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sirchat.memory.cache import BoundedCache
from sirchat.models.model import LoadedModel

OnPass = Callable[[Tensor, BoundedCache], None]
"""Told the logits [m, V] of each forward pass, and the cache it ran over, before they count."""


@dataclass(frozen=True)
class RecordingModel(LoadedModel):
    """A model that shows every forward pass to `watch`."""

    on_pass: OnPass

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> Tensor:
        """As the model's own."""
        logits = super().forward(ids, cache, **how)
        self.on_pass(logits, cache)
        return logits


def recording(model: LoadedModel, on_pass: OnPass) -> RecordingModel:
    """The same model, weights included, with somebody who watches it."""
    own = {field.name: getattr(model, field.name) for field in fields(LoadedModel)}
    return RecordingModel(**own, on_pass=on_pass)


class Predictions:
    """What the full cache foretells in one round that begins at stream position `start`."""

    def __init__(self, start: int) -> None:
        self._end = start
        self._pieces: list[tuple[int, Tensor]] = []  # start, log-probabilities [m, V]

    def note(self, position: int, logits: Tensor) -> None:
        """Keep logits [m, V] of the tokens at `position`.., which come in order."""
        self._pieces.append((position, torch.log_softmax(logits, -1)))
        self._end = position + len(logits)

    def at(self, start: int, count: int) -> Tensor:
        """Log-probabilities [m, V] of the tokens at `start`..; fewer where the round ends."""
        end = min(start + count, self._end)
        return torch.cat(
            [
                rows[max(start - begin, 0) : max(end - begin, 0)]
                for begin, rows in self._pieces
                if begin < end and start < begin + len(rows)
            ]
        )


class Agreement:
    """Compares a setting with what the full cache foretold in the same round."""

    def __init__(self, predictions: Predictions) -> None:
        self._predictions = predictions
        self.nats: dict[int, float] = {}
        """KL divergence of the next token, by the position of the token it comes after."""

    def note(self, position: int, logits: Tensor) -> None:
        """Compare logits [m, V] of the tokens at `position`..; what is read again counts again."""
        found = divergence(self._predictions.at(position, len(logits)), logits).tolist()
        self.nats |= enumerate(found, position)


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || other) in nats, [m], never below 0.

    Args:
        reference: log-probabilities [m, V].
        logits: of the other distribution [m, V].
    """
    other = torch.log_softmax(logits, -1)
    terms = reference.exp() * (reference - other)
    # A token that neither can say has a logit of -inf in both, and counts for nothing.
    return terms.nan_to_num(nan=0.0).sum(-1).clamp_min(0.0)
