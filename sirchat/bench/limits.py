"""What the archive takes over a long conversation: memory and disk against their limit."""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sirchat.engine.engine import Engine
from sirchat.engine.records import CacheSettings, TurnRef
from sirchat.memory.ledger import Role
from sirchat.memory.policies.entropy import Entropy
from sirchat.models.model import LoadedModel

_ROUND = 2_000  # tokens
_MIB = 2**20


@dataclass(frozen=True)
class Taken:
    """The most that a conversation took at any round's end, in bytes.

    Attributes:
        place: where the archive was, `ram` or `disk`.
        tokens: read.
        limit: of the archive.
        archive: keys and values in the archive.
        disk: files of the archive.
        memory: of the process, beyond what it took after the first rounds; None where unknown.
        archived: rows that could come back at the end.
        seconds: of the whole run.
    """

    place: str
    tokens: int
    limit: int
    archive: int
    disk: int
    memory: int | None
    archived: int
    seconds: float


def bench_limits(model: LoadedModel, tokens: int, limit: int) -> Iterator[Taken]:
    """Read `tokens` random ids under the entropy policy, budget 1,024, with either archive."""
    for place in ("ram", "disk"):
        with tempfile.TemporaryDirectory() as folder:
            yield _read(model, tokens, limit, Path(folder) if place == "disk" else None)


def print_limits(model: LoadedModel, tokens: int, limit: int, *, as_json: bool) -> None:
    """Run it, and print what was taken to stdout."""
    notes = Console(stderr=True, highlight=False)
    with notes.status("reading", spinner="line"):
        found = list(bench_limits(model, tokens, limit))
    console = Console(soft_wrap=True, highlight=False)
    if as_json:
        record = {"model": model.name, "results": [asdict(one) for one in found]}
        console.print(json.dumps(record, indent=2), markup=False)
        return
    table = Table("archive", "limit", "most archived", "most on disk", "memory grew", box=None)
    for one in found:
        grew = "unknown" if one.memory is None else _mib(one.memory)
        table.add_row(one.place, _mib(one.limit), _mib(one.archive), _mib(one.disk), grew)
    console.print(f"{model.name} on {model.device}, {tokens:,} tokens", markup=False)
    console.print(table)


def _read(model: LoadedModel, tokens: int, limit: int, folder: Path | None) -> Taken:
    files = folder / "archive" if folder else None
    engine = Engine(model, CacheSettings(Entropy(), 1024, archive=limit, folder=files))
    draw, start = random.Random(0), time.perf_counter()
    archive = disk = memory = before = 0
    for turn in range(-(-tokens // _ROUND)):
        ids = draw.choices(range(model.vocab_size), k=min(_ROUND, tokens - turn * _ROUND))
        for _ in engine.feed(ids, [Role.USER] * len(ids), TurnRef(turn, turn)):
            archive = max(archive, engine.store.archive_bytes)
        engine.close_round()
        disk = max(disk, _size(files))
        now = _resident()
        before = now if archive < limit // 2 else before
        memory = max(memory, now - before)
    return Taken(
        place="disk" if folder else "ram",
        tokens=engine.ledger.seen,
        limit=limit,
        archive=archive,
        disk=disk,
        memory=memory if before else None,
        archived=engine.store.archived,
        seconds=time.perf_counter() - start,
    )


def _resident() -> int:
    """Memory of this process in bytes; 0 where the system does not tell."""
    gc.collect()
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError):
        return 0
    return pages * 4096


def _size(folder: Path | None) -> int:
    if folder is None or not folder.exists():
        return 0
    return sum(path.stat().st_size for path in folder.iterdir())


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f} MiB"
