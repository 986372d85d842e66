"""The decode step of a `Decoder` whose first layers are on the CPU, and the others on a GPU.

The library reads a token through the first layers. A captured step goes on from its state, for
which the token costs one copy to the GPU, and one from it.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sirchat.memory.cache import BoundedCache
from sirchat.models.decoder import Decoder
from sirchat.models.llama_step import LlamaStep
from sirchat.models.native_step import MAX_BATCH, NativeStep


class FirstLayers:
    """Reads tokens through the layers of a split `Decoder` that are on the CPU, by the library.

    `dtype` is that of the cache. The states after `wanted_layers`, counted from 1, are returned.
    Raises ValueError if the library can't compute the layers.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        module: Decoder,
        dtype: torch.dtype,
        wanted_layers: Sequence[int] = (),
    ) -> None:
        self._module, self.count = module, module.model.cpu_layers
        self.device, self._size = module.model.norm.weight.device, module.config.hidden_size
        inner = [number for number in wanted_layers if number <= self.count]
        self._wanted_size = len(inner) * self._size
        self._wanted_after = [number - self.count for number in wanted_layers[len(inner) :]]
        body = module.model
        part = _part(module, slice(self.count), body.rotary_emb, body.embed_tokens, None)
        if not NativeStep.supports(part):
            raise ValueError(f"layers of {module.dtype}")
        self._step = NativeStep(library, part, dtype, sorted({*inner, self.count}))
        # With which the other layers begin, always in the same place
        self.states = torch.zeros(MAX_BATCH, self._size, device=self.device)

    def fits(self, cache: BoundedCache) -> bool:
        """Whether the rows of these layers and of the others are where the steps expect them."""
        return len(cache.buffers) == 2 and all(rows.pool is not None for rows in cache.buffers)

    def read(self, tokens: Sequence[tuple[int, int, BoundedCache]]) -> tuple[Tensor, Tensor]:
        """Read one token (id, position, cache) in each of B conversations.

        Returns the states [B, d] with which the other layers begin, and the wanted ones
        [B, layers x d]; raises ValueError if a cache has no room.
        """
        rows = [(token_id, position, cache.buffers[0]) for token_id, position, cache in tokens]
        states = self._step.read_together(rows)[1]
        return states[:, -self._size :], states[:, : self._wanted_size]

    def other_layers(self) -> Iterator[Callable[[], LlamaStep]]:
        """Yield ways to make the step of the other layers, the fastest first; each may fail."""
        rotary = copy.deepcopy(self._module.model.rotary_emb).to(self.device)
        how = slice(self.count, None), rotary, lambda ids: self.states[: len(ids)]
        part = _part(self._module, *how, self._module.lm_head)
        for kernels in ("triton", "torch"):
            yield partial(LlamaStep, part, kernels, self._wanted_after)


def _part(module: Decoder, layers: slice, rotary: Any, embeddings: Any, head: Any) -> Any:
    """Some layers of a model, with all that a decode step asks of a module."""
    body = module.model
    part = SimpleNamespace(layers=body.layers[layers], norm=body.norm, rotary_emb=rotary)
    return SimpleNamespace(
        config=module.config,
        dtype=module.dtype,
        device=part.layers[0].input_layernorm.weight.device,
        model=part,
        get_input_embeddings=lambda: embeddings,
        get_output_embeddings=lambda: head,
    )
