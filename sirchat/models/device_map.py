"""Spreads a model over several devices: accelerate chooses one for each part, and loads it there.

It places layers in order, so that a forward pass goes from each device to the next only once. A
layer on disk is read to the first device for each pass; its keys and values stay there.
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
from torch import nn

from sirchat.errors import ModelError
from sirchat.memory.archive_folder import ArchiveFolder
from sirchat.memory.free_memory import free_large_blocks_at_once
from sirchat.models.devices import (
    CPU,
    DISK,
    DeviceOrDisk,
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

    Raises ModelError if accelerate is missing, or if `device` or `quantize` forbids a map.
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
    return DeviceMap(name, spread, rows * item * elements)


def main_device() -> torch.device:
    """The first GPU; the CPU if there is none."""
    return next(iter(available_gpus()), torch.device(CPU))


@dataclass(frozen=True)
class DeviceMap:
    model: str  # its name
    spread: Spread
    cache_bytes: int  # of all keys and values, for which it leaves room

    def options(self, outline: nn.Module) -> dict[str, Any]:
        """Options of `from_pretrained`; `outline` has no weights. Then call `finish_loading`."""
        placement = self.choose_devices(outline)
        return {"device_map": placement, "offload_folder": self._offload_folder(placement)}

    def dispatch(self, module: Any) -> None:
        """Move the parts of a model from the CPU to their devices."""
        from accelerate import dispatch_model

        placement = self.choose_devices(module)
        skipped = getattr(module, "_skip_keys_device_placement", None)
        folder = self._offload_folder(placement)
        dispatch_model(module, placement, offload_dir=folder, skip_keys=skipped)
        self.finish_loading(module)

    def finish_loading(self, module: Any) -> None:
        """Let the layers on the CPU compute there; accelerate would copy them to a GPU."""
        from accelerate import hooks

        placement: ModuleDevices = getattr(module, "hf_device_map", {})
        if DISK in placement.values():
            module.offloaded = self._folder  # it is deleted with the model
        if not any(isinstance(device, torch.device) for device in placement.values()):
            return
        for name, device in placement.items():
            if device == CPU:
                part = module.get_submodule(name)
                hooks.remove_hook_from_module(part, recurse=True)
                hooks.add_hook_to_module(part, hooks.AlignDevicesHook(CPU, place_submodules=True))
                hooks.attach_execution_device_hook(part, CPU)
        module.tie_weights()

    def choose_devices(self, module: Any) -> ModuleDevices:
        """The device of each part of a model, by the shapes and types of its weights.

        Raises ModelError if the model does not fit.
        """
        # accelerate knows a GPU by its number.
        devices = {gpu.index if gpu.type != "mps" else "mps": gpu for gpu in available_gpus()}
        memory = {key: max(0, free_gpu_bytes(gpu) - GPU_RESERVE) for key, gpu in devices.items()}
        free = free_memory()
        memory[CPU] = _UNLIMITED_BYTES if free is None else max(0, free - PROGRAM_BYTES)
        weights = sum(parameter.nbytes for parameter in module.parameters())
        share = weights / (weights + self.cache_bytes)  # each layer's keys and values are beside it
        layers, first = decoder_layers(module), next(iter(memory))
        plan = self._infer(module, layers, {key: int(n * share) for key, n in memory.items()})
        if DISK in plan.values():  # these parts, with their keys and values, compute on the first
            largest = max(sum(one.nbytes for one in layer.parameters()) for layer in layers)
            if memory[first] < self.cache_bytes + largest:
                raise ModelError(
                    f"{self.model} does not fit, not even with its layers on disk",
                    hint="choose a smaller budget or model",
                )
            memory[first] -= self.cache_bytes
            plan = self._infer(module, layers, memory)
        by_key: dict[int | str, DeviceOrDisk] = {**devices, CPU: CPU, DISK: DISK}
        return {part: by_key[key] for part, key in plan.items()}

    def _infer(
        self, module: Any, layers: nn.ModuleList, memory: dict[int | str, int]
    ) -> dict[str, int | str]:
        """accelerate's device for each part; `memory` has the bytes for weights on each device."""
        from accelerate.utils import get_balanced_memory, infer_auto_device_map

        unsplit = list({type(one).__name__ for one in (*layers, module.get_input_embeddings())})
        with no_warnings():  # of GPUs that this machine does not have
            if self.spread == "balanced":
                memory = get_balanced_memory(module, memory, unsplit)
            plan: dict[str, int | str] = infer_auto_device_map(module, memory, unsplit)
        return plan

    def _offload_folder(self, placement: ModuleDevices) -> str | None:
        return str(self._folder.path) if DISK in placement.values() else None

    @cached_property
    def _folder(self) -> ArchiveFolder:
        """A private folder for weights on disk, if the model's files have them in another form."""
        folder = ArchiveFolder(archives_dir() / f"weights-{os.getpid()}-{secrets.token_hex(4)}")
        folder.make()
        free_large_blocks_at_once()
        return folder
