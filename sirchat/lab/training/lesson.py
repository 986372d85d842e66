"""A lesson: talk, and a teacher's vectors of its sentences, from which any model's encoder learns.

The bundled one, of MiniLM, spares users a teacher: `statements.yaml` as messages, and texts that
smollm2 wrote.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from sirchat.errors import ModelError

LESSON = Path(__file__).with_name("lesson.xz")
_MOST = 127  # of an int8


@dataclass(frozen=True)
class Lesson:
    """The rounds of a lesson, and the unit vectors [D] of their sentences, by text."""

    name: str  # of the teacher
    rounds: Sequence[tuple[str, str]]
    known: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        """D, the length of a vector."""
        return len(next(iter(self.known.values())))

    def vectors(self, texts: Sequence[str]) -> Tensor:
        """The vectors [n, D] of sentences that the lesson knows."""
        return torch.stack([self.known[text] for text in texts])

    def save(self, path: Path, size: int) -> None:
        """Write it into a file, its vectors on the `size` axes on which they differ most."""
        vectors = torch.stack(list(self.known.values())).double()
        vectors = vectors @ torch.linalg.eigh(vectors.T @ vectors).eigenvectors[:, -size:]
        rounded = (vectors * _MOST / vectors.abs().amax(1, keepdim=True)).round().to(torch.int8)
        head = {"name": self.name, "size": rounded.shape[1], "rounds": self.rounds}
        text = json.dumps({**head, "sentences": list(self.known)}).encode()
        try:
            path.write_bytes(lzma.compress(text + b"\n" + rounded.numpy().tobytes()))
        except OSError as error:
            raise ModelError(f"lesson {path} can't be written: {error}") from None

    @classmethod
    def load(cls, path: Path = LESSON) -> Self:
        """Read a lesson that `save` has written."""
        text, _, numbers = lzma.decompress(path.read_bytes()).partition(b"\n")
        said = json.loads(text)
        vectors = torch.frombuffer(bytearray(numbers), dtype=torch.int8).view(-1, said["size"])
        vectors = torch.nn.functional.normalize(vectors.float(), dim=-1)
        known = dict(zip(said["sentences"], vectors, strict=True))
        return cls(said["name"], [tuple(pair) for pair in said["rounds"]], known)
