"""Hear what a model's layers ask: their queries, through transformers' attention interface.

While somebody listens, the model runs with an attention function of ours under a name of its own,
registered with transformers, which hands the queries on and then calls the function that the model
uses otherwise. No module is patched.
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

from sirchat.errors import ModelError
from sirchat.memory.cache import LayerRotation
from sirchat.memory.recall import Heard, unrotated
from sirchat.model import LoadedModel

_NAME = "sirchat_heard_"


class Ear:
    """What was heard so far, layer by layer."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[Tensor, int]]] = {}
        self._of: dict[int, tuple[float, int]] = {}  # factor of the softmax, heads of the keys

    def hear(self, layer: int, queries: Tensor, keys: Tensor, scale: float) -> None:
        """Take note of queries [1, H_q, m, D] at the end of keys [1, H, n + m, D], both rotated."""
        start = keys.shape[2] - queries.shape[2]
        self._parts.setdefault(layer, []).append((queries[0].clone(), start))
        self._of[layer] = scale, keys.shape[1]

    def heard(self, rotations: Sequence[LayerRotation]) -> list[Heard]:
        """What each layer asked, its rotation taken back; fewer entries, if some did not ask."""
        out = []
        for layer, rotation in enumerate(rotations):
            parts = [
                unrotated(queries, torch.arange(start, start + queries.shape[1]), rotation.key)
                for queries, start in self._parts.get(layer, [])
            ]
            if not parts:
                break
            out.append(Heard(torch.cat(parts, dim=1), *self._of[layer]))
        return out


_EAR: ContextVar[Ear] = ContextVar("ear")


@contextmanager
def listening(module: Any) -> Iterator[Ear]:
    """Hear the queries of every forward pass of a transformers model in this block.

    Raises ModelError for a model whose attention can't be chosen.
    """
    usual = module.config._attn_implementation or "eager"
    name = _NAME + usual
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _hearing(usual))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[usual])
    ear = Ear()
    token = _EAR.set(ear)
    try:
        module.set_attn_implementation(name)
        if module.config._attn_implementation != name:
            raise ModelError(
                f"the attention of {module.config.model_type} models can't be listened to",
                hint="another measure, such as mips, does without",
            )
        yield ear
    finally:
        module.set_attn_implementation(usual)
        _EAR.reset(token)


def _hearing(usual: str) -> Callable[..., Any]:
    """The attention function of that name, made audible."""

    def attend(module: Any, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        _EAR.get().hear(int(module.layer_idx), query, key, float(scale))
        return _usual(usual, module)(module, query, key, *args, **options)

    return attend


def _usual(name: str, module: Any) -> Callable[..., Any]:
    """The attention function that the model uses otherwise; `eager` is its own."""
    if name in ALL_ATTENTION_FUNCTIONS:
        found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return found
    own: Callable[..., Any] = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return own


def refuse_unheard(model: LoadedModel) -> None:
    """Raise ModelError for a model whose queries can't be compared with its cached keys."""
    cache = model.new_cache(1)
    with listening(model.module) as ear:
        model.forward([0], cache)
    cache.commit(1)
    heard = ear.heard(model.rotations)
    keys = [cache.layer_keys(layer)[0] for layer in range(len(model.rotations))]
    if len(heard) < len(keys) or not all(map(Heard.fits, heard, keys)):
        raise ModelError(
            f"what {model.name} looks for is not what it caches",
            hint="another measure, such as mips, does without",
        )
