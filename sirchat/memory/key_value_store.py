"""What is held and what is archived: moves rows between cache and archive, ledger in step.

Without an archive the rows that a turn pushed out are still kept until the next one begins, so that
a turn can be undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.archive import Archive
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Ledger, State
from sirchat.memory.segments import Positions, Rows

JOURNAL_BYTES = 256 * 2**20
"""Without an archive, what one turn pushes out is kept up to this size; beyond, no undo."""


@dataclass(frozen=True)
class CacheCheckpoint:
    """A moment to come back to: tokens seen, those held [n], the decay so far, their attention."""

    seen: int
    held: Positions
    log_decay: float
    attention: AttentionCheckpoint


class KeyValueStore:
    """Cache, ledger and archive of one conversation.

    Args:
        cache: empty.
        ledger: empty.
        limit: bytes that the archive may take; 0 for no archive.
        folder: folder for full segments of the archive; None for RAM.
    """

    def __init__(
        self, cache: BoundedCache, ledger: Ledger, limit: int = 0, folder: Path | None = None
    ) -> None:
        self.cache = cache
        self.ledger = ledger
        self._problems: list[str] = []
        self._archive = Archive(limit or JOURNAL_BYTES, folder)
        self._archiving = limit > 0
        self._folder = folder
        self._told = False

    @property
    def archived(self) -> int:
        """Rows that are not held and can come back."""
        return int((self.ledger.column("state") == State.ARCHIVED).sum())

    @property
    def archive_bytes(self) -> int:
        """Memory of the archive."""
        return self._archive.nbytes

    def take_problems(self) -> list[str]:
        """Problems of the archive since the last call, one line each."""
        problems, self._problems = self._problems, []
        return problems

    def set_limit(self, limit: int, folder: Path | None = None) -> None:
        """Let the archive take `limit` bytes, in `folder` or in RAM; 0 empties it."""
        before, was_on = self._archive, self._archiving
        self._archiving = limit > 0
        if was_on and self._archiving and folder == self._folder:
            before.limit = limit
            self._shrink()
            return
        self._archive, self._folder = Archive(limit or JOURNAL_BYTES, folder), folder
        if self._archiving:
            stored = before.positions
            if len(stored):
                self._archive.add(before.fetch(stored))
        else:
            self.ledger.lose(np.flatnonzero(self.ledger.column("state") == State.ARCHIVED))
        before.close()
        self._shrink()

    def reachable(self) -> Positions:
        """Stream positions [n], ascending, of all rows that are held or archived."""
        return np.flatnonzero(self.ledger.column("state") != State.GONE)

    def keep(self, rows: Tensor) -> Positions:
        """Hold only these rows [k] of those held; returns the positions that left."""
        leaves = np.ones(self.ledger.held_count, bool)
        leaves[rows.numpy()] = False
        self._put_away(np.flatnonzero(leaves))
        self.cache.keep(rows)
        gone = self.ledger.keep(rows, self._away)
        self._shrink()
        return gone

    def hold(self, positions: Positions) -> tuple[Positions, Positions]:
        """Hold exactly these reachable positions [n], ascending.

        Returns the positions that left and those that came back.
        """
        self.cache.remove()
        stays = np.isin(self.ledger.held_positions, positions, assume_unique=True)
        self._put_away(np.flatnonzero(~stays))
        self._replace(np.flatnonzero(stays), positions)
        gone, came = self.ledger.hold(positions, self._away)
        self._shrink()
        return gone, came

    def insert(self, start: int, layers: Sequence[Positions]) -> None:
        """Let archived rows, `layers[i]` in layer i, stand before held row `start`.

        Raises LookupError, changing nothing, when one of them is gone.
        """
        rows = [self._archive.fetch(one, layer) for layer, one in enumerate(layers)]
        self.cache.insert(start, rows)

    @property
    def archive(self) -> Archive:
        """What is stored now, to search in; another one after `set_limit`."""
        return self._archive

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Lose nothing while this lasts: what is read in it will be taken back."""
        limit, self._archive.limit = self._archive.limit, None
        try:
            yield
        finally:
            self._archive.limit = limit

    def checkpoint(self) -> CacheCheckpoint:
        """The present moment, at the beginning of a turn."""
        if not self._archiving:
            self._archive.clear()
        ledger = self.ledger
        held = ledger.held_positions.copy()
        return CacheCheckpoint(
            ledger.seen, held, ledger.log_decay, ledger.attention.checkpoint(held)
        )

    def has(self, positions: Positions) -> bool:
        """Whether all of these rows are held or stored."""
        missing = np.setdiff1d(positions, self.ledger.held_positions, assume_unique=True)
        return bool(self._archive.has(missing).all())

    def undo(self, checkpoint: CacheCheckpoint) -> None:
        """Go back to `mark`: what was read since has never been.

        Raises LookupError, changing nothing, when a row of then is gone.
        """
        if not self.has(checkpoint.held):
            raise LookupError("some of the rows that were held then are gone")
        self.cache.remove()
        before = self.ledger.held_positions
        since = before >= checkpoint.seen
        stays = np.isin(before, checkpoint.held, assume_unique=True)
        self._put_away(np.flatnonzero(~stays & ~since))
        self._replace(np.flatnonzero(stays), checkpoint.held)
        self.ledger.hold(checkpoint.held, self._away)
        self._archive.truncate(checkpoint.seen)
        self.ledger.truncate(checkpoint.seen, checkpoint.log_decay)
        self.ledger.attention.undo(checkpoint.attention, checkpoint.seen)

    def rows(self, limit: int | None = None) -> Rows | None:
        """Everything that is held or archived, as first written, by ascending position, on the CPU.

        What is held alone, if all takes more than `limit` bytes; None if that does, too.
        """
        positions = self.reachable()
        held = self.ledger.held_positions
        a_row = self.cache.first_written(torch.arange(min(1, len(held))), held[:1].copy()).nbytes
        if limit is not None and len(held) * a_row > limit:
            return None
        mine = self.cache.first_written(torch.arange(len(held)), held.copy()).to("cpu")
        elsewhere = np.setdiff1d(positions, held, assume_unique=True)
        if not len(elsewhere) or (limit is not None and len(positions) * a_row > limit):
            return mine
        return _merged(mine, self._archive.fetch(elsewhere))

    def load(self, rows: Rows, device: torch.device) -> None:
        """Take over saved rows: those that the ledger holds fill the cache, on `device`."""
        at = np.searchsorted(rows.positions, self.ledger.held_positions)
        self.cache.replace(rows.take(at).to(device))
        if self._archiving:
            away = np.setdiff1d(np.arange(len(rows)), at)
            self._archive.add(rows.take(away))
            self.ledger.archive(rows.positions[away])
            self._shrink()

    def forget(self, positions: Positions) -> None:
        """Let these rows go for good, from the cache and from the archive."""
        self.cache.remove()
        held = self.ledger.held_positions
        stays = np.flatnonzero(~np.isin(held, positions))
        self.cache.keep(torch.from_numpy(stays))
        self.ledger.keep(torch.from_numpy(stays), State.GONE)
        self._archive.remove(positions)
        self.ledger.lose(positions)

    @property
    def _away(self) -> State:
        return State.ARCHIVED if self._archiving else State.GONE

    def _put_away(self, rows: NDArray[np.int64]) -> None:
        """Archive these rows [k] of the held view, but those that are archived already."""
        positions = self.ledger.held_positions[rows]
        new = ~self._archive.has(positions)
        if new.any():
            chosen = torch.from_numpy(rows[new])
            self._archive.add(self.cache.first_written(chosen, positions[new]))
            if self._archive.trouble:
                self._problems.append(f"the archive is off: {self._archive.trouble}")
                self.set_limit(0)

    def _replace(self, rows: NDArray[np.int64], positions: Positions) -> None:
        """Fill the cache with `positions` [n]: rows [k] of the held view, the others archived."""
        held = self.ledger.held_positions[rows]
        if len(held) == len(positions):
            self.cache.keep(torch.from_numpy(rows))
            return
        came = self._archive.fetch(np.setdiff1d(positions, held, assume_unique=True))
        if len(held):
            came = _merged(self.cache.first_written(torch.from_numpy(rows), held), came)
        self.cache.replace(came)

    def _shrink(self) -> None:
        gone = self._archive.shrink(self.ledger.log_decayed_surprisal_of)
        self.ledger.lose(gone)
        if len(gone) and self._archiving and not self._told:
            self._told = True
            self._problems.append(
                "the archive is full: from now on what surprised least is lost (/set archive_limit)"
            )


def _merged(one: Rows, other: Rows) -> Rows:
    """Both, by ascending position."""
    positions = np.concatenate([one.positions, other.positions])
    order = np.argsort(positions)
    chosen = torch.from_numpy(order)
    tensors = [
        torch.cat([a, b.to(a.device)], dim=1).index_select(1, chosen.to(a.device))
        for a, b in zip(one.tensors, other.tensors, strict=True)
    ]
    written_at = np.concatenate([one.written_at, other.written_at])[order]
    return Rows(positions[order], written_at, tensors)
