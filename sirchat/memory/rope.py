"""Rotary position embeddings: find how a layer rotates keys, and rotate keys to other positions.

If the input is a single token, the hidden states do not depend on its position. Therefore the keys
of this token at two positions differ by exactly the layer's rotation. `match_rotation` tries each
frequency buffer of the model in each layout, and returns the rotation that explains the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """The rotary position embedding of one layer's keys or values.

    Attributes:
        inv_freq: angular frequencies, float32 [d/2], in radians per position, negative for a
            rotation backward; kept on the CPU, because not every device has float64.
        interleaved: True if pairs of adjacent dimensions are rotated: (0, 1), (2, 3), ...; False
            if the pairs are (0, d/2), (1, d/2 + 1), ...
        offset: index within the head of the first of the d rotated dimensions.
    """

    inv_freq: Tensor
    interleaved: bool = False
    offset: int = 0

    @property
    def dims(self) -> int:
        """Number d of dimensions of each head that are rotated."""
        return 2 * self.inv_freq.numel()

    def cos_sin(self, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [n, d/2], that rotate n keys from positions `old` to `new`.

        Angles are rounded to float32, like the model's own, and then subtracted in float64.
        Therefore a rotated key equals the key that the model would have computed at the new
        position.
        """
        inv_freq = self.inv_freq[None]  # [1, d/2]
        angle_old = (old.float()[:, None] * inv_freq).double()
        angle_new = (new.float()[:, None] * inv_freq).double()
        # Below 2 pi float32 is exact enough, and its cosine is several times faster.
        delta = torch.remainder(angle_new - angle_old, 2 * math.pi).float()
        return delta.cos(), delta.sin()

    def apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate vectors `x` [..., n, D] by the cosines `cos` and sines `sin`, each [n, d/2].

        Returns a rotated copy in float32.
        """
        cos, sin = cos.to(x.device), sin.to(x.device)
        out = x.float() if x.dtype != torch.float32 else x.clone()
        old = self._pairs(x.float())
        new = self._pairs(out)
        torch.mul(old[0], cos, out=new[0]).addcmul_(old[1], sin, value=-1)
        torch.mul(old[1], cos, out=new[1]).addcmul_(old[0], sin)
        return out

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second coordinates of all rotated pairs of `x`: views [..., d/2]."""
        part = x[..., self.offset : self.offset + self.dims]
        if self.interleaved:
            return part[..., 0::2], part[..., 1::2]
        half = self.dims // 2
        return part[..., :half], part[..., half:]

    def same_angles(self, other: Rotation) -> bool:
        """Whether `other` has the same frequencies, and therefore the same cosines and sines."""
        return torch.equal(self.inv_freq, other.inv_freq)


class CosSin:
    """Cosines and sines that rotate n keys from rotary positions `old` [n] to `new` [n].

    Cosines and sines are computed once for each device and each set of frequencies. Layers with the
    same frequencies share them.
    """

    def __init__(self, old: Tensor, new: Tensor) -> None:
        self._positions = old, new
        self._computed: list[tuple[Rotation, torch.device, tuple[Tensor, Tensor]]] = []

    def of(self, rotation: Rotation | None, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """The cosines and sines of `rotation`, each [n, d/2], on `device`.

        Returns None if `rotation` is None.
        """
        if rotation is None:
            return None
        for other, where, cos_sin in self._computed:
            if where == device and other.same_angles(rotation):
                return cos_sin
        cos, sin = rotation.cos_sin(*self._positions)
        self._computed.append((rotation, device, (cos.to(device), sin.to(device))))
        return self._computed[-1][2]


def unrotated(vectors: Tensor, written_at: Tensor, rotation: Rotation | None) -> Tensor:
    """Keys or values [H, k, D] without their `rotation`, in float32.

    `written_at` [k] are their rotary positions.
    """
    if rotation is None:
        return vectors.float()
    slots = int(written_at.max()) + 1 if len(written_at) else 0
    cos, sin = rotation.cos_sin(torch.arange(slots), torch.zeros(slots, dtype=torch.int64))
    return rotation.apply(vectors, cos[written_at], sin[written_at])


def match_rotation(
    samples: Mapping[int, Tensor], frequencies: Mapping[str, Tensor], tolerance: float
) -> Rotation | None:
    """Find the rotation that turns a token's key at position 0 into its keys at other positions.

    Args:
        samples: for each position, the key (or value) [H, D] of the same token at that position;
            must include position 0.
        frequencies: the model's `inv_freq` buffers by name, float32 [d/2] each.
        tolerance: largest relative error of a match.

    Returns:
        The rotation, or None if the key does not depend on the position.

    Raises:
        LookupError: the key depends on the position, but no known rotation explains how.
    """
    if _error(samples, None) <= tolerance:
        return None
    head_dim = samples[0].shape[-1]
    for sign in (1, -1):  # few models rotate backward, such as NanoChat
        best = min(
            _candidates(frequencies, head_dim, sign),
            key=lambda rotation: _error(samples, rotation),
            default=None,
        )
        if best is not None and _error(samples, best) <= tolerance:
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


def _error(samples: Mapping[int, Tensor], rotation: Rotation | None) -> float:
    """The largest relative error if `rotation` rotates a token's key to other positions.

    `samples` has the token's key [H, D] at each position. The key at position 0 is rotated to every
    position, and compared with the key at that position. If `rotation` is None, it is compared
    without rotation.
    """
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
