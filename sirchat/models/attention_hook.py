"""Hear what a model's layers ask and look at, through transformers' attention interface.

A model that was listened to runs with an attention function of ours under a name of its own,
registered with transformers: it calls the function that the model uses otherwise, and hands what
went in to whoever listens. No module is patched, and what the model says does not change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sirchat.memory.cache import LayerRotation
from sirchat.memory.recall import LayerQueries, unrotated
from sirchat.models.attention_weights import AttentionCall, AttentionObserver

_NAME = "sirchat_heard_"


class QueryRecorder:
    """Takes note of what each layer asks."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[Tensor, int]]] = {}
        self._of: dict[int, tuple[float, int]] = {}  # factor of the softmax, heads of the keys

    def hear(self, one: AttentionCall) -> None:
        """Note the queries, and where they stand."""
        start = one.keys.shape[2] - one.queries.shape[2]
        self._parts.setdefault(one.layer, []).append((one.queries[0].clone(), start))
        self._of[one.layer] = one.scale, one.keys.shape[1]

    def heard(self, rotations: Sequence[LayerRotation]) -> list[LayerQueries]:
        """What each layer asked, its rotation taken back; fewer entries, if some did not ask."""
        out = []
        for layer, rotation in enumerate(rotations):
            parts = [
                unrotated(queries, torch.arange(start, start + queries.shape[1]), rotation.key)
                for queries, start in self._parts.get(layer, [])
            ]
            if not parts:
                break
            out.append(LayerQueries(torch.cat(parts, dim=1), *self._of[layer]))
        return out


_LISTENERS: ContextVar[tuple[AttentionObserver, ...]] = ContextVar("listeners", default=())


@contextmanager
def observed_by(module: Any, listener: AttentionObserver) -> Iterator[None]:
    """Let `listener` hear every forward pass of a transformers model in this block.

    Nothing is heard of a model whose attention can't be chosen.
    """
    install_hook(module)
    token = _LISTENERS.set((*_LISTENERS.get(), listener))
    try:
        yield
    finally:
        _LISTENERS.reset(token)


def install_hook(module: Any) -> bool:
    """Let the model use a function of ours from now on; without listeners it only passes on.

    Tells whether the model lets its attention be chosen.
    """
    usual = module.config._attn_implementation or "eager"
    if usual.startswith(_NAME):
        return True
    name = _NAME + usual
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _audible(usual))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[usual])
    module.set_attn_implementation(name)
    return bool(module.config._attn_implementation == name)


def _audible(usual: str) -> Callable[..., Any]:
    """The attention function of that name, made audible."""

    def attend(
        module: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Any, **options: Any
    ) -> Any:
        out = _usual(usual, module)(module, queries, keys, values, mask, **options)
        for listener in _LISTENERS.get():
            layer = int(module.layer_idx)
            listener.hear(AttentionCall(layer, queries, keys, mask, options, out[1]))
        return out

    return attend


def _usual(name: str, module: Any) -> Callable[..., Any]:
    """The attention function that the model uses otherwise; `eager` is its own."""
    if name in ALL_ATTENTION_FUNCTIONS:
        found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return found
    own: Callable[..., Any] = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return own
