"""The KV cache as a `transformers.Cache`, which models of transformers accept without a patch."""

# The only file of this folder that imports transformers, because that takes a second.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from sirchat.memory.cache import BoundedCache, LayerKind, LayerRotation, RowArguments, RowLayer


class HubCache(BoundedCache, Cache):  # type: ignore[misc]  # transformers is untyped
    """A `BoundedCache` for models with any `kinds` of layers; None: keys and values only."""

    def __init__(
        self,
        rotations: list[LayerRotation],
        capacity: int,
        dtype: torch.dtype | None = None,
        kinds: list[LayerKind] | None = None,
        reads_singly: bool = False,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        self._kinds = kinds
        BoundedCache.__init__(self, rotations, capacity, dtype, devices)
        self.reads_singly = reads_singly
        Cache.__init__(self, layers=self.layers)

    def _new_layers(self, rows: Sequence[RowArguments]) -> list[Any]:
        left, layers = iter(rows), list[Any]()
        kinds = [(True, 0)] * len(rows) if self._kinds is None else self._kinds
        for has_rows, states in kinds:
            arguments = next(left) if has_rows else ()
            if states and has_rows:
                layers.append(RowAndStateLayer(states, *arguments))
            elif states:
                layers.append(StateLayer(states))
            else:
                layers.append(HubRowLayer(*arguments) if has_rows else DummyLayer())
        return layers


class HubRowLayer(RowLayer, CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, as a layer of transformers' cache."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    @property
    def is_compileable(self) -> bool:  # whether masks are made from lengths on the device
        return self.cursor.slot is not None

    def get_seq_length(self) -> int | Tensor:
        return self.cursor.length if self.cursor.slot is None else self.cursor.slot

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.cursor.slot is not None:
            return self.cursor.capacity, 0
        return self.cursor.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """A layer with recurrent or convolution states, but without keys and values."""

    def copy_state(self) -> dict[tuple[str, int], Tensor]:
        kinds = {"conv": self.conv_states, "recurrent": self.recurrent_states}
        return {
            (kind, number): tensor.clone()
            for kind, states in kinds.items()
            for number, tensor in states.items()
            if tensor is not None and self.has_previous_state[number]
        }

    def set_state(self, state: dict[tuple[str, int], Tensor]) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, self.number_of_states)
        for (kind, number), tensor in state.items():
            getattr(self, f"{kind}_states")[number] = tensor.clone()
            getattr(self, f"is_{kind}_states_initialized")[number] = True
            self.has_previous_state[number] = True
            if kind == "conv":
                self.conv_kernel_size[number] = tensor.shape[-1]
                self.dtype, self.device = tensor.dtype, tensor.device


class RowAndStateLayer(StateLayer, HubRowLayer):
    """One layer that has keys and values as well as recurrent or convolution states."""

    def __init__(self, states: int, *args: Any) -> None:
        HubRowLayer.__init__(self, *args)
        LinearAttentionCacheLayerMixin.__init__(self, states)


def layer_kinds(config: Any) -> list[LayerKind]:
    """The kind of each layer of a model, as in transformers' own cache for its `config`."""
    return [
        (
            isinstance(layer, CacheLayerMixin),
            layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0,
        )
        for layer in DynamicCache(config=config).layers
    ]
