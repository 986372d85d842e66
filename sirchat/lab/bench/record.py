"""Reads and compares records of `sirchat bench all`, and describes the machine for a record."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sirchat import __version__
from sirchat.errors import UsageError
from sirchat.models.devices import physical_cores
from sirchat.models.processor import cpuinfo, processor

# CPU instruction sets that make matrix products and attention faster, the newest first
_FEATURES = ("amx_tile", "avx512_fp16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")


class TwoValues(NamedTuple):
    """The name of a measurement, and its values in two records.

    A value is NaN if its record lacks the measurement.
    """

    name: str
    first: float
    second: float


def machine() -> dict[str, Any]:
    """Describe this machine for a record: processor, its features, GPU, system and versions.

    The measured speeds depend on these facts. Returns them as a JSON object.
    """
    said = cpuinfo("flags", "Features").split()
    return {
        "processor": processor(),
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


def read_record(path: Path) -> dict[str, Any]:
    """Read a record of measurements that `sirchat bench all --json` wrote to a file.

    Returns the JSON object. Raises UsageError if the file has no such record or can't be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read as a record: {type(error).__name__}") from None
    if not isinstance(found, dict) or not isinstance(found.get("machine"), dict):
        raise UsageError(
            f"{path} is not a record of a machine", hint="sirchat bench all --json > FILE makes one"
        )
    return found


def compare_records(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[TwoValues]:
    """Yield each measurement of two records, with its values in both."""
    ours, theirs = dict(values(first)), dict(values(second))
    for name in dict.fromkeys([*ours, *theirs]):
        yield TwoValues(name, ours.get(name, float("nan")), theirs.get(name, float("nan")))


def values(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each measurement in a record."""
    for command, measured in record.get("benchmarks", {}).items():
        for one in measured.get("results", ()):
            value = one.get("median", one.get("ours"))
            if isinstance(value, int | float):
                unit = f", {one['unit']}" if "ours" in one else ""
                yield f"{command}: {one['name']}{unit}", float(value)
