"""The block formats of GGUF: blocks of four-bit weights taken apart, and any block as floats.

Layouts as in ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sirchat.models.gguf.header import BLOCKS, GgufTensor
from sirchat.models.packed import GROUP

FOUR_BIT = ("Q4_0", "Q4_1", "Q4_K")
"""The formats that `four_bit` takes apart."""


class FourBit(NamedTuple):
    """A matrix [N, K] of weights `q * scale + minimum`.

    Attributes:
        q: uint8 [N, K], 0 to 15.
        scale: float32 [N, K / 32], one for each group of 32.
        minimum: likewise.
    """

    q: Tensor
    scale: Tensor
    minimum: Tensor


def four_bit(tensor: GgufTensor) -> FourBit:
    """Take apart a matrix of a type in `FOUR_BIT`, without loss."""
    rows, columns = tensor.shape
    blocks = torch.from_numpy(np.array(tensor.blocks))  # [b, bytes of a block]
    taken = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}[tensor.type](blocks)
    return FourBit(taken.q.reshape(rows, columns), *(x.reshape(rows, -1) for x in taken[1:]))


def floats(tensor: GgufTensor) -> Tensor:
    """A tensor of any known type as float32, or in its own type if it is no block format."""
    if tensor.type == "BF16":
        return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16).reshape(tensor.shape)
    if tensor.type in ("F32", "F16"):
        kind = np.float32 if tensor.type == "F32" else np.float16
        return torch.from_numpy(np.array(tensor.data).view(kind)).reshape(tensor.shape)
    if tensor.type in FOUR_BIT and len(tensor.shape) == 2:
        q, scale, minimum = four_bit(tensor)
        grouped = q.view(*scale.shape, GROUP)
        return (grouped * scale[..., None] + minimum[..., None]).view(tensor.shape)
    if tensor.type == "Q8_0":
        blocks = torch.from_numpy(np.array(tensor.blocks))
        return (blocks[:, 2:].view(torch.int8) * _half(blocks, 0)).reshape(tensor.shape)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize  # the formats that are rarer

    kind = GGMLQuantizationType(BLOCKS[tensor.type][0])
    return torch.from_numpy(dequantize(tensor.blocks, kind)).reshape(tensor.shape)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block [b, bytes], as float32 [b, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(bytes_: Tensor) -> Tensor:
    """The low halves of n bytes [b, n], then their high halves: [b, 2 n]."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> FourBit:
    scale = _half(blocks, 0)
    return FourBit(_nibbles(blocks[:, 2:]), scale, -8 * scale)


def _q4_1(blocks: Tensor) -> FourBit:
    return FourBit(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: Tensor) -> FourBit:
    """Eight groups of 32, whose scales and minima are six-bit multiples of two floats."""
    packed = blocks[:, 4:16].view(-1, 3, 4)
    low, high, mixed = packed.unbind(1)  # [b, 4] each
    scale = torch.cat((low & 63, (mixed & 15) | (low >> 6 << 4)), -1)
    minimum = torch.cat((high & 63, (mixed >> 4) | (high >> 6 << 4)), -1)
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 256)
    return FourBit(q, scale * _half(blocks, 0), minimum * -_half(blocks, 2))
