"""Attention received: how much each row was looked at, for whoever wants to know.

A row's attention is the sum of the weights that it got from each query since it was read, its own
included, while it was held: each the mean over heads and over the layers that are counted. It fades
with every round's decay, from the moment on when it was received. Beside it stand, where they are
wanted, the weights of the newest queries alone.

Nothing is counted, and nothing stored, while nobody wants to know.
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

_RETURNS = 256  # are remembered, one for each moment to go back to: more than can be undone


@dataclass(frozen=True)
class AttentionStatsConfig:
    """What is counted.

    Attributes:
        layers: how many, evenly spaced among those that see all that is held; 0 for all there are.
        window: the newest queries whose weights are kept one by one; 0 for none.
    """

    layers: int = 4
    window: int = 0

    def of(self, layers: int, narrow: Collection[int] = ()) -> list[int]:
        """The numbers of the counted ones among so many layers, of which some have a window."""
        wide = [number for number in range(layers) if number not in narrow]
        among = wide if self.layers and wide else list(range(layers))
        count = min(self.layers or layers, len(among))
        return [among[int((at + 0.5) * len(among) / count)] for at in range(count)]


@dataclass(frozen=True)
class QueryWindow:
    """What the rows at `positions` [n] got in one forward pass: from each query, weights [m, n]."""

    positions: Positions
    weights: NDArray[np.float32]


class PassAttention(NamedTuple):
    """What one forward pass looked at, of the rows that were in the cache behind it.

    Attributes:
        sums: [n], what each row got from all queries.
        queries: how many there were, the newest rows' own.
        newest: [<= window, n], what each row got from the newest of them.
    """

    sums: Floats
    queries: int
    newest: NDArray[np.float32]

    @classmethod
    def of(cls, weights: NDArray[np.float32], window: int = 0) -> PassAttention:
        """By the weights [m, n] from each query to each row."""
        newest = weights[max(0, len(weights) - window) :].copy()
        return cls(weights.sum(0, dtype=np.float64), len(weights), newest)


@dataclass(frozen=True)
class AttentionCheckpoint:
    """What rows have received, to be saved or gone back to.

    Attributes:
        positions: [n], ascending.
        total: [n], each as it was at `log_decay` [n].
        window: the newest queries' weights, pass by pass.
        returns: how often rows had come back by then; None where nothing was counted yet.
    """

    positions: Positions
    total: Floats
    log_decay: Floats
    window: tuple[QueryWindow, ...] = ()
    returns: int | None = 0


class AttentionStats:
    """What every row of the stream has received."""

    def __init__(self) -> None:
        self._total = np.zeros(0)
        self._log_decay = np.zeros(0)  # the ledger's, when the total was brought up to date
        self._window: tuple[QueryWindow, ...] = ()
        # What rows had before they came back; all of them between two moments are one entry.
        self._returned: deque[AttentionCheckpoint] = deque(maxlen=_RETURNS)
        self._returns = 0  # entries, those that are no longer remembered included
        self._is_marked = True

    @property
    def is_counted(self) -> bool:
        """Whether anything was ever counted."""
        return len(self._total) > 0

    def add(
        self,
        positions: Positions,
        passes: Sequence[PassAttention],
        log_decay: float,
        window: int = 0,
    ) -> None:
        """Add what the rows at these positions [n] got while ids were read, in one pass or several.

        Of all passes, the newest `window` queries are kept one by one. Rows that were read while
        nobody counted begin with what is usual among the others.
        """
        if not passes:
            return
        self._reserve(int(positions[-1]) + 1)
        before = self._total[positions]
        late = before == 0
        late[len(late) - sum(one.queries for one in passes) :] = False  # the queries' own rows
        total = before * np.exp(log_decay - self._log_decay[positions])
        for one in passes:
            total[: len(one.sums)] += one.sums
        if late.any():
            total[late] = np.maximum(total[late], np.median(total[~late]))
        self._total[positions] = total
        self._log_decay[positions] = log_decay
        newest = (QueryWindow(positions[: len(one.sums)].copy(), one.newest) for one in passes)
        self._window = _newest((*self._window, *newest), window)

    def of(self, positions: Positions, log_decay: float) -> Floats:
        """What rows [n] have received, faded by the decays since; 0 where nothing was counted."""
        known, out = positions < len(self._total), np.zeros(len(positions))
        at = positions[known]
        out[known] = self._total[at] * np.exp(log_decay - self._log_decay[at])
        return out

    def recent_attention(self, positions: Positions) -> Floats:
        """What rows [n], ascending, have received from the newest queries alone."""
        out = np.zeros(len(positions))
        for one in self._window:
            _, here, there = np.intersect1d(
                positions, one.positions, assume_unique=True, return_indices=True
            )
            out[here] += one.weights[:, there].sum(0)
        return out

    def came_back(self, positions: Positions) -> None:
        """Note what these rows had before they were held again, so that it can be gone back to."""
        if not (self.is_counted and len(positions)):
            return
        if self._is_marked or not self._returned:
            self._returned.append(self._of(positions))
            self._returns += 1
        else:  # of a row that came back twice only what it had at first counts
            last = self._returned.pop()
            new = self._of(np.setdiff1d(positions, last.positions))
            self._returned.append(_joined(last, new))
        self._is_marked = False

    def received(self, positions: Positions) -> AttentionCheckpoint:
        """What rows [n], ascending, have received until now, to be gone back to: a copy."""
        self._is_marked = True
        if not self.is_counted:
            nothing = np.zeros(0)
            return AttentionCheckpoint(positions[:0], nothing, nothing, returns=None)
        return replace(self._of(positions), window=self._window, returns=self._returns)

    def _of(self, positions: Positions) -> AttentionCheckpoint:
        known, total, log_decay = positions < len(self._total), *np.zeros((2, len(positions)))
        at = positions[known]
        total[known], log_decay[known] = self._total[at], self._log_decay[at]
        return AttentionCheckpoint(positions, total, log_decay)

    def go_back(self, to: AttentionCheckpoint, seen: int) -> None:
        """Forget what was received since; rows from `seen` on have never been.

        `to` is what the rows that were held then had received.
        """
        if to.returns is None:  # nothing was counted by then
            self._total = self._log_decay = np.zeros(0)
            self._window = ()
            self._returned.clear()
            return
        self._is_marked = True
        while self._returns > to.returns:
            self._returns -= 1
            if self._returned:
                self._put(self._returned.pop())
        self._put(to)
        self._total[seen:], self._log_decay[seen:] = 0, 0
        self._window = to.window

    def load(self, saved: AttentionCheckpoint) -> None:
        """Take over what was saved."""
        self._put(saved)
        self._window = saved.window

    def renew(self, start: int, log_decay: float) -> None:
        """Let rows from position `start` on be as fresh as `log_decay`, the ledger's, is."""
        self._log_decay[start:] = log_decay

    def erase(self, positions: Positions) -> None:
        """Keep nothing of what these rows got."""
        self._total[positions[positions < len(self._total)]] = 0
        self._window = tuple(
            QueryWindow(one.positions[stays], one.weights[:, stays])
            for one in self._window
            for stays in [~np.isin(one.positions, positions)]
        )
        self._returned.clear()

    def _put(self, one: AttentionCheckpoint) -> None:
        if len(one.positions):
            self._reserve(int(one.positions[-1]) + 1)
        self._total[one.positions], self._log_decay[one.positions] = one.total, one.log_decay

    def _reserve(self, rows: int) -> None:
        """Grow by doubling."""
        more = max(rows, 2 * len(self._total)) - len(self._total)
        if rows > len(self._total):
            self._total = np.concatenate([self._total, np.zeros(more)])
            self._log_decay = np.concatenate([self._log_decay, np.zeros(more)])


def or_median(received: Tensor) -> Tensor:
    """What rows [n] received; those that were read before anybody counted got what is usual.

    A row that was counted got something, from its own query.
    """
    known = received[received > 0]
    usual = known.median() if len(known) else torch.ones((), dtype=received.dtype)
    return torch.where(received > 0, received, usual)


def _joined(one: AttentionCheckpoint, other: AttentionCheckpoint) -> AttentionCheckpoint:
    """Both, of other rows."""
    positions = np.concatenate([one.positions, other.positions])
    order = np.argsort(positions)
    total = np.concatenate([one.total, other.total])[order]
    log_decay = np.concatenate([one.log_decay, other.log_decay])[order]
    return AttentionCheckpoint(positions[order], total, log_decay)


def _newest(passes: tuple[QueryWindow, ...], window: int) -> tuple[QueryWindow, ...]:
    """The newest passes that have `window` queries together, the oldest of them cut."""
    kept: list[QueryWindow] = []
    for one in reversed(passes):
        if window <= 0:
            break
        kept.append(QueryWindow(one.positions, one.weights[-window:]))
        window -= len(one.weights)
    return tuple(reversed(kept))
