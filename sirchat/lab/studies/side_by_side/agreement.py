"""How far a model predicts the same under a budget as with the full cache: KL divergence by token.

A recording model reports the logits of every forward pass. The predictions with the full cache are
kept for one round, and compared with those under a budget as they are made. So memory never holds
the logits of more than one round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sirchat.memory.cache import BoundedCache
from sirchat.models.model import LoadedModel
from sirchat.models.surprisal import PassResult

OnPass = Callable[[Tensor, BoundedCache], None]
"""Called with the logits [m, V] and the cache of a forward pass, before the pass returns."""


@dataclass(frozen=True)
class RecordingModel(LoadedModel):
    """A model that calls `on_pass` after every forward pass."""

    on_pass: OnPass

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> Tensor:
        """The model's own forward pass, reported to `on_pass`."""
        logits = super().forward(ids, cache, **how)
        self.on_pass(logits, cache)
        return logits

    def read(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> PassResult:
        """The same pass; surprisal and the last logits."""
        return PassResult.of_logits(self.forward(ids, cache, **how), ids)


def recording(model: LoadedModel, on_pass: OnPass) -> RecordingModel:
    """The same model, weights shared, that calls `on_pass` after every forward pass."""
    parts = {field.name: getattr(model, field.name) for field in fields(LoadedModel)}
    return RecordingModel(**parts, on_pass=on_pass)


class Predictions:
    """The predictions with the full cache in one round, which starts at a stream position."""

    def __init__(self, start: int) -> None:
        self._end = start
        self._chunks: list[tuple[int, Tensor]] = []  # start, log-probabilities [m, V]

    def add(self, position: int, logits: Tensor) -> None:
        """Add logits [m, V] of the m tokens from `position` on; chunks come in order."""
        self._chunks.append((position, torch.log_softmax(logits, -1)))
        self._end = position + len(logits)

    def at(self, start: int, count: int) -> Tensor:
        """Log-probabilities [m, V] of `count` tokens from `start` on; fewer at the round's end."""
        end = min(start + count, self._end)
        return torch.cat(
            [
                rows[max(start - begin, 0) : max(end - begin, 0)]
                for begin, rows in self._chunks
                if begin < end and start < begin + len(rows)
            ]
        )


class Agreement:
    """Compares the predictions of a setting with those of the full cache in the same round."""

    def __init__(self, predictions: Predictions) -> None:
        self._predictions = predictions
        self.nats: dict[int, float] = {}
        """KL divergence of the next token's distribution, by position of the token before it."""

    def add(self, position: int, logits: Tensor) -> None:
        """Compare logits [m, V] of the m tokens from `position` on; newer ones replace older."""
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
    # A token that is impossible in both has a logit of -inf, and must not give NaN.
    return terms.nan_to_num(nan=0.0).sum(-1).clamp_min(0.0)
