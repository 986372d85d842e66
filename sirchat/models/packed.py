"""Linear layers whose weights stay packed in four to eight bits.

On a CPU, torch's kernels round inputs to bfloat16 (float32 inputs would take ten times as long),
and are made for few rows. For many rows, weights are unpacked for each product; on a GPU some rows
at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from sirchat.models.gguf.header import BLOCK_LAYOUTS, NATIVE_ROW_BLOCK

# Number of neighbouring four-bit weights that share a scale and a minimum.
GROUP = 32

_UNPACKED_ROWS = 4096  # that are unpacked at a time; on a CPU only of eight bits
_GPU_KERNEL_ROWS = 8  # rows that kernels multiply without unpacked weights
REFINED_LOGITS = 16  # largest logits of a row, which are computed again in float32
_REFINED_ROWS = 32  # for which that is done at a time

UNLIMITED_ROWS = 2**30  # a limit to a number of rows that is none

Unpacked = Literal["bfloat16", "float32"]


class MatmulMethod(NamedTuple):
    """How packed weights are multiplied: by torch's kernels, or after unpacking."""

    dtype: Unpacked = "bfloat16"  # to which they are unpacked
    # Most rows for which torch's kernels for four and for eight bits are faster than unpacking
    max_kernel_rows_4bit: int = 32
    max_kernel_rows_8bit: int = 8
    max_native_rows: int = 0  # for which `products.cpp` is fastest, but for blocks, always
    gpu_kernels: GpuKernels | None = None  # instead of torch's operations

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


class GpuWeights(NamedTuple):
    """Weights [N, K] as `packed_kernels.py` reads them: with minima, or symmetric around 0.

    The kind of `scales`: `rows`, one for each; `bfloat16`, a scale for each 32 columns, and the
    weight that 8 stands for; `halves`, float16 scales and minima; `codes`, multiples of `factors`.
    """

    words: Tensor  # uint8 [N, K / 2], the order of `FourBit.nibbles`, or int8 [N, K]
    scales: Tensor
    bits: int  # in `words`: 4 or 8
    scale_kind: Literal["rows", "bfloat16", "halves", "codes"]
    has_minima: bool
    high: Tensor | None = None  # int32 [N, K / 32 high_bits]
    high_bits: int = 0
    factors: Tensor | None = None  # float16 [N, K / 256], or int32 for pairs of float16


class GpuKernels(NamedTuple):
    """Kernels for packed weights on a GPU."""

    unpack: Callable[[GpuWeights, slice, torch.dtype], Tensor]  # some rows [n, K]
    multiply: Callable[[Tensor, GpuWeights], Tensor]  # a few rows x [m, K]: float32 [m, N]


class PackedLinear(nn.Module, ABC):
    """A linear layer whose weights [N, K] stay packed in four to eight bits."""

    in_features: int  # K
    out_features: int  # N
    bias: nn.Parameter | None  # [N]
    # The layer with the weights of this one and of others with the same input (`fuse_projections`);
    # in a tuple, so that torch does not count its buffers twice.
    joined: tuple[PackedLinear] | None = None
    matmul_method = MatmulMethod()  # see `set_matmul_method`
    bits: int
    row_dims: Mapping[str, int]  # for each buffer, its dimension of N rows

    @property
    def max_native_rows(self) -> int:
        """The most rows that `products.cpp` may multiply with these weights; 0 if it can't."""
        return self.matmul_method.max_native_rows if self.fits_native_products else 0

    @property
    def fits_native_products(self) -> bool:
        return self.in_features % GROUP == 0 and self.out_features >= NATIVE_ROW_BLOCK

    @abstractmethod
    def unpacked(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Unpack the weights [K, N] to `dtype`; eight-bit weights do not include the scales."""

    @abstractmethod
    def multiply_packed(self, x: Tensor) -> Tensor:
        """Multiply a few rows x [m, K] with the packed weights: x W^T [m, N], without a bias."""

    def _rows_for_gpu(self, x: Tensor) -> Tensor:
        """The rows [m, K] of x [..., K], in the number type of products on a GPU."""
        # float16 would overflow: eight-bit weights are multiplied without their scales
        dtype = torch.float32 if x.dtype == torch.float32 else torch.bfloat16
        return x.reshape(-1, self.in_features).to(dtype)

    @property
    def row_kinds(self) -> list[tuple[torch.dtype, torch.Size]]:
        """What layers must have in common to be joined: of each buffer, but for its rows."""
        buffers = [(getattr(self, name), dim) for name, dim in self.row_dims.items()]
        return [(buffer.dtype, buffer.narrow(dim, 0, 0).shape) for buffer, dim in buffers]

    @classmethod
    def join_layers(cls, parts: Sequence[Self]) -> Self:
        """Make one layer without bias of the rows of all `parts`."""
        dims = cls.row_dims.items()
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim) for name, dim in dims))

    def take_rows(self, layer: Self, start: int) -> None:
        """Use the rows of a joined layer from `start` on as this layer's weights."""
        for name, dim in self.row_dims.items():
            setattr(self, name, getattr(layer, name).narrow(dim, start, self.out_features))
        self.joined = (layer,)


class Int4Linear(PackedLinear):
    """A layer on a CPU with four-bit weights in groups of 32 columns: `q * scale + minimum`."""

    bits = 4
    row_dims: Mapping[str, int] = {"packed": 0, "scales": 1}
    packed: Tensor
    scales: Tensor

    def __init__(self, packed: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.shape[1] * 2, len(packed)
        # here packed [N, K / 2], as torch's kernel has it; scales, bfloat16 [K / 32, N, 2], has
        # scale and zero: each weight is (q - 8) * scale + zero
        for name, buffer in zip(self.row_dims, (packed, scales), strict=True):
            self.register_buffer(name, buffer)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def from_values(
        cls, q: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None = None
    ) -> Self:
        """Make a layer from q, uint8 [N, K], 0 to 15, and scale and minimum, [N, K / 32]."""
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        return cls(packed, _scale_zero_pairs(scale, minimum), bias)

    @classmethod
    def from_nibbles(cls, nibbles: Tensor, scale: Tensor, minimum: Tensor) -> Self:
        """Make a layer without bias from `FourBit.nibbles`, in a third of the time that q takes."""
        groups, half = nibbles.shape[1], int4_block_rows() // 2
        halves = _halve_blocks(nibbles, 0)  # [N / block, 2, half, K / 32, 16]
        upper, lower = halves.permute(0, 1, 3, 4, 2).contiguous().unbind(1)
        packed = torch.empty(len(upper), groups, 2, 16, half, dtype=torch.uint8)
        torch.bitwise_or(upper & 15, lower << 4, out=packed[:, :, 0])
        torch.bitwise_or(upper >> 4, lower & 0xF0, out=packed[:, :, 1])
        return cls(packed.view(len(nibbles), -1), _scale_zero_pairs(scale, minimum))

    @staticmethod
    def fits(rows: int, columns: int) -> bool:
        """Whether a matrix of this shape can be packed in four bits on this machine."""
        block = int4_block_rows()
        return block > 0 and rows % block == 0 and columns % GROUP == 0

    def forward(self, x: Tensor) -> Tensor:
        flat, method = x.reshape(-1, self.in_features), self.matmul_method
        if len(flat) <= max(method.max_kernel_rows_4bit, self.max_native_rows):
            return _add_bias(self.multiply_packed(flat), x, self.bias)
        flat = flat.to(method.torch_dtype)
        return _add_bias(flat @ self.unpacked(flat.dtype), x, self.bias)

    def multiply_packed(self, x: Tensor) -> Tensor:
        scales = self.scales.contiguous()  # no copy, unless the layer is part of a joined one
        if len(x) <= self.max_native_rows:
            own: Tensor = torch.ops.sirchat.multiply_4(x.float().contiguous(), self.packed, scales)
            return own
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        y: Tensor = multiply(x.bfloat16(), self.packed, GROUP, scales)
        return y

    def unpacked(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        columns, rows, size = self.in_features, self.out_features, int4_block_rows() // 2
        blocks = self.packed.view(-1, columns, size)  # [N / block, K, size], two rows a byte
        out = torch.empty(columns, rows, dtype=dtype)
        halves = _halve_blocks(out, 1)  # [K, N / block, 2, size]
        for half, q in enumerate((blocks & 15, blocks >> 4)):
            halves[:, :, half] = q.view(torch.int8).sub_(8).transpose(0, 1)
        grouped = out.view(-1, GROUP, rows)  # [K / 32, 32, N]
        # Copies, because a stride of 2 takes five times as long in the next line.
        scale, zero = (x.contiguous().to(dtype) for x in self.scales.unbind(-1))  # [K / 32, N]
        return torch.addcmul(zero[:, None], grouped, scale[:, None], out=grouped).view_as(out)


class BlockLinear(PackedLinear):
    """A layer on a CPU with blocks of a GGUF file, which only the library in C++ multiplies."""

    row_dims: Mapping[str, int] = {"blocks": 0}
    blocks: Tensor  # uint8 [N, K / columns, bytes]; the number of bytes tells the format

    def __init__(self, blocks: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        size = blocks.shape[2]
        layout = next(one for one in BLOCK_LAYOUTS.values() if one.row_bytes == size)
        self.out_features, self.in_features = len(blocks), blocks.shape[1] * layout.columns
        self.bits = layout.bits
        self.register_buffer("blocks", blocks)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def empty(cls, kind: str, rows: int, columns: int) -> Self:
        layout = BLOCK_LAYOUTS[kind]
        shape = rows, columns // layout.columns, layout.row_bytes
        return cls(torch.empty(shape, dtype=torch.uint8))

    @staticmethod
    def fits(kind: str, rows: int, columns: int) -> bool:
        """Whether a matrix in blocks of this kind can be packed."""
        layout = BLOCK_LAYOUTS.get(kind)
        return layout is not None and layout.fits(rows, columns)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        return _add_bias(self.multiply_packed(flat), x, self.bias)

    def multiply_packed(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.sirchat.multiply_blocks(x.float().contiguous(), self.blocks)
        return y

    def unpacked(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.rows(torch.arange(self.out_features)).T.to(dtype)

    def rows(self, indices: Tensor) -> Tensor:
        """Unpack the rows with these indices [...]; returns float32 [..., K]."""
        flat = indices.flatten().long()
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.out_features:
            raise IndexError(f"rows {flat.tolist()} of {self.out_features}")
        rows: Tensor = torch.ops.sirchat.unpack_rows(self.blocks, flat)
        return rows.view(*indices.shape, -1)


class GpuLinear(PackedLinear):
    """A layer whose weights the GPU kernels read; elsewhere, torch unpacks some rows at a time."""

    @property
    def fits_native_products(self) -> bool:
        return False

    @property
    @abstractmethod
    def gpu_weights(self) -> GpuWeights:
        """The weights as the kernels read them."""

    @abstractmethod
    def unpacked_rows(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Unpack n rows; returns [n, K]."""

    def forward(self, x: Tensor) -> Tensor:
        return _add_bias(self.multiply_packed(self._rows_for_gpu(x)), x, self.bias)

    def multiply_packed(self, x: Tensor) -> Tensor:
        starts = range(0, self.out_features, _UNPACKED_ROWS)
        parts = (slice(start, start + _UNPACKED_ROWS) for start in starts)
        kernels, weights = self.matmul_method.gpu_kernels, self.gpu_weights
        if kernels is None:
            return torch.cat([x @ self.unpacked_rows(rows, x.dtype).T for rows in parts], 1)
        if len(x) <= _GPU_KERNEL_ROWS:
            return kernels.multiply(x, weights)
        return torch.cat([x @ kernels.unpack(weights, rows, x.dtype).T for rows in parts], 1)

    def unpacked(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.unpacked_rows(slice(None), dtype).T


class Int4GpuLinear(GpuLinear, Int4Linear):
    """A layer with the weights of an `Int4Linear`, in the layout of the GPU kernels.

    `nibbles` is uint8 [N, K / 2] in the order of `FourBit.nibbles`; `scales` is [N, K / 32, 2].
    """

    bits, row_dims = 4, {"nibbles": 0, "scales": 0}
    nibbles: Tensor

    @classmethod
    def from_values(
        cls, q: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None = None
    ) -> Self:
        first, second = q.view(len(q), -1, 2, GROUP // 2).unbind(2)  # halves of the groups
        return cls.from_nibbles(first | second << 4, scale, minimum, bias)

    @classmethod
    def from_nibbles(
        cls, nibbles: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None = None
    ) -> Self:
        scales = _scale_zero_pairs(scale, minimum).transpose(0, 1)  # [N, K / 32, 2]
        return cls(nibbles.flatten(1), scales.contiguous(), bias)

    @staticmethod
    def fits(rows: int, columns: int) -> bool:
        return columns % GROUP == 0

    @property
    def gpu_weights(self) -> GpuWeights:
        scales = self.scales.view(torch.int32)
        return GpuWeights(self.nibbles, scales, 4, "bfloat16", has_minima=True)

    def unpacked_rows(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        groups = self.nibbles[rows].view(-1, self.in_features // GROUP, GROUP // 2)
        q = torch.cat((groups & 15, groups >> 4), -1).view(torch.int8).sub_(8)  # [n, K / 32, 32]
        scale, zero = self.scales[rows, :, :, None].to(dtype).unbind(2)  # [n, K / 32, 1]
        return torch.addcmul(zero, q.to(dtype), scale).flatten(1)  # [n, K]


class BlockGpuLinear(GpuLinear):
    """A layer with the bits and values of blocks of a GGUF file, as `split_blocks` returns them."""

    row_dims: Mapping[str, int] = {"words": 0, "high": 0, "scales": 0, "factors": 0}
    words: Tensor  # uint8 [N, K / 2], the order of `FourBit.nibbles`, or int8 [N, K]
    high: Tensor  # int32 [N, K / 32, 0 to 2]: the bits above the lowest four
    scales: Tensor  # float16 [N, K / 32, 1 or 2], or [N, K / 32, 2] of eight bits
    factors: Tensor  # float16 [N, K / 256, 1 or 2]: what the scales of eight bits multiply

    def __init__(self, *parts: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        for name, part in zip(self.row_dims, parts, strict=True):
            self.register_buffer(name, part)
        self.out_features, groups = self.scales.shape[:2]
        self.in_features, self.high_bits = groups * GROUP, self.high.shape[2]
        self.bits = self.words.shape[1] * 8 // self.in_features + self.high_bits
        self.has_codes = self.factors.shape[1] > 0
        self.has_minima = (self.factors if self.has_codes else self.scales).shape[2] == 2
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def gpu_weights(self) -> GpuWeights:
        def pairs(floats: Tensor) -> Tensor:
            return floats.view(torch.int32) if self.has_minima else floats

        scales = self.scales.view(torch.int16) if self.has_codes else pairs(self.scales)
        factors = pairs(self.factors) if self.has_codes else None
        return GpuWeights(
            self.words,
            scales,
            self.bits - self.high_bits,
            "codes" if self.has_codes else "halves",
            self.has_minima,
            self.high,
            self.high_bits,
            factors,
        )

    def rows(self, indices: Tensor) -> Tensor:
        """Unpack the rows with these indices [...]; returns float32 [..., K]."""
        flat = self.unpacked_rows(indices.flatten(), torch.float32)
        return flat.view(*indices.shape, self.in_features)

    def unpacked_rows(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        numbers = self.scales[rows].float()  # [n, K / 32, 1 or 2]
        if self.has_codes:
            blocks = numbers.view(len(numbers), -1, 8, 2)
            numbers = (blocks * self.factors[rows, :, None].float()).flatten(1, 2)
        shape = numbers.shape[:2]
        q = self.words[rows].view(*shape, -1)
        if self.bits < 8:
            q = torch.cat((q & 15, q >> 4), -1)  # [n, K / 32, 32]
        if self.high_bits:
            shifts = torch.arange(0, 8, self.high_bits, device=q.device, dtype=torch.uint8)
            # Each byte has bits of as many columns, which lie four apart.
            planes = self.high[rows].view(torch.uint8).view(*shape, 1, self.high_bits, 1, 4)
            upper = planes >> shifts.view(-1, 1, 2, 1)
            q |= (upper & (1 << self.high_bits) - 1).view_as(q) << 4
        if not self.has_minima:
            center = 1 << self.bits - 1 if self.bits < 8 else 0
            q = (q.view(torch.int8) - center).view(*shape, numbers.shape[2], -1)
            return q.float().mul_(numbers[..., None]).flatten(1).to(dtype)
        scale, minimum = torch.split(numbers, 1, -1)
        minimum = -minimum if self.has_codes else minimum
        return torch.addcmul(minimum, q.float(), scale).flatten(1).to(dtype)


class Int8Linear(PackedLinear):
    """A linear layer with eight-bit weights `q * scale`; q is int8 [N, K], scale bfloat16 [N]."""

    bits, row_dims = 8, {"q": 0, "scale": 0}
    q: Tensor
    scale: Tensor

    def __init__(self, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = q.shape
        self.register_buffer("q", q)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def gpu_weights(self) -> GpuWeights:
        return GpuWeights(self.q, self.scale, 8, "rows", has_minima=False)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu:
            return _add_bias(self._multiply_parts(self._rows_for_gpu(x)), x, self.bias)
        flat, method = x.reshape(-1, self.in_features), self.matmul_method
        if len(flat) <= max(method.max_kernel_rows_8bit, self.max_native_rows):
            return _add_bias(self.multiply_packed(flat), x, self.bias)
        return _add_bias(self._multiply_parts(flat.to(method.torch_dtype)), x, self.bias)

    def unpacked(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.q.to(dtype).T

    def _multiply_parts(self, x: Tensor) -> Tensor:
        kernels = self.matmul_method.gpu_kernels
        if kernels is not None and len(x) <= _GPU_KERNEL_ROWS and not self.in_features % GROUP:
            return kernels.multiply(x, self.gpu_weights)
        y = x.new_empty(len(x), self.out_features)
        # A large vocabulary, unpacked as a whole, would take gigabytes.
        for start in range(0, self.out_features, _UNPACKED_ROWS):
            rows = slice(start, start + _UNPACKED_ROWS)
            torch.mul(x @ self.q[rows].to(x.dtype).T, self.scale[rows], out=y[:, rows])
        return y

    def multiply_packed(self, x: Tensor) -> Tensor:
        if not x.is_cpu:
            return self._multiply_parts(x.bfloat16())
        if len(x) <= self.max_native_rows:
            own: Tensor = torch.ops.sirchat.multiply_8(x.float().contiguous(), self.q, self.scale)
            return own
        y: Tensor = torch.ops.aten._weight_int8pack_mm.default(x.bfloat16(), self.q, self.scale)
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """Unpack the rows with these indices [...]; returns float32 [..., K]."""
        return self.q[indices].float() * self.scale[indices].float()[..., None]


class RefinedHead(PackedLinear):
    """A packed output head; its largest logits are computed again in float32.

    In bfloat16, logits have steps of 0.06 to 0.12: close ones would be equal, and surprisal wrong.
    """

    @abstractmethod
    def rows(self, indices: Tensor) -> Tensor:
        """Unpack the rows with these indices [...]; returns float32 [..., K]."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).float()  # [..., V]
        return self._refine_logits(y.view(-1, self.out_features), x).view_as(y)

    def refined_logits(self, x: Tensor) -> Tensor:
        """Compute float32 logits [m, V] from a few hidden states [m, K]."""
        y = self.multiply_packed(x).float()
        y = y if self.bias is None else y + self.bias
        for at in range(len(x)):
            self._refine_logits(y[at : at + 1], x[at : at + 1])  # in place
        return y

    def _refine_logits(self, y: Tensor, x: Tensor) -> Tensor:
        """Compute the largest of the logits y [m, V] of x [..., K] again, in place."""
        top = y.topk(min(REFINED_LOGITS, self.out_features)).indices  # [m, k]
        rows = x.reshape(-1, self.in_features, 1).float()  # [m, K, 1]
        for at in range(0, len(top), _REFINED_ROWS):
            some = slice(at, at + _REFINED_ROWS)
            refined = (self.rows(top[some]) @ rows[some])[..., 0]  # [m, k]
            if self.bias is not None:
                refined = refined + self.bias[top[some]]
            y[some].scatter_(1, top[some], refined)
        return y


class Int8Head(RefinedHead, Int8Linear):
    rows = Int8Linear.rows


class BlockHead(RefinedHead, BlockLinear):
    rows = BlockLinear.rows


class BlockGpuHead(RefinedHead, BlockGpuLinear):
    rows = BlockGpuLinear.rows


RowLinear = Int8Linear | BlockLinear | BlockGpuLinear  # of which single rows can be unpacked


class SharedEmbedding(nn.Module):
    """Token embeddings read from the output head's weights; replaces the module `original`."""

    def __init__(self, original: Any, head: RowLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._head = (head,)  # not a submodule, whose buffers would count twice
        self._dtype = dtype
        scale = getattr(original, "scalar_embed_scale", 1.0)  # as in Gemma
        self.scale = float(torch.tensor(scale, dtype=dtype))

    @property
    def head(self) -> RowLinear:
        return self._head[0]

    def forward(self, ids: Tensor) -> Tensor:
        return (self._head[0].rows(ids) * self.scale).to(self._dtype)


def has_fast_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor without converting it to float32."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_matrix_units() -> bool:
    """Whether the library has products by matrix units (`tiles.cpp`), fastest for many rows."""
    return torch._C._dispatch_has_kernel("sirchat::score_8")


def set_matmul_method(module: nn.Module, method: MatmulMethod, place: str = "cpu") -> None:
    """Let packed layers multiply by `method`, if they are on this type of device."""
    for layer in _layers_of(module):
        if next(layer.buffers()).device.type != place:
            continue
        layer.matmul_method = method
        if layer.joined is not None:
            layer.joined[0].matmul_method = method


def matmul_method_of(module: nn.Module) -> MatmulMethod | None:
    """How packed layers of a module on a CPU multiply; None if it has no such layer."""
    on_cpu = (layer for layer in _layers_of(module) if next(layer.buffers()).is_cpu)
    return next((layer.matmul_method for layer in on_cpu), None)


def packed_buffers(module: nn.Module) -> Iterator[Tensor]:
    for layer in _layers_of(module):
        yield from layer.buffers()


def int4_class(device: torch.device) -> type[Int4Linear]:
    return Int4Linear if device.type == "cpu" else Int4GpuLinear


def int4_block_rows() -> int:
    """Rows that torch's four-bit kernel packs together on this machine: 64, 32, 16; 0 if unknown.

    A byte holds one row in its low four bits, another in its high four bits (`_halve_blocks`).
    """
    return int4_layout()[0]


@cache
def int4_layout() -> tuple[int, bool]:
    """The result of `int4_block_rows`, and whether the two rows of a byte are adjacent."""
    # 64 rows with AVX-512, 32 with AVX2, each byte from both halves of them; 16 (32 with wider
    # vectors) on ARM, and 32 on other processors, each byte with an even row and the next.
    q = (torch.arange(64)[:, None] + 3 * torch.arange(GROUP)) % 16  # [64, 32]
    with suppress(RuntimeError, AttributeError):
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        for layout in product((64, 32, 16), (False, True)):
            low, high = _halve_blocks(q, 0, layout).unbind(1)  # [64 / block, block / 2, 32]
            if torch.equal((low | high << 4).transpose(1, 2).reshape(64, -1), packed.long()):
                return layout
    return 0, False


def _halve_blocks(x: Tensor, dim: int, layout: tuple[int, bool] | None = None) -> Tensor:
    """View N rows as [N / block, 2, block / 2]: rows in low four bits, rows in high ones."""
    block, follow = layout or int4_layout()
    pair = (block // 2, 2) if follow else (2, block // 2)
    blocks = x.view(*x.shape[:dim], -1, *pair, *x.shape[dim + 1 :])
    return blocks.transpose(dim + 1, dim + 2) if follow else blocks


def packing_layout() -> str:
    """A name of the layout of packed weights on this machine; other layouts can't be used."""
    block, follow = int4_layout()
    return f"blocks of {block}" + (", pairs of rows" if follow else "")


def _layers_of(module: nn.Module) -> Iterator[PackedLinear]:
    return (layer for layer in module.modules() if isinstance(layer, PackedLinear))


def _scale_zero_pairs(scale: Tensor, minimum: Tensor) -> Tensor:
    """Pair scale and minimum [N, K / 32] for torch's kernel: (q - 8) scale + zero."""
    pairs = torch.stack([scale, minimum + 8 * scale], -1).transpose(0, 1)  # [K / 32, N, 2]
    return pairs.contiguous().bfloat16()


def _add_bias(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias to y [m, N]; returns [..., N] in the number type of the input x [..., K]."""
    y = y.to(x.dtype).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias
