"""Devices, number types and CPU threads, and how much memory a model takes on each device."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.memory.archive import Archive, ArchiveFolder
from sirchat.memory.cache import BoundedCache
from sirchat.memory.free_memory import control_groups, free_large_blocks_at_once, free_memory
from sirchat.models.fit import PROGRAM_BYTES, tensor_bytes
from sirchat.models.gguf.header import parse_gguf
from sirchat.models.gguf.translate import config_values
from sirchat.models.hidden_states import decoder_layers
from sirchat.models.learning import is_learning
from sirchat.models.listing import FoundModel, find_model
from sirchat.models.model_config import LLAMA_KINDS, DecoderConfig
from sirchat.models.names import locate
from sirchat.models.progress import no_warnings
from sirchat.models.shape import precision, stored_weights
from sirchat.paths import archives_dir

DeviceName = Literal["auto", "cuda", "mps", "cpu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

DeviceOrDisk = torch.device | str  # of a part of a model: a GPU, `CPU` or `DISK`
ModuleDevices = dict[str, DeviceOrDisk]  # by the name of a layer, or of a module outside the layers

CPU, DISK = "cpu", "disk"

_SYS = Path("/sys")


Spread = Literal["off", "auto", "balanced"]  # the setting `device_map`

GPU_RESERVE = 1_000_000_000  # bytes of each GPU left free, for its driver and results; assumed

_OUTSIDE, _EMBEDDINGS = -1, -2  # weights that are in no layer; embeddings that are not the head's

_UNLIMITED_BYTES = 1 << 60  # bytes of main memory where the system does not say what is free


def available_gpus() -> list[torch.device]:
    if torch.cuda.is_available():
        return [torch.device("cuda", at) for at in range(torch.cuda.device_count())]
    return [torch.device("mps", 0)] if torch.backends.mps.is_available() else []


def pick_device(name: DeviceName) -> torch.device:
    """The device for the setting `device`; raises ModelError if it is not available."""
    available = ["cuda"] if torch.cuda.is_available() else []
    available += ["mps", "cpu"] if torch.backends.mps.is_available() else ["cpu"]
    if name == "auto":
        return torch.device(available[0])
    if name not in available:
        there = ", ".join(available)
        raise ModelError(f"device {name!r} is not available", hint=f"available: {there}")
    return torch.device(name)


def pick_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """The number type for the setting `dtype`; `auto` is float32 on a CPU, bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def free_gpu_bytes(device: torch.device) -> int:
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    free: int = torch.get_device_module(device).mem_get_info(device)[0]
    if device.type == "cuda":  # torch holds what a model had, for what comes next
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free


def free_memory_at(device: torch.device) -> int | None:
    """Bytes of memory that can still be taken for a device; None if unknown."""
    return free_memory() if device.type == "cpu" else free_gpu_bytes(device)


def is_spread(module: Any) -> bool:
    """Whether a model lies on several devices, or partly on disk."""
    where = set(getattr(module, "hf_device_map", {}).values())
    return len(where) > 1 or DISK in where


def input_device(module: Any) -> torch.device:
    """The device to which ids are sent: that of the embeddings, or the CPU if they are on disk."""
    device: torch.device = module.device
    return torch.device(CPU) if device.type == "meta" else device


def unique_parameters(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each parameter of a model; tied ones only once."""
    # accelerate lists tied ones, such as a head of the embeddings' weights, twice if on disk.
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    return (pair for pair in module.named_parameters() if pair[0] not in tied)


def loaded_parameters(module: Any) -> Iterator[Tensor]:
    """Yield all parameters of a model; parameters on disk are read into memory."""
    for name, parameter in unique_parameters(module):
        if not parameter.is_meta:
            yield parameter
            continue
        from transformers.integrations.accelerate import load_offloaded_parameter

        yield load_offloaded_parameter(module, name)


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes that weights, KV cache and archive take on one device, or on disk."""

    device: str
    weights: int
    cache: int
    archive: int


def memory_by_device(
    module: Any, cache: BoundedCache, archive: Archive | None = None
) -> list[DeviceMemory]:
    weights, archived = weights_by_device(module), Counter[str]()
    rows = Counter({str(device): size for device, size in cache.bytes_by_device().items()})
    if archive is not None:
        archived += archive.bytes_by_device()
    names = dict.fromkeys([*weights, *rows, *archived])
    return [DeviceMemory(name, weights[name], rows[name], archived[name]) for name in names]


def use_threads(count: int, environment: Mapping[str, str] = os.environ) -> None:
    """Set torch's number of CPU threads to `count`.

    0 means the number in SIRCHAT_THREADS or OMP_NUM_THREADS, or else the number of free cores.
    """
    # Beside other programs, one thread for each core is several times slower than one alone: every
    # step waits for the thread that was interrupted.
    told = environment.get("SIRCHAT_THREADS", "").strip()
    if count == 0 and told.isdecimal():
        count = int(told)
    if count == 0 and not environment.get("OMP_NUM_THREADS"):
        count = free_thread_count()
    if count:
        torch.set_num_threads(count)


def agree_on_instructions() -> None:
    """Hide from oneDNN the instructions that ATEN_CPU_CAPABILITY hides from torch."""
    # With AMX, torch's attention over bfloat16 otherwise asks oneDNN for what torch may not use.
    if not os.environ.get("ATEN_CPU_CAPABILITY", "avx512").startswith("avx512"):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2_VNNI_2")


def onednn_isa_limit() -> str:
    """The newest instructions that ONEDNN_MAX_CPU_ISA allows to oneDNN; "" if it allows all."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return "" if most in ("DEFAULT", "ALL") else most


def free_thread_count(load: float | None = None) -> int:
    """The number of physical cores, at least 1, that other programs leave free.

    `load` is how many they keep busy; None measures it.
    """
    load = load_of_others() if load is None else load
    everywhere = range(os.cpu_count() or 1)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(everywhere)
    cores = physical_cores(set(everywhere) | allowed)
    return thread_count(cores, physical_cores(allowed), cpu_quota(), load)


def load_of_others(loadavg: Path = Path("/proc/loadavg")) -> float:
    """The average number of other programs' threads in the last minute that still run."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    try:  # the commands just before this one were others, too, but have ended
        now = int(loadavg.read_text("ascii").split()[3].partition("/")[0]) - 1
    except (OSError, ValueError, LookupError):  # not Linux
        return load
    # What learns an encoder keeps all cores busy, and gives way, with the lowest priority.
    return 0.0 if is_learning() else max(0.0, min(load, now))


def thread_count(cores: int, allowed: int, quota: float | None, load: float) -> int:
    """How many of the machine's physical `cores` are free for this process; at least 1.

    `load` is how many cores were busy in the last minute. This process may run on `allowed` of
    them, and may use the CPU time of `quota` cores; None means no limit.
    """
    most = allowed if quota is None else min(allowed, int(quota))
    return max(1, min(most, cores - round(load)))


def physical_cores(cpus: set[int], sys: Path = _SYS) -> int:
    """Count the physical cores behind these logical CPUs; two logical CPUs may share one core."""
    siblings = set[str]()
    for cpu in cpus:
        path = sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            siblings.add(path.read_text("ascii").strip())
        except OSError:  # not Linux, or not stated: count each CPU as a core
            siblings.add(f"{cpu}")
    return len(siblings)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPU time, in cores, that this process's control groups allow; None if unlimited."""
    quotas, files = list[float](), (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    for folder, names in product(control_groups("cpu", root), files):
        with suppress(OSError, ValueError, ZeroDivisionError):  # such as "max"
            words = " ".join((folder / name).read_text("ascii") for name in names).split()
            quota, period = map(int, words)
            quotas.append(quota / period)
    return min((quota for quota in quotas if quota > 0), default=None)  # -1: no limit


def describe_threads(device: torch.device, *, was_free: bool = False) -> str:
    """torch's number of CPU threads, such as `2 threads`; empty if `device` is not a CPU.

    `was_free`: no setting chose the number; cores that other programs keep busy are named.
    """
    if device.type != "cpu":
        return ""
    count, most = torch.get_num_threads(), free_thread_count(0)
    words = f"{count} thread{'s' if count > 1 else ''}"
    is_said = any(map(os.environ.get, ("SIRCHAT_THREADS", "OMP_NUM_THREADS")))
    if not was_free or count >= most or is_said:
        return words
    return f"{words} (other programs kept {most - count} of {most} cores busy)"


def weights_by_device(module: Any) -> Counter[str]:
    """The bytes of a model's weights on each device, including packed ones."""
    sizes, seen = Counter[str](), set[object]()
    placement: ModuleDevices = getattr(module, "hf_device_map", {})
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    packed = getattr(module.get_input_embeddings(), "head", None)  # perhaps the output head, too
    shared = () if packed is None else packed.named_buffers()
    for name, tensor in chain(module.named_parameters(), module.named_buffers(), shared):
        if tensor.is_meta and name in tied:
            continue
        where = str(tensor.device)
        if tensor.is_meta:
            parts = (part for part in placement if not part or f"{name}.".startswith(f"{part}."))
            where = str(placement[next(parts)])
        key = name if tensor.is_meta else (where, tensor.data_ptr(), tensor.nbytes)
        if key not in seen:
            seen.add(key)
            sizes[where] += tensor.nbytes
    return sizes


def make_device_map(profile: Profile, rows: int) -> DeviceMap:
    """Make the device map by which a profile's model will be loaded, beside a cache of `rows`.

    Raises ModelError if accelerate is missing, if another setting forbids a map, or if the layers
    of a GGUF file that does not fit on the GPU can't be split.
    """
    is_gguf = bool(locate(profile.model)[1])
    quantize = ("auto", "none", "packed")[: 2 + is_gguf]
    for setting, allowed in (("device", ("auto",)), ("quantize", quantize)):
        if (value := getattr(profile, setting)) not in allowed:
            problem = f"{setting}={value} can't be used with a device map"
            raise ModelError(problem, hint="leave out one of them")
    if is_gguf and profile.device_map != "auto":
        raise ModelError("a GGUF file can't be balanced over GPUs", hint="--device-map auto")
    if not is_gguf and find_spec("accelerate") is None:
        raise ModelError(
            "a device map needs the package accelerate", hint="pip install 'sirchat[devices]'"
        )
    found = shape = None
    with suppress(ModelError):  # it is not on this machine yet, or loading says what is wrong
        found = find_model(profile.model)
        shape = found.shape
    elements = (shape.row_elements if shape is not None else None) or 0
    kind = profile.dtype if profile.cache_dtype == "auto" else profile.cache_dtype
    item = pick_dtype(kind, main_device()).itemsize
    made = DeviceMap(profile.device_map, rows * item * elements)
    return made if found is None or not is_gguf else made.split(found, profile)


def main_device() -> torch.device:
    """The first GPU; the CPU if there is none."""
    return next(iter(available_gpus()), torch.device(CPU))


@dataclass(frozen=True)
class DeviceMap:
    spread: Spread
    cache_bytes: int  # of all keys and values, for which each device keeps room
    # The first layers of a GGUF file, which are on the CPU; None if accelerate makes the map
    cpu_layers: int | None = None
    device: torch.device = field(default_factory=main_device)  # of the other layers

    def split(self, found: FoundModel, profile: Profile) -> DeviceMap:
        """The map of a GGUF file: the first layers that the GPU has no room for are on the CPU.

        Raises ModelError if these layers can't be split.
        """
        path, shape = found.path, found.shape
        if path is None or shape is None or self.device.type in (CPU, "mps"):
            return replace(self, cpu_layers=0)
        stored, kind = stored_weights(path), precision(shape, profile)
        item, sizes = pick_dtype(profile.dtype, self.device).itemsize, Counter[int]()
        for one in stored.tensors:
            part, at, *_ = f"{one.name}.".split(".")
            layer = int(at) if part == "blk" and at.isdecimal() else _OUTSIDE
            if one.is_embedding and not stored.is_tied:
                layer = _EMBEDDINGS
            sizes[layer] += tensor_bytes(one, stored.is_tied, kind, item, block_rows=1)
        room = free_gpu_bytes(self.device) - GPU_RESERVE - self.cache_bytes
        if sizes.total() <= room:
            return replace(self, cpu_layers=0)
        layers = [sizes[at] for at in sorted(sizes) if at >= 0]
        beside = room - sizes[_OUTSIDE]
        cpu_layers = next((n for n in range(1, len(layers)) if sum(layers[n:]) <= beside), 0)
        if not cpu_layers:
            return replace(self, cpu_layers=0, device=torch.device(CPU))
        values = config_values(parse_gguf(path, with_text_lists=False))
        values["vocab_size"] = 1  # which the text lists tell
        is_like_llama = DecoderConfig.can_read(values) and values["model_type"] in LLAMA_KINDS
        if not is_like_llama or values.get("sliding_window"):
            raise ModelError(
                f"{found.name!r} needs {sizes.total() / 1e9:.1f} GB of the GPU, where "
                f"{max(0, room) / 1e9:.1f} GB are free, and its layers can't be split",
                hint="choose --device cpu, a smaller budget, or a folder of safetensors",
            )
        return replace(self, cpu_layers=cpu_layers)

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
        first, on_first = next(iter(room.items()))
        unsplit = list({type(layer).__name__ for layer in layers})
        with no_warnings():  # of GPUs that this machine does not have
            if self.spread == "balanced":
                room = get_balanced_memory(outline, room, unsplit)
            plan: dict[str, Any] = infer_auto_device_map(outline, room, unsplit)
        if {CPU, DISK} & set(plan.values()) - {first}:  # these layers compute on the first device
            largest = max(sum(part.nbytes for part in layer.parameters()) for layer in layers)
            if on_first < largest:
                raise ModelError(
                    "the model does not fit, not even with its layers on disk",
                    hint="choose a smaller budget or model",
                )
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
