"""Puts packed layers into a transformers model, and their weights side by side in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sirchat.models.packed import (
    Int4Linear,
    Int8Head,
    Int8Linear,
    PackedLinear,
    SharedEmbedding,
    eight_bits,
    four_bits,
)
from sirchat.models.threads import trim_memory

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of a module that have the same input; a decode step then takes one product for all."""

_ALIGN = 64  # bytes


@torch.no_grad()
def pack_module(module: Any, bits: int) -> None:
    """Round the matrices of a transformers model to 8 or 4 bits, one after the other, in place.

    The output head gets 8 bits. Embeddings are shared with it if they are the same weights, and
    else stay.
    """
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    is_tied = embeddings.weight is head.weight
    for name, layer in list(module.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        weight = layer.weight.detach()
        packed: PackedLinear
        if layer is head:
            packed = eight = Int8Head(*eight_bits(weight), layer.bias)
            if is_tied:
                module.set_input_embeddings(SharedEmbedding(eight, weight.dtype))
        elif bits == 4 and Int4Linear.fits(*weight.shape):
            packed = Int4Linear(*four_bits(weight), layer.bias)
        else:
            packed = Int8Linear(*eight_bits(weight), layer.bias)
        module.set_submodule(name, packed)
        fuse_projections(module, name, WeightStore(0))
    trim_memory()


def fuse_projections(module: Any, path: str, store: WeightStore) -> None:
    """Move the weights of the packed layer at `path`, which was just put there, into `store`.

    Layers of the same input lie side by side, as one matrix, as soon as all of them are packed in
    the same way.
    """
    owner, _, name = path.rpartition(".")
    names = next((group for group in SAME_INPUT if name in group), (name,))
    layers = [getattr(module.get_submodule(owner), one, None) for one in names]
    packed = [one for one in layers if isinstance(one, PackedLinear)]
    if len(packed) < len(layers):
        return
    if len(packed) == 1 or len({type(one) for one in packed}) > 1:
        for one in packed:
            store.move(one)
        return
    whole = packed[0].joining(packed)
    store.move(whole)
    start = 0
    for one in packed:
        one.take(whole, start)
        start += one.out_features


class WeightStore:
    """One block of memory for the weights of many layers.

    What is computed on the way to a layer's weights then leaves no holes between them, of which
    memory would consist in the end.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8)
        self._used = 0

    def move(self, layer: nn.Module) -> None:
        """Move the buffers of a layer here; what has no room stays where it is."""
        for name, buffer in layer.named_buffers():
            start = -(-self._used // _ALIGN) * _ALIGN
            end = start + buffer.numel() * buffer.element_size()
            if end <= len(self._bytes):
                here = self._bytes[start:end].view(buffer.dtype).view(buffer.shape)
                setattr(layer, name, here.copy_(buffer))
                self._used = end
