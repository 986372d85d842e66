"""Layers whose weights stay packed in four or eight bits, by torch's own kernels for CPUs.

The kernels take bfloat16 (with float32 they are ten times slower), so inputs are rounded to it, and
results come back in the type of the input. They are made for few rows at a time. Where more are
read at once, the weights are unpacked for this one product, which takes less time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

GROUP = 32
"""Weights of a row that share a scale and a minimum in four bits."""

_BLOCK = 64  # rows that the four-bit kernel packs together on CPUs with AVX-512
_ALIGN = 64  # bytes
_FEW_4, _FEW_8 = 32, 8  # rows of input up to which the kernels are faster than unpacking


class Int4Linear(nn.Module):
    """y = x W^T + bias, with weights of four bits and a scale and a minimum for each group of 32.

    Args:
        q: uint8 [N, K], 0 to 15; `fits` says which shapes can be packed.
        scale, minimum: [N, K / 32]; a weight is `q * scale + minimum`.
        bias: [N], or None.
    """

    packed: Tensor
    scales: Tensor

    def __init__(
        self, q: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = q.shape
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)  # [N, K / 2]
        # The kernel computes (q - 8) scale + zero.
        pairs = torch.stack([scale, minimum + 8 * scale], -1).transpose(0, 1)  # [K / 32, N, 2]
        self.register_buffer("packed", packed)
        self.register_buffer("scales", pairs.contiguous().bfloat16())
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @staticmethod
    def fits(rows: int, columns: int) -> bool:
        """Whether a matrix [rows, columns] can be packed here."""
        return rows % _BLOCK == 0 and columns % GROUP == 0 and is_available()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).bfloat16()
        y = self._product(flat) if len(flat) <= _FEW_4 else flat @ self.unpacked()
        return _like(y, x, self.bias)

    def of_row(self, x: Tensor) -> Tensor:
        """The same for one bfloat16 row [1, K], without the costs of a module: [1, N]."""
        y = self._product(x)
        return y if self.bias is None else y.add_(self.bias)

    def _product(self, flat: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            flat, self.packed, GROUP, self.scales
        )
        return y

    def unpacked(self) -> Tensor:
        """The weights as bfloat16, transposed: [K, N]."""
        columns, rows = self.in_features, self.out_features
        blocks = self.packed.view(-1, columns, _BLOCK // 2)  # [N / 64, K, 32], two rows a byte
        out = torch.empty(columns, rows, dtype=torch.bfloat16)
        halves = out.view(columns, -1, 2, _BLOCK // 2)  # [K, N / 64, 2, 32]
        halves[:, :, 0] = (blocks & 15).transpose(0, 1)
        halves[:, :, 1] = (blocks >> 4).transpose(0, 1)
        grouped = out.view(-1, GROUP, rows)  # [K / 32, 32, N]
        scale, zero = self.scales.unbind(-1)  # [K / 32, N]
        torch.addcmul(zero[:, None], grouped.sub_(8), scale[:, None], out=grouped)
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, 4 bits"


class Int8Linear(nn.Module):
    """y = x W^T + bias, with weights of eight bits and a scale for each row.

    Args:
        q: int8 [N, K].
        scale: bfloat16 [N]; a weight is `q * scale`.
        bias: [N], or None.
    """

    q: Tensor
    scale: Tensor

    def __init__(self, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = q.shape
        self.register_buffer("q", q)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).bfloat16()
        if len(flat) <= _FEW_8:
            y = torch.ops.aten._weight_int8pack_mm(flat, self.q, self.scale)
        else:
            y = nn.functional.linear(flat, self.q.bfloat16()) * self.scale
        return _like(y, x, self.bias)

    def of_row(self, x: Tensor) -> Tensor:
        """The same for one bfloat16 row [1, K], without the costs of a module: [1, N]."""
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.q, self.scale)
        return y if self.bias is None else y.add_(self.bias)

    def rows(self, which: Tensor) -> Tensor:
        """Rows `which` [...] of the weights as float32: [..., K]."""
        return self.q[which].float() * self.scale[which].float()[..., None]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, 8 bits"


class SharedEmbedding(nn.Module):
    """The embeddings of a model whose output head has the same weights, and holds them.

    Args:
        head: holds the weights.
        dtype: type of the embeddings.
    """

    def __init__(self, head: Int8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._head = (head,)  # not a submodule, whose buffers would count twice
        self._dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return self._head[0].rows(ids).to(self._dtype)


def eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [N, K] rounded to 255 steps in each row: q and scale of `Int8Linear`."""
    largest = weight.abs().amax(1, keepdim=True).float()  # [N, 1]
    scale = (largest.clamp_min(1e-12) / 127).bfloat16()
    return (weight / scale).round_().clamp_(-127, 127).to(torch.int8), scale[:, 0]


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight [N, K] rounded to 16 steps in each group: q, scale and minimum of `Int4Linear`."""
    groups = weight.float().view(len(weight), -1, GROUP)
    minimum, most = groups.amin(-1), groups.amax(-1)
    scale = ((most - minimum) / 15).clamp_min(1e-12)
    q = ((groups - minimum[..., None]) / scale[..., None]).round().clamp(0, 15)
    return q.to(torch.uint8).view_as(weight), scale, minimum


@torch.no_grad()
def pack_module(module: Any, bits: int) -> None:
    """Round the matrices of a transformers model to 8 or 4 bits, one after the other, in place.

    Embeddings are shared with the output head if they are the same weights, and else stay.
    """
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    is_tied = embeddings.weight is head.weight
    for name, layer in list(module.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        weight = layer.weight.detach()
        if bits == 4 and Int4Linear.fits(*weight.shape) and not (layer is head and is_tied):
            packed: nn.Module = Int4Linear(*four_bits(weight), layer.bias)
        else:
            packed = Int8Linear(*eight_bits(weight), layer.bias)
            if layer is head and is_tied:
                module.set_input_embeddings(SharedEmbedding(packed, weight.dtype))
        module.set_submodule(name, packed)


def packed_buffers(module: nn.Module) -> Iterator[Tensor]:
    """The buffers of all packed layers."""
    for layer in module.modules():
        if isinstance(layer, Int4Linear | Int8Linear):
            yield from layer.buffers()


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


@cache
def is_available() -> bool:
    """Whether this torch packs four bits in the way that `Int4Linear.unpacked` takes apart."""
    q = (torch.arange(_BLOCK)[:, None] + 3 * torch.arange(GROUP)) % 16  # [64, 32]
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        half = packed.view(1, GROUP, _BLOCK // 2)
    except (RuntimeError, AttributeError):
        return False
    unpacked = torch.cat((half & 15, half >> 4), -1)[0].T
    return torch.equal(unpacked.long(), q)


def _like(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """A product y [m, N] in the shape and type of its input x [..., K]."""
    y = y.to(x.dtype).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias
