"""How much a token told the model: surprisal, in nats, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PassResult:
    """What a forward pass over m ids found.

    Attributes:
        surprisal: float32 [m - 1], of all ids but the first, in nats.
        logits: float32 [V], raw, after the last id.
    """

    surprisal: Tensor
    logits: Tensor

    @classmethod
    def of_logits(cls, logits: Tensor, ids: Sequence[int]) -> PassResult:
        """What the logits [m, V] of ids [m] say."""
        if len(ids) == 1:
            return cls(logits.new_empty(0), logits[0])
        with torch.inference_mode():
            after = torch.tensor(ids[1:], device=logits.device)
            # A copy, so that the other rows are freed.
            return cls(surprisal(logits[:-1], after), logits[-1].clone())


def surprisal(logits: Tensor, ids: Tensor) -> Tensor:
    """-log p(id) for each row: SirLLM's "token entropy" (arXiv:2405.12528, section 3.2).

    Args:
        logits: [m, V], as the model gives them: before temperature or any penalty.
        ids: [m], the token that came after each row's context.

    Returns:
        float32 [m], in nats, never below 0.
    """
    logits = logits.float()
    chosen = logits.gather(-1, ids[:, None])[:, 0]
    return (torch.logsumexp(logits, -1) - chosen).clamp_min(0.0)


def surprisal_of(logits: Tensor, token_id: int) -> float:
    """The same for one row [V] and one id."""
    # One fused kernel: for a single row, the number of kernels is what takes the time.
    return max(0.0, -torch.log_softmax(logits.float(), -1)[token_id].item())
