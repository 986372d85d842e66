"""What is read from the hidden states of each token, whichever way the token is read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sirchat.models.encoder import Encoder


@dataclass(eq=False)
class Readings:
    """What is read from the states of m ids: a request, which `Readout.fill` answers."""

    encodes: bool = False  # whether the encoder's numbers are wanted
    numbers: Tensor | None = None  # [m, D], of the encoder, on the CPU; None if not wanted

    def part(self, at: int) -> Readings:
        """The readings of the id with this index."""
        numbers = None if self.numbers is None else self.numbers[at : at + 1]
        return Readings(self.encodes, numbers)


@dataclass(frozen=True, eq=False)
class Readout:
    """Computes a model's encodings from the states after the layers of its encoder."""

    encoder: Encoder

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose states are needed, ascending, counted from 1."""
        return self.encoder.layers

    def fill(self, readings: Readings, states: Tensor) -> None:
        """Answer a request about m ids from their states [m, layers x d]."""
        if readings.encodes and self.layers:
            readings.numbers = self.on_device(states).cpu()

    def on_device(self, states: Tensor) -> Tensor:
        """The numbers of m tokens, float32 [m, D], from their states [m, layers x d]."""
        return self.encoder.numbers(states)
