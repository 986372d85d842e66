"""Vectors of words, from a model's input embeddings: words of similar meaning have close vectors.

The mean of the embeddings is subtracted. Of the principal directions, the first three are left out,
because all words share them, and the next 256 are kept (after Mu and Viswanath 2018,
"All-but-the-Top", https://arxiv.org/abs/1702.01417). If a word has several tokens, its vector is
the sum of the tokens' vectors, in which higher token ids, usually of rarer tokens, weigh more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DIMS = 256
_SHARED = 3  # number of the first directions, which are left out
_SAMPLE = 8_192  # number of embeddings from which the directions are found


class WordVectors:
    """Makes vectors of words from the input embeddings of a model.

    Args:
        embed: returns the input embeddings [n, d] of token ids [n].
        vocab_size: number of token ids.
        encode: returns the token ids of a text.
    """

    def __init__(
        self,
        embed: Callable[[Tensor], Tensor],
        vocab_size: int,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self._embed, self._encode = embed, encode
        step = -(-vocab_size // _SAMPLE)
        sample = self._embedded(torch.arange(0, vocab_size, step))
        self._mean = sample.mean(0)
        self._directions = _principal(sample - self._mean, DIMS + _SHARED)[:, _SHARED:]

    @property
    def dims(self) -> int:
        """The number D of dimensions of a word vector."""
        return self._directions.shape[1]

    def of(self, words: Sequence[str]) -> NDArray[np.float32]:
        """Make vectors [n, D] of length 1 for n words; D is 256, or less for small models."""
        ids = [self._encode(" " + word) for word in words]
        joined = torch.tensor([one for each in ids for one in each], dtype=torch.int64)
        weights = [
            1.0 if len(each) == 1 else np.log(max(2.0, one / 100)) for each in ids for one in each
        ]
        vectors = (self._embedded(joined) - self._mean) @ self._directions
        vectors *= torch.tensor(weights, dtype=torch.float32)[:, None]
        of_word = torch.repeat_interleave(
            torch.arange(len(words)), torch.tensor([len(each) for each in ids], dtype=torch.int64)
        )
        total = torch.zeros(len(words), vectors.shape[1]).index_add_(0, of_word, vectors)
        length = total.norm(dim=1, keepdim=True).clamp_min(1e-9)
        found: NDArray[np.float32] = (total / length).numpy()
        return found

    @torch.inference_mode()
    def _embedded(self, ids: Tensor) -> Tensor:
        return self._embed(ids).float().cpu()


def word_vectors_of(
    embed: Callable[[Tensor], Tensor], vocab_size: int, tokenizer: Any
) -> WordVectors:
    """Make a WordVectors object for a model, whose `tokenizer` gives the token ids of a word.

    `embed` returns the input embeddings [n, d] of token ids [n].
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        return ids

    return WordVectors(embed, vocab_size, encode)


def _principal(centred: Tensor, count: int) -> Tensor:
    """The first `count` principal directions [d, count] of vectors [n, d]; fewer if d is less.

    The directions are found by iteration from a fixed start, because an exact solution takes a
    minute for a large d.
    """
    count = min(count, *centred.shape)
    start = torch.randn(centred.shape[1], count, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(start).Q
    for _ in range(6):
        basis = torch.linalg.qr(centred.mT @ (centred @ basis)).Q
    rotation: Tensor = torch.linalg.svd(centred @ basis, full_matrices=False).Vh.mT
    found: Tensor = basis @ rotation
    return found
