"""Spreads a model over several devices: chooses the device of each part, and loads it there.

A layer is never split. A layer on the CPU is computed on the CPU, even if there are GPUs. A layer
on disk is read for each pass to the main device, which is the first GPU or else the CPU.
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
from sirchat.errors import ModelError, format_value, nearest
from sirchat.memory.free_memory import free_large_blocks_at_once
from sirchat.memory.segments import ArchiveFolder
from sirchat.models.devices import (
    CPU,
    DtypeName,
    Placement,
    Where,
    accelerators,
    free_bytes,
    is_within,
    pick_dtype,
)
from sirchat.models.fit import PROGRAM
from sirchat.models.layout import DISK, GPU_RESERVE, DeviceRoom, ModelPart, lay_out
from sirchat.models.listing import find_model
from sirchat.models.scorer import decoder_layers
from sirchat.models.shape import free_memory
from sirchat.paths import archives_dir

_PLANS = ("auto", "balanced")
_MOST_BYTES = 1_000_000  # most bytes of a file with a device map


def read_device_map(setting: str) -> str | dict[str, Where]:
    """Read the setting `device_map`: returns `auto`, `balanced`, or devices by module name.

    The devices come from the YAML or JSON file that the setting names. Raises ModelError if the
    file can't be read or names a device that this machine does not have, and SettingError if the
    file is not valid YAML.
    """
    if setting in _PLANS:
        return setting
    path, said = Path(setting).expanduser(), "--device-map"
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            raise ModelError(
                f"{said} {format_value(setting)}: there is no such file, or it is too large",
                hint="give auto, balanced, or a YAML or JSON file with a device for each module",
            )
        values = parse_yaml(path.read_text("utf-8"), path)
    except (OSError, UnicodeError) as error:
        raise ModelError(f"{said} {format_value(setting)} can't be read: {error}") from error
    if not isinstance(values, dict) or not values:
        raise ModelError(
            f"{path} is no mapping of module names to devices", hint="such as model.layers.0: cpu"
        )
    return {str(name): _device(value, f"{path}: {name}") for name, value in values.items()}


def _device(value: object, where: str) -> Where:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    text = f"cuda:{value}" if is_number else str(value)
    if text in (CPU, DISK):
        return text
    there = accelerators()
    with suppress(RuntimeError):  # it is not the name of a device
        device = torch.device(text)
        if (found := torch.device(device.type, device.index or 0)) in there:
            return found
    allowed = ", ".join(map(str, (CPU, DISK, *there)))
    raise ModelError(f"{where} has the device {format_value(value)}", hint=f"allowed: {allowed}")


def spread_of(
    name: str, device_map: str, rows: int, dtype: DtypeName, *, device: str, quantize: str
) -> Spread:
    """Make the device map (`Spread`) with which the model `name` will be loaded.

    `auto` and `balanced` leave room for the KV cache of `rows` tokens. Raises ModelError if the
    device map can't be read, if accelerate is not installed, or if the settings `device` or
    `quantize` can't be combined with a device map.
    """
    if device != "auto" or quantize not in ("auto", "none"):
        other = f"device={device}" if device != "auto" else f"quantize={quantize}"
        raise ModelError(f"{other} can't be used with a device map", hint="leave out one of them")
    if find_spec("accelerate") is None:
        raise ModelError(
            "a device map needs the package accelerate", hint="pip install 'sirchat[devices]'"
        )
    spread, shape = Spread(name, read_device_map(device_map)), None
    if isinstance(spread.said, str):
        with suppress(ModelError):  # it is not on this machine yet
            shape = find_model(name).shape
    of_layers = (shape.layer_elements if shape is not None else None) or ()
    item = pick_dtype(dtype, spread.main_device).itemsize
    return replace(spread, caches=tuple(rows * item * one for one in of_layers))


@dataclass(frozen=True)
class Spread:
    """The device map of a model: says on which device each part of the model is loaded.

    Attributes:
        model: the model's name.
        said: the result of `read_device_map`.
        caches: bytes of each layer's keys and values, for which `auto` and `balanced` leave room.
    """

    model: str
    said: str | dict[str, Where]
    caches: tuple[int, ...] = ()

    @property
    def main_device(self) -> torch.device:
        """The first GPU of this device map; the CPU if the map has no GPU."""
        where = accelerators() if isinstance(self.said, str) else self.said.values()
        named = (one for one in where if isinstance(one, torch.device))
        return min(named, key=lambda one: one.index, default=torch.device(CPU))

    def options(self, outline: nn.Module) -> dict[str, Any]:
        """The options of `from_pretrained` that load a model with this device map.

        `outline` is the model without weights. Call `finish` after loading the model with these
        options.
        """
        placement = self.place(outline)
        folder = str(self._folder.path) if DISK in placement.values() else None
        return {"device_map": placement, "offload_folder": folder}

    def dispatch(self, module: Any) -> None:
        """Move the parts of a model from the CPU to the devices of this device map."""
        from accelerate import dispatch_model

        placement = self.place(module)
        folder = str(self._folder.path) if DISK in placement.values() else None
        skipped = getattr(module, "_skip_keys_device_placement", None)
        dispatch_model(module, placement, offload_dir=folder, skip_keys=skipped)
        self.finish(module)

    def finish(self, module: Any) -> None:
        """Make the layers on the CPU compute on the CPU; accelerate would copy them to a GPU."""
        from accelerate import hooks

        placement: Placement = getattr(module, "hf_device_map", {})
        if DISK in placement.values():
            module.offloaded = self._folder  # it is deleted with the model
        if not any(isinstance(one, torch.device) for one in placement.values()):
            return
        for name, where in placement.items():
            if where == CPU:
                part = module.get_submodule(name)
                hooks.remove_hook_from_module(part, recurse=True)
                own = hooks.AlignDevicesHook(CPU, place_submodules=True)
                hooks.add_hook_to_module(part, own)
                hooks.attach_execution_device_hook(part, CPU)
        module.tie_weights()

    @cached_property
    def _folder(self) -> ArchiveFolder:
        """A private folder for weights on disk that the model's own files have in another form.

        The first access creates the folder, so use it only if some weights are on disk.
        """
        folder = ArchiveFolder(archives_dir() / f"weights-{os.getpid()}-{secrets.token_hex(4)}")
        folder.make()
        free_large_blocks_at_once()
        return folder

    def place(self, module: Any) -> Placement:
        """Choose the device of each part of a model, as this device map says.

        Only the shapes and types of the weights are needed. Raises ModelError if the map names a
        module that the model does not have, splits a layer or leaves a part without a device, or if
        the model does not fit.
        """
        names = {id(one): name for name, one in module.named_modules()}
        layers = [names[id(layer)] for layer in decoder_layers(module)]
        is_tied = getattr(module.config, "tie_word_embeddings", False)
        head = names[id(module.get_output_embeddings())] if is_tied else None
        parts = [one for one in _parts_of(module, layers) if one != head]
        if isinstance(self.said, str):
            found = self._planned(module, parts, layers)
        else:
            found = self._as_said(self.said, list(names.values()), parts, layers)
        if head is not None:  # its weights are those of the embeddings
            found[head] = found[names[id(module.get_input_embeddings())]]
        return found

    def _as_said(
        self, said: dict[str, Where], known: list[str], parts: list[str], layers: list[str]
    ) -> Placement:
        for name in said:
            if name not in known:
                raise ModelError(
                    f"the device map names {format_value(name)}; {self.model} has no such module",
                    hint=nearest(name, known, alike=0.7) or f"its first layer is {layers[0]}",
                )
            inside = next((one for one in layers if name != one and is_within(name, one)), None)
            if inside:
                raise ModelError(f"the device map splits {inside}", hint="give it the whole layer")
        found = Placement()
        for part in parts:
            outer = max((one for one in said if is_within(part, one)), key=len, default=None)
            if outer is None:
                raise ModelError(
                    f"the device map has no device for {part}",
                    hint='the empty name "" stands for all modules that are not named',
                )
            found[part] = said[outer]
        return found

    def _planned(self, module: nn.Module, parts: list[str], layers: list[str]) -> Placement:
        caches, sized = dict(zip(layers, self.caches, strict=False)), list[ModelPart]()
        for name in parts:
            weights = sum(one.nbytes for one in module.get_submodule(name).parameters())
            if weights:  # the frequencies of a rotation have none
                sized.append(ModelPart(name, weights, caches.get(name, 0)))
        gpus, free = accelerators(), free_memory()
        places = [DeviceRoom(str(one), max(0, free_bytes(one) - GPU_RESERVE)) for one in gpus]
        places.append(DeviceRoom(CPU, None if free is None else max(0, free - PROGRAM)))
        even = len(gpus) * (self.said == "balanced")
        laid = lay_out(sized, [*places, DeviceRoom(DISK, None)], even=even)
        if laid is None:
            raise ModelError(
                f"{self.model} does not fit, not even with its layers on disk",
                hint="choose a smaller budget or model",
            )
        where: list[Where] = [*gpus, CPU, DISK]
        found = {one.name: at for at, held in zip(where, laid, strict=True) for one in held}
        return {name: found.get(name, found[sized[0].name]) for name in parts}


def _parts_of(module: nn.Module, layers: list[str]) -> Iterator[str]:
    """Yield the names of the parts of a model that are placed on devices, in order.

    These are the layers, and the modules outside the layers that have weights or buffers of their
    own. Raises ModelError if a module that contains a layer has weights or buffers of its own.
    """
    for name, one in module.named_modules():
        if name in layers:
            yield name
        elif not any(is_within(name, layer) for layer in layers):
            own = (*one.parameters(recurse=False), *one.buffers(recurse=False))
            if own and any(is_within(layer, name) for layer in layers):
                whose = name or "its root"
                raise ModelError(
                    f"the model can't be spread: {whose} has weights beside its layers"
                )
            if own:
                yield name
