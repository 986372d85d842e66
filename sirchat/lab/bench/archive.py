"""Measures the memory that the archive and a loaded model take."""

from __future__ import annotations

import gc
import random
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings, TurnRef
from sirchat.errors import UsageError
from sirchat.memory.ledger import Role
from sirchat.memory.policies.entropy import Entropy
from sirchat.models.fit import fit_of
from sirchat.models.listing import find_model
from sirchat.models.load import load_model_of
from sirchat.models.model import LoadedModel

_ROUND = 2_000  # tokens read between two measurements


@dataclass(frozen=True)
class ArchiveUse:
    """The peak memory and disk space of an archive of evicted tokens, from one measurement."""

    place: str  # where the archive was stored, `ram` or `disk`
    tokens: int  # number of tokens that the model read
    limit: int  # the largest allowed size of the archive in bytes
    archive: int  # the largest measured size of the keys and values in the archive, in bytes
    disk: int  # the largest measured size of the archive's files, in bytes
    # how many bytes the memory of the process grew at most after the archive was half full; None if
    # this could not be measured
    memory: int | None
    archived: int  # number of tokens in the archive at the end
    seconds: float  # duration of the whole measurement


def bench_archive(model: LoadedModel, tokens: int, limit: int) -> Iterator[ArchiveUse]:
    """Measure what an archive takes, in RAM and then on disk, while a model reads tokens."""
    for place in ("ram", "disk"):
        with tempfile.TemporaryDirectory() as folder:
            yield _read(model, tokens, limit, Path(folder) if place == "disk" else None)


def _read(model: LoadedModel, tokens: int, limit: int, folder: Path | None) -> ArchiveUse:
    files = folder / "archive" if folder else None
    engine = Engine(
        model, CacheSettings(policy=Entropy(), budget=1024, archive=limit, folder=files)
    )
    draw, start = random.Random(0), time.perf_counter()
    archive = disk = memory = before = 0
    for turn in range(-(-tokens // _ROUND)):
        ids = draw.choices(range(model.vocab_size), k=min(_ROUND, tokens - turn * _ROUND))
        for _ in engine.prefill(ids, [Role.USER] * len(ids), TurnRef(turn=turn, round=turn)):
            archive = max(archive, engine.store.archive.nbytes)
        engine.decay_at_round_end()
        disk = max(disk, _size(files))
        now = resident_memory()
        before = now if archive < limit // 2 else before
        memory = max(memory, now - before)
    return ArchiveUse(
        place="disk" if folder else "ram",
        tokens=engine.ledger.seen,
        limit=limit,
        archive=archive,
        disk=disk,
        memory=memory if before else None,
        archived=engine.ledger.archived_count,
        seconds=time.perf_counter() - start,
    )


def resident_memory() -> int:
    """The resident memory of this process in bytes; 0 if the system does not report it."""
    gc.collect()
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError):
        return 0
    return pages * 4096


def most_memory() -> int:
    """The highest resident memory of this process since its start, in bytes.

    Returns 0 if the system does not report it.
    """
    try:
        status = Path("/proc/self/status").read_text("ascii", "replace")
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _size(folder: Path | None) -> int:
    if folder is None or not folder.exists():
        return 0
    return sum(path.stat().st_size for path in folder.iterdir())


@dataclass(frozen=True)
class MemoryMeasure:
    """The stated and the measured memory of a part of a model, in bytes."""

    name: str  # the name of the part: weights, KV cache, or both
    said: int  # the memory that `sirchat models fit` states for the part
    tensors: int  # the sum of the sizes of the part's tensors
    grew: int  # how much the memory of the process grew when the part was loaded or filled


@torch.inference_mode()
def bench_memory(profile: Profile) -> list[MemoryMeasure]:
    """Measure the memory that the weights and the full KV cache of a profile's model take.

    Raises ModelError if the model is not on this machine or can't be loaded, and UsageError if its
    files do not state its sizes.
    """
    said = fit_of(find_model(profile.model), profile, None).choices[0]
    budget, cache_said = max(said.caches.items())
    if cache_said is None:
        raise UsageError(f"the files of model {profile.model!r} do not state its sizes")
    torch.ones(64, 64) @ torch.ones(64, 64)  # loads libraries that every model needs
    before = resident_memory()
    model = load_model_of(profile)
    cache = model.new_cache(budget)
    model.forward([0], cache)  # reads all weights, allocates the cache
    after_weights = resident_memory()
    for layer in cache.row_layers:
        for tensor in layer.tensors:
            if tensor.buffer is not None:
                tensor.buffer.fill_(0)  # the system gives memory when it is first written
    full = resident_memory()
    weights = _tensor_bytes(model)
    return [
        MemoryMeasure("weights", said.weights, weights, after_weights - before),
        MemoryMeasure(f"KV cache at {budget:,}", cache_said, cache.nbytes, full - after_weights),
        MemoryMeasure("both", said.weights + cache_said, weights + cache.nbytes, full - before),
    ]


def _tensor_bytes(model: LoadedModel) -> int:
    """The size in bytes of all parameters and buffers of a model, as stored in memory."""
    tensors = (*model.module.parameters(), *model.module.buffers())
    return sum({one.data_ptr(): one.numel() * one.element_size() for one in tensors}.values())
