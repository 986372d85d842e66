"""Vectors of words, from a model's input embeddings: words of similar meaning have close vectors.

The mean of the embeddings is subtracted. Of the principal directions, the first three are left out,
because all words share them, and the next 256 are kept (after Mu and Viswanath 2018,
"All-but-the-Top", https://arxiv.org/abs/1702.01417).
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sirchat.models.model import LoadedModel

DIMS = 256
_SHARED = 3  # number of the first directions, which are left out
_SAMPLE = 8_192  # number of embeddings from which the directions are found

Basis = tuple[Tensor, Tensor]  # the mean embedding [d], and the directions kept [d, D]
_BASES: WeakKeyDictionary[nn.Module, Basis] = WeakKeyDictionary()


class WordVectors:
    """Makes vectors of words by a model; the first for a model take a second."""

    def __init__(self, model: LoadedModel) -> None:
        if model.module not in _BASES:
            _BASES[model.module] = _basis_of(model)
        self._model = model
        self._mean, self._directions = _BASES[model.module]

    @property
    def dims(self) -> int:
        """The number D of dimensions of a word vector."""
        return self._directions.shape[1]

    def of(self, words: Sequence[str]) -> NDArray[np.float32]:
        """Vectors [n, D] of length 1 for n words; D is 256, or less for small models."""
        encode = self._model.tokenizer.encode
        ids = [
            encode(f" {word}", add_special_tokens=False, split_special_tokens=True)
            for word in words
        ]
        counts = torch.tensor([len(of_word) for of_word in ids], dtype=torch.int64)
        joined = torch.tensor([id for of_word in ids for id in of_word], dtype=torch.int64)
        # Of a word's tokens those with higher ids, usually rarer ones, weigh more.
        weights = (joined.double() / 100).clamp_min(2.0).log().float()
        weights[torch.repeat_interleave(counts, counts) == 1] = 1.0
        vectors = (_embedded(self._model, joined) - self._mean) @ self._directions
        vectors *= weights[:, None]
        of_word = torch.repeat_interleave(torch.arange(len(words)), counts)
        total = torch.zeros(len(words), vectors.shape[1]).index_add_(0, of_word, vectors)
        length = total.norm(dim=1, keepdim=True).clamp_min(1e-9)
        unit: NDArray[np.float32] = (total / length).numpy()
        return unit


def _basis_of(model: LoadedModel) -> Basis:
    sample = _embedded(model, torch.arange(0, model.vocab_size, -(-model.vocab_size // _SAMPLE)))
    mean = sample.mean(0)
    return mean, _principal(sample - mean, DIMS + _SHARED)[:, _SHARED:]


@torch.inference_mode()
def _embedded(model: LoadedModel, ids: Tensor) -> Tensor:
    return model.embeddings(ids).float().cpu()


def _principal(centred: Tensor, count: int) -> Tensor:
    # The first principal directions [d, count] of vectors [n, d], by iteration from a fixed start:
    # an exact solution takes a minute for a large d.
    count = min(count, *centred.shape)
    start = torch.randn(centred.shape[1], count, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(start).Q
    for _ in range(6):
        basis = torch.linalg.qr(centred.mT @ (centred @ basis)).Q
    rotation: Tensor = torch.linalg.svd(centred @ basis, full_matrices=False).Vh.mT
    directions: Tensor = basis @ rotation
    return directions
