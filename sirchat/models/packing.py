"""Puts packed layers, including experts, into a model, and their weights into one memory block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from sirchat.memory.free_memory import trim_memory
from sirchat.models.packed import (
    Int8Head,
    Int8Linear,
    PackedLinear,
    SharedEmbedding,
    int4_class,
    quantize_int4,
    quantize_int8,
)

Rounded = TypeVar("Rounded", bound=tuple[Tensor, ...])

# Groups of layers with the same input; a decode step computes one product for each group.
_SAME_INPUT_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

_ALIGNMENT_BYTES = 64
_ROUNDED_ROWS = 4096  # rows of a matrix that are rounded at a time on a GPU
_CPU = torch.device("cpu")


@torch.no_grad()
def pack_module(module: Any, bits: int, device: torch.device | None = None) -> None:
    """Replace a model's linear layers in place by packed ones of 8 or 4 bits, on `device`.

    The head gets 8 bits, and so do layers whose shape does not allow 4. Embeddings stay, or read
    the head's weights if they share them. Without `device`, layers stay where they are.
    """
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    is_tied, device = embeddings.weight is head.weight, device or module.device
    four, store = int4_class(device), WeightStore(0, device)
    for name, layer in list(module.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        weight = layer.weight.detach()
        packed: PackedLinear
        if layer is head:
            packed = eight = Int8Head(*_rounded(quantize_int8, weight, device), layer.bias)
            if is_tied:
                shared = SharedEmbedding(embeddings, eight, weight.dtype)
                module.set_input_embeddings(shared)
        elif bits == 4 and four.fits(*weight.shape):
            packed = four.from_values(*_rounded(quantize_int4, weight, device), layer.bias)
        else:
            packed = Int8Linear(*_rounded(quantize_int8, weight, device), layer.bias)
        module.set_submodule(name, packed)
        fuse_projections(module, name, store)
    trim_memory()


def may_be_joined(path: str) -> bool:
    """Whether the layer at `path` may be joined with other layers that have the same input."""
    return any(path.rpartition(".")[2] in group for group in _SAME_INPUT_NAMES)


def fuse_projections(module: Any, path: str, store: WeightStore) -> None:
    """Move the weights of the packed layer at `path` into `store`.

    Layers with the same input wait until all are packed; if all are packed alike, they are joined.
    """
    owner, _, name = path.rpartition(".")
    names = next((group for group in _SAME_INPUT_NAMES if name in group), (name,))
    layers = [getattr(module.get_submodule(owner), name, None) for name in names]
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    if len(packed) < len(layers):
        return
    kinds = {(type(layer), next(layer.buffers()).shape[1:]) for layer in packed}
    if len(packed) == 1 or len(kinds) > 1:
        for layer in packed:
            store.move(layer)
        return
    joined = packed[0].join_layers(packed, store.empty)
    store.move(joined)
    start = 0
    for layer in packed:
        layer.take_rows(joined, start)
        start += layer.out_features


class WeightStore:
    """One block of `size` bytes on a device for the weights of many layers.

    Without it, the temporary tensors of packing would leave gaps between the weights.
    """

    def __init__(self, size: int, device: torch.device = _CPU) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """Make an uninitialized tensor in the block; if full or for another `device`, outside."""
        block_device = self._bytes.device
        if device is None or device == block_device:
            view = self._take(prod(shape) * dtype.itemsize)
            if view is not None:
                return view.view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device or block_device)

    def move(self, layer: nn.Module) -> None:
        for name, buffer in layer.named_buffers():
            if 0 <= buffer.data_ptr() - self._bytes.data_ptr() < len(self._bytes):
                continue  # made by `empty`
            view = self._take(buffer.nbytes)
            if view is None:
                setattr(layer, name, buffer.to(self._bytes.device))
            else:
                here = view.view(buffer.dtype).view(buffer.shape)
                setattr(layer, name, here.copy_(buffer))

    def _take(self, size: int) -> Tensor | None:
        start = -(-self._used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if start + size > len(self._bytes):
            return None
        self._used = start + size
        return self._bytes[start : self._used]


class PackedExperts(nn.Module):
    """Replaces a layer's experts, stacked tensors in transformers, by packed layers of each expert.

    The gate and the biases of the module `original` are still used.
    """

    def __init__(self, original: Any, layers: Mapping[Any, Sequence[PackedLinear]]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.ModuleList(layers[part]) for part in ("gate", "up", "down")
        )
        self.gate_up_proj_bias = getattr(original, "gate_up_proj_bias", None)  # [E, 2 F]
        self.down_proj_bias = getattr(original, "down_proj_bias", None)  # [E, K]
        original.gate_up_proj = original.down_proj = None
        self._original = (original,)  # in a tuple, so that it is not a submodule

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Sum each row's k `chosen` experts, weighted by `shares`; x and the result are [m, K]."""
        out = torch.zeros_like(x)
        for expert in set(chosen.flatten().tolist()):
            row_indices, choice_indices = torch.where(chosen == expert)
            share = shares[row_indices, choice_indices, None]
            y = self._expert_output(expert, x[row_indices]) * share
            out.index_add_(0, row_indices, y.to(out.dtype))
        return out

    def _expert_output(self, expert: int, x: Tensor) -> Tensor:
        original = self._original[0]
        gate, up = self.gate[expert](x), self.up[expert](x)  # [n, F] each
        if original.is_concatenated:
            both = torch.cat((gate, up), -1)
        else:  # the rows of gate and up alternate
            both = torch.stack((gate, up), -1).flatten(-2)
        if self.gate_up_proj_bias is not None:
            both = both + self.gate_up_proj_bias[expert]
        y: Tensor = self.down[expert](original._apply_gate(both))
        return y if self.down_proj_bias is None else y + self.down_proj_bias[expert]


def _rounded(
    quantize: Callable[[Tensor], Rounded], weight: Tensor, device: torch.device
) -> Rounded:
    """Round a matrix [N, K] by `quantize`; on a GPU from float32, so that results equal a CPU's."""
    if device.type == "cpu":
        return quantize(weight)
    parts = [quantize(rows.to(device).float()) for rows in torch.split(weight, _ROUNDED_ROWS)]
    return cast(Rounded, tuple(torch.cat(each) for each in zip(*parts, strict=True)))
