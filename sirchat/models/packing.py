"""Puts packed layers, of experts too, into a model, and their weights into one block of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from sirchat.memory.free_memory import trim_memory
from sirchat.models.packed import (
    Int4Linear,
    Int8Head,
    Int8Linear,
    PackedLinear,
    SharedEmbedding,
    quantize_int4,
    quantize_int8,
)

# Groups of layers with the same input; a decode step computes one product for each group.
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

_ALIGN = 64  # bytes


@torch.no_grad()
def pack_module(module: Any, bits: int) -> None:
    """Replace the linear layers of a model by packed ones of 8 or 4 bits, in place.

    The head gets 8 bits, and so does a layer whose shape does not allow 4. Embeddings stay, or read
    the weights that they share with the head.
    """
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    is_tied = embeddings.weight is head.weight
    for name, layer in list(module.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        weight = layer.weight.detach()
        packed: PackedLinear
        if layer is head:
            packed = eight = Int8Head(*quantize_int8(weight), layer.bias)
            if is_tied:
                shared = SharedEmbedding(embeddings, eight, weight.dtype)
                module.set_input_embeddings(shared)
        elif bits == 4 and Int4Linear.fits(*weight.shape):
            packed = Int4Linear.of_values(*quantize_int4(weight), layer.bias)
        else:
            packed = Int8Linear(*quantize_int8(weight), layer.bias)
        module.set_submodule(name, packed)
        fuse_projections(module, name, WeightStore(0))
    trim_memory()


def has_same_input(path: str) -> bool:
    """Whether other layers have the same input as the layer at `path`, and may be joined."""
    return any(path.rpartition(".")[2] in group for group in _SAME_INPUT)


def fuse_projections(module: Any, path: str, store: WeightStore) -> None:
    """Move the weights of the packed layer at `path` into `store`.

    Layers with the same input wait until all are packed, and are then joined if packed in one way.
    """
    owner, _, name = path.rpartition(".")
    names = next((group for group in _SAME_INPUT if name in group), (name,))
    layers = [getattr(module.get_submodule(owner), name, None) for name in names]
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    if len(packed) < len(layers):
        return
    if len(packed) == 1 or len({type(layer) for layer in packed}) > 1:
        for layer in packed:
            store.move(layer)
        return
    joined = packed[0].join_layers(packed)
    store.move(joined)
    start = 0
    for layer in packed:
        layer.take_rows(joined, start)
        start += layer.out_features


class WeightStore:
    """One block of `size` bytes for the weights of many layers.

    Without it, the temporary tensors of packing would leave gaps between these.
    """

    def __init__(self, size: int) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor without values in the block, or elsewhere if it has no room."""
        place = self._place(prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype) if place is None else place.view(dtype).view(shape)

    def move(self, layer: nn.Module) -> None:
        """Move a layer's buffers into the block, as far as it has room."""
        for name, buffer in layer.named_buffers():
            if _begin(buffer) == _begin(self._bytes):
                continue  # made by `empty`
            place = self._place(buffer.nbytes)
            if place is not None:
                here = place.view(buffer.dtype).view(buffer.shape)
                setattr(layer, name, here.copy_(buffer))

    def _place(self, size: int) -> Tensor | None:
        start = -(-self._used // _ALIGN) * _ALIGN
        if start + size > len(self._bytes):
            return None
        self._used = start + size
        return self._bytes[start : self._used]


class PackedExperts(nn.Module):
    """Replaces a layer's experts, stacked tensors in transformers, by packed layers of each expert.

    The gate and the biases of the experts `before` are still used.
    """

    def __init__(self, before: Any, layers: Mapping[Any, Sequence[PackedLinear]]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.ModuleList(layers[part]) for part in ("gate", "up", "down")
        )
        self.gate_up_proj_bias = getattr(before, "gate_up_proj_bias", None)  # [E, 2 F]
        self.down_proj_bias = getattr(before, "down_proj_bias", None)  # [E, K]
        before.gate_up_proj = before.down_proj = None
        self._before = (before,)  # in a tuple, so that it is not a submodule

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Sum, for each row of x [m, K], the outputs of its k experts `chosen` times `shares`."""
        out = torch.zeros_like(x)
        for expert in set(chosen.flatten().tolist()):
            rows, places = torch.where(chosen == expert)
            y = self._of_expert(expert, x[rows]) * shares[rows, places, None]
            out.index_add_(0, rows, y.to(out.dtype))
        return out

    def _of_expert(self, expert: int, x: Tensor) -> Tensor:
        before = self._before[0]
        gate, up = self.gate[expert](x), self.up[expert](x)  # [n, F] each
        if before.is_concatenated:
            both = torch.cat((gate, up), -1)
        else:  # the rows of gate and up alternate
            both = torch.stack((gate, up), -1).flatten(-2)
        if self.gate_up_proj_bias is not None:
            both = both + self.gate_up_proj_bias[expert]
        y: Tensor = self.down[expert](before._apply_gate(both))
        return y if self.down_proj_bias is None else y + self.down_proj_bias[expert]


def _begin(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
