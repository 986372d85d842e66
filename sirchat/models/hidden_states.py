"""A model's layers, and the hidden states after some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class _PassEnded(Exception):
    """Ends a forward pass after the deepest needed layer, when all wanted states are recorded."""


def layer_count(module: Any) -> int:
    """The number of a model's layers; each of LongCat Flash has two attention layers."""
    config = module.config.get_text_config(decoder=True)
    return int(getattr(config, "num_layers", config.num_hidden_layers))


@contextmanager
def record_states(
    module: Any, layers: Sequence[int], *, ends_pass: bool = False
) -> Iterator[list[Tensor]]:
    """Context manager: yields a list that receives the states [m, d] after each of `layers`.

    `layers` ascend, counted from 1. With `ends_pass`, the pass stops after the last of them.
    """
    states = list[Tensor]()

    def record(layer: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # [1, m, d]
        states.append(hidden[0])
        if ends_pass and len(states) == len(layers):
            raise _PassEnded(states)

    try:
        with ExitStack() as hooks:
            for number in layers:
                layer = decoder_layers(module)[number - 1]
                hooks.callback(layer.register_forward_hook(record).remove)
            yield states
    except _PassEnded as ended:  # a pass may be recorded twice
        if ended.args[0] is not states:
            raise


def concat_states(states: Sequence[Tensor]) -> Tensor:
    """Join the states of several layers, float32 [m, layers x d]."""
    return torch.cat([layer.to(states[0].device).float() for layer in states], -1)


def decoder_layers(module: Any) -> nn.ModuleList:
    """The model's layers: its first module list whose length is the number of layers."""
    count = layer_count(module)
    return next(
        part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == count
    )
