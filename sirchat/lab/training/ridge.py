"""Ridge regression in closed form, of which only sums are kept in memory."""

from __future__ import annotations

import torch
from torch import Tensor


class Ridge:
    """Ridge regression that predicts a vector y [k] from a vector x [d], with d = `size`.

    The penalty applies to the weights of the standardised x, and not to the intercept. Observations
    are added in parts, and only their sums are kept in memory.
    """

    def __init__(self, size: int, k: int = 1) -> None:
        self._count = 0
        self._x, self._y = (torch.zeros(n, dtype=torch.float64) for n in (size, k))
        self._xx = torch.zeros(size, size, dtype=torch.float64)
        self._xy = torch.zeros(size, k, dtype=torch.float64)

    @property
    def count(self) -> int:
        """Number of observations that have been added to the regression."""
        return self._count

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add m observations to the regression: vectors `x` [m, d] and their `y` [m, k]."""
        x, y = x.double().cpu(), y.double()
        self._count += len(y)
        self._x += x.sum(0)
        self._y += y.sum(0)
        self._xx += x.T @ x
        self._xy += x.T @ y

    def solve(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Fit the regression with the given penalty; returns weights [d, k] and bias [k], float64.

        Both apply to vectors x as they were added, not to standardised ones.
        """
        mean, mean_y = self._x / self._count, self._y / self._count
        covariance = self._xx - self._count * mean.outer(mean)
        deviation = (covariance.diag() / self._count).clamp_min(0).sqrt()
        deviation[deviation <= 1e-6 * mean.abs()] = 1  # x is constant, apart from rounding
        scaled = covariance / deviation.outer(deviation)
        wanted = (self._xy - self._count * mean.outer(mean_y)) / deviation[:, None]
        weight = torch.linalg.solve(scaled + penalty * torch.eye(len(mean)), wanted)
        weight /= deviation[:, None]
        return weight, mean_y - mean @ weight

    def main_axes(self, weight: Tensor, bias: Tensor, most: int) -> Tensor:
        """The axes [k, most] on which what `solve` found predicts the most, orthonormal."""
        cross = (weight.T @ self._x).outer(bias)
        products = weight.T @ self._xx @ weight + cross + cross.T
        products += self._count * bias.outer(bias)
        axes: Tensor = torch.linalg.eigh(products).eigenvectors[:, -most:]
        return axes
