"""Retriever `random`: chooses tokens at random, as a baseline for the other retrievers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirchat.recall.retrievers.base import Retriever

if TYPE_CHECKING:
    from torch import Tensor

    from sirchat.recall.candidates import Candidates


class Random(Retriever):
    """Chooses archived tokens at random, as a baseline for the other retrievers."""

    takes_weight = False

    def score(self, candidates: Candidates) -> Tensor:
        import torch

        return torch.from_numpy(candidates.random_numbers())[None]
