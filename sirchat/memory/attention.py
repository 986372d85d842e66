"""Statistics of the attention weights that each token receives from later tokens.

For the policy `kvzip`, the model reads each round a second time when the round has ended. Each
token of the round then gets one more number: the highest attention weight that any query of the
second reading gave to the token, as a mean over heads and layers. This number never changes later.
(KVzip, arXiv:2505.23416, section 3, has one number for each head.)
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

from sirchat.memory.key_values import Positions

Floats = NDArray[np.float64]


class RepeatAttention:
    """Stores the highest attention weight of each token when its round was read a second time.

    A token whose round was read only once has the weight 0.
    """

    def __init__(self) -> None:
        self._highest = np.zeros(0)

    def set(self, positions: Positions, highest: Floats) -> None:
        """Set the highest attention weights of tokens in the second reading of their round.

        `positions` [n] are the tokens' stream positions, ascending; `highest` [n] the weights.
        """
        rows = int(positions[-1]) + 1 if len(positions) else 0
        if rows > len(self._highest):
            more = max(rows, 2 * len(self._highest)) - len(self._highest)
            self._highest = np.concatenate([self._highest, np.zeros(more)])
        self._highest[positions] = highest

    def of(self, positions: Positions) -> Floats:
        """The weights [n] of the tokens at stream `positions` [n]; 0 for tokens without a weight.

        A weight is the highest attention weight that the token got in the second reading.
        """
        known, out = positions < len(self._highest), np.zeros(len(positions))
        out[known] = self._highest[positions[known]]
        return out

    def truncate(self, seen: int) -> None:
        """Set the weights of all but the conversation's first `seen` tokens to 0."""
        self._highest[seen:] = 0

    def erase(self, positions: Positions) -> None:
        """Set the weights of the tokens at these stream positions to 0."""
        self._highest[positions[positions < len(self._highest)]] = 0


_RESTORATIONS = 256  # maximum number of `_restored` entries; one per checkpoint, enough to undo


@dataclass(frozen=True)
class AttentionStatsConfig:
    """Configuration: which attention weights are recorded while the model reads.

    The sum of the weights from all queries is recorded for each token.

    Attributes:
        layers: number of layers whose weights are recorded. They are evenly spaced among the layers
            without a sliding window. 0 for all layers of the model.
        window: the weights from this many newest queries are also stored one by one; 0 for none.
    """

    layers: int = 4
    window: int = 0

    def counted_layers(self, num_layers: int, sliding: Collection[int] = ()) -> list[int]:
        """Numbers of the layers whose attention is recorded, for a model of `num_layers` layers.

        `sliding` are the numbers of the model's layers with sliding-window attention.
        """
        wide = [number for number in range(num_layers) if number not in sliding]
        among = wide if self.layers and wide else list(range(num_layers))
        count = min(self.layers or num_layers, len(among))
        return [among[int((at + 0.5) * len(among) / count)] for at in range(count)]


@dataclass(frozen=True)
class QueryWindow:
    """The attention weights from the m newest queries, each stored separately.

    `weights` [m, n] are the weights from the queries to the tokens at stream `positions` [n].
    """

    positions: Positions
    weights: NDArray[np.float32]


class PassAttention(NamedTuple):
    """Attention weights that n cache rows received in one forward pass.

    Attributes:
        sums: [n], for each row, the sum of the weights from all queries of the pass.
        queries: number q of queries in the pass; the last q of the n rows are those of the queries'
            own tokens.
        newest: [at most `window`, n], the weights from each of the newest queries.
    """

    sums: Floats
    queries: int
    newest: NDArray[np.float32]

    @classmethod
    def from_weights(cls, weights: NDArray[np.float32], window: int = 0) -> PassAttention:
        """Make the record of a forward pass from its attention `weights` [m, n].

        They are the weights from m queries to n cache rows. The record has their sum over all
        queries, and the weights from each of the newest `window` queries.
        """
        newest = weights[max(0, len(weights) - window) :].copy()
        return cls(weights.sum(0, dtype=np.float64), len(weights), newest)


@dataclass(frozen=True)
class AttentionCheckpoint:
    """A copy of the attention statistics of n tokens, for a saved chat or for undo.

    Attributes:
        positions: [n], the tokens' stream positions, ascending.
        total: [n], for each token, the sum of the attention weights that it has received, after
            the decays up to `log_decay`.
        log_decay: [n], for each token, the logarithm of the ledger's accumulated decay when `total`
            was last changed.
        window: weights from the newest queries.
        repeated: [n], highest weights when the round was read a second time, see `RepeatAttention`;
            None if they were not copied.
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
    """Statistics of the attention weights that each token of the conversation has received.

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
        """Whether any attention weights have been recorded in this conversation."""
        return len(self._total) > 0

    def add(
        self,
        positions: Positions,
        passes: Sequence[PassAttention],
        log_decay: float,
        window: int = 0,
    ) -> None:
        """Add the attention weights that tokens received in forward passes to their totals.

        `positions` [n] are the tokens' stream positions; `passes` has one record for each pass.
        `log_decay` is the logarithm of the ledger's accumulated decay. The weights from the newest
        `window` queries are also stored one by one. A token that was read while no attention was
        recorded starts with at least the median of the other tokens' totals.
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
        """The sum of the attention weights that each token has received, after all decays.

        `positions` [n] are the tokens' stream positions; returns sums [n]. The sum is 0 for a token
        without recorded attention. `log_decay` is the logarithm of the ledger's accumulated decay.
        """
        known, out = positions < len(self._total), np.zeros(len(positions))
        at = positions[known]
        out[known] = self._total[at] * np.exp(log_decay - self._log_decay[at])
        return out

    def recent(self, positions: Positions) -> Floats:
        """The sum of the attention weights that each token received from the newest queries.

        `positions` [n] are the tokens' stream positions, ascending; returns sums [n].
        """
        out = np.zeros(len(positions))
        for one in self._window:
            _, here, there = np.intersect1d(
                positions, one.positions, assume_unique=True, return_indices=True
            )
            out[here] += one.weights[:, there].sum(0)
        return out

    def note_restored(self, positions: Positions) -> None:
        """Store the attention totals of tokens that are restored to the cache.

        `positions` are the tokens' stream positions. `undo` needs these totals to be exact, because
        a restored token can receive more attention.
        """
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
        """Return a copy of the attention statistics of n tokens, to which `undo` can go back.

        `positions` [n] are the tokens' stream positions, ascending.
        """
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
        """Undo all changes of the attention statistics since the checkpoint `to`.

        Statistics of all but the conversation's first `seen` tokens are deleted.
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
        """Load the attention statistics of a saved chat's tokens."""
        if saved.total.any():
            self._put(saved)
            self._window = saved.window
        if saved.repeated is not None:
            self.repeat.set(saved.positions, saved.repeated)

    def spare_from_decay(self, start: int, log_decay: float) -> None:
        """Let no past decay apply to the attention of the tokens from stream position `start` on.

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
        """Extend the arrays of statistics, which have one entry per token, for `rows` tokens.

        Arrays that are too short become at least twice as long.
        """
        more = max(rows, 2 * len(self._total)) - len(self._total)
        if rows > len(self._total):
            self._total = np.concatenate([self._total, np.zeros(more)])
            self._log_decay = np.concatenate([self._log_decay, np.zeros(more)])


def or_median(received: Tensor) -> Tensor:
    """The attention `received` [n] by n tokens, with each 0 replaced by the median of the others.

    A 0 means that the token was read while no attention was recorded. Any other token has received
    some attention, at least from its own query. If all numbers are 0, each is replaced by 1.
    """
    known = received[received > 0]
    usual = known.median() if len(known) else torch.ones((), dtype=received.dtype)
    return torch.where(received > 0, received, usual)


def _joined(one: AttentionCheckpoint, other: AttentionCheckpoint) -> AttentionCheckpoint:
    """Make one checkpoint of the attention totals of two that have no token in common."""
    positions = np.concatenate([one.positions, other.positions])
    order = np.argsort(positions)
    total = np.concatenate([one.total, other.total])[order]
    log_decay = np.concatenate([one.log_decay, other.log_decay])[order]
    return AttentionCheckpoint(positions[order], total, log_decay)


def _newest(windows: tuple[QueryWindow, ...], count: int) -> tuple[QueryWindow, ...]:
    """The attention weights from the newest `count` queries in `windows`, oldest query first.

    Each item of `windows` has the weights from several successive queries; the oldest item comes
    first, also in the result.
    """
    kept: list[QueryWindow] = []
    for one in reversed(windows):
        if count <= 0:
            break
        kept.append(QueryWindow(one.positions, one.weights[-count:]))
        count -= len(one.weights)
    return tuple(reversed(kept))
