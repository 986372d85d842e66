"""Devices that are only simulated: their numbers are in main memory.

A tensor on one says so, and an operation that mixes devices raises an error, as with real GPUs;
only copies go from one device to another.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

KIND = "privateuseone"  # torch's own name for devices that it does not know
DEVICES = [torch.device(KIND, at) for at in range(2)]
FREE = {0: 1_800_000, 1: 1_800_000}  # bytes that each says are free, beside the reserve

_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten._to_copy.default)
# Operations that need a device's numbers on the host; so do those that index by booleans.
_WAITING = (
    *(_aten._local_scalar_dense, _aten.item, _aten.is_nonzero, _aten.equal, _aten.nonzero),
    *(_aten.masked_select, _aten._unique, _aten._unique2, _aten.unique_dim),
    *(_aten.unique_consecutive, _aten.bincount, _aten.argwhere, _aten.allclose),
)
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
# Operations that a GPU does not have, in any version of torch.
_OF_CPUS = (
    *(_aten._weight_int8pack_mm.default, _aten._weight_int4pack_mm_for_cpu.default),
    _aten._convert_weight_to_int4pack_for_cpu.default,
)


class SimulatedTensor(Tensor):
    """A tensor that says it is on a simulated device; `host` has its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor, device: Any = None, **how: Any) -> Any:
        if device is None:  # accelerate makes a parameter of the same class as the former one
            return torch.nn.Parameter(host, **how)
        made: SimulatedTensor = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=device,
        )
        made.host = host
        return made

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.host.tolist()

    def __repr__(self, **how: Any) -> str:  # type: ignore[override]
        return f"SimulatedTensor({tuple(self.shape)}, {self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:  # torch has a kernel for each kind of device
            return _run(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Simulation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets operations on tensors of the CPU make tensors on simulated devices, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Tensors(TorchFunctionMode):
    """Makes tensors from lists on the CPU first: torch does so too, but shows it to no mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.tensor or "device" not in kwargs:
            return func(*args, **kwargs)
        device = kwargs.pop("device")
        return func(*args, **kwargs).to(device)


class _NoWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what waits for a simulated device, or would copy from or to one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        where = {one.device for one in tensors if isinstance(one, SimulatedTensor)}
        if func in _COPIES:
            end = args[1].device if func is _aten.copy_.default else kwargs.get("device")
            where = {args[0].device, torch.device(end or args[0].device)}
        if len(where) > 1 or (where and _needs_numbers(func, args, kwargs)):
            raise RuntimeError(f"{func} waits for {', '.join(sorted(map(str, where)))}")
        if where or func.overloadpacket is _aten.to:  # inference mode shows the whole of some
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return func(*args, **kwargs)


def _needs_numbers(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    packet = func.overloadpacket
    if packet in _INDEXING:
        is_fill = packet is not _aten.index and args[2].numel() == 1 and len(args) < 4
        return not is_fill and any(one.dtype == torch.bool for one in args[1] if one is not None)
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return packet in _WAITING


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the hosts of its tensors; its result is on the device of these."""
    if getattr(func, "overloadpacket", None) is _aten.to:  # a copy, or nothing
        with _Simulation():  # type: ignore[no-untyped-call]
            return func.decompose(*args, **kwargs)
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    where = {one.device for one in tensors if one.dim() or isinstance(one, SimulatedTensor)}
    if len(where) > 1 and func not in _COPIES:
        raise RuntimeError(f"{func} mixes {', '.join(sorted(map(str, where)))}")
    wanted = kwargs.get("device")
    if wanted is not None:
        target, kwargs = torch.device(wanted), {**kwargs, "device": _as_host(wanted)}
    elif func is _aten.copy_.default:
        target = args[0].device
    else:
        target = next(iter(where), torch.device("cpu"))
    if func in _OF_CPUS and target.type == KIND:
        raise RuntimeError(f"{func} works on a CPU only")
    known = {id(one.host): one for one in tensors if isinstance(one, SimulatedTensor)}

    def simulated(one: Any) -> Any:
        if isinstance(one, Tensor) and id(one) in known:
            return known[id(one)]
        return SimulatedTensor(one, target) if isinstance(one, Tensor) else one

    def host(one: Any) -> Any:
        return one.host if isinstance(one, SimulatedTensor) else one

    if target.type != KIND:
        return func(*tree_map(host, args), **tree_map(host, kwargs))
    with torch.inference_mode(False), torch.no_grad():  # else nothing could be written in place
        return tree_map(simulated, func(*tree_map(host, args), **tree_map(host, kwargs)))


def _as_host(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device("cpu") if device.type == KIND else device


def _open(file: Any, framework: str, device: Any) -> Any:
    """Open a file of weights; accelerate moves them to the device that it asked for."""
    return safe_open(file, framework, device=str(_as_host(device)))


class _Guard(torch._C._acc.DeviceGuard):
    """Does nothing where torch makes a device the present one."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


@cache
def _let_torch_know() -> _Guard:
    guard = _Guard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    return guard


@contextmanager
def simulated_devices() -> Iterator[list[torch.device]]:
    """Within this block there are two simulated devices, and no other GPU."""
    _let_torch_know()
    module: Any = ModuleType(f"torch.{KIND}")
    module.device_count = lambda: len(DEVICES)
    module.mem_get_info = lambda device: (10**9 + FREE[torch.device(device).index], 10**10)
    mode = _Simulation()  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch, mode, _Tensors():
        patch.setitem(sys.modules, f"torch.{KIND}", module)
        patch.setattr(torch, KIND, module, raising=False)
        patch.setattr("sirchat.models.devices.available_gpus", lambda: DEVICES)
        patch.setattr("accelerate.utils.offload.safe_open", _open)
        patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a simulation is of one thread
        yield DEVICES


@contextmanager
def refuses_waits() -> Iterator[None]:
    """Within this block, which is within `simulated_devices()`, waiting for a device is an error.

    That is what can't be captured as a CUDA graph: numbers of a device on the host, and copies
    between the host and a device, or two devices.
    """

    def tolist(tensor: SimulatedTensor) -> Any:
        raise RuntimeError(f"tolist waits for {tensor.device}")

    mode = _NoWaits()  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(SimulatedTensor, "tolist", tolist)
        yield


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what is copied to and from simulated devices, and what else waits for one."""
    counts, run, tolist = Counter[str](), _run, SimulatedTensor.tolist

    def counting(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        made = run(func, args, kwargs)
        if func in _COPIES:
            ends = {one.device for one in (args[0], made, *args[1:2]) if isinstance(one, Tensor)}
            if len(ends) > 1:
                counts["upload" if made.device.type == KIND else "download"] += 1
        elif func is not F.scaled_dot_product_attention and _needs_numbers(func, args, kwargs):
            tensors = tree_leaves((args, kwargs))
            counts.update(["wait"] * any(isinstance(one, SimulatedTensor) for one in tensors))
        return made

    def counted_list(tensor: SimulatedTensor) -> Any:
        counts["wait"] += 1
        return tolist(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "_run", counting)
        patch.setattr(SimulatedTensor, "tolist", counted_list)
        yield counts


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move a module's parameters and buffers to a simulated device, for good."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = SimulatedTensor(tensor.detach(), device)
