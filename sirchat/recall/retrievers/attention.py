"""Retriever `attention`: scores tokens by the attention weight from the turn's queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirchat.recall.retrievers.base import LayerRetriever

if TYPE_CHECKING:
    from torch import Tensor

    from sirchat.memory.key_values import Positions
    from sirchat.recall.candidates import Candidates


class Attention(LayerRetriever):
    """Scores tokens by the attention weight that the turn's queries would give to them.

    The weight is a softmax of q k / sqrt(d) over the archived tokens alone, without rotary
    positions: the largest from any of the turn's queries, averaged over the heads of a layer, and
    evened out.
    """

    needs_queries = True

    def score_layer(self, candidates: Candidates, layer: int) -> Tensor:
        import torch

        asked, blocks = candidates.query.of_layer(layer), []
        for keys, _ in candidates.pairs(layer):
            heads, _, dims = keys.shape
            queries = asked.queries.to(keys.device).reshape(heads, -1, dims)  # [H, group x m, D]
            blocks.append(queries @ keys.mT * asked.scale)  # [H, group x m, k]
        weights = torch.cat(blocks, dim=2).softmax(-1)
        by_head = weights.reshape(len(weights), -1, asked.queries.shape[1], weights.shape[2])
        scores = by_head.amax(2).mean((0, 1))  # of [H, group, m, n]
        return softened(scores, candidates.positions)


def softened(scores: Tensor, positions: Positions) -> Tensor:
    """Even out the scores [n] of tokens at ascending stream `positions` [n].

    Takes the root of each score, less the lowest, so that a few very high ones don't decide alone,
    and adds to half of it a quarter of the roots of the tokens right before and after.
    """
    import torch

    roots = (scores - scores.min()).sqrt()
    adjacent = torch.from_numpy(positions[1:] == positions[:-1] + 1).to(roots)  # [n - 1]
    smoothed = roots / 2  # the answer often stands beside the token that the queries match
    smoothed[1:] += roots[:-1] * adjacent / 4
    smoothed[:-1] += roots[1:] * adjacent / 4
    return smoothed
