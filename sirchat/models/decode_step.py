"""Reads single tokens of a Llama-like model on a CPU, in C++ once the library is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sirchat.memory.cache import BoundedCache
from sirchat.models.decoder import Decoder
from sirchat.models.devices import is_spread
from sirchat.models.hidden_states import concat_states, record_states
from sirchat.models.model_config import LLAMA_KINDS, sliding_window
from sirchat.models.native_step import MAX_BATCH, NativeStep, TokenToRead
from sirchat.models.probe import cache_argument


class DecodeStep:
    """Reads single tokens by the library `native` where it is set and fits, or else by the module.

    `supports` must be true for the module. `dtype` is the number type of the cache. The hidden
    states after `wanted_layers`, counted from 1, are returned.
    """

    def __init__(self, module: Any, dtype: torch.dtype, wanted_layers: Sequence[int] = ()) -> None:
        self.module, self.dtype, self.wanted_layers = module, dtype, tuple(wanted_layers)
        self.native: NativeStep | None = None

    @staticmethod
    def supports(module: Any) -> bool:
        """Whether a model is on a CPU and has only layers that `step.cpp` can compute."""
        config = module.config
        is_like_llama = (
            config.model_type in LLAMA_KINDS
            and sliding_window(config) is None
            and getattr(config, "hidden_act", "") == "silu"
        )
        return (
            (isinstance(module, Decoder) or is_like_llama)
            and module.device.type == "cpu"
            and not is_spread(module)
            and module.dtype in (torch.float32, torch.bfloat16)
        )

    @torch.inference_mode()
    def read(self, token_id: int, position: int, cache: BoundedCache) -> tuple[Tensor, Tensor]:
        """Read a token at a rotary position; the caller then commits the cache.

        Returns float32 logits [1, V], and the states [1, layers x d] that the encoder needs.
        """
        if self.native is not None and self.native.fits([token_id], cache):
            return self.native([(token_id, position, cache)])
        cache.begin_pass()
        with record_states(self.module, self.wanted_layers) as states:
            logits = self.module(
                input_ids=torch.tensor([[token_id]]),
                position_ids=torch.tensor([[position]]),
                use_cache=True,
                **cache_argument(self.module, cache),
            ).logits[0]
        return logits.float(), concat_states(states) if states else torch.empty(1, 0)

    def can_read_text(self, ids: Sequence[int], cache: BoundedCache) -> bool:
        """Whether a few ids can be read by the library in one call."""
        return len(ids) <= MAX_BATCH and self.native is not None and self.native.fits(ids, cache)

    @torch.inference_mode()
    def read_text(
        self, ids: Sequence[int], positions: Sequence[int], cache: BoundedCache
    ) -> tuple[Tensor, Tensor]:
        """Read a few ids [m], for which `can_read_text` is true; the caller commits the cache.

        Returns float32 logits [m, V] and the states [m, layers x d] that the encoder needs.
        """
        assert self.native is not None
        return self.native.read_text(ids, positions, cache)

    @torch.inference_mode()
    def read_together(self, tokens: Sequence[TokenToRead]) -> tuple[Tensor, Tensor]:
        """Read one token (id, position, cache) in each of B conversations.

        Returns logits [B, V] and states [B, layers x d]. In C++, the weights are read only once.
        """
        native = self.native
        if native is not None and all(native.fits([id], cache) for id, _, cache in tokens):
            starts = range(0, len(tokens), MAX_BATCH)
            results = [native(tokens[start : start + MAX_BATCH]) for start in starts]
        else:
            results = [self.read(*token) for token in tokens]
        logits, states = zip(*results, strict=True)
        return torch.cat(logits), torch.cat(states)
