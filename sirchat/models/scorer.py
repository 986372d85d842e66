"""A scorer: a linear map from a token's hidden states to the score that the policy `learned` uses.

The score is the logarithm of what `sirchat train scorer` was told to predict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sirchat import paths
from sirchat.errors import ModelError


@dataclass(frozen=True, eq=False)
class Scorer:
    """Predicts a score for each token from the outputs of a few layers; by default NaN."""

    layers: tuple[int, ...] = ()  # ascending, counted from 1; empty for no scorer
    weight: Tensor = field(default_factory=lambda: torch.zeros(0))  # float32 [layers x d]
    bias: float = math.nan
    about: Mapping[str, str] = field(default_factory=dict)  # facts about the training, by name

    def scores(self, states: Tensor) -> list[float]:
        """Compute the scores of m tokens from their hidden states [m, layers x d]."""
        scores: list[float] = self.scores_on_device(states).tolist()
        return scores

    def scores_on_device(self, states: Tensor) -> Tensor:
        """The scores [m], where the hidden states [m, layers x d] are."""
        return states.float() @ self.weight.to(states.device) + self.bias

    def to(self, device: torch.device) -> Self:
        """The same scorer with its weight on `device`."""
        return replace(self, weight=self.weight.to(device))

    def save(self, path: Path) -> None:
        """Write the scorer into a file; raises ModelError if it can't be written."""
        tensors = {"weight": self.weight, "bias": torch.tensor([self.bias])}
        try:
            paths.private_dir(path.parent)
            save_file(tensors, path, {**self.about, "layers": json.dumps(self.layers)})
        except (OSError, SafetensorError) as error:
            raise ModelError(f"scorer {path} can't be written: {error}") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a scorer from a file; raises ModelError if the file is damaged."""
        try:
            with safe_open(path, "pt") as file:
                about = dict(file.metadata() or {})
                layers = tuple(map(int, json.loads(about.pop("layers"))))
                weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
            scorer = cls(layers, weight.float(), float(bias), about)
            if weight.ndim != 1 or not (weight.isfinite().all() and math.isfinite(scorer.bias)):
                raise ValueError
        except (OSError, SafetensorError, ValueError, TypeError, LookupError, RuntimeError):
            raise _unusable(path, "is damaged") from None
        return scorer


def scorer_of(name: str, module: Any) -> Scorer:
    """Load a model's scorer: the user's own, or else the bundled one, or else an empty one.

    Raises ModelError for a file that is damaged or was made for a model of another shape.
    """
    path = next((path for path in paths.scorer_files(name) if path.is_file()), None)
    if path is None:
        return Scorer()
    scorer = Scorer.load(path)
    if not _fits(scorer, module):
        raise _unusable(path, "was trained for another model")
    return scorer


def layer_count(module: Any) -> int:
    """The number of a model's layers; LongCat Flash caches two layers for each."""
    config = module.config.get_text_config(decoder=True)
    return int(getattr(config, "num_layers", config.num_hidden_layers))


@contextmanager
def recorded_states(module: Any, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Context manager: records the hidden states [m, d] after layers (ascending, from 1) of a pass.

    Yields the list to which the states of each layer are added.
    """
    states = list[Tensor]()

    def record(layer: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # [1, m, d]
        states.append(hidden[0])

    with ExitStack() as hooks:
        for number in layers:
            layer = decoder_layers(module)[number - 1]
            hooks.callback(layer.register_forward_hook(record).remove)
        yield states


def side_by_side(states: Sequence[Tensor]) -> Tensor:
    """Join the states of several layers, float32 [m, layers x d]."""
    return torch.cat([layer.to(states[0].device).float() for layer in states], -1)


def decoder_layers(module: Any) -> nn.ModuleList:
    """The model's layers: the first module list whose length is the number of layers."""
    count = layer_count(module)
    return next(
        part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == count
    )


def _fits(scorer: Scorer, module: Any) -> bool:
    layers, size = scorer.layers, module.config.get_text_config(decoder=True).hidden_size
    is_valid = list(layers) == sorted({n for n in layers if 1 <= n <= layer_count(module)})
    return is_valid and len(scorer.weight) == len(layers) * size > 0


def _unusable(path: Path, why: str) -> ModelError:
    return ModelError(f"scorer {path} {why}", hint="delete this file, and train a new scorer")
