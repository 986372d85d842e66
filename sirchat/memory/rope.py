"""Rotary position embeddings: find how a layer rotates keys, and rotate keys to other positions.

The hidden states of an input of one token do not depend on its position. So this token's keys at
two positions differ by exactly the layer's rotation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """The rotary position embedding of one layer's keys or values."""

    # float32 [d/2], radians per position, negative for a rotation backward; on the CPU, because not
    # every device has float64
    inv_freq: Tensor
    interleaved: bool = False  # pairs are (0, 1), (2, 3), ..., else (0, d/2), (1, d/2 + 1), ...
    offset: int = 0  # of the first of the d rotated dimensions within the head

    def cos_sin(self, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [n, d/2], that rotate n keys from positions `old` to `new`."""
        # Rounded to float32, like the model's own, and then subtracted in float64: a rotated key
        # equals the key that the model would have computed at the new position.
        inv_freq = self.inv_freq[None]  # [1, d/2]
        angle_old = (old.float()[:, None] * inv_freq).double()
        angle_new = (new.float()[:, None] * inv_freq).double()
        # Below 2 pi float32 is exact enough, and its cosine is several times faster.
        delta = torch.remainder(angle_new - angle_old, 2 * math.pi).float()
        return delta.cos(), delta.sin()

    def apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The vectors `x` [..., n, D], rotated by `cos` and `sin` [n, d/2]: a copy in float32."""
        cos, sin = cos.to(x.device), sin.to(x.device)
        out = x.float() if x.dtype != torch.float32 else x.clone()
        half = cos.shape[-1]  # d/2
        part = slice(self.offset, self.offset + 2 * half)
        old, new = x.float()[..., part], out[..., part]
        if self.interleaved:
            pairs = slice(0, None, 2), slice(1, None, 2)
        else:
            pairs = slice(0, half), slice(half, None)
        first, second = old[..., pairs[0]], old[..., pairs[1]]
        torch.mul(first, cos, out=new[..., pairs[0]]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=new[..., pairs[1]]).addcmul_(first, sin)
        return out

    def has_same_angles(self, other: Rotation) -> bool:
        """Whether `other` has the same frequencies, and therefore the same cosines and sines."""
        return torch.equal(self.inv_freq, other.inv_freq)


def unrotated(vectors: Tensor, written_at: Tensor, rotation: Rotation | None) -> Tensor:
    """Keys or values [H, k, D] at rotary positions `written_at` [k], rotated back, in float32."""
    if rotation is None:
        return vectors.float()
    slots = int(written_at.max()) + 1 if len(written_at) else 0
    cos, sin = rotation.cos_sin(torch.arange(slots), torch.zeros(slots, dtype=torch.int64))
    return rotation.apply(vectors, cos[written_at], sin[written_at])


def match_rotation(
    samples: Mapping[int, Tensor], frequencies: Mapping[str, Tensor], tolerance: float
) -> Rotation | None:
    """The rotation that turns a token's key at position 0 into its keys at other positions.

    `samples` has the key or value [H, D] by position, `frequencies` the model's `inv_freq` buffers
    [d/2] by name. `tolerance` is the largest relative error of a match. Returns None if keys do not
    depend on the position; raises LookupError if no known rotation matches.
    """
    if rotation_error(samples, None) <= tolerance:
        return None
    head_dim = samples[0].shape[-1]
    for sign in (1, -1):  # few models rotate backward, such as NanoChat
        best = min(
            _candidates(frequencies, head_dim, sign),
            key=lambda rotation: rotation_error(samples, rotation),
            default=None,
        )
        if best is not None and rotation_error(samples, best) <= tolerance:
            return best
    raise LookupError("no known rotation maps this layer's keys from one position to another")


def _candidates(frequencies: Mapping[str, Tensor], head_dim: int, sign: int) -> Iterator[Rotation]:
    for buffer in frequencies.values():
        inv_freq = sign * buffer.detach().float().cpu()
        dims = 2 * inv_freq.numel()
        if dims > head_dim:
            continue
        for interleaved in (False, True):
            for offset in sorted({0, head_dim - dims}):
                yield Rotation(inv_freq, interleaved, offset)


def rotation_error(samples: Mapping[int, Tensor], rotation: Rotation | None) -> float:
    """The largest relative error of a key [H, D] at position 0, rotated to other positions."""
    start = samples[0].float()[:, None]  # [H, 1, D]
    worst = 0.0
    for position, sample in samples.items():
        moved = start
        if rotation is not None:
            cos, sin = rotation.cos_sin(torch.tensor([0]), torch.tensor([position]))
            moved = rotation.apply(start, cos, sin)
        gap = (moved[:, 0] - sample.float()).norm() / sample.float().norm().clamp_min(1e-30)
        worst = max(worst, float(gap))
    return worst
