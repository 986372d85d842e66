"""Retriever `attention`: scores tokens by the attention weight from the turn's queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirchat.memory.recall.base import LayerRetriever

if TYPE_CHECKING:
    from torch import Tensor

    from sirchat.memory.retrieval import Candidates


class Attention(LayerRetriever):
    """Scores tokens by the attention weight that the turn's queries would give to them.

    The weight is a softmax of q k / sqrt(d) over the archived tokens alone, where the rotary
    positions of query q and key k are undone. In each layer and head, the largest weight from any
    of the turn's queries is taken; a token's score in a layer is its mean over heads.
    """

    needs_queries = True
    takes_soft = True
    index_probes = 64

    def score_layer(self, candidates: Candidates, layer: int) -> Tensor:
        import torch

        asked, blocks = candidates.query.of_layer(layer), []
        for keys, _ in candidates.pairs(layer):
            heads, _, dims = keys.shape
            queries = asked.queries.to(keys.device).reshape(heads, -1, dims)  # [H, group x m, D]
            blocks.append(queries @ keys.mT * asked.scale)  # [H, group x m, k]
        logits, counts = torch.cat(blocks, dim=2), candidates.counts
        if counts is not None:  # a row that stands for c rows enters the softmax's sum c times
            counts = counts.to(logits.device)
            logits += counts.log()
        weights = logits.softmax(-1)
        by_head = weights.reshape(len(weights), -1, asked.queries.shape[1], weights.shape[2])
        scores: Tensor = by_head.amax(2).mean((0, 1))  # of [H, group, m, n]
        return scores if counts is None else scores / counts
