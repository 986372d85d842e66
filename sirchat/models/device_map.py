"""Spreads a model over several devices: accelerate chooses one for each part, and loads it there.

It places layers in order, so that a forward pass goes from each device to the next only once. With
a GPU, layers in main memory or on disk are read to the first one for each pass; their keys and
values stay there.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

import torch

from sirchat.errors import ModelError
from sirchat.memory.archive import ArchiveFolder
from sirchat.memory.free_memory import free_large_blocks_at_once
from sirchat.models.devices import (
    CPU,
    DISK,
    DtypeName,
    ModuleDevices,
    available_gpus,
    free_gpu_bytes,
    pick_dtype,
)
from sirchat.models.fit import PROGRAM_BYTES
from sirchat.models.hidden_states import decoder_layers
from sirchat.models.listing import find_model
from sirchat.models.progress import no_warnings
from sirchat.models.shape import free_memory
from sirchat.paths import archives_dir

Spread = Literal["off", "auto", "balanced"]  # the setting `device_map`

GPU_RESERVE = 1_000_000_000  # bytes of each GPU left free, for its driver and results; assumed

_UNLIMITED_BYTES = 1 << 60  # bytes of main memory where the system does not say what is free


def make_device_map(
    name: str, spread: Spread, rows: int, dtype: DtypeName, *, device: str, quantize: str
) -> DeviceMap:
    """Make the device map by which the model `name` will be loaded, beside a cache of `rows`.

    Raises ModelError if accelerate is missing, or if another setting forbids a map.
    """
    if device != "auto" or quantize not in ("auto", "none"):
        other = f"device={device}" if device != "auto" else f"quantize={quantize}"
        raise ModelError(f"{other} can't be used with a device map", hint="leave out one of them")
    if find_spec("accelerate") is None:
        raise ModelError(
            "a device map needs the package accelerate", hint="pip install 'sirchat[devices]'"
        )
    shape = None
    with suppress(ModelError):  # it is not on this machine yet
        shape = find_model(name).shape
    elements = (shape.row_elements if shape is not None else None) or 0
    item = pick_dtype(dtype, main_device()).itemsize
    return DeviceMap(spread, rows * item * elements)


def main_device() -> torch.device:
    """The first GPU; the CPU if there is none."""
    return next(iter(available_gpus()), torch.device(CPU))


@dataclass(frozen=True)
class DeviceMap:
    spread: Spread
    cache_bytes: int  # of all keys and values, for which each device keeps room

    def options(self, outline: Any) -> dict[str, Any]:
        """Options of `from_pretrained`; `outline` is the model without weights."""
        from accelerate.utils import get_balanced_memory, infer_auto_device_map

        # accelerate knows a GPU by its number.
        devices = {gpu.index if gpu.type != "mps" else "mps": gpu for gpu in available_gpus()}
        free = {key: free_gpu_bytes(gpu) - GPU_RESERVE for key, gpu in devices.items()}
        in_ram = free_memory()
        free[CPU] = _UNLIMITED_BYTES if in_ram is None else in_ram - PROGRAM_BYTES
        room = {key: max(0, size - self.cache_bytes) for key, size in free.items()}
        layers = (*decoder_layers(outline), outline.get_input_embeddings())
        unsplit = list({type(layer).__name__ for layer in layers})
        with no_warnings():  # of GPUs that this machine does not have
            if self.spread == "balanced":
                room = get_balanced_memory(outline, room, unsplit)
            plan: dict[str, Any] = infer_auto_device_map(outline, room, unsplit)
        placement: ModuleDevices = {part: devices.get(key, key) for part, key in plan.items()}
        folder = self._folder.path if DISK in placement.values() else None
        return {"device_map": placement, "offload_folder": folder}

    @cached_property
    def _folder(self) -> ArchiveFolder:
        """A private folder for weights on disk, if the model's files have them in another form."""
        folder = ArchiveFolder(archives_dir() / f"weights-{os.getpid()}-{secrets.token_hex(4)}")
        folder.make()
        free_large_blocks_at_once()
        return folder
