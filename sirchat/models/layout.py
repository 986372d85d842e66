"""Lays the parts of a model out over devices: which layer goes where, in the order of the layers.

Layers stay in order, so that a forward pass goes from each device to the next only once. A layer on
disk is read to the first device for each pass; its keys and values stay on the first device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GPU_RESERVE = 1_000_000_000
"""Bytes of each GPU that are left free, for its driver and the results of forward passes."""

DISK = "disk"


@dataclass(frozen=True)
class ModelPart:
    """A part of a model that is never split, such as a layer.

    Attributes:
        name: the part's name.
        weights: bytes of the part's weights.
        cache: bytes of the part's keys and values in a full KV cache.
    """

    name: str
    weights: int
    cache: int = 0

    @property
    def size(self) -> int:
        """Bytes of this part's weights and of its keys and values in a full KV cache, together."""
        return self.weights + self.cache


@dataclass(frozen=True)
class DeviceRoom:
    """The name of a device, and the bytes of a model that it has room for; None for no limit."""

    name: str
    room: int | None


def lay_out(
    parts: Sequence[ModelPart], places: Sequence[DeviceRoom], *, even: int = 0
) -> list[list[ModelPart]] | None:
    """Distribute a model's parts over `places` in order; returns the parts of each place.

    Each place is filled before the next one is used. But if `even` is above 0, the first `even`
    places get equally many bytes, if all parts fit there. If the last place is the disk, it gets
    the last parts. Returns None if the parts do not fit.
    """
    if even and (found := _evenly(parts, places[:even])) is not None:
        return [*found, *([] for _ in places[even:])]
    if not places or places[-1].name != DISK:
        return _filled(parts, places)
    for count in range(len(parts) + 1):  # the last `count` parts go to disk
        rest, stored = parts[: len(parts) - count], parts[len(parts) - count :]
        kept = sum(one.cache for one in stored) + max((one.weights for one in stored), default=0)
        first = places[0]
        less = DeviceRoom(first.name, None if first.room is None else first.room - kept)
        if (less.room is None or less.room >= 0) and (
            found := _filled(rest, [less, *places[1:-1]])
        ) is not None:
            return [*found, list(stored)]
    return None


def _filled(
    parts: Sequence[ModelPart], places: Sequence[DeviceRoom]
) -> list[list[ModelPart]] | None:
    """Distribute a model's parts over `places` in order; each place is filled before the next.

    Returns the parts of each place; None if the parts do not fit. None of the places may be the
    disk.
    """
    found, at = [list[ModelPart]() for _ in places], 0
    left = [one.room for one in places]
    for part in parts:
        while at < len(places) and (room := left[at]) is not None and room < part.size:
            at += 1
        if at == len(places):
            return None
        found[at].append(part)
        if (room := left[at]) is not None:
            left[at] = room - part.size
    return found


def _evenly(
    parts: Sequence[ModelPart], places: Sequence[DeviceRoom]
) -> list[list[ModelPart]] | None:
    """Distribute a model's parts over `places` in order, with few bytes in the fullest place.

    The number of bytes in the fullest place is the lowest possible. Returns the parts of each
    place; None if the parts do not fit.
    """
    low, high = 0, sum(one.size for one in parts)
    best = _filled(parts, places)
    while best is not None and low < high:
        middle = (low + high) // 2
        capped = [
            DeviceRoom(one.name, middle if one.room is None else min(one.room, middle))
            for one in places
        ]
        found = _filled(parts, capped)
        best, low, high = (best, middle + 1, high) if found is None else (found, low, middle)
    return best
