"""Makes the attention mask of the paper Anchor-based LLMs (equation 4).

Text is divided into sequences, and each sequence ends with its anchor token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

# A function that takes indices of row, head, query and key as tensors, and returns a bool tensor.
# The result says whether the query attends to the key
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def anchor_mask(
    is_anchor: Tensor,
    document: Tensor | None = None,
    is_kept: Tensor | None = None,
    *,
    sinks: int = 0,
) -> Tensor:
    """The attention mask, bool [B, 1, T, T], under which text is only seen through its anchors.

    `is_anchor` is bool [B, T], whether each token is an anchor, which ends a sequence.
    """
    rows, length = is_anchor.shape
    document = torch.zeros_like(is_anchor, dtype=torch.int64) if document is None else document
    row = torch.arange(rows, device=is_anchor.device)[:, None, None, None]
    at = torch.arange(length, device=is_anchor.device)
    return _mask_function(is_anchor, document, is_kept, sinks)(row, row, at[:, None], at)


def block_mask(is_anchor: Tensor, document: Tensor, *, sinks: int = 0) -> Any:
    """The mask of anchor-based attention as a block mask of PyTorch's flex attention."""
    rows, length = is_anchor.shape
    mask = _mask_function(is_anchor, document, None, sinks)
    return create_block_mask(mask, rows, None, length, length, device=str(is_anchor.device))


def _mask_function(
    is_anchor: Tensor, document: Tensor, is_kept: Tensor | None, sinks: int
) -> MaskFunction:
    # A new document also begins a new sequence.
    sequence = sequence_numbers(is_anchor) + document * is_anchor.shape[1]
    visible_later = is_anchor if is_kept is None else is_anchor | is_kept
    is_sink = position_in_document(document) < sinks

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_sequence = sequence[row, query] == sequence[row, key]
        earlier = ~is_anchor[row, query] & visible_later[row, key]
        same_document = document[row, query] == document[row, key]
        return (query >= key) & same_document & (same_sequence | earlier | is_sink[row, key])

    return mask


def sequence_numbers(is_anchor: Tensor) -> Tensor:
    """The number of the sequence that each token belongs to, int [B, T], from 0 in each row.

    A sequence ends with its anchor. `is_anchor`, bool [B, T], says where the anchors are.
    """
    before: Tensor = is_anchor.long().cumsum(1) - is_anchor.long()
    return before


def position_in_document(document: Tensor) -> Tensor:
    """The position of each token in its document, int [B, T], from 0.

    `document`, int [B, T], has the number of each token's document.
    """
    length = document.shape[1]
    at = torch.arange(length, device=document.device).expand_as(document)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return at - torch.where(begins, at, 0).cummax(1).values
