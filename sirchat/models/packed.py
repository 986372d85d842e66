"""Linear layers whose weights stay packed in four or eight bits, computed by torch on a CPU.

torch's kernels take bfloat16 (with float32 they are ten times slower). So the layers round their
inputs to bfloat16, and convert the results to the type of the input. The kernels are made for few
rows at a time. For more rows it is faster to unpack the weights to the type in `Products`: for each
product, or, within `SharedWeights`, once for several passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from sirchat.models.shape import MOST_UNPACKED

# Number of neighbouring four-bit weights that share a scale and a minimum.
GROUP = 32

_VOCABULARY = 4096  # a larger eight-bit matrix is unpacked in parts of this many rows
_LIKELIEST = 16  # number of a row's largest logits, which are computed in float32
_AT_ONCE = 32  # rows whose largest logits are computed at the same time
_MANY_PASSES = 10  # so many passes over the same weights make up for arranging them for products

Unpacked = Literal["bfloat16", "float32"]


class Products(NamedTuple):
    """How packed weights are multiplied: by torch's kernels, or after they are unpacked.

    Attributes:
        dtype: number type to which the weights are unpacked.
        few_4, few_8: for up to this number of rows, the kernels for four and eight bits are faster
            than unpacking the weights.
        few: up to this number of rows, the kernels are faster even if the weights are unpacked
            already.
    """

    dtype: Unpacked = "bfloat16"
    few_4: int = 32
    few_8: int = 8
    few: int = 8

    @property
    def type(self) -> torch.dtype:
        """The torch number type to which packed weights are unpacked."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


class PackedLinear(nn.Module, ABC):
    """A linear layer whose weights [N, K] stay packed in four or eight bits.

    Attributes:
        products: how the weights are multiplied; see `set_products`.
        in_features, out_features: K and N.
        bias: [N], or None.
        joined: None, or a tuple with the layer that holds the weights of this layer and of others
            with the same input. See `fuse_projections`. Without the tuple, torch would count
            buffers twice.
    """

    in_features: int
    out_features: int
    bias: nn.Parameter | None
    joined: tuple[PackedLinear] | None = None
    products = Products()

    @abstractmethod
    def unpacked(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Unpack the weights [K, N] to `dtype`; eight-bit weights do not include the scales."""

    def _times_unpacked(self, x: Tensor) -> Tensor:
        """Multiply rows x [m, K] with the unpacked weights, of the same type: x W^T [m, N].

        The weights are unpacked now or, within `SharedWeights`, were unpacked in an earlier pass.
        """
        shared = self._shared()
        if shared is None:
            return x @ self.unpacked(self.products.type)
        if self not in shared.unpacked:
            weights = self.unpacked(self.products.type)
            if shared.are_arranged:
                weights = torch.ops.mkldnn._reorder_linear_weight(weights.T, len(x))
            shared.unpacked[self] = weights
        weights = shared.unpacked[self]
        if not weights.is_mkldnn:
            return x @ weights
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weights, None, "none", [], "")
        return y

    def _shared(self) -> _Shared | None:
        """The unpacked weights that several passes share; None outside `SharedWeights`."""
        return _SHARED.get()

    @abstractmethod
    def of_row(self, x: Tensor) -> Tensor:
        """Multiply a few bfloat16 rows x [m, K] with the packed weights: x W^T [m, N], no bias."""

    @classmethod
    @abstractmethod
    def joining(cls, parts: Sequence[Self]) -> Self:
        """Make one layer without bias with the weights of all `parts`, one after the other."""

    @abstractmethod
    def take(self, whole: Self, start: int) -> None:
        """Use rows of the joined layer `whole`, from row `start` on, as this layer's weights."""


class Int4Linear(PackedLinear):
    """A linear layer, y = x W^T + bias, with four-bit weights in groups of 32.

    Args:
        q: uint8 [N, K], 0 to 15; `fits` says which shapes can be packed.
        scale, minimum: [N, K / 32], one for each group; a weight is `q * scale + minimum`.
        bias: [N], or None.
    """

    packed: Tensor
    scales: Tensor

    def __init__(
        self, q: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None = None
    ) -> None:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)  # [N, K / 2]
        self._fill(packed, scale, minimum, bias)

    @classmethod
    def of_nibbles(cls, nibbles: Tensor, scale: Tensor, minimum: Tensor) -> Self:
        """Make a layer without bias from bytes with two weights q each: uint8 [N, K / 32, 16].

        The low four bits are the first 16 values of a group, the high four bits the other 16. This
        takes a third of the time that it takes to unpack the values first.
        """
        groups, half = nibbles.shape[1], four_bit_block() // 2
        halves = nibbles.view(-1, 2, half, groups, 16)  # the rows of each block
        upper, lower = halves.permute(0, 1, 3, 4, 2).contiguous().unbind(1)
        packed = torch.empty(len(upper), groups, 2, 16, half, dtype=torch.uint8)
        torch.bitwise_or(upper & 15, lower << 4, out=packed[:, :, 0])
        torch.bitwise_or(upper >> 4, lower & 0xF0, out=packed[:, :, 1])
        layer = cls.__new__(cls)
        layer._fill(packed.view(len(nibbles), -1), scale, minimum, None)
        return layer

    def _fill(self, packed: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = len(scale), GROUP * scale.shape[1]
        # The kernel computes (q - 8) scale + zero.
        pairs = torch.stack([scale, minimum + 8 * scale], -1).transpose(0, 1)  # [K / 32, N, 2]
        self.register_buffer("packed", packed)
        self.register_buffer("scales", pairs.contiguous().bfloat16())
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def joining(cls, parts: Sequence[Self]) -> Self:
        whole = cls.__new__(cls)
        nn.Module.__init__(whole)
        whole.in_features = parts[0].in_features
        whole.out_features = sum(part.out_features for part in parts)
        whole.register_buffer("packed", torch.cat([part.packed for part in parts]))
        whole.register_buffer("scales", torch.cat([part.scales for part in parts], 1))
        whole.bias = None
        return whole

    def take(self, whole: Self, start: int) -> None:
        end = start + self.out_features
        self.packed, self.scales = whole.packed[start:end], whole.scales[:, start:end]
        self.joined = (whole,)

    @staticmethod
    def fits(rows: int, columns: int) -> bool:
        """Whether a matrix [rows, columns] can be packed in four bits on this machine."""
        block = four_bit_block()
        return block > 0 and rows % block == 0 and columns % GROUP == 0

    def forward(self, x: Tensor) -> Tensor:
        flat, how = x.reshape(-1, self.in_features), self.products
        if len(flat) <= (how.few_4 if self._shared() is None else how.few):
            return _like(self.of_row(flat.bfloat16()), x, self.bias)
        return _like(self._times_unpacked(flat.to(how.type)), x, self.bias)

    def of_row(self, x: Tensor) -> Tensor:
        scales = self.scales.contiguous()  # no copy, unless the layer is part of a joined one
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        y: Tensor = multiply(x, self.packed, GROUP, scales)
        return y

    def unpacked(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        columns, rows, size = self.in_features, self.out_features, four_bit_block() // 2
        blocks = self.packed.view(-1, columns, size)  # [N / block, K, size], two rows a byte
        out = torch.empty(columns, rows, dtype=dtype)
        halves = out.view(columns, -1, 2, size)  # [K, N / block, 2, size]
        for half, q in enumerate((blocks & 15, blocks >> 4)):
            halves[:, :, half] = q.view(torch.int8).sub_(8).transpose(0, 1)
        grouped = out.view(-1, GROUP, rows)  # [K / 32, 32, N]
        # Copies, because a stride of 2 takes five times as long in the next line.
        scale, zero = (one.contiguous().to(dtype) for one in self.scales.unbind(-1))  # [K / 32, N]
        return torch.addcmul(zero[:, None], grouped, scale[:, None], out=grouped).view_as(out)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, 4 bits"


class Int8Linear(PackedLinear):
    """A linear layer, y = x W^T + bias, with eight-bit weights and a scale for each row of W.

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
        flat, how = x.reshape(-1, self.in_features), self.products
        if len(flat) <= how.few_8:
            return _like(self.of_row(flat.bfloat16()), x, self.bias)
        flat = flat.to(how.type)
        if self._shared() is not None or self.out_features <= _VOCABULARY:
            return _like(self._times_unpacked(flat) * self.scale, x, self.bias)
        y = torch.empty(len(flat), self.out_features, dtype=how.type)
        for start in range(0, self.out_features, _VOCABULARY):  # a large vocabulary takes gigabytes
            some = slice(start, start + _VOCABULARY)
            torch.mul(flat @ self.q[some].to(how.type).T, self.scale[some], out=y[:, some])
        return _like(y, x, self.bias)

    def unpacked(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.q.to(dtype).T

    @classmethod
    def joining(cls, parts: Sequence[Self]) -> Self:
        return cls(torch.cat([part.q for part in parts]), torch.cat([part.scale for part in parts]))

    def take(self, whole: Self, start: int) -> None:
        end = start + self.out_features
        self.q, self.scale = whole.q[start:end], whole.scale[start:end]
        self.joined = (whole,)

    def of_row(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int8pack_mm.default(x, self.q, self.scale)
        return y

    def rows(self, which: Tensor) -> Tensor:
        """Unpack the weights' rows with the indices `which` [...]; returns float32 [..., K]."""
        return self.q[which].float() * self.scale[which].float()[..., None]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, 8 bits"


class Int8Head(Int8Linear):
    """The output head in eight bits; its largest logits are float32, not rounded to bfloat16.

    Large logits in bfloat16 have steps of 0.06 to 0.12: close logits would become equal, and
    surprisal would be wrong by about one step. So the largest logits are computed again in float32.
    """

    @classmethod
    def of(cls, layer: Int8Linear) -> Int8Head:
        """Make an output head that uses the weights of `layer`, without a copy."""
        return cls(layer.q, layer.scale, layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).float()  # [..., V]
        return self._refined(y.view(-1, self.out_features), x).view_as(y)

    def _shared(self) -> None:
        """Return None: passes do not share the head's unpacked weights; it reads few tokens."""

    def of_vector(self, x: Tensor) -> Tensor:
        """Compute float32 logits [V] from one float32 hidden state [K]."""
        row = x[None]
        y = self.of_row(row.bfloat16()).float()
        return self._refined(y if self.bias is None else y + self.bias, row)[0]

    def of_few(self, x: Tensor) -> Tensor:
        """Compute float32 logits [m, V] from a few float32 hidden states [m, K]."""
        y = self.of_row(x.bfloat16()).float()
        y = y if self.bias is None else y + self.bias
        for at in range(len(x)):
            self._refined(y[at : at + 1], x[at : at + 1])  # in place
        return y

    def _refined(self, y: Tensor, x: Tensor) -> Tensor:
        """Compute the largest logits y [m, V] of inputs x [..., K] again in float32, in place."""
        top = y.topk(min(_LIKELIEST, self.out_features)).indices  # [m, k]
        rows = x.reshape(-1, self.in_features, 1).float()  # [m, K, 1]
        for at in range(0, len(top), _AT_ONCE):
            some = slice(at, at + _AT_ONCE)
            exact = (self.rows(top[some]) @ rows[some])[..., 0]  # [m, k]
            y[some].scatter_(
                1, top[some], exact if self.bias is None else exact + self.bias[top[some]]
            )
        return y


class SharedEmbedding(nn.Module):
    """Token embeddings that are read from the output head, which has the same weights.

    Args:
        head: the output head, which stores the weights.
        dtype: number type of the embeddings.
        scale: factor by which the embeddings are multiplied, as in Gemma.
    """

    def __init__(self, head: Int8Linear, dtype: torch.dtype, scale: float = 1) -> None:
        super().__init__()
        self._head = (head,)  # not a submodule, whose buffers would count twice
        self._dtype = dtype
        self._scale = scale

    @classmethod
    def like(cls, before: Any, head: Int8Linear, dtype: torch.dtype) -> SharedEmbedding:
        """Make token embeddings that replace the module `before`, and multiply by its factor."""
        scale = torch.tensor(getattr(before, "scalar_embed_scale", 1.0), dtype=dtype)
        return cls(head, dtype, float(scale))

    def forward(self, ids: Tensor) -> Tensor:
        return (self._head[0].rows(ids) * self._scale).to(self._dtype)


def eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [N, K] to 255 steps in each row; returns q and scale as in `Int8Linear`."""
    largest = weight.abs().amax(1, keepdim=True).float()  # [N, 1]
    scale = (largest.clamp_min(1e-12) / 127).bfloat16()
    return (weight / scale).round_().clamp_(-127, 127).to(torch.int8), scale[:, 0]


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix [N, K] to 16 steps in each group of 32; returns q, scale and minimum."""
    groups = weight.float().view(len(weight), -1, GROUP)
    minimum, most = groups.amin(-1), groups.amax(-1)
    scale = ((most - minimum) / 15).clamp_min(1e-12)
    q = ((groups - minimum[..., None]) / scale[..., None]).round().clamp(0, 15)
    return q.to(torch.uint8).view_as(weight), scale, minimum


class _Shared(NamedTuple):
    """The unpacked weights that the passes of one text share.

    Attributes:
        unpacked: the unpacked weights of each layer.
        are_arranged: whether oneDNN has arranged the weights as its products need them. If not,
            each product does this, which takes a third of the time of a product with 60 rows.
    """

    unpacked: dict[PackedLinear, Tensor]
    are_arranged: bool


# The unpacked weights that forward passes share; None outside `SharedWeights`.
_SHARED: ContextVar[_Shared | None] = ContextVar("shared weights", default=None)


class SharedWeights:
    """Context manager: the passes of one text share unpacked weights; each layer is unpacked once.

    Run each of these passes inside `with shared: ...`; other passes over the same layers, in this
    thread or another, are not affected. Nothing is shared if all unpacked weights would take more
    than 512 MiB. The output head is left out: it is computed for few tokens at once. `count` is the
    number of passes; if there are many, the weights are arranged for products, too.
    """

    def __init__(self, module: nn.Module, count: int = 1) -> None:
        layers = [
            one
            for one in module.modules()
            if isinstance(one, PackedLinear) and not isinstance(one, Int8Head)
        ]
        size = sum(
            one.in_features * one.out_features * one.products.type.itemsize for one in layers
        )
        is_bfloat16 = all(one.products.dtype == "bfloat16" for one in layers)
        are_arranged = count >= _MANY_PASSES and is_bfloat16 and has_fast_bfloat16()
        self._shared = _Shared({}, are_arranged) if size <= MOST_UNPACKED else None

    def __enter__(self) -> None:
        self._before = _SHARED.set(self._shared)

    def __exit__(self, *_: object) -> None:
        _SHARED.reset(self._before)


def has_fast_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor without converting it to float32."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def set_products(module: nn.Module, products: Products) -> None:
    """Set the way in which all packed layers of a module multiply their weights."""
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            layer.products = products
            if layer.joined is not None:
                layer.joined[0].products = products


def products_of(module: nn.Module) -> Products | None:
    """How the packed layers of a module multiply their weights; None without packed layers."""
    found = (one.products for one in module.modules() if isinstance(one, PackedLinear))
    return next(found, None)


def packed_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of all packed layers in a module."""
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            yield from layer.buffers()


@cache
def four_bit_block() -> int:
    """Number of rows that torch's four-bit kernel packs together on this machine; 0 if unknown.

    It is 64 with AVX-512 and 32 with AVX2. Two rows are in each byte: one of the first half of
    these rows in the low four bits, and one of the second half in the high four bits. On other
    processors the layout is another one, and `Int4Linear` can't be used.
    """
    q = (torch.arange(64)[:, None] + 3 * torch.arange(GROUP)) % 16  # [64, 32]
    with suppress(RuntimeError, AttributeError):
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        for block in (64, 32):
            half = packed.view(-1, GROUP, block // 2)
            unpacked = torch.cat((half & 15, half >> 4), -1).transpose(1, 2)  # [64 / block, ...]
            if torch.equal(unpacked.reshape(64, GROUP).long(), q):
                return block
    return 0


def _like(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias to a product y [m, N]; returns [..., N] in the type of the input x [..., K]."""
    y = y.to(x.dtype).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias
