"""Spreads a model over several devices: chooses a device for each part, and loads the part there.

accelerate places layers in order, so that a forward pass goes from each device to the next only
once. A layer on disk is read to the first device for each pass; its keys and values stay there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sirchat.config.values import parse_yaml
from sirchat.errors import ModelError, did_you_mean, format_value
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
    is_submodule,
    pick_dtype,
)
from sirchat.models.fit import PROGRAM_BYTES
from sirchat.models.hidden_states import decoder_layers
from sirchat.models.listing import find_model
from sirchat.models.progress import no_warnings
from sirchat.models.shape import free_memory
from sirchat.paths import archives_dir

GPU_RESERVE = 1_000_000_000  # bytes of each GPU left free, for its driver and results; assumed

_PLAN_NAMES = ("auto", "balanced")
_MAX_FILE_BYTES = 1_000_000  # most bytes of a file with a device map
_UNLIMITED_BYTES = 1 << 60  # bytes of main memory where the system does not say what is free


def read_device_map(setting: str) -> str | dict[str, DeviceOrDisk]:
    """Read the setting `device_map`: returns `auto`, `balanced`, or devices by module name.

    Raises ModelError if the file can't be read or names a device that this machine does not have,
    and SettingError if it is not valid YAML.
    """
    if setting in _PLAN_NAMES:
        return setting
    path, flag = Path(setting).expanduser(), f"--device-map {format_value(setting)}"
    try:
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelError(
                f"{flag}: there is no such file, or it is too large",
                hint="give auto, balanced, or a YAML or JSON file with a device for each module",
            )
        values = parse_yaml(path.read_text("utf-8"), path)
    except (OSError, UnicodeError) as error:
        raise ModelError(f"{flag} can't be read: {error}") from error
    if not isinstance(values, dict) or not values:
        raise ModelError(
            f"{path} is no mapping of module names to devices", hint="such as model.layers.0: cpu"
        )
    return {str(name): _parse_device(value, f"{path}: {name}") for name, value in values.items()}


def make_device_map(
    name: str, device_map: str, rows: int, dtype: DtypeName, *, device: str, quantize: str
) -> DeviceMap:
    """Make the device map by which the model `name` will be loaded.

    `auto` and `balanced` leave room for the KV cache of `rows` tokens. Raises ModelError if the map
    can't be read, if accelerate is missing, or if `device` or `quantize` forbids a map.
    """
    if device != "auto" or quantize not in ("auto", "none"):
        other = f"device={device}" if device != "auto" else f"quantize={quantize}"
        raise ModelError(f"{other} can't be used with a device map", hint="leave out one of them")
    _require_accelerate()
    devices, shape = DeviceMap(name, read_device_map(device_map)), None
    if isinstance(devices.setting, str):
        with suppress(ModelError):  # it is not on this machine yet
            shape = find_model(name).shape
    elements = (shape.row_elements if shape is not None else None) or 0
    item = pick_dtype(dtype, devices.main_device).itemsize
    return replace(devices, cache_bytes=rows * item * elements)


@dataclass(frozen=True)
class DeviceMap:
    model: str  # its name
    setting: str | dict[str, DeviceOrDisk]  # what `read_device_map` returns
    cache_bytes: int = 0  # of all keys and values, for which `auto` and `balanced` leave room

    @property
    def main_device(self) -> torch.device:
        """The first GPU of the map; the CPU if there is none."""
        listed = available_gpus() if isinstance(self.setting, str) else self.setting.values()
        gpus = (device for device in listed if isinstance(device, torch.device))
        return min(gpus, key=lambda gpu: gpu.index, default=torch.device(CPU))

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
        """Choose the device of each part of a model by the shapes and types of its weights.

        Raises ModelError if a module is unknown or has no device, or if the model does not fit.
        """
        names = {id(part): name for name, part in module.named_modules()}
        layers = [names[id(layer)] for layer in decoder_layers(module)]
        parts = list(_placed_modules(module, layers))
        if not getattr(module.config, "tie_word_embeddings", False):
            self._check_names(parts, layers[0])
            return self._assign(module, parts)
        # The head has the weights of the embeddings, and so their device.
        head = names[id(module.get_output_embeddings())]
        self._check_names([*parts, head], layers[0])
        placement = self._assign(module, [part for part in parts if part != head])
        placement[head] = placement[names[id(module.get_input_embeddings())]]
        return placement

    def _check_names(self, known: list[str], first_layer: str) -> None:
        for name in () if isinstance(self.setting, str) else self.setting:
            if not any(is_submodule(part, name) for part in known):
                hint = did_you_mean(name, known, cutoff=0.7) or f"its first layer is {first_layer}"
                problem = f"{self.model} has no such module, or has it within a layer"
                raise ModelError(f"the device map names {format_value(name)}; {problem}", hint=hint)

    def _assign(self, module: Any, parts: list[str]) -> ModuleDevices:
        if isinstance(self.setting, str):
            return self._plan(module, parts)
        placement = ModuleDevices()
        for part in parts:
            outer = [name for name in self.setting if is_submodule(part, name)]
            if not outer:
                raise ModelError(
                    f"the device map has no device for {part}",
                    hint='the empty name "" stands for all modules that are not named',
                )
            placement[part] = self.setting[max(outer, key=len)]
        return placement

    def _plan(self, module: Any, parts: list[str]) -> ModuleDevices:
        # accelerate knows a GPU by its number.
        devices = {gpu.index if gpu.type != "mps" else "mps": gpu for gpu in available_gpus()}
        memory = {key: max(0, free_gpu_bytes(gpu) - GPU_RESERVE) for key, gpu in devices.items()}
        free = free_memory()
        memory[CPU] = _UNLIMITED_BYTES if free is None else max(0, free - PROGRAM_BYTES)
        weights = sum(parameter.nbytes for parameter in module.parameters())
        share = weights / (weights + self.cache_bytes)  # each layer's keys and values are beside it
        plan = self._infer(module, parts, {key: int(size * share) for key, size in memory.items()})
        first = next(iter(memory))
        on_disk = [module.get_submodule(part) for part in parts if plan[part] == DISK]
        if on_disk:  # these layers, with their keys and values, compute on the first device
            largest = max(sum(one.nbytes for one in part.parameters()) for part in on_disk)
            if memory[first] < self.cache_bytes + largest:
                raise ModelError(
                    f"{self.model} does not fit, not even with its layers on disk",
                    hint="choose a smaller budget or model",
                )
            memory[first] -= self.cache_bytes
            plan = self._infer(module, parts, memory)
        by_key: dict[int | str, DeviceOrDisk] = {**devices, CPU: CPU, DISK: DISK}
        return {part: by_key[key] for part, key in plan.items()}

    def _infer(
        self, module: Any, parts: list[str], memory: dict[int | str, int]
    ) -> dict[str, int | str]:
        """accelerate's device for each part; `memory` has the bytes for weights on each device."""
        from accelerate.utils import get_balanced_memory, infer_auto_device_map

        unsplit = [type(module.get_submodule(name)).__name__ for name in parts]
        with no_warnings():  # of GPUs that this machine does not have
            if self.setting == "balanced":
                memory = get_balanced_memory(module, memory, unsplit)
            plan = infer_auto_device_map(module, memory, unsplit, clean_result=False)
        # accelerate names a module that contains several parts if all of them have one device
        return {
            part: key for name, key in plan.items() for part in parts if is_submodule(part, name)
        }

    def _offload_folder(self, placement: ModuleDevices) -> str | None:
        return str(self._folder.path) if DISK in placement.values() else None

    @cached_property
    def _folder(self) -> ArchiveFolder:
        """A private folder for weights on disk, if the model's files have them in another form."""
        folder = ArchiveFolder(archives_dir() / f"weights-{os.getpid()}-{secrets.token_hex(4)}")
        folder.make()
        free_large_blocks_at_once()
        return folder


def _require_accelerate() -> None:
    if find_spec("accelerate") is None:
        raise ModelError(
            "a device map needs the package accelerate", hint="pip install 'sirchat[devices]'"
        )


def _parse_device(value: object, where: str) -> DeviceOrDisk:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    text = f"cuda:{value}" if is_number else str(value)
    if text in (CPU, DISK):
        return text
    available = available_gpus()
    with suppress(RuntimeError):  # it is not the name of a device
        device = torch.device(text)
        if (gpu := torch.device(device.type, device.index or 0)) in available:
            return gpu
    allowed = ", ".join(map(str, (CPU, DISK, *available)))
    raise ModelError(f"{where} has the device {format_value(value)}", hint=f"allowed: {allowed}")


def _placed_modules(module: nn.Module, layers: list[str]) -> Iterator[str]:
    """Yield the names of parts that get a device: layers, and modules with weights beside them.

    Raises ModelError if a module that contains a layer has weights or buffers of its own.
    """
    for name, part in module.named_modules():
        if name in layers:
            yield name
        elif not any(is_submodule(name, layer) for layer in layers):
            tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
            if tensors and any(is_submodule(layer, name) for layer in layers):
                whose = name or "its root"
                raise ModelError(
                    f"the model can't be spread: {whose} has weights beside its layers"
                )
            if tensors:
                yield name
