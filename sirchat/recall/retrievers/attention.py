"""Retriever `attention`: scores tokens by the attention weight from the turn's queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirchat.recall.retrievers.base import LayerRetriever

if TYPE_CHECKING:
    from torch import Tensor

    from sirchat.recall.candidates import Candidates


class Attention(LayerRetriever):
    """Scores tokens by the attention weight that the turn's queries would give to them.

    The weight is a softmax of q k / sqrt(d) over the archived tokens alone, without rotary
    positions: the largest from any of the turn's queries, averaged over the heads of a layer.
    """

    needs_queries = True
    takes_soft = True

    def score_layer(self, candidates: Candidates, layer: int) -> Tensor:
        import torch

        asked, blocks = candidates.query.of_layer(layer), []
        for keys, _ in candidates.pairs(layer):
            heads, _, dims = keys.shape
            queries = asked.queries.to(keys.device).reshape(heads, -1, dims)  # [H, group x m, D]
            blocks.append(queries @ keys.mT * asked.scale)  # [H, group x m, k]
        weights = torch.cat(blocks, dim=2).softmax(-1)
        by_head = weights.reshape(len(weights), -1, asked.queries.shape[1], weights.shape[2])
        scores: Tensor = by_head.amax(2).mean((0, 1))  # of [H, group, m, n]
        return scores
