"""Statistics of the attention weights that each token receives from later tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sirchat.memory.key_values import Positions

Floats = NDArray[np.float64]

_MAX_RESTORATIONS = 8192  # entries of `_restored_totals`: over a hundred for each turn to undo


@dataclass(frozen=True)
class AttentionStatsConfig:
    """Which attention weights are recorded while the model reads. Their sum is always recorded."""

    layers: int = 4  # evenly spaced among those without a sliding window; 0 for all
    window: int = 0  # the weights from so many newest queries are stored one by one, too
    per_head: bool = False  # and those for each of these layers, and each head

    def recorded_layers(self, num_layers: int, sliding: Collection[int] = ()) -> list[int]:
        """Numbers of the recorded layers, chosen among those that are not `sliding`."""
        without_window = [number for number in range(num_layers) if number not in sliding]
        candidates = without_window if self.layers and without_window else list(range(num_layers))
        count = min(self.layers or num_layers, len(candidates))
        return [candidates[int((index + 0.5) * len(candidates) / count)] for index in range(count)]


@dataclass(frozen=True)
class QueryWindow:
    """Attention `weights` of the m newest queries on the tokens at `positions` [n]."""

    positions: Positions
    weights: NDArray[np.float32]  # mean [m, n], or of each head [layers, heads, m, n]


class PassAttention(NamedTuple):
    """Attention weights on n cache slots in one forward pass."""

    sums: Floats  # [n], over all queries of the pass
    queries: int  # number q of queries; the last q slots are those of the queries' own tokens
    newest: NDArray[np.float32]  # from each of at most `window` newest queries; see `QueryWindow`

    @classmethod
    def from_weights(cls, weights: NDArray[np.float32], window: int = 0) -> PassAttention:
        """The record of a pass with `weights` [m, n] of m queries."""
        newest = weights[max(0, len(weights) - window) :].copy()
        return cls(weights.sum(0, dtype=np.float64), len(weights), newest)


@dataclass(frozen=True)
class AttentionCheckpoint:
    """A copy of the statistics of n tokens, for a saved chat or for undo."""

    positions: Positions  # [n], ascending
    total: Floats  # [n], the weights received, after the decays up to `log_decay`
    log_decay: Floats  # [n], the log of the ledger's decays when `total` was last changed
    window: tuple[QueryWindow, ...] = ()
    # How often restored tokens had been noted; None if no attention had been recorded.
    restorations: int | None = 0


class AttentionStats:
    """The attention weights that each token of the conversation has received.

    Positions are in the stream, ascending. `log_decay` is the log of the ledger's decays so far.
    """

    def __init__(self) -> None:
        self._total = np.zeros(0)
        self._log_decay = np.zeros(0)  # the ledger's log_decay at each total's last update
        self._window: tuple[QueryWindow, ...] = ()
        # The totals of tokens when they were restored.
        self._restored_totals: deque[AttentionCheckpoint] = deque(maxlen=_MAX_RESTORATIONS)
        self._restoration_count = 0  # number of entries so far, deleted ones included

    @property
    def has_records(self) -> bool:
        return len(self._total) > 0

    def add(
        self,
        positions: Positions,
        passes: Sequence[PassAttention],
        log_decay: float,
        window: int = 0,
    ) -> None:
        """Add the attention weights that the tokens at `positions` [n] received in forward passes.

        The weights of the newest `window` queries are also stored one by one. A token that was read
        while nothing was recorded starts with at least the median of the others.
        """
        if not passes:
            return
        self._grow(int(positions[-1]) + 1)
        before = self._total[positions]
        is_unknown = before == 0
        is_unknown[len(before) - sum(record.queries for record in passes) :] = False
        total = before * np.exp(log_decay - self._log_decay[positions])
        for record in passes:
            total[: len(record.sums)] += record.sums
        if is_unknown.any():
            total[is_unknown] = np.maximum(total[is_unknown], np.median(total[~is_unknown]))
        self._total[positions] = total
        self._log_decay[positions] = log_decay
        newest = (QueryWindow(positions[: len(it.sums)].copy(), it.newest) for it in passes)
        self._window = _newest_windows((*self._window, *newest), window)

    def totals(self, positions: Positions, log_decay: float) -> Floats:
        """The sum [n] of each token's weights after all decays; 0 for tokens without a record."""
        is_recorded, out = positions < len(self._total), np.zeros(len(positions))
        recorded = positions[is_recorded]
        out[is_recorded] = self._total[recorded] * np.exp(log_decay - self._log_decay[recorded])
        return out

    def recent(self, positions: Positions) -> Floats:
        """Sums [layers, heads, n] of the weights that tokens received from the newest queries.

        The shape is [1, 1, n] if the newest record has no weights for each head. Records with other
        heads count with their mean, for every head.
        """
        heads = (*self._window[-1].weights.shape[:-2], 1, 1)[:2] if self._window else (1, 1)
        out = np.zeros((*heads, len(positions)))
        for window in self._window:
            _, here, there = np.intersect1d(
                positions, window.positions, assume_unique=True, return_indices=True
            )
            received = window.weights[..., there].sum(-2)
            mean_over = () if received.shape[:-1] == heads else tuple(range(received.ndim - 1))
            out[..., here] += received.mean(mean_over)
        return out

    def note_restored(self, positions: Positions) -> None:
        """Store the totals of tokens that are being restored, for an exact undo."""
        if len(positions) and self.has_records:
            self._restored_totals.append(self._copy_of(positions))
            self._restoration_count += 1

    def checkpoint(self, positions: Positions) -> AttentionCheckpoint:
        """A copy of the statistics of the tokens at `positions`, to which `undo` can return."""
        if not self.has_records:
            zeros = np.zeros(len(positions))
            return AttentionCheckpoint(positions, zeros, zeros, restorations=None)
        return replace(
            self._copy_of(positions), window=self._window, restorations=self._restoration_count
        )

    def undo(self, to: AttentionCheckpoint, seen: int) -> None:
        """Undo all changes since the checkpoint `to`, when `seen` tokens had been read."""
        if to.restorations is None:  # nothing had been counted by then
            self._total = self._log_decay = np.zeros(0)
            self._window = ()
            self._restored_totals.clear()
            return
        while self._restoration_count > to.restorations:
            self._restoration_count -= 1
            if self._restored_totals:  # a token's first total is written back last
                self._write_back(self._restored_totals.pop())
        self._write_back(to)
        self._total[seen:], self._log_decay[seen:] = 0, 0
        self._window = to.window

    def load(self, saved: AttentionCheckpoint) -> None:
        if saved.total.any():
            self._write_back(saved)
            self._window = saved.window

    def reorder(self, order: Positions, rank: Positions) -> None:
        """Give the tokens new positions; see `Ledger.reorder`."""
        if not self.has_records:
            return
        self._grow(len(rank))
        self._total, self._log_decay = self._total[order], self._log_decay[order]
        windows = []
        for window in self._window:
            new = rank[window.positions]
            stays = np.argsort(new)[int((new < 0).sum()) :]
            windows.append(QueryWindow(new[stays], window.weights[..., stays]))
        self._window = tuple(windows)
        self._restored_totals.clear()

    def erase(self, positions: Positions) -> None:
        self._total[positions[positions < len(self._total)]] = 0
        windows = []
        for window in self._window:
            stays = ~np.isin(window.positions, positions)
            windows.append(QueryWindow(window.positions[stays], window.weights[..., stays]))
        self._window = tuple(windows)
        self._restored_totals.clear()

    def _copy_of(self, positions: Positions) -> AttentionCheckpoint:
        is_recorded, total, log_decay = positions < len(self._total), *np.zeros((2, len(positions)))
        recorded = positions[is_recorded]
        total[is_recorded] = self._total[recorded]
        log_decay[is_recorded] = self._log_decay[recorded]
        return AttentionCheckpoint(positions, total, log_decay)

    def _write_back(self, saved: AttentionCheckpoint) -> None:
        if len(saved.positions):
            self._grow(int(saved.positions[-1]) + 1)
        self._total[saved.positions] = saved.total
        self._log_decay[saved.positions] = saved.log_decay

    def _grow(self, rows: int) -> None:
        self._total = _lengthened(self._total, rows)
        self._log_decay = _lengthened(self._log_decay, rows)


def _lengthened(array: Floats, rows: int) -> Floats:
    """The array, padded with zeros to at least twice its length if it is shorter than `rows`."""
    if rows <= len(array):
        return array
    return np.concatenate([array, np.zeros(max(rows, 2 * len(array)) - len(array))])


def _newest_windows(windows: tuple[QueryWindow, ...], count: int) -> tuple[QueryWindow, ...]:
    """The weights of the newest `count` queries in `windows`, oldest query first."""
    kept: list[QueryWindow] = []
    for window in reversed(windows):
        if count <= 0:
            break
        kept.append(QueryWindow(window.positions, window.weights[..., -count:, :]))
        count -= window.weights.shape[-2]
    return tuple(reversed(kept))
