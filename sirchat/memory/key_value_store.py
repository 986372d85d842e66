"""The key/value store: moves keys and values of tokens (rows) between the cache and the archive.

The store also updates the ledger, the table of tokens, which records where each token's keys and
values are. If the archive is off, the rows that a turn evicted are kept until the next turn begins,
so that the turn can be undone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
from sirchat.memory.cache_layers import CacheState
from sirchat.memory.key_value_stats import median_for_unknown
from sirchat.memory.key_values import KeyValues, Positions, merged, united
from sirchat.memory.ledger import Flag, KeyValueStat, Ledger, State

UNDO_BYTES = 256 * 2**20
"""Maximum size in bytes of the evicted rows that are kept for undo while the archive is off.

If a turn evicts more bytes, this turn can't be undone.
"""

_MOST_UNWRITTEN = 2**30
"""Bytes by which an archive on disk may grow in RAM after a write to the disk has failed."""


@dataclass(frozen=True)
class CacheCheckpoint:
    """Record of the tokens that the cache holds at one moment, to which `undo` can go back.

    Attributes:
        seen: number of tokens that have been read by this moment.
        held: stream positions [n] of the tokens in the cache, ascending.
        pinned: stream positions of the pinned tokens, ascending.
        log_decay: logarithm of the ledger's accumulated decay.
        attention: statistics of the attention that the tokens in the cache have received.
        state: the state of the model's recurrent and convolution layers.
    """

    seen: int
    held: Positions
    pinned: Positions
    log_decay: float
    attention: AttentionCheckpoint
    state: CacheState = ()


class KeyValueStore:
    """The keys and values of one conversation: held in the cache, or evicted to the archive.

    Args:
        cache: an empty KV cache.
        ledger: an empty ledger (table of tokens).
        limit: maximum size of the archive in bytes; 0 turns it off.
        folder: folder of the archive's files; None keeps the archive in RAM.
    """

    def __init__(
        self, cache: BoundedCache, ledger: Ledger, limit: int = 0, folder: Path | None = None
    ) -> None:
        self.cache = cache
        self.ledger = ledger
        self._problems: list[str] = []
        self._archive = Archive(limit or UNDO_BYTES, folder)
        self._archiving = limit > 0
        self._folder = folder
        self._is_full_reported = self._is_disk_reported = False

    @property
    def archived(self) -> int:
        """Number of tokens that are in the archive and not in the cache."""
        return int((self.ledger.column("state") == State.ARCHIVED).sum())

    @property
    def archive_bytes(self) -> int:
        """Size in bytes of all keys and values in the archive."""
        return self._archive.nbytes

    def take_problems(self) -> list[str]:
        """Return the archive's new problems, such as a full disk: one line for each problem.

        The next call returns only problems that come after this call.
        """
        problems, self._problems = self._problems, []
        return problems

    def set_limit(self, limit: int, folder: Path | None = None) -> None:
        """Change the archive's maximum size and its folder; archived rows are moved if necessary.

        `limit` is in bytes; 0 turns the archive off, and archived tokens can no longer be restored.
        `folder` is the folder for the archive's files; None keeps the archive in RAM.
        """
        old, was_on = self._archive, self._archiving
        self._archiving = limit > 0
        if was_on and self._archiving and folder == self._folder:
            old.limit = self._bounded(limit)
            self._shrink()
            return
        self._archive = Archive(limit or UNDO_BYTES, folder)
        self._folder = folder
        if self._archiving:
            self._archive.add_all(old)
        else:
            self.ledger.mark_gone(np.flatnonzero(self.ledger.column("state") == State.ARCHIVED))
        old.close()
        self._shrink()

    def _bounded(self, limit: int) -> int:
        """The size limit for the archive in bytes: `limit`, or less if the disk has failed.

        After a failed write, evicted rows stay in RAM; then the archive may grow only by
        `_MOST_UNWRITTEN` bytes.
        """
        if self._archive.disk_error is None:
            return limit
        return min(limit, self._archive.nbytes + _MOST_UNWRITTEN)

    def reachable(self) -> Positions:
        """Stream positions [n], ascending, of all tokens in the cache or in the archive.

        Tokens with the flag `EXCLUDED`, which must never be restored, are left out.
        """
        ledger, stored = self.ledger, self._archive.positions
        stored = stored[stored < ledger.seen]
        archived = stored[ledger.column("state")[stored] == State.ARCHIVED]
        found = united((ledger.held_positions, archived))
        allowed: Positions = found[ledger.column("flags")[found] & Flag.EXCLUDED == 0]
        return allowed

    def keep(self, rows: Tensor) -> Positions:
        """Evict all rows from the cache except those numbered `rows` [k].

        Returns the stream positions of the evicted rows.
        """
        evicted = np.ones(self.ledger.held_count, bool)
        evicted[rows.numpy()] = False
        self._archive_rows(np.flatnonzero(evicted))
        self.cache.keep(rows)
        positions = self.ledger.keep(rows, self._evicted_state)
        self._shrink()
        return positions

    def hold(self, positions: Positions) -> tuple[Positions, Positions]:
        """Evict and restore rows, so that the cache holds exactly the rows at given positions.

        `positions` [n] are stream positions, ascending, of rows in the cache or the archive.
        Returns the positions of the evicted rows, and the positions of the restored rows.
        """
        self.cache.remove_inserted()
        stays = np.isin(self.ledger.held_positions, positions, assume_unique=True)
        self._archive_rows(np.flatnonzero(~stays))
        self._replace(np.flatnonzero(stays), positions)
        evicted, restored = self.ledger.hold(positions, self._evicted_state)
        self._shrink()
        return evicted, restored

    def insert(self, start: int, layers: Sequence[Positions]) -> None:
        """Copy archived rows into the cache as extra rows, before the cache's row number `start`.

        Layer i gets the rows at stream positions `layers[i]`. Raises LookupError, changing nothing,
        if one of the rows is not archived.
        """
        self._archive.insert_into(self.cache, start, layers)

    @property
    def archive(self) -> Archive:
        """The archive of evicted rows; `set_limit` may replace this object by another."""
        return self._archive

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Context manager that turns off the archive's size limit within its block.

        Use it to read ids whose reading is undone afterwards: no archived row is deleted.
        """
        limit, self._archive.limit = self._archive.limit, None
        try:
            yield
        finally:
            self._archive.limit = limit

    def checkpoint(self) -> CacheCheckpoint:
        """Return a record of the present state, to which `undo` can go back.

        Call this at the beginning of a turn. If the archive is off, the rows that the previous turn
        evicted are deleted.
        """
        if not self._archiving:
            self._archive.clear()
        ledger = self.ledger
        held = ledger.held_positions.copy()
        attention = ledger.attention.checkpoint(held)
        pinned = ledger.pinned_positions
        state = self.cache.state
        return CacheCheckpoint(ledger.seen, held, pinned, ledger.log_decay, attention, state)

    def has(self, positions: Positions) -> bool:
        """Whether the rows at all of these stream positions are in the cache or in the archive."""
        missing = np.setdiff1d(positions, self.ledger.held_positions, assume_unique=True)
        return bool(self._archive.has(missing).all())

    def undo(self, checkpoint: CacheCheckpoint) -> None:
        """Go back to the state of `checkpoint`, and delete all tokens that were read after it.

        Raises LookupError, changing nothing, if a row that was in the cache at the checkpoint is
        now neither in the cache nor in the archive.
        """
        if not self.has(checkpoint.held):
            raise LookupError("some rows that the checkpoint held are neither held nor archived")
        self.cache.remove_inserted()
        held = self.ledger.held_positions
        is_new = held >= checkpoint.seen
        stays = np.isin(held, checkpoint.held, assume_unique=True)
        self._archive_rows(np.flatnonzero(~stays & ~is_new))
        self._replace(np.flatnonzero(stays), checkpoint.held)
        self.ledger.hold(checkpoint.held, self._evicted_state)
        self._archive.truncate(checkpoint.seen)
        self.ledger.truncate(checkpoint.seen, checkpoint.log_decay)
        self.ledger.attention.undo(checkpoint.attention, checkpoint.seen)
        self.cache.state = checkpoint.state

    def statistics(
        self, positions: Positions, wanted: Collection[KeyValueStat]
    ) -> dict[KeyValueStat, NDArray[np.float64]]:
        """Compute statistics of the keys and values of tokens, by which policies rank them.

        `positions` [n] are the tokens' stream positions, ascending; `wanted` are names of
        statistics. Returns an array [n] for each name. A token that is neither in the cache nor in
        the archive gets the median of the other tokens.
        """
        held = self.ledger.held_positions
        found = self._archive.statistics(self.cache, held, positions, wanted)
        return {name: median_for_unknown(values) for name, values in found.items()}

    def rows(self, limit: int | None = None) -> KeyValues | None:
        """A copy on the CPU of all rows in the cache or the archive, with keys as first written.

        Rows are in ascending order of stream position. If all rows together are larger than `limit`
        bytes, returns only the rows in the cache; if the rows in the cache are larger, too, returns
        None.
        """
        positions = self.reachable()
        held = self.ledger.held_positions
        row_bytes = self.cache.first_written(
            torch.arange(min(1, len(held))), held[:1].copy()
        ).nbytes
        if limit is not None and len(held) * row_bytes > limit:
            return None
        held_rows = self.cache.first_written(torch.arange(len(held)), held.copy()).to("cpu")
        archived = np.setdiff1d(positions, held, assume_unique=True)
        if not len(archived) or (limit is not None and len(positions) * row_bytes > limit):
            return held_rows
        return merged(held_rows, self._archive.fetch(archived))

    def load(self, rows: KeyValues) -> None:
        """Load the saved rows of a conversation, whose ledger is loaded already.

        Rows that the ledger records as held go into the cache, all other rows into the archive.
        """
        held = np.searchsorted(rows.positions, self.ledger.held_positions)
        self.cache.replace(rows.take(held))
        if self._archiving:
            archived = np.setdiff1d(np.arange(len(rows)), held)
            self._archive.add(rows.take(archived))
            self.ledger.archive(rows.positions[archived])
            self._shrink()

    def erase(self, positions: Positions) -> None:
        """Erase the rows at these stream positions from the cache and from the archive."""
        self.cache.remove_inserted()
        held = self.ledger.held_positions
        stays = np.flatnonzero(~np.isin(held, positions))
        self.cache.keep(torch.from_numpy(stays))
        self.ledger.keep(torch.from_numpy(stays), State.GONE)
        self._archive.remove(positions)
        self.ledger.mark_gone(positions)

    @property
    def _evicted_state(self) -> State:
        return State.ARCHIVED if self._archiving else State.GONE

    def _archive_rows(self, rows: NDArray[np.int64]) -> None:
        """Copy the cache's rows numbered `rows` [k] to the archive.

        Rows that the archive already has are skipped.
        """
        positions = self.ledger.held_positions[rows]
        new = ~self._archive.has(positions)
        if new.any():
            chosen = torch.from_numpy(rows[new])
            self._archive.add_held(self.cache, chosen, positions[new])

    def _replace(self, rows: NDArray[np.int64], positions: Positions) -> None:
        """Make the cache hold exactly the rows at stream `positions` [n].

        The rows that the cache holds already have the row numbers `rows` [k]. The missing rows are
        copied from the archive.
        """
        held, chosen = self.ledger.held_positions[rows], torch.from_numpy(rows)
        if len(held) == len(positions):
            self.cache.keep(chosen)
        else:
            self._archive.fill(self.cache, chosen, held, positions)

    def _shrink(self) -> None:
        """Delete archived rows until the archive is within its limit of bytes.

        A full archive or a failed disk is recorded as a problem for `take_problems`.
        """
        archive = self._archive
        if archive.disk_error and archive.limit is not None and not self._is_disk_reported:
            self._is_disk_reported = True
            archive.limit = self._bounded(archive.limit)
            self._problems.append(
                "the archive can't be written to disk, so what is evicted now stays in "
                f"memory: {archive.disk_error}"
            )
        dropped = self._archive.shrink(self.ledger.log_decayed_surprisal_of)
        self.ledger.mark_gone(dropped)
        if len(dropped) and self._archiving and not self._is_full_reported:
            self._is_full_reported = True
            self._problems.append(
                "the archive is full: from now on the rows with the lowest surprisal are deleted "
                "(/set archive_limit raises the limit)"
            )
