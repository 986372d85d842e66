"""Describes the machine on which something was measured."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from sirchat import __version__
from sirchat.models.compiling import cpuinfo, processor_name
from sirchat.models.devices import physical_cores

# CPU instruction sets that make matrix products and attention faster, the newest first
_FEATURES = ("amx_tile", "avx512_fp16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")


def machine() -> dict[str, Any]:
    """Describe this machine for a record: processor, its features, GPU, system and versions.

    The measured speeds depend on these facts. Returns them as a JSON object.
    """
    said = cpuinfo("flags", "Features").split()
    return {
        "processor": processor_name(),
        "features": [one for one in _FEATURES if one in said],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": physical_cores(set(range(torch.get_num_threads()))),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "torch": torch.__version__,
        "sirchat": __version__,
    }


def machine_in_words(about: Mapping[str, Any]) -> str:
    """The description of a machine in one line, such as `AMD EPYC 9R14 (avx512_bf16 avx512_vnni)`.

    `about` is a result of `machine`.
    """
    features = " ".join(map(str, about.get("features") or ()))
    gpu = f", {about['gpu']}" if about.get("gpu") else ""
    return f"{about.get('processor', 'unknown processor')} ({features or 'no features'}){gpu}"
