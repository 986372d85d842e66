"""The memory that a model's KV cache will take, computed before the model is loaded."""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sirchat.config.profile import Profile
from sirchat.models.shape import ModelShape


def cache_bytes(shape: ModelShape, profile: Profile, rows: int) -> int | None:
    """Bytes that are allocated for `rows` tokens under a profile; None where that is unknown."""
    if shape.row_elements is None:
        return None
    return shape.row_elements * rows * _item_size(shape, profile)


def _item_size(shape: ModelShape, profile: Profile) -> int:
    """Bytes of one number in the cache; see `LoadedModel.cache_dtype` and `pick_dtype`."""
    on_cpu = profile.device == "cpu" or (profile.device == "auto" and not _has_accelerator())
    is_wide = profile.dtype == "float32" or (profile.dtype == "auto" and on_cpu)
    unasked = profile.quantize == "auto" and profile.dtype == "auto" and on_cpu
    packed = profile.quantize in ("packed", "int8", "int4") or (
        unasked and shape.stays_packed and _packs_four_bits()
    )
    return 4 if is_wide and not packed else 2


def _has_accelerator() -> bool:
    """Whether `device: auto` will find a GPU; torch itself takes seconds to tell."""
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    with suppress(PackageNotFoundError):
        return not version("torch").endswith("+cpu") and Path("/dev/nvidiactl").exists()
    return False


def _packs_four_bits() -> bool:
    """Whether torch packs four bits on this CPU as `packed.can_pack_four_bits` wants it."""
    with suppress(OSError):
        return "avx512f" in Path("/proc/cpuinfo").read_text("ascii", "replace")
    return False
