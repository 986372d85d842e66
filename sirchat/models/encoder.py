"""A sentence encoder: a linear map from the hidden states of a sentence's tokens to its vector.

A sentence's vector is the mean of its tokens' vectors plus a bias, scaled to length 1. So each
token's vector can be computed as the token is read, before the end of the sentence is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from sirchat import paths
from sirchat.errors import ModelError
from sirchat.models.hidden_states import layer_count

_MAX_INT8 = 127  # of an int8


# What a user's sentence can be told to be: a standing rule for replies, something stated.
KINDS = ("instruction", "fact")


@dataclass(eq=False)
class EncoderOutput:
    """The vectors of m ids; a forward pass fills them in if `is_wanted` is true."""

    is_wanted: bool = False
    token_vectors: Tensor | None = None  # [m, D], on the CPU; None if not wanted

    def of_token(self, index: int) -> EncoderOutput:
        vectors = self.token_vectors
        return EncoderOutput(
            self.is_wanted, None if vectors is None else vectors[index : index + 1]
        )


@dataclass(frozen=True, eq=False)
class Encoder:
    """A linear map from hidden states to vectors of D numbers; by default an empty one."""

    layers: tuple[int, ...] = ()  # whose outputs are read: ascending, counted from 1
    weight: Tensor = field(default_factory=lambda: torch.zeros(0))  # [layers x d, D]; int8 in files
    bias: Tensor = field(default_factory=lambda: torch.zeros(0))  # [D], of sentences
    about: Mapping[str, str] = field(default_factory=dict)  # facts about the training, by name
    # A network that tells `KINDS` by a sentence's vector: float32 [H, D + 1] and [2, H + 1], each
    # row with a bias at its end; empty if it was not trained.
    hidden: Tensor = field(default_factory=lambda: torch.zeros(0, 1))
    kinds: Tensor = field(default_factory=lambda: torch.zeros(0, 1))
    # Tells a message that asks for something told before: float32 [D + 1]; empty if not trained.
    question: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def size(self) -> int:
        """D, the length of a sentence's vector; 0 if there is no encoder."""
        return len(self.bias)

    @cached_property
    def checksum(self) -> int:
        """A checksum of the layers, the weight and the bias: it changes with what vectors mean."""
        tensors = (tensor.cpu().numpy().tobytes() for tensor in (self.weight, self.bias))
        return crc32(b"".join((str(self.layers).encode(), *tensors)))

    def to(self, device: torch.device) -> Self:
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    def token_vectors(self, states: Tensor) -> Tensor:
        """The vectors [m, D] of m tokens from their hidden states [m, layers x d]."""
        return states.float() @ self.weight.to(states.device)

    def fill(self, encoder_output: EncoderOutput, states: Tensor) -> None:
        """If wanted, set the vectors of m ids from their states [m, layers x d]."""
        if encoder_output.is_wanted and self.layers:
            encoder_output.token_vectors = self.token_vectors(states).cpu()

    def unit_vectors(self, means: Tensor) -> Tensor:
        """The unit vectors [..., D] of sentences from the means of their tokens' vectors."""
        return F.normalize(means + self.bias.to(means.device), dim=-1)

    def is_kind(self, kind: str, vectors: Tensor) -> Tensor:
        """Which of n sentences, by vectors [n, D], are of this kind: bool [n]; none if unknown."""
        if not len(self.kinds):
            return torch.zeros(len(vectors), dtype=torch.bool)
        return kind_scores(vectors.float(), self.hidden, self.kinds)[:, KINDS.index(kind)] > 0

    def asks_about_past(self, vector: Tensor) -> bool:
        """Whether a message, by its vector [D], asks for something that was said earlier."""
        weight = self.question
        return len(weight) > 0 and float(vector.float() @ weight[:-1] + weight[-1]) > 0

    def save(self, path: Path) -> None:
        """Write the file, wholly or not at all; raises ModelError if that fails."""
        try:
            paths.make_private_dir(path.parent)
            stored = self._to_tensors()
            about = {**self.about, "layers": json.dumps(self.layers), "sum": _checksum(stored)}
            paths.write_private(path, save(stored, about), replaces=True)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"encoder {path} can't be written: {error}") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a map from a file; raises ModelError if the file is damaged."""
        with suppress(OSError, SafetensorError, ValueError, TypeError, LookupError, RuntimeError):
            with safe_open(path, "pt") as file:
                about = dict(file.metadata() or {})
                layers = tuple(map(int, json.loads(about.pop("layers"))))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about.pop("sum", "") not in ("", _checksum(tensors)):  # older files have none
                raise ValueError
            # copies: the file stays mapped else, and who shortens it would end the process
            restored = {name: one.to(torch.float32, copy=True) for name, one in tensors.items()}
            restored["weight"] *= restored.pop("scale")
            if all(tensor.isfinite().all() for tensor in restored.values()):
                found = cls(layers, about=about, **restored)
                found._try_shapes()
                return found
        raise _unusable(path, "is damaged")

    @classmethod
    def of_model(cls, name: str, module: Any) -> Self:
        """The encoder of a model: the user's own, or else the bundled one, or else an empty one.

        Raises ModelError for a file that is damaged or was made for a model of another shape.
        """
        own, bundled = paths.encoder_files(name)
        path = next((path for path in (own, bundled) if path.is_file()), None)
        if path is None:
            return cls()
        found, count = cls.load(path), layer_count(module)
        size = module.config.get_text_config(decoder=True).hidden_size
        is_valid = list(found.layers) == sorted({n for n in found.layers if 1 <= n <= count})
        if not (is_valid and len(found.weight) == len(found.layers) * size > 0):
            raise _unusable(path, "was trained for another model")
        return replace(found, about={**found.about, "bundled": "yes"}) if path == bundled else found

    def _try_shapes(self) -> None:
        """Compute everything once; any exception means that the shapes do not fit each other."""
        token_vectors = self.token_vectors(torch.zeros(1, len(self.weight)))
        if token_vectors.shape != (1, self.size):
            raise ValueError
        vectors = self.unit_vectors(token_vectors)
        self.is_kind(KINDS[-1], vectors)
        self.asks_about_past(vectors[0])

    def _to_tensors(self) -> dict[str, Tensor]:
        scale = (self.weight.abs().amax(1, keepdim=True) / _MAX_INT8).clamp_min(1e-30)
        rounded = (self.weight / scale).round().to(torch.int8)
        network = {"hidden": self.hidden, "kinds": self.kinds, "question": self.question}
        return {"weight": rounded, "scale": scale, "bias": self.bias, **network}


def kind_scores(vectors: Tensor, hidden: Tensor, kinds: Tensor) -> Tensor:
    """The scores [n, 2] of n sentences, by vectors [n, D], for both kinds; above 0 means yes."""
    between = F.relu(vectors @ hidden[:, :-1].T + hidden[:, -1])
    return between @ kinds[:, :-1].T + kinds[:, -1]


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    return str(crc32(save(dict(tensors))))


def _unusable(path: Path, why: str) -> ModelError:
    hint = "delete this file, and train a new encoder"
    return ModelError(f"encoder {path} {why}", hint=hint)
