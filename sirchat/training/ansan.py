"""What each token sees under anchor-based attention (Anchor-based LLMs, equation 4).

A sequence ends with its anchor. A token sees its own sequence, and of the sequences before it the
anchors alone; an anchor sees nothing but its own sequence, so that all of it must go into the
anchor's keys and values. Beyond the equation, documents in one row do not see each other; the first
`sinks` tokens of each are visible to all of it, as in a cache that holds them; and so are, but not
to anchors, the rows that are kept (section 6.1, where the whole source stays).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of row, head, query and key, all numbers: whether that query sees that key."""


def visible(
    is_anchor: Tensor,
    document: Tensor | None = None,
    is_kept: Tensor | None = None,
    *,
    sinks: int = 0,
) -> Tensor:
    """Bool [B, 1, T, T]: whether a token (third dimension) sees another (fourth).

    Args:
        is_anchor: bool [B, T].
        document: int [B, T], rising with each document that begins; None for one in each row.
        is_kept: bool [B, T]; none if None.
        sinks: first tokens of each document that all of it sees.
    """
    rows, length = is_anchor.shape
    document = torch.zeros_like(is_anchor, dtype=torch.int64) if document is None else document
    row = torch.arange(rows, device=is_anchor.device)[:, None, None, None]
    at = torch.arange(length, device=is_anchor.device)
    return _sees(is_anchor, document, is_kept, sinks)(row, row, at[:, None], at)


def block_mask(is_anchor: Tensor, document: Tensor, *, sinks: int = 0) -> Any:
    """The same for tokens [B, T] as a mask of blocks, which flex attention skips where it can.

    Attention then takes less time; making the mask still goes through a dense one of bools.
    """
    rows, length = is_anchor.shape
    sees = _sees(is_anchor, document, None, sinks)
    return create_block_mask(sees, rows, None, length, length, device=str(is_anchor.device))


def _sees(is_anchor: Tensor, document: Tensor, is_kept: Tensor | None, sinks: int) -> Sees:
    """The equation, and what goes beyond it."""
    # A new document begins a new sequence, too.
    sequence = sequences(is_anchor) + document * is_anchor.shape[1]
    free = is_anchor if is_kept is None else is_anchor | is_kept
    is_sink = position_in_document(document) < sinks

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = sequence[row, query] == sequence[row, key]
        others = ~is_anchor[row, query] & free[row, key]
        together = document[row, query] == document[row, key]
        return (query >= key) & together & (own | others | is_sink[row, key])

    return sees


def sequences(is_anchor: Tensor) -> Tensor:
    """The number of each token's sequence, int [B, T]; an anchor belongs to the one it ends."""
    before: Tensor = is_anchor.long().cumsum(1) - is_anchor.long()
    return before


def position_in_document(document: Tensor) -> Tensor:
    """Where each token stands in its document, int [B, T], from 0."""
    length = document.shape[1]
    at = torch.arange(length, device=document.device).expand_as(document)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return at - torch.where(begins, at, 0).cummax(1).values
