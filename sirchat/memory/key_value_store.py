"""The key/value store: moves keys and values of tokens between the cache and the archive.

The store also updates the ledger, which records where each token's keys and values are. If the
archive is off, evicted tokens are kept until the next turn begins, so that a turn can be undone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sirchat.errors import UsageError
from sirchat.memory.archive import Archive
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.cache import BoundedCache
from sirchat.memory.key_values import (
    CacheState,
    KeyValues,
    LostTokensError,
    Positions,
    merge_key_values,
)
from sirchat.memory.ledger import (
    Flag,
    KeyValueStat,
    Ledger,
    MovedRows,
    Placement,
    State,
)
from sirchat.memory.policies.base import fill_nan_with_median

# Bytes of what is evicted that are kept for undo while the archive is off; a turn that evicts more
# can't be undone.
UNDO_BYTES = 256 * 2**20
_MAX_UNWRITTEN_BYTES = 2**30  # that an archive on disk may grow in RAM after a failed write
_NONE = np.zeros(0, np.int64)
_MAX_FETCHED_TOKENS = 4_096  # archived tokens of which statistics are computed
_TINY = 1e-12  # least length to divide by, so that the cosine of a zero vector is 0


class Block(NamedTuple):
    """Keys and values of k of the n tokens that a policy ranks."""

    rows: Tensor  # [k], their indices among the n tokens
    tensors: list[Tensor]  # two for each layer, keys then values, each [H, k, D]


class HeldKeysValues(NamedTuple):
    """The n held tokens of one layer, in stream order: copies on the layer's device."""

    positions: Positions  # [n], in the stream
    first_written: Tensor  # keys [H, n, D] as the model computed them, before any move
    keys: Tensor  # keys [H, n, D] as placed: as attention reads them now
    values: Tensor  # [H, n, D]


@dataclass(frozen=True)
class Checkpoint:
    """Where the tokens are at one moment, to which `undo` can return."""

    seen: int  # tokens read by this moment
    placement: Placement
    pinned: Positions  # ascending
    rules: list[Positions]  # see `Ledger.rules`
    log_decay: float  # accumulated in the ledger
    attention: AttentionCheckpoint  # that the held tokens have received
    state: CacheState = ()  # of the model's recurrent and convolution layers
    reread: Positions = field(default_factory=lambda: _NONE)  # see `add_reread`
    logits: Tensor | None = None  # [V], raw, for the next token; this and `round` are the engine's
    round: int = 0


class KeyValueStore:
    """The keys and values of one conversation: held in the cache, or evicted to the archive.

    `cache` and `ledger` must be empty. `limit` is the archive's size in bytes; 0: only undoing
    restores rows. `folder` is for its files; None: RAM. `set_limit` may replace `archive`.
    """

    def __init__(
        self, cache: BoundedCache, ledger: Ledger, limit: int = 0, folder: Path | None = None
    ) -> None:
        self.cache, self.ledger = cache, ledger
        self.archive = Archive(limit or UNDO_BYTES, folder)
        self._placement = Placement(_NONE)  # but for what was read since
        self._archiving, self._folder = limit > 0, folder
        self._problems: list[str] = []
        self._is_full_reported = self._is_disk_reported = self._is_reread_reported = False
        self._reread = _NONE  # positions of tokens whose keys and values were computed again

    def take_problems(self) -> list[str]:
        """The archive's problems since the last call, such as a full disk: one line for each."""
        problems, self._problems = self._problems, []
        return problems

    def set_limit(self, limit: int, folder: Path | None = None) -> None:
        """Change the archive's size in bytes and its folder, and move the archived tokens.

        With 0 the archive is off, and archived tokens can no longer be restored.
        """
        old, was_on = self.archive, self._archiving
        if was_on and limit and folder == self._folder:
            old.limit = self._limit_after_error(limit)
            self._shrink()
            return
        new = Archive(limit or UNDO_BYTES, folder)
        new.copy_from(old, with_rows=limit > 0)  # may fail; then nothing has changed
        self.archive, self._folder, self._archiving = new, folder, limit > 0
        self._is_disk_reported = False
        if not limit:
            archived = np.flatnonzero(self.ledger.column("state") == State.ARCHIVED)
            self.ledger.mark_not_stored(archived)
            self._forget_rounding()
        old.close()
        self._shrink()

    def reachable(self) -> Positions:
        """Stream positions, ascending, of all held or archived tokens that may be restored."""
        ledger, archived = self.ledger, self.archive.positions
        archived = archived[archived < ledger.seen]
        is_stored = np.zeros(ledger.seen, bool)  # hundreds of times as fast as `np.union1d`
        is_stored[archived[ledger.column("state")[archived] == State.ARCHIVED]] = True
        is_stored[ledger.held_positions] = True
        stored = np.flatnonzero(is_stored)
        allowed: Positions = stored[ledger.column("flags")[stored] & Flag.EXCLUDED == 0]
        return allowed

    def recallable(self) -> Positions:
        """The `reachable` positions, and those of lost tokens, which can be read again."""
        if not self._archiving:
            return self.reachable()
        flags = self.ledger.column("flags") & np.uint8(Flag.ERASED | Flag.EXCLUDED)
        return np.flatnonzero(flags == 0)

    def rereadable(self, positions: Positions) -> Positions:
        """The `positions` of lost tokens: neither held nor archived, but `recallable`."""
        lost = positions[self.ledger.column("state")[positions] == State.NOT_STORED]
        return np.intersect1d(lost, self.recallable()) if len(lost) else lost

    def add_reread(self, rows: KeyValues) -> None:
        """Archive `rows` of lost tokens, whose keys and values were computed again.

        The archive may exceed its limit until tokens move.
        """
        self.archive.add(rows)
        self.ledger.mark_archived(rows.positions)
        self._reread = np.union1d(self._reread, rows.positions)
        if not self._is_reread_reported:
            self._is_reread_reported = True
            self._problems.append(
                "some evicted tokens are no longer stored; where they are needed, they are read "
                "again from the text"
            )

    @property
    def placement(self) -> Placement:
        """Where the tokens are now; another object after each `place`."""
        return replace(self._placement, held=self.ledger.held_positions.copy())

    @property
    def has_recall(self) -> bool:
        return self._placement.has_recall

    def is_placed(self, placement: Placement) -> bool:
        """Whether `placement` is the object that `place` was last called with."""
        return placement is self._placement

    def place(self, placement: Placement) -> list[MovedRows]:
        """Move tokens as `placement` says; returns records of those evicted and restored."""
        evicted, restored = self._place(placement)
        self._shrink()
        moves = self.evicted_rows(evicted)
        if len(restored):
            moves.append(MovedRows(restored, self.cache.length, self.ledger.seen, restored=True))
        return moves

    def evicted_rows(self, positions: Positions) -> list[MovedRows]:
        """The record of tokens that were just evicted; none without tokens."""
        rows = MovedRows(positions, self.cache.length, self.ledger.seen)
        return [rows] if len(positions) else []

    def evict_all_but(self, kept: Positions) -> list[MovedRows]:
        """Hold `kept` alone, and end recall; returns a record of the policy's other tokens."""
        own = self.placement.policy_positions
        self.place(Placement(kept))
        return self.evicted_rows(np.setdiff1d(own, kept, assume_unique=True))

    @contextmanager
    def placed(self, placement: Placement) -> Iterator[None]:
        """Context manager: places the tokens as `placement` says; afterwards as before."""
        before = self.placement
        with self.without_limit():
            self.place(placement)
            try:
                yield
            finally:
                self.place(before)

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """Context manager: turns off the archive's limit, to read ids that are undone later."""
        limit, self.archive.limit = self.archive.limit, None
        try:
            yield
        finally:
            self.archive.limit = limit

    def checkpoint(self) -> Checkpoint:
        """The state at the beginning of a turn, to which `undo` can return.

        If the archive is off, the tokens that the previous turn evicted are deleted.
        """
        if not (self.has_recall or self._archiving):
            self.archive.clear()
            self._forget_rounding()
        ledger, placement = self.ledger, self.placement
        return Checkpoint(
            ledger.seen,
            placement,
            ledger.pinned_positions,
            ledger.rules(),
            ledger.log_decay,
            ledger.attention.checkpoint(placement.held),
            self.cache.state,
            self._reread,
        )

    def has(self, positions: Positions) -> bool:
        """Whether all of these tokens are held or archived."""
        missing = np.setdiff1d(positions, self.ledger.held_positions, assume_unique=True)
        return bool(self.archive.has(missing).all())

    def undo(self, checkpoint: Checkpoint) -> None:
        """Return to the checkpoint, and delete all tokens that were read after it.

        Raises LostTokensError, changing nothing, if a token of the checkpoint is no longer stored.
        """
        reread = np.setdiff1d(self._reread, checkpoint.reread, assume_unique=True)
        needed = np.union1d(checkpoint.placement.held, checkpoint.placement.aside)
        if not self.has(needed) or np.isin(reread, needed).any():
            raise LostTokensError(
                "some rows that the checkpoint held are neither held nor archived"
            )
        self._place(checkpoint.placement, np.arange(checkpoint.seen, self.ledger.seen))
        self.archive.truncate(checkpoint.seen)
        self.archive.remove(reread)
        self.ledger.mark_not_stored(reread)
        self._reread = checkpoint.reread
        self.ledger.truncate(checkpoint.seen, checkpoint.log_decay)
        self.ledger.attention.undo(checkpoint.attention, checkpoint.seen)
        self.cache.state = checkpoint.state

    @torch.inference_mode()
    def statistics(
        self, positions: Positions, wanted: Collection[KeyValueStat]
    ) -> dict[KeyValueStat, Tensor]:
        """Statistics [n], by name, at `positions` [n], ascending; lost tokens get the median.

        Each is a mean over a layer's key/value heads, then over layers. They are computed from the
        stored keys and values, so they are the same after a switch, an undo or a resume.
        """
        shape = (len(positions),)
        stats = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in wanted}
        needs_norms = bool(stats.keys() - {"key_similarity"})
        for rows, tensors in self._blocks(positions, as_read=False) if needs_norms else ():
            keys, values = tensors[::2], tensors[1::2]
            if "key_norm" in stats:
                stats["key_norm"][rows] = _mean([_norm(key, 2) for key in keys])
            if "value_norm" in stats:
                stats["value_norm"][rows] = _mean([_norm(value, 1) for value in values])
        if "key_similarity" in stats:
            # The cosine with the mean of the keys, each of length 1, equals that with their sum.
            sums = list[Tensor]()
            for _, tensors in self._blocks(positions, as_read=True):
                parts = [_sum_of_units(key) for key in tensors[::2]]  # [H, 1, D]
                pairs = zip(sums, parts, strict=bool(sums))
                sums = [total + part.to(total.device) for total, part in pairs] or parts
            for rows, tensors in self._blocks(positions, as_read=True):
                pairs = zip(tensors[::2], sums, strict=True)
                cosines = [_cosines(key, total.to(key.device)) for key, total in pairs]
                stats["key_similarity"][rows] = _mean(cosines)
        return {name: fill_nan_with_median(values) for name, values in stats.items()}

    def as_read(self, positions: Positions) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """For each layer, keys and values of the tokens at `positions`, as in `HeldRows`."""
        copies = list[Tensor]()
        for rows, tensors in self._blocks(positions, as_read=True):
            sizes = ((tensor.shape[0], len(positions), tensor.shape[2]) for tensor in tensors)
            copies = copies or [torch.zeros(size) for size in sizes]
            for copy, tensor in zip(copies, tensors, strict=True):
                copy[:, rows] = tensor.float().cpu()
        return tuple(copies[::2]), tuple(copies[1::2])

    def held_keys_values(self, layer: int) -> HeldKeysValues:
        """Copies of the held keys and values of a layer; UsageError for a wrong layer number."""
        layers, held = len(self.cache.row_layers), self.ledger.held_positions.copy()
        if not 0 <= layer < layers or not len(held):
            known = f"layers are 0 to {layers - 1}" if len(held) else "nothing was read yet"
            raise UsageError(f"there are no keys and values of layer {layer}: {known}")
        first = self.cache.first_written_rows(torch.arange(len(held)), held).tensors[2 * layer]
        placed = self.cache.layer_keys(layer), self.cache.layer_values(layer)
        return HeldKeysValues(held, first.clone(), *(tensor[0].clone() for tensor in placed))

    def archived(self) -> Positions:
        """Stream positions, ascending, of archived tokens that are not held and may be restored."""
        reachable = self.reachable()
        archived: Positions = reachable[
            self.ledger.column("state")[reachable] == int(State.ARCHIVED)
        ]
        return archived

    def copy_key_values(self, limit: int | None = None) -> KeyValues | None:
        """A copy on the CPU, in stream order, of held tokens and archived ones.

        Above `limit` bytes, the oldest archived ones are left out; None if the held are larger.
        """
        held, positions = self.ledger.held_positions, self.reachable()
        first = self.cache.first_written_rows(torch.arange(min(1, len(held))), held[:1].copy())
        if limit is not None and len(held) * first.nbytes > limit:
            return None
        in_cache = self.cache.first_written_rows(torch.arange(len(held)), held.copy()).to("cpu")
        tiers = self.archive.tiers(self.ledger.column("state") == State.NOT_STORED)
        archived = np.setdiff1d(positions, held, assume_unique=True)
        if limit is not None and first.nbytes:
            archived = archived[max(0, len(archived) + len(held) - limit // first.nbytes) :]
        if not len(archived):
            return replace(in_cache, tiers=tiers)
        return replace(merge_key_values(in_cache, self.archive.fetch(archived)), tiers=tiers)

    def load(self, saved: KeyValues) -> None:
        """Load the keys and values of a saved conversation, whose ledger is loaded already.

        Tokens that are held in the ledger go to the cache; the others go to their archive tiers.
        """
        if saved.tiers is not None:
            self.archive.restore_tiers(saved.tiers)
        if not self._archiving:
            self._forget_rounding()
        held = np.searchsorted(saved.positions, self.ledger.held_positions)
        self.cache.replace(saved.take(held))
        if self._archiving:
            archived = np.setdiff1d(np.arange(len(saved)), held)
            self.archive.add(saved.take(archived))
            self.ledger.mark_archived(saved.positions[archived])
            self._shrink()

    def erase(self, positions: Positions) -> None:
        self._place(self.placement.without(positions), positions)
        self.archive.remove(positions)
        self.ledger.mark_not_stored(positions)

    def reorder(self, order: Positions, turns: Positions, rounds: Positions) -> Positions:
        """Put the tokens into another order, and erase all others; see `Ledger.reorder`.

        Recall must have ended. Keys and values stay as they were written.
        """
        self.erase(np.setdiff1d(np.arange(self.ledger.seen), order))
        held = self.ledger.held_positions.copy()
        rank = self.ledger.reorder(order, turns, rounds)
        self.archive.reorder(order, rank)
        now = np.argsort(rank[held])
        if len(held):
            rows = self.cache.first_written_rows(torch.from_numpy(now), rank[held][now])
            self.cache.replace(rows)
        reread = rank[self._reread]
        self._reread = np.sort(reread[reread >= 0])
        self._placement = Placement(self.ledger.held_positions.copy())
        return rank

    def _place(self, new: Placement, dropped: Positions = _NONE) -> tuple[Positions, Positions]:
        """Move tokens as `new` says, without archiving `dropped` ones. All moves happen here."""
        ledger, cache, archive = self.ledger, self.cache, self.archive
        held = ledger.held_positions
        stays = np.isin(held, new.held, assume_unique=True)
        evicted, came = held[~stays], np.setdiff1d(new.held, held, assume_unique=True)
        rows = torch.from_numpy(np.flatnonzero(stays))
        stored = archive.has(evicted) | np.isin(evicted, dropped, assume_unique=True)
        leaving = torch.from_numpy(np.flatnonzero(~stays)[~stored])
        if len(evicted) and not len(came):
            cache.keep(rows, leaving, archive.add if len(leaving) else None)
        elif len(came):
            if len(leaving):
                archive.add(cache.first_written_rows(leaving, evicted[~stored]))
            restored = archive.fetch(came)
            aside = self._placement.aside
            archive.note_restored(np.setdiff1d(came, aside, assume_unique=True))
            if len(rows):
                restored = merge_key_values(cache.first_written_rows(rows, held[stays]), restored)
            cache.replace(restored)
        ledger.hold(new, evicted, came, State.ARCHIVED if self._archiving else State.NOT_STORED)
        self._placement = new
        return evicted, came

    def _blocks(self, positions: Positions, as_read: bool) -> Iterator[Block]:
        """Keys and values at `positions` [n]; with `as_read`, rotated as if all were held."""
        held = self.ledger.held_positions
        held_indices = np.flatnonzero(np.isin(positions, held, assume_unique=True))
        rows = torch.from_numpy(np.searchsorted(held, positions[held_indices]))
        if as_read and len(held_indices) == len(positions):
            yield Block(torch.from_numpy(held_indices), self.cache.as_read(rows))
            return
        first = list[KeyValues]()
        if len(held_indices):
            first.append(self.cache.first_written_rows(rows, positions[held_indices]))
        archived = np.setdiff1d(positions, held, assume_unique=True)
        archived = archived[self.archive.has(archived)]
        size = _MAX_FETCHED_TOKENS
        starts = range(0, len(archived), size)
        fetched = (self.archive.fetch(archived[start : start + size]) for start in starts)
        for part in chain(first, fetched):
            numbers = torch.from_numpy(np.searchsorted(positions, part.positions))
            yield Block(numbers, (self.cache.rotated(part, numbers) if as_read else part).tensors)

    def _forget_rounding(self) -> None:
        """Forget the archive's bits of all tokens that are stored nowhere."""
        self.archive.forget(np.flatnonzero(self.ledger.column("state") == State.NOT_STORED))

    def _limit_after_error(self, limit: int) -> int:
        """The limit in bytes; lower after a failed write, because evicted tokens stay in RAM."""
        if self.archive.disk_error is None:
            return limit
        return min(limit, self.archive.nbytes + _MAX_UNWRITTEN_BYTES)

    def _shrink(self) -> None:
        """Bring the archive within its limit; note a full archive or a failed disk."""
        archive = self.archive
        if self.has_recall:  # what is aside is nowhere else
            return
        if archive.disk_error and archive.limit is not None and not self._is_disk_reported:
            self._is_disk_reported = True
            archive.limit = self._limit_after_error(archive.limit)
            self._problems.append(
                "the archive can't be written to disk, so what is evicted now stays in "
                f"memory: {archive.disk_error}"
            )
        if not self._archiving:  # the turn can't be undone
            if archive.is_over_limit:
                archive.clear()
                self._forget_rounding()
            return
        if archive.is_over_limit and not self._is_full_reported:
            self._is_full_reported = True
            self._problems.append(
                "the archive is full: from now on its oldest rows are stored in 8 bits a number, "
                "then in 4, and then deleted (/set archive_limit raises the limit)"
            )
        archive.shrink(self.ledger.held_positions, self.ledger.mark_not_stored)


def _sum_of_units(keys: Tensor) -> Tensor:
    return (1 / _norm(keys, 2).clamp_min(_TINY))[:, None] @ keys.float()  # [H, 1, D]


def _cosines(keys: Tensor, anchor: Tensor) -> Tensor:
    products = (keys.float() @ anchor.mT)[..., 0]  # [H, k] of [H, k, D] and [H, 1, D]
    return products / (_norm(keys, 2) * _norm(anchor, 2)).clamp_min(_TINY)


def _mean(layers: list[Tensor]) -> Tensor:
    total = torch.zeros(layers[0].shape[1], dtype=torch.float64, device=layers[0].device)
    for layer in layers:  # [H, k]
        total += layer.double().mean(0).to(total.device)
    return (total / len(layers)).cpu()


def _norm(x: Tensor, p: int) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, p, dim=-1, dtype=torch.float32)
    return norm
