"""Unpacks the block formats of GGUF files, laid out as in ggml.

https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.models.gguf.header import BLOCK_LAYOUTS, BLOCKS, GgufTensor
from sirchat.models.packed import GROUP, BlockLinear, Int8Linear

# In eight bytes: 1 in each; bit 0 to bit 7, one in each; what brings each of them up to bit 7.
_ONES = 0x0101_0101_0101_0101
_DIAGONAL = 0x8040_2010_0804_0201 - (1 << 64)
_UP_TO_HIGHEST = 0x0040_6070_787C_7E7F


class FourBit(NamedTuple):
    """A matrix [N, K] in four bits, in groups of 32: each weight is `q * scale + minimum`."""

    # uint8 [N, K / 32, 16]: q of 0 to 15; low four bits: the first 16 of a group, high: the others
    nibbles: Tensor
    scale: Tensor  # float32 [N, K / 32]
    minimum: Tensor  # float32 [N, K / 32]

    @property
    def q(self) -> Tensor:
        """All values q, uint8 [N, K]."""
        return torch.cat((self.nibbles & 15, self.nibbles >> 4), -1).flatten(1)


def split_four_bit(tensor: GgufTensor) -> FourBit:
    """Split a four-bit matrix of a GGUF file into its values, scales and minima, without loss."""
    rows, columns = tensor.shape
    q, scale, minimum = _SPLITTERS[tensor.type](torch.from_numpy(np.array(tensor.blocks)))
    if minimum is None:  # Q4_0: q is from -8 to 7
        q, minimum = q + 8, -8 * scale
    groups = (rows, columns // GROUP)
    first, second = q.view(torch.uint8).view(*groups, 2, GROUP // 2).unbind(2)
    return FourBit(first | second << 4, scale.reshape(groups), minimum.reshape(groups))


def split_blocks(tensor: GgufTensor, device: torch.device) -> tuple[Tensor, ...]:
    """Split a matrix [N, K] of blocks into the buffers of a `BlockGpuLinear`, without loss."""
    layout, groups = BLOCK_LAYOUTS[tensor.type], (tensor.shape[0], tensor.shape[1] // GROUP)
    blocks = torch.from_numpy(np.array(tensor.blocks)).to(device)
    q = _SPLITTERS[tensor.type](blocks).q.view(torch.uint8)
    start, end = BLOCK_FLOATS[tensor.type]
    floats = blocks[:, start:end].contiguous().view(torch.float16)
    floats = floats.view(tensor.shape[0], -1, floats.shape[1])  # [N, blocks, 1 or 2]
    scales, factors = floats, floats[:, :0]
    if layout.columns > GROUP:
        is_signed = tensor.type == "Q6_K"
        codes = blocks[:, 192:208].view(torch.int8) if is_signed else _six_bits(blocks).mT
        scales, factors = codes.contiguous().view(*groups, 2), floats
    high = q.new_empty((*groups, 0), dtype=torch.int32)
    if layout.bits == 8:
        return q.reshape(tensor.shape), high, scales, factors
    q = q.view(*groups, GROUP) + (0 if end - start == 4 else 1 << layout.bits - 1)
    high_bits, (first, second) = layout.bits - 4, (q & 15).chunk(2, -1)
    if high_bits:
        shifts = torch.arange(0, 8, high_bits, device=device, dtype=torch.uint8).view(-1, 1, 2, 1)
        upper = (q >> 4).view(*groups, -1, high_bits, 2, 4) << shifts
        high = upper.sum((2, 4), dtype=torch.uint8).view(torch.int32).view(*groups, high_bits)
    return (first | second << 4).flatten(1), high, scales, factors


class NativePacking:
    """Packs matrices of a GGUF file by the library of `blocks.cpp`: as they are, or in eight bits.

    Eight bits are those of `quantize_int8`. Row r of a layer is row `order[r]` of the matrix.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        number, address = ctypes.c_int64, ctypes.c_void_p
        source: list[Any] = [number, address, number, number, address]
        self._blocks, self._eight = library.sirchat_pack_blocks, library.sirchat_pack_eight
        self._blocks.argtypes = [*source, address, number]
        self._eight.argtypes = [*source, address, address, number]
        self._blocks.restype = self._eight.restype = ctypes.c_bool

    @staticmethod
    def can_pack_eight_bits(tensor: GgufTensor) -> bool:
        """Whether a matrix can be packed in eight bits."""
        return tensor.type in _SPLITTERS

    def pack_blocks(
        self, tensor: GgufTensor, order: Tensor, layer: BlockLinear | None = None
    ) -> BlockLinear:
        """Pack a matrix that `BlockLinear.fits` without loss, into `layer` if one is given."""
        layer = layer or BlockLinear.empty(tensor.type, *tensor.shape)
        target = layer.blocks.data_ptr(), torch.get_num_threads()
        _check_memory(self._blocks(*_source(tensor, order), *target))
        return layer

    def pack_eight_bits(self, tensor: GgufTensor, order: Tensor) -> Int8Linear:
        """Round a matrix as `quantize_int8` does."""
        q = torch.empty(tensor.shape, dtype=torch.int8)
        scale = torch.empty((len(q),), dtype=torch.bfloat16)
        target = q.data_ptr(), scale.data_ptr(), torch.get_num_threads()
        _check_memory(self._eight(*_source(tensor, order), *target))
        return Int8Linear(q, scale)


def _source(tensor: GgufTensor, order: Tensor) -> tuple[int, ...]:
    return (BLOCKS[tensor.type][0], tensor.data.ctypes.data, *tensor.shape, order.data_ptr())


def _check_memory(suffices: bool) -> None:
    if not suffices:
        raise MemoryError("no memory is free to pack weights")


def unpack_floats(tensor: GgufTensor) -> Tensor:
    """Unpack a GGUF tensor of any known type to float32; F16 and BF16 keep their number type."""
    if tensor.type == "BF16":
        return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16).reshape(tensor.shape)
    if tensor.type in ("F32", "F16"):
        kind = np.float32 if tensor.type == "F32" else np.float16
        return torch.from_numpy(np.array(tensor.data).view(kind)).reshape(tensor.shape)
    blocks = np.array(tensor.blocks)
    if (split := _SPLITTERS.get(tensor.type)) is None:
        return torch.from_numpy(_unpack_by_package(tensor.type, blocks)).reshape(tensor.shape)
    q, scale, minimum = split(torch.from_numpy(blocks))
    floats = q.float().view(*scale.shape, -1).mul_(scale[..., None])
    if minimum is not None:
        floats.add_(minimum[..., None])
    return floats.view(tensor.shape)


def _unpack_by_package(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Unpack blocks of rarer formats by the package `gguf`."""
    from gguf import quants

    # Not by `dequantize`, which makes a call for each 16 blocks.
    unpacker = getattr(quants, kind)
    unpacker.init_grid()
    floats: NDArray[np.float32] = unpacker.dequantize_blocks(blocks)
    return floats


class _Split(NamedTuple):
    """Weights of b blocks with g groups each; a weight is `q * scale + minimum`."""

    q: Tensor  # int8 or uint8, as many for each group
    scale: Tensor  # float32 [b, g]
    minimum: Tensor | None = None  # float32 [b, g]


def _read_float16(blocks: Tensor, offset: int) -> Tensor:
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()  # [b, 1]


def _read_words(blocks: Tensor, start: int, end: int, run: int = 32) -> Tensor:
    """The bytes of blocks, in runs of `run` bytes, as int64 [b, runs, run / 8]."""
    # Operations on eight bytes at once, without strides, are several times as fast.
    return blocks[:, start:end].contiguous().view(torch.int64).view(len(blocks), -1, run // 8)


def _split_bits(words: Tensor, width: int, to: int = 0) -> Tensor:
    """Cut bytes into `width`-bit fields, moved to bit `to`: uint8 [b, runs, 8 / width, run]."""
    moved = [words >> bit - to if bit > to else words << to - bit for bit in range(0, 8, width)]
    mask = ((1 << width) - 1 << to) * _ONES
    return torch.stack(moved, 2).bitwise_and_(mask).view(torch.uint8)


def _spread_fifth_bits(blocks: Tensor, offset: int) -> Tensor:
    """Turn 32 bits of four bytes into the fifth bits of 32 weights, [b, 1, 2, 16]."""
    copies = blocks[:, offset : offset + 4].long() * _ONES  # eight copies of each byte
    # Keep one bit in each copy; if it is set, the sum has the highest bit of its byte.
    high = copies.bitwise_and_(_DIAGONAL).add_(_UP_TO_HIGHEST) >> 3
    return high.bitwise_and_(0x10 * _ONES).view(torch.uint8).view(-1, 1, 2, 16)


def _six_bits(blocks: Tensor) -> Tensor:
    """The multiples of a block's floats in Q4_K and Q5_K, uint8 [b, 2, 8]: of scales, of minima."""
    low, high, mixed = _read_three_words(blocks, 4)
    scale = low & 0x3F3F3F3F, mixed & 0xF0F0F0F | low >> 2 & 0x30303030
    minimum = high & 0x3F3F3F3F, mixed >> 4 & 0xF0F0F0F | high >> 2 & 0x30303030
    return torch.stack((*scale, *minimum), -1).view(torch.uint8).view(-1, 2, 8)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K, [b, 8] each."""
    factors = blocks[:, :4].contiguous().view(torch.float16).float()
    found, subtracted = (_six_bits(blocks).float() * factors[..., None]).unbind(1)
    return found.contiguous(), -subtracted


def _read_three_words(blocks: Tensor, offset: int) -> Tensor:
    """Read the twelve bytes in each block that hold its groups' scales, as int32 [3, b]."""
    return blocks[:, offset : offset + 12].contiguous().view(torch.int32).T.contiguous()


def _split_q4_0(blocks: Tensor) -> _Split:
    q = _split_bits(_read_words(blocks, 2, 18, 16), 4)
    return _Split(q.view(torch.int8).sub_(8), _read_float16(blocks, 0))


def _split_q4_1(blocks: Tensor) -> _Split:
    q = _split_bits(_read_words(blocks, 4, 20, 16), 4)
    return _Split(q, _read_float16(blocks, 0), _read_float16(blocks, 2))


def _split_q5_0(blocks: Tensor) -> _Split:
    q = _spread_fifth_bits(blocks, 2).bitwise_or_(_split_bits(_read_words(blocks, 6, 22, 16), 4))
    return _Split(q.view(torch.int8).sub_(16), _read_float16(blocks, 0))


def _split_q5_1(blocks: Tensor) -> _Split:
    q = _spread_fifth_bits(blocks, 4).bitwise_or_(_split_bits(_read_words(blocks, 8, 24, 16), 4))
    return _Split(q, _read_float16(blocks, 0), _read_float16(blocks, 2))


def _split_q8_0(blocks: Tensor) -> _Split:
    return _Split(blocks[:, 2:].contiguous().view(torch.int8), _read_float16(blocks, 0))


def _split_q2_k(blocks: Tensor) -> _Split:
    scale, minimum = blocks[:, :16] & 15, blocks[:, :16] >> 4
    q = _split_bits(_read_words(blocks, 16, 80), 2)
    return _Split(q, scale * _read_float16(blocks, 80), minimum * -_read_float16(blocks, 82))


def _split_q3_k(blocks: Tensor) -> _Split:
    q = _split_bits(_read_words(blocks, 0, 32), 1, 2)  # [b, 1, 8, 32]
    q |= _split_bits(_read_words(blocks, 32, 96), 2).view_as(q)
    first, second, high = _read_three_words(blocks, 96)
    low = (first, second, first >> 4, second >> 4)
    upper = (high << 4, high << 2, high, high >> 2)
    words = [a & 0xF0F0F0F | b & 0x30303030 for a, b in zip(low, upper, strict=True)]
    scale = torch.stack(words, -1).view(torch.int8).sub_(32)  # [b, 16]
    return _Split(q.view(torch.int8).sub_(4), scale * _read_float16(blocks, 108))


def _split_q4_k(blocks: Tensor) -> _Split:
    return _Split(_split_bits(_read_words(blocks, 16, 144), 4), *_scales_and_minima(blocks))


def _split_q5_k(blocks: Tensor) -> _Split:
    q = _split_bits(_read_words(blocks, 16, 48), 1, 4)  # [b, 1, 8, 32]
    q |= _split_bits(_read_words(blocks, 48, 176), 4).view_as(q)
    return _Split(q, *_scales_and_minima(blocks))


def _split_q6_k(blocks: Tensor) -> _Split:
    q = _split_bits(_read_words(blocks, 128, 192), 2, 4)  # [b, 2, 4, 32]
    q |= _split_bits(_read_words(blocks, 0, 128, 64), 4).view_as(q)
    scale = blocks[:, 192:208].contiguous().view(torch.int8)
    return _Split(q.view(torch.int8).sub_(32), scale * _read_float16(blocks, 208))


# Where the floats of a block are that `BlockGpuLinear` keeps: a scale, or a scale and a minimum.
BLOCK_FLOATS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0, 2)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 4)),
    "Q6_K": (208, 210),
}
# How blocks of each format are split into values and scales; others are read by the package gguf.
_SPLITTERS: dict[str, Callable[[Tensor], _Split]] = {
    "Q4_0": _split_q4_0,
    "Q4_1": _split_q4_1,
    "Q5_0": _split_q5_0,
    "Q5_1": _split_q5_1,
    "Q8_0": _split_q8_0,
    "Q2_K": _split_q2_k,
    "Q3_K": _split_q3_k,
    "Q4_K": _split_q4_k,
    "Q5_K": _split_q5_k,
    "Q6_K": _split_q6_k,
}
