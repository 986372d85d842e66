"""The attention mask of anchor-based attention (Anchor-based LLMs, equation 4).

A sequence ends with its anchor. A token attends to its own sequence, and to the anchors of earlier
sequences. An anchor attends to its own sequence only, so that its keys and values must represent
all of it. Beyond the equation, documents in one row do not attend to each other; the first `sinks`
tokens of a document are visible to all of it, as in a cache with sinks; and kept rows are visible
like anchors (section 6.1, where the whole source text stays).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From indices of row, head, query and key: whether that query attends to that key."""


def visible(
    is_anchor: Tensor,
    document: Tensor | None = None,
    is_kept: Tensor | None = None,
    *,
    sinks: int = 0,
) -> Tensor:
    """The mask, bool [B, 1, T, T]: whether a token (third dimension) attends to another (fourth).

    Args:
        is_anchor: bool [B, T].
        document: int [B, T], the number of each token's document; None for one in each row.
        is_kept: bool [B, T], further visible tokens; None for none.
        sinks: number of first tokens of each document that are visible to all of it.
    """
    rows, length = is_anchor.shape
    document = torch.zeros_like(is_anchor, dtype=torch.int64) if document is None else document
    row = torch.arange(rows, device=is_anchor.device)[:, None, None, None]
    at = torch.arange(length, device=is_anchor.device)
    return _mask_function(is_anchor, document, is_kept, sinks)(row, row, at[:, None], at)


def block_mask(is_anchor: Tensor, document: Tensor, *, sinks: int = 0) -> Any:
    """The same mask as a block mask for flex attention, which skips empty blocks.

    Building it still needs memory for a dense bool mask.
    """
    rows, length = is_anchor.shape
    mask = _mask_function(is_anchor, document, None, sinks)
    return create_block_mask(mask, rows, None, length, length, device=str(is_anchor.device))


def _mask_function(
    is_anchor: Tensor, document: Tensor, is_kept: Tensor | None, sinks: int
) -> MaskFunction:
    # A new document also begins a new sequence.
    sequence = sequences(is_anchor) + document * is_anchor.shape[1]
    visible_later = is_anchor if is_kept is None else is_anchor | is_kept
    is_sink = position_in_document(document) < sinks

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_sequence = sequence[row, query] == sequence[row, key]
        earlier = ~is_anchor[row, query] & visible_later[row, key]
        same_document = document[row, query] == document[row, key]
        return (query >= key) & same_document & (same_sequence | earlier | is_sink[row, key])

    return mask


def sequences(is_anchor: Tensor) -> Tensor:
    """The number of each token's sequence, int [B, T]; an anchor belongs to the one it ends."""
    before: Tensor = is_anchor.long().cumsum(1) - is_anchor.long()
    return before


def position_in_document(document: Tensor) -> Tensor:
    """The position of each token in its document, int [B, T], from 0."""
    length = document.shape[1]
    at = torch.arange(length, device=document.device).expand_as(document)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return at - torch.where(begins, at, 0).cummax(1).values
