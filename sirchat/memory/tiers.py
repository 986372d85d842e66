"""Keys and values in 8 or 4 bits a number, as an archive over its limit stores them.

A token's numbers in one head are `centre + step * code`, with integer codes, and a step for each
token and head. The centre, one for the whole archive, is what all keys of a head have in common,
which in many models is far larger than their differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EXACT = 0  # as many bits as the model's numbers have
NOT_STORED = 255  # in `Tiers.bits`: neither in the cache nor in the archive
# The tier below each, in bits a number; below the last one is the text.
LOWER_TIER = {EXACT: 8, 8: 4}
_MIN_STEP = 2.0**-100  # step, for a token whose numbers are all the centre's


@dataclass(frozen=True)
class Tiers:
    """The bits and centres with which an archive that is loaded stores its tokens as before."""

    bits: NDArray[np.uint8]  # [seen], of each token, or `EXACT`, or `NOT_STORED`
    centres: list[Tensor]  # [H, 1, D] each, one for each tensor of `KeyValues`

    def fit(self, row: list[Tensor], seen: int) -> bool:
        """Whether these tiers suit a stream of `seen` tokens with keys and values like `row`."""
        shapes = [[(one.dtype, one.shape) for one in tensors] for tensors in (self.centres, row)]
        is_known = np.isin(self.bits, [EXACT, *LOWER_TIER.values(), NOT_STORED]).all()
        is_of_stream = self.bits.dtype == np.uint8 and self.bits.shape == (seen,)
        return bool(is_of_stream and is_known and shapes[0] == shapes[1])


@torch.inference_mode()
def quantized(tensors: list[Tensor], centres: list[Tensor], bits: int, lower: int) -> list[Tensor]:
    """Encode tensors stored in `bits` with `lower` bits: bytes [H, n, B] of n tokens each.

    The first two bytes are the step, the others are the codes.
    """
    exact = dequantized(tensors, centres, bits)
    return [_quantize(tensor, centre, lower) for tensor, centre in zip(exact, centres, strict=True)]


@torch.inference_mode()
def dequantized(tensors: list[Tensor], centres: list[Tensor], bits: int) -> list[Tensor]:
    """Decode tensors stored in `bits` to numbers [H, n, D], in the dtype of `centres`."""
    if bits == EXACT:
        return tensors
    pairs = zip(tensors, centres, strict=True)
    return [_dequantize(tensor, centre, bits) for tensor, centre in pairs]


def _quantize(numbers: Tensor, centre: Tensor, bits: int) -> Tensor:
    rest = numbers.contiguous().float() - centre.float()
    most = rest.abs().amax(-1, keepdim=True)
    # Steps are powers of two, and in 4 bits small multiples of the step in 8. So numbers that were
    # rounded once get the same step and codes when they are stored again; 0.1 is for roundings.
    mantissa, exponent = torch.frexp(most / 127.1)
    step = torch.ldexp(torch.ceil(2 * mantissa), exponent - 1).clamp_min(_MIN_STEP)
    codes = (rest / step).round_()
    if bits == 4:
        times = (codes.abs().amax(-1, keepdim=True) / 7).round().clamp_min(1)
        codes, step = (codes / times).round_(), step * times
    packed = (codes + 2 ** (bits - 1)).to(torch.uint8)
    if bits == 4:
        packed = torch.nn.functional.pad(packed, (0, packed.shape[-1] % 2))
        packed = packed[..., ::2] | packed[..., 1::2] << 4
    return torch.cat((step.to(torch.bfloat16).view(torch.uint8), packed), -1)


def _dequantize(codes: Tensor, centre: Tensor, bits: int) -> Tensor:
    step = codes[..., :2].reshape(-1).view(torch.bfloat16).view(*codes.shape[:2], 1)
    packed = codes[..., 2:]
    if bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., : centre.shape[-1]]
    numbers: Tensor = (packed.float() - 2 ** (bits - 1)) * step.float() + centre.float()
    return numbers.to(centre.dtype)
