"""Ridge regression in closed form."""

from __future__ import annotations

import torch
from torch import Tensor


class Ridge:
    """Ridge regression that predicts vectors y [n, k] from vectors x [n, d].

    The penalty applies to the weights of the standardised x, and not to the intercept.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y.double()

    def solve(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Fit the regression with the given penalty; returns weights [d, k] and bias [k], float64.

        Both apply to vectors x as they were given, not to standardised ones.
        """
        mean, mean_y = self._x.double().mean(0), self._y.mean(0)
        x, y = self._x - mean, self._y - mean_y
        deviation = x.square().mean(0).sqrt()
        deviation[deviation <= 1e-6 * mean.abs()] = 1  # x is constant, apart from rounding
        x /= deviation
        # Of both matrices that give the same weights, the smaller one: a large model has more
        # numbers in a state than there are sentences.
        if x.shape[0] < x.shape[1]:
            weight = x.T @ torch.linalg.solve(x @ x.T + penalty * torch.eye(len(x)), y)
        else:
            weight = torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1]), x.T @ y)
        weight /= deviation[:, None]
        return weight, mean_y - mean @ weight

    def main_axes(self, weight: Tensor, bias: Tensor, most: int) -> Tensor:
        """The axes [k, most] on which what `solve` found predicts the most, orthonormal."""
        found = self._x.double() @ weight + bias
        axes: Tensor = torch.linalg.eigh(found.T @ found).eigenvectors[:, -most:]
        return axes
