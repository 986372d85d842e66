"""Unpacks the block formats of GGUF files, laid out as in ggml.

https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sirchat.models.gguf.header import BLOCKS, FOUR_BIT, GgufTensor
from sirchat.models.packed import GROUP


class FourBit(NamedTuple):
    """A matrix [N, K] in four bits, in groups of 32: each weight is `q * scale + minimum`."""

    # uint8 [N, K / 32, 16]: q of 0 to 15; low four bits: the first 16 of a group, high: the others
    nibbles: Tensor
    scale: Tensor  # float32 [N, K / 32]
    minimum: Tensor  # float32 [N, K / 32]

    @property
    def q(self) -> Tensor:
        """The values q of all weights, uint8 [N, K]."""
        return _nibbles(self.nibbles).flatten(1)


def split_four_bit(tensor: GgufTensor) -> FourBit:
    """Split a four-bit matrix of a GGUF file into its values, scales and minima, without loss."""
    rows, columns = tensor.shape
    blocks = torch.from_numpy(np.array(tensor.blocks))  # [b, bytes of a block]
    taken = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}[tensor.type](blocks)
    groups = (rows, columns // GROUP)
    return FourBit(taken.nibbles.reshape(*groups, -1), *(x.reshape(groups) for x in taken[1:]))


def unpack_floats(tensor: GgufTensor) -> Tensor:
    """Unpack a GGUF tensor of any known type to float32; F16 and BF16 keep their number type."""
    if tensor.type == "BF16":
        return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16).reshape(tensor.shape)
    if tensor.type in ("F32", "F16"):
        kind = np.float32 if tensor.type == "F32" else np.float16
        return torch.from_numpy(np.array(tensor.data).view(kind)).reshape(tensor.shape)
    if tensor.type in FOUR_BIT and len(tensor.shape) == 2:
        taken = split_four_bit(tensor)
        scale, minimum = taken.scale[..., None], taken.minimum[..., None]
        return (_nibbles(taken.nibbles) * scale + minimum).view(tensor.shape)
    if tensor.type == "Q8_0":
        blocks = torch.from_numpy(np.array(tensor.blocks))
        return (blocks[:, 2:].view(torch.int8) * _half(blocks, 0)).reshape(tensor.shape)
    if tensor.type == "Q6_K":  # the embeddings of most four-bit files
        return _q6_k(torch.from_numpy(np.array(tensor.blocks))).view(tensor.shape)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize  # for the rarer formats

    kind = GGMLQuantizationType(BLOCKS[tensor.type][0])
    return torch.from_numpy(dequantize(tensor.blocks, kind)).reshape(tensor.shape)


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()  # [b, 1]


def _nibbles(bytes_: Tensor) -> Tensor:
    return torch.cat((bytes_ & 15, bytes_ >> 4), dim=-1)  # [..., 2 n]


def _q4_0(blocks: Tensor) -> FourBit:
    scale = _half(blocks, 0)
    return FourBit(blocks[:, 2:], scale, -8 * scale)


def _q4_1(blocks: Tensor) -> FourBit:
    return FourBit(blocks[:, 4:], _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: Tensor) -> FourBit:
    """Split Q4_K blocks [b, bytes], of eight groups of 32 weights, into values, scales and minima.

    Each scale and each minimum is a six-bit multiple of a float that the block has.
    """
    packed = blocks[:, 4:16].view(-1, 3, 4)
    low, high, mixed = packed.unbind(1)  # [b, 4] each
    scale = torch.cat((low & 63, (mixed & 15) | (low >> 6 << 4)), -1)
    minimum = torch.cat((high & 63, (mixed >> 4) | (high >> 6 << 4)), -1)
    first, second = blocks[:, 16:].view(-1, 4, 2, 16).unbind(2)  # of two groups of 32: low, high
    pairs = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)
    return FourBit(torch.stack(pairs, 2), scale * _half(blocks, 0), minimum * -_half(blocks, 2))


def _q6_k(blocks: Tensor) -> Tensor:
    """Unpack Q6_K blocks [b, bytes], of sixteen groups of 16 weights, to floats.

    The scale of each group is an eight-bit multiple of a float that the block has.
    """
    low = _nibbles(blocks[:, :128].view(-1, 2, 64))  # [b, 2, 128]
    pairs = blocks[:, 128:192].view(-1, 2, 32)
    high = torch.cat([pairs >> shift & 3 for shift in (0, 2, 4, 6)], -1)  # [b, 2, 128]
    q = (low | high << 4).view(torch.int8).sub_(32).view(-1, 16, 16)
    scale = blocks[:, 192:208].contiguous().view(torch.int8) * _half(blocks, 208)  # [b, 16]
    return q * scale[..., None]
