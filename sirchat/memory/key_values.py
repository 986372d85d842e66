"""Keys and values of tokens, as first written, and their copies between a GPU and main memory.

Copies from a GPU run on a CUDA stream of their own, into pinned memory; only the reader of a copy
waits for it. Copies to a GPU come from pinned memory and run on the stream of the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Positions = NDArray[np.int64]  # of tokens in the stream, the whole conversation

_MAX_JOINED_BYTES = 2**26  # of tensors that are joined for one copy, which takes as many again

# A copy of the states of all recurrent and convolution layers, one dictionary for each layer; the
# key of a tensor is its kind, `conv` or `recurrent`, and its number.
CacheState = tuple[dict[tuple[str, int], Tensor], ...]

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


class LostTokensError(LookupError):
    """Tokens, or a state, that are to be had again are no longer stored."""


@dataclass(frozen=True)
class KeyValues:
    """The keys and values of n tokens, of one layer or of all."""

    positions: Positions  # [n], in the stream
    written_at: NDArray[np.int64]  # [n], the rotary positions of the keys
    tensors: list[Tensor]  # two for each layer, keys then values, each [H, n, D]
    tiers: Tiers | None = None  # of the archive, in what is saved; None if all is exact
    block: Tensor | None = None  # [2 L, H, n, D], of which all tensors are parts, if it is known

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(self, device: torch.device | str) -> KeyValues:
        tensors = to_device(self.tensors, torch.device(device))
        return KeyValues(self.positions, self.written_at, tensors)

    def take(self, index: NDArray[np.int64]) -> KeyValues:
        """A copy of the tokens with the indices `index` [k]."""
        chosen = torch.from_numpy(index)
        tensors = [tensor.index_select(1, chosen.to(tensor.device)) for tensor in self.tensors]
        return KeyValues(self.positions[index], self.written_at[index], tensors)


def merge_key_values(first: KeyValues, second: KeyValues) -> KeyValues:
    """Copies of the tokens of both, by ascending position, on the devices of `first`."""
    positions = np.concatenate([first.positions, second.positions])
    order = np.argsort(positions)
    device = first.tensors[0].device
    index, *theirs = to_device([torch.from_numpy(order), *second.tensors], device)
    kinds = {(tensor.shape, tensor.device) for tensor in first.tensors}
    if device.type != "cpu" and len(kinds) == 1:
        block = torch.cat([torch.stack(first.tensors), torch.stack(theirs)], dim=2)
        tensors = list(block.index_select(2, index))
    else:
        pairs = zip(first.tensors, theirs, strict=True)
        ready = (to_device([tensor, other, index], tensor.device) for tensor, other in pairs)
        tensors = [torch.cat(both, dim=1).index_select(1, chosen) for *both, chosen in ready]
    written_at = np.concatenate([first.written_at, second.written_at])[order]
    return KeyValues(positions[order], written_at, tensors)


@dataclass(frozen=True)
class Transfer:
    """Copies of tensors from GPUs to main memory, which may still be running."""

    tensors: list[Tensor]
    ends: list[Any]  # events of CUDA

    def take(self) -> list[Tensor]:
        """Wait until all copies are finished, and return them."""
        for end in self.ends:
            end.synchronize()
        return self.tensors


@dataclass
class Transfers:
    """Starts copies from GPUs to main memory, with one CUDA stream for each GPU."""

    _streams: dict[torch.device, Any] = field(default_factory=dict)

    def to_host(self, tensors: Sequence[Tensor], block: Tensor | None = None) -> Transfer:
        """Start to copy tensors, which must not change until the copies are finished.

        Tensors of up to 64 MiB together are joined to one copy for each device; those of a `block`
        are one already.
        """
        ends = list[Any]()
        if block is not None:
            return Transfer(list(self._start(ends, block)), ends)
        copies = _copy_joined(tensors, torch.device("cpu"), partial(self._start, ends))
        return Transfer(copies, ends)

    def _start(self, ends: list[Any], tensor: Tensor) -> Tensor:
        """Start to copy a tensor; adds the CUDA event of the copy's end to `ends`."""
        if not tensor.is_cuda:
            return tensor.cpu()
        stream = self._stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # keeps its memory until the copy is finished
        ends.append(stream.record_event())
        return copy

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on `device`, copied if they are elsewhere; the CPU does not wait for a GPU.

    Tensors of up to 64 MiB together are joined to one copy from each device.
    """

    def copy(tensor: Tensor) -> Tensor:
        to_gpu = device.type == "cuda" and not tensor.is_cuda
        return (tensor.pin_memory() if to_gpu else tensor).to(device, non_blocking=to_gpu)

    return _copy_joined(tensors, device, copy)


def _copy_joined(
    tensors: Sequence[Tensor], device: torch.device, copy: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """The tensors on `device`; `copy` gets the tensors of each other device joined."""
    moving = {id(tensor): tensor for tensor in tensors if tensor.device != device}
    moved = dict[int, Tensor]()
    for source in {tensor.device for tensor in moving.values()}:
        here = [tensor for tensor in moving.values() if tensor.device == source]
        if sum(tensor.nbytes for tensor in here) > _MAX_JOINED_BYTES:
            moved |= {id(tensor): copy(tensor) for tensor in here}
            continue
        here.sort(key=lambda tensor: -tensor.element_size())  # so that all are aligned
        flat = [tensor.contiguous().as_strided((tensor.numel(),), (1,)) for tensor in here]
        joined = torch.cat([tensor.view(torch.uint8) for tensor in flat])
        parts = torch.split(copy(joined), [tensor.nbytes for tensor in here])
        for tensor, part in zip(here, parts, strict=True):
            moved[id(tensor)] = part.view(tensor.dtype).view(tensor.shape)
    return [moved.get(id(tensor), tensor) for tensor in tensors]


# In a tier, a token's numbers in one head are `centre + step * code`, with integer codes, and a
# step for each token and head. The centre, one for the whole archive, is what all keys of a head
# have in common, which in many models is far larger than their differences.


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
