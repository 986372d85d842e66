"""Statistics of the attention weights that each token receives from later tokens.

For the policy `kvzip`, the model reads each round a second time when the round has ended. Then the
round's tokens get one more number: the highest attention weight that any query of this second
reading gave them, as a mean over heads and layers. This number never changes later. (KVzip,
arXiv:2505.23416, section 3, has such a number for each head.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Positions = NDArray[np.int64]
Floats = NDArray[np.float64]


class RepeatAttention:
    """For each token, the highest attention weight that it got when its round was read again.

    The weight is 0 for tokens whose round was read only once.
    """

    def __init__(self) -> None:
        self._highest = np.zeros(0)

    def set(self, positions: Positions, highest: Floats) -> None:
        """Set the weights `highest` [n] of the tokens at stream `positions` [n], ascending."""
        rows = int(positions[-1]) + 1 if len(positions) else 0
        if rows > len(self._highest):
            more = max(rows, 2 * len(self._highest)) - len(self._highest)
            self._highest = np.concatenate([self._highest, np.zeros(more)])
        self._highest[positions] = highest

    def of(self, positions: Positions) -> Floats:
        """The weights [n] of the tokens at stream `positions` [n]; 0 where none was set."""
        known, out = positions < len(self._highest), np.zeros(len(positions))
        out[known] = self._highest[positions[known]]
        return out

    def truncate(self, seen: int) -> None:
        """Set the weights of all tokens from stream position `seen` on to 0."""
        self._highest[seen:] = 0

    def erase(self, positions: Positions) -> None:
        """Set the weights of the tokens at these stream positions to 0."""
        self._highest[positions[positions < len(self._highest)]] = 0


_RESTORATIONS = 256  # maximum number of `_restored` entries; one per checkpoint, enough to undo


@dataclass(frozen=True)
class AttentionStatsConfig:
    """Which attention weights are recorded.

    Attributes:
        layers: number of layers whose weights are recorded: evenly spaced among those without a
            sliding window; 0 for all layers of the model.
        window: number of the newest queries whose weights are stored one by one, besides the sum
            over all queries; 0 for none.
    """

    layers: int = 4
    window: int = 0

    def counted_layers(self, num_layers: int, sliding: Collection[int] = ()) -> list[int]:
        """Numbers of the layers whose attention is recorded, for a model of `num_layers` layers.

        `sliding` are the numbers of the layers with sliding-window attention.
        """
        wide = [number for number in range(num_layers) if number not in sliding]
        among = wide if self.layers and wide else list(range(num_layers))
        count = min(self.layers or num_layers, len(among))
        return [among[int((at + 0.5) * len(among) / count)] for at in range(count)]


@dataclass(frozen=True)
class QueryWindow:
    """Attention weights [m, n] from m queries to the tokens at stream `positions` [n]."""

    positions: Positions
    weights: NDArray[np.float32]


class PassAttention(NamedTuple):
    """Attention weights that n cache rows received in one forward pass.

    Attributes:
        sums: [n], each row's sum of the weights from all queries of the pass.
        queries: number of queries q; the last q of the n rows belong to the queries' own tokens.
        newest: [<= window, n], the weights from each of the newest queries.
    """

    sums: Floats
    queries: int
    newest: NDArray[np.float32]

    @classmethod
    def from_weights(cls, weights: NDArray[np.float32], window: int = 0) -> PassAttention:
        """Make the record of a pass from its `weights` [m, n], from m queries to n rows.

        The weights are summed over all queries; those of the newest `window` queries are also
        stored one by one.
        """
        newest = weights[max(0, len(weights) - window) :].copy()
        return cls(weights.sum(0, dtype=np.float64), len(weights), newest)


@dataclass(frozen=True)
class AttentionCheckpoint:
    """A copy of the attention that n tokens have received, for a saved chat or for undo.

    Attributes:
        positions: [n], stream positions, ascending.
        total: [n], sum of the attention weights received, after the decays up to `log_decay`.
        log_decay: [n], the logarithm of the ledger's accumulated decay when each total was last
            changed.
        window: weights from the newest queries.
        repeated: [n], highest weights in the second reading: see `RepeatAttention`; None if unset.
        restorations: how often `AttentionStats` had noted restored tokens before the checkpoint;
            all restorations between two checkpoints count as one. None if no attention had been
            recorded.
    """

    positions: Positions
    total: Floats
    log_decay: Floats
    window: tuple[QueryWindow, ...] = ()
    repeated: Floats | None = None
    restorations: int | None = 0


class AttentionStats:
    """The attention weights that every token of the stream has received so far.

    Attributes:
        repeat: the weights that tokens received while their round was read a second time.
    """

    def __init__(self) -> None:
        self.repeat = RepeatAttention()
        self._total = np.zeros(0)
        self._log_decay = np.zeros(0)  # the ledger's log_decay at each total's last update
        self._window: tuple[QueryWindow, ...] = ()
        # Totals of rows at their restoration; all restorations between two checkpoints: one entry.
        self._restored: deque[AttentionCheckpoint] = deque(maxlen=_RESTORATIONS)
        self._restorations = 0  # number of entries so far, deleted ones included
        self._is_checkpointed = True

    @property
    def is_counted(self) -> bool:
        """Whether any attention weights were recorded so far."""
        return len(self._total) > 0

    def add(
        self,
        positions: Positions,
        passes: Sequence[PassAttention],
        log_decay: float,
        window: int = 0,
    ) -> None:
        """Add the attention that the tokens at stream `positions` [n] got in forward `passes`.

        `log_decay` is the logarithm of the ledger's accumulated decay. The weights of the newest
        `window` queries are also stored one by one. A token that was read while no attention was
        recorded starts with the median of the other tokens' totals.
        """
        if not passes:
            return
        self._grow(int(positions[-1]) + 1)
        before = self._total[positions]
        uncounted = before == 0
        own_rows = sum(one.queries for one in passes)
        uncounted[len(uncounted) - own_rows :] = False
        total = before * np.exp(log_decay - self._log_decay[positions])
        for one in passes:
            total[: len(one.sums)] += one.sums
        if uncounted.any():
            total[uncounted] = np.maximum(total[uncounted], np.median(total[~uncounted]))
        self._total[positions] = total
        self._log_decay[positions] = log_decay
        newest = (QueryWindow(positions[: len(one.sums)].copy(), one.newest) for one in passes)
        self._window = _newest((*self._window, *newest), window)

    def totals(self, positions: Positions, log_decay: float) -> Floats:
        """For each stream position [n], the summed attention weights, after all decays so far.

        A token that was read while no attention was recorded gets 0. `log_decay` is the logarithm
        of the ledger's accumulated decay.
        """
        known, out = positions < len(self._total), np.zeros(len(positions))
        at = positions[known]
        out[known] = self._total[at] * np.exp(log_decay - self._log_decay[at])
        return out

    def recent(self, positions: Positions) -> Floats:
        """For each stream position [n], ascending, the summed weights from the newest queries."""
        out = np.zeros(len(positions))
        for one in self._window:
            _, here, there = np.intersect1d(
                positions, one.positions, assume_unique=True, return_indices=True
            )
            out[here] += one.weights[:, there].sum(0)
        return out

    def note_restored(self, positions: Positions) -> None:
        """Remember the totals of tokens that are restored to the cache, so that `undo` is exact."""
        if not (self.is_counted and len(positions)):
            return
        if self._is_checkpointed or not self._restored:
            self._restored.append(self._of(positions))
            self._restorations += 1
        else:  # a row that was restored twice keeps its first total
            last = self._restored.pop()
            new = self._of(np.setdiff1d(positions, last.positions))
            self._restored.append(_joined(last, new))
        self._is_checkpointed = False

    def checkpoint(self, positions: Positions) -> AttentionCheckpoint:
        """A copy of the attention received so far by tokens at `positions` [n], ascending."""
        self._is_checkpointed = True
        repeated = self.repeat.of(positions)
        if not self.is_counted:
            zeros = np.zeros(len(positions))
            return AttentionCheckpoint(positions, zeros, zeros, (), repeated, restorations=None)
        return replace(
            self._of(positions),
            window=self._window,
            repeated=repeated,
            restorations=self._restorations,
        )

    def _of(self, positions: Positions) -> AttentionCheckpoint:
        known, total, log_decay = positions < len(self._total), *np.zeros((2, len(positions)))
        at = positions[known]
        total[known], log_decay[known] = self._total[at], self._log_decay[at]
        return AttentionCheckpoint(positions, total, log_decay)

    def undo(self, to: AttentionCheckpoint, seen: int) -> None:
        """Undo everything recorded since the checkpoint `to`.

        The attention of tokens from stream position `seen` on is deleted.
        """
        self.repeat.truncate(seen)
        if to.restorations is None:  # nothing had been counted by then
            self._total = self._log_decay = np.zeros(0)
            self._window = ()
            self._restored.clear()
            return
        self._is_checkpointed = True
        while self._restorations > to.restorations:
            self._restorations -= 1
            if self._restored:
                self._put(self._restored.pop())
        self._put(to)
        self._total[seen:], self._log_decay[seen:] = 0, 0
        self._window = to.window

    def load(self, saved: AttentionCheckpoint) -> None:
        """Load the attention that a saved chat's tokens had received."""
        if saved.total.any():
            self._put(saved)
            self._window = saved.window
        if saved.repeated is not None:
            self.repeat.set(saved.positions, saved.repeated)

    def spare_from_decay(self, start: int, log_decay: float) -> None:
        """Exempt all tokens at stream position `start` or later from the decays so far.

        `log_decay` is the logarithm of the ledger's accumulated decay.
        """
        self._log_decay[start:] = log_decay

    def erase(self, positions: Positions) -> None:
        """Delete the recorded attention of the tokens at these stream positions."""
        self.repeat.erase(positions)
        self._total[positions[positions < len(self._total)]] = 0
        self._window = tuple(
            QueryWindow(one.positions[stays], one.weights[:, stays])
            for one in self._window
            for stays in [~np.isin(one.positions, positions)]
        )
        self._restored.clear()

    def _put(self, one: AttentionCheckpoint) -> None:
        if len(one.positions):
            self._grow(int(one.positions[-1]) + 1)
        self._total[one.positions], self._log_decay[one.positions] = one.total, one.log_decay

    def _grow(self, rows: int) -> None:
        """If the arrays are too short for `rows` tokens, extend them to at least twice as long."""
        more = max(rows, 2 * len(self._total)) - len(self._total)
        if rows > len(self._total):
            self._total = np.concatenate([self._total, np.zeros(more)])
            self._log_decay = np.concatenate([self._log_decay, np.zeros(more)])


def or_median(received: Tensor) -> Tensor:
    """The attention `received` [n] by n rows, with each 0 replaced by the median of the others.

    A 0 means that the row was read while no attention was recorded: any other row has received
    some weight, at least from its own query. If all are 0, they are replaced by 1.
    """
    known = received[received > 0]
    usual = known.median() if len(known) else torch.ones((), dtype=received.dtype)
    return torch.where(received > 0, received, usual)


def _joined(one: AttentionCheckpoint, other: AttentionCheckpoint) -> AttentionCheckpoint:
    """Combine the totals of two checkpoints that have no stream position in common."""
    positions = np.concatenate([one.positions, other.positions])
    order = np.argsort(positions)
    total = np.concatenate([one.total, other.total])[order]
    log_decay = np.concatenate([one.log_decay, other.log_decay])[order]
    return AttentionCheckpoint(positions[order], total, log_decay)


def _newest(windows: tuple[QueryWindow, ...], count: int) -> tuple[QueryWindow, ...]:
    """The weights of the newest `count` queries among all those in `windows`, oldest first."""
    kept: list[QueryWindow] = []
    for one in reversed(windows):
        if count <= 0:
            break
        kept.append(QueryWindow(one.positions, one.weights[-count:]))
        count -= len(one.weights)
    return tuple(reversed(kept))
