"""Linear maps from a token's hidden states, after a few layers of a model, to numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sirchat import paths
from sirchat.errors import ModelError


@dataclass(frozen=True, eq=False)
class StateMap:
    """A linear map of the outputs of a few layers, read from a file; by default of no layers."""

    layers: tuple[int, ...] = ()  # ascending, counted from 1; empty for no map
    weight: Tensor = field(default_factory=lambda: torch.zeros(0))  # float32 [layers x d, ...]
    bias: Tensor = field(default_factory=lambda: torch.zeros(0))  # float32 [...]
    about: Mapping[str, str] = field(default_factory=dict)  # facts about the training, by name
    kind: ClassVar[str]  # `scorer` or `encoder`

    def of_states(self, states: Tensor) -> Tensor:
        """The numbers [m, ...] of hidden states [m, layers x d], where these are."""
        return states.float() @ self.weight.to(states.device) + self.bias.to(states.device)

    def to(self, device: torch.device) -> Self:
        """The same map with its weights on `device`."""
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    def save(self, path: Path) -> None:
        """Write the map into a file; raises ModelError if it can't be written."""
        try:
            paths.private_dir(path.parent)
            about = {**self.about, "layers": json.dumps(self.layers)}
            save_file(self._stored(), path, about)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.kind} {path} can't be written: {error}") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a map from a file; raises ModelError if the file is damaged."""
        with suppress(OSError, SafetensorError, ValueError, TypeError, LookupError, RuntimeError):
            with safe_open(path, "pt") as file:
                about = dict(file.metadata() or {})
                layers = tuple(map(int, json.loads(about.pop("layers"))))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            restored = cls._restored(tensors)
            if all(tensor.isfinite().all() for tensor in restored.values()):
                return cls(layers, about=about, **restored)
        raise cls._unusable(path, "is damaged")

    @classmethod
    def of_model(cls, name: str, module: Any) -> Self:
        """A model's map: the user's own, or else the bundled one, or else an empty one.

        Raises ModelError for a file that is damaged or was made for a model of another shape.
        """
        files = paths.state_map_files(cls.kind, name)
        path = next((path for path in files if path.is_file()), None)
        if path is None:
            return cls()
        found, count = cls.load(path), layer_count(module)
        size = module.config.get_text_config(decoder=True).hidden_size
        is_valid = list(found.layers) == sorted({n for n in found.layers if 1 <= n <= count})
        if not (is_valid and len(found.weight) == len(found.layers) * size > 0):
            raise cls._unusable(path, "was trained for another model")
        return found

    def _stored(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "bias": self.bias}

    @classmethod
    def _restored(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weight, bias and others from a file's tensors; an error says that it is damaged."""
        raise NotImplementedError

    @classmethod
    def _unusable(cls, path: Path, why: str) -> ModelError:
        hint = f"delete this file, and train a new {cls.kind}"
        return ModelError(f"{cls.kind} {path} {why}", hint=hint)


class _PassEnded(Exception):
    """Ends a forward pass after the deepest layer that is needed."""


def layer_count(module: Any) -> int:
    """The number of a model's layers; LongCat Flash caches two layers for each."""
    config = module.config.get_text_config(decoder=True)
    return int(getattr(config, "num_layers", config.num_hidden_layers))


@contextmanager
def recorded_states(
    module: Any, layers: Sequence[int], *, ends_pass: bool = False
) -> Iterator[list[Tensor]]:
    """Context manager: records the hidden states [m, d] after layers (ascending, from 1) of a pass.

    Yields the list to which the states of each layer are added. With `ends_pass`, the block ends
    after the last of the layers.
    """
    states = list[Tensor]()

    def record(layer: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # [1, m, d]
        states.append(hidden[0])
        if ends_pass and len(states) == len(layers):
            raise _PassEnded

    with ExitStack() as hooks, suppress(_PassEnded):
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
