"""A decode step for any transformers model, captured because it takes no numbers from the host.

The model's own forward reads one id over a cache that shows all its slots, as transformers'
`StaticCache` does. The model then computes its masks from the length, a tensor on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sirchat.errors import ModelError
from sirchat.memory.cache import BoundedCache
from sirchat.models.devices import is_spread
from sirchat.models.hidden_states import concat_states, record_states
from sirchat.models.llama_step import Kernels, UnusedSlots
from sirchat.models.packing import PackedExperts
from sirchat.models.probe import cache_argument


class HubStep:
    """The body of a captured step for one conversation; it runs the module of a `LoadedModel`.

    Raises ModelError, with the reason, if the model can't be run so.
    """

    description = "the model's own operations"
    pads_batch = observes_attention = False
    max_batch = 1
    kernels: Kernels = "torch"

    def __init__(self, model: Any, wanted_layers: Sequence[int]) -> None:
        if reason := self.reason_against(model):
            raise ModelError(reason)
        self.vocab_size: int = model.vocab_size
        self._module, self._wanted_layers = model.module, wanted_layers
        self._unused = UnusedSlots()

    @staticmethod
    def reason_against(model: Any) -> str:
        """Why a `LoadedModel` can't be decoded by this step, as text; "" if it can."""
        module = model.module
        if model.has_state:
            return "some of its layers keep a state"
        if is_spread(module):
            return "it is spread over several devices"
        if model.anchors is not None:
            return "it compresses its text into anchors"
        if any(isinstance(part, PackedExperts) for part in module.modules()):
            return "its experts are packed"
        if not type(module).__module__.startswith("transformers."):
            return "its code is not that of transformers"
        return ""

    def graph_key(self, caches: Sequence[BoundedCache]) -> Hashable:
        """The key of a graph, by the cache's buffers; clears unused slots, because all are read."""
        (cache,) = caches
        return self._unused.clear(cache)

    @torch.inference_mode()
    def __call__(
        self,
        ids: Tensor,
        lengths: Tensor,
        positions: Tensor,
        pools: Any,
        caches: Any,
        observed_layers: Collection[int] = (),
    ) -> tuple[Tensor, ...]:
        """Read one id; ids, lengths and positions are int64 [1], on the device.

        Its row is written into slot `lengths`. Returns float32 logits [1, V] and the wanted hidden
        states [1, layers x d].
        """
        (cache,) = caches
        cache.cursor.slot = lengths
        try:
            with (
                _batched_experts(self._module),
                record_states(self._module, self._wanted_layers) as states,
            ):
                out = self._module(
                    input_ids=ids[None],
                    position_ids=positions[None],
                    use_cache=True,
                    **cache_argument(self._module, cache),
                )
        finally:
            cache.cursor.slot = None
        logits: Tensor = out.logits[0].float()
        return logits, concat_states(states) if states else logits[:, :0]


@contextmanager
def _batched_experts(module: Any) -> Iterator[None]:
    """Run a token's experts as transformers' `generate` does on a GPU: without waiting for it."""
    usual: dict[str, str | None] = module.get_experts_implementation()
    batched = {part: "batched_mm" if how == "grouped_mm" else how for part, how in usual.items()}
    module.set_experts_implementation(batched)
    try:
        yield
    finally:
        module.set_experts_implementation(usual)
