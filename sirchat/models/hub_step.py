"""A decode step of any model of transformers that needs no number of the host, so it is captured.

The model's own forward reads one id over a cache that shows it all slots. As over a `StaticCache`
of transformers, it then makes its masks from the length, which is a tensor on the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sirchat.memory.cache import BoundedCache
from sirchat.models.devices import is_spread
from sirchat.models.packing import PackedExperts
from sirchat.models.probe import cache_argument
from sirchat.models.scorer import recorded_states, side_by_side

_CHECKED = 5  # ids that the check reads
_SLOTS = 8  # of its caches: more, so that some are not in use
_TOLERANCE = 1e-3, 2e-2  # of its logits, in float32 and in 16 bits


class HubStep:
    """The body of a captured step, for one conversation: runs `module` for one token."""

    def __init__(self, module: Any, scored_layers: Sequence[int]) -> None:
        self._module, self._scored_layers = module, scored_layers
        self._cleared = WeakKeyDictionary[BoundedCache, Hashable]()

    @staticmethod
    def supports(model: Any) -> str:
        """Check that a `LoadedModel` can decode so; returns "", or in a few words why not."""
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
        is_exact = model.dtype == model.cache_dtype == torch.float32
        try:
            error = _largest_error(HubStep(module, model.scorer.layers), model)
        except Exception as raised:  # whatever a model's code raises, no chat must end
            first = next(iter(str(raised).splitlines()), "")
            return f"its forward fails over all slots ({type(raised).__name__}: {first})"
        return "" if error < _TOLERANCE[not is_exact] else f"its logits differ by {error:.1g}"

    def key(self, caches: Sequence[BoundedCache]) -> Hashable:
        """The addresses and shapes of the buffers; a captured graph stays right for these.

        In new buffers, it sets the slots that are not in use to zero.
        """
        (cache,) = caches
        buffers = [
            tensor.buffer
            for layer in cache.row_layers
            for tensor in layer.tensors
            if tensor.buffer is not None
        ]
        key = tuple((buffer.data_ptr(), buffer.shape) for buffer in buffers)
        if self._cleared.get(cache) != key:
            # Attention gives them weight 0, which would make NaN of what the memory may contain.
            with torch.inference_mode():
                for buffer in buffers:
                    buffer[:, :, :, cache.length :] = 0
            self._cleared[cache] = key
        return key

    @torch.inference_mode()
    def __call__(
        self, ids: Tensor, lengths: Tensor, positions: Tensor, caches: Sequence[BoundedCache]
    ) -> tuple[Tensor, Tensor]:
        """Read one id; ids, lengths and positions are int64 [1], on the device.

        Writes its row into slot `lengths`; returns float32 logits [1, V] and the hidden states
        [1, layers x d] after the scored layers.
        """
        (cache,) = caches
        cache.cursor.slot = lengths
        try:
            with (
                _batched_experts(self._module),
                recorded_states(self._module, self._scored_layers) as states,
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
        return logits, side_by_side(states) if states else logits[:, :0]


@contextmanager
def _batched_experts(module: Any) -> Iterator[None]:
    """Multiply with a token's experts as transformers' `generate` does on a GPU, without a wait."""
    usual: dict[str, str | None] = module.get_experts_implementation()
    batched = {part: "batched_mm" if how == "grouped_mm" else how for part, how in usual.items()}
    module.set_experts_implementation(batched)
    try:
        yield
    finally:
        module.set_experts_implementation(usual)


def _largest_error(step: HubStep, model: Any) -> float:
    """Read a few ids with and without the step; returns the largest relative error of logits."""
    ids = [(7 * at + 5) % model.vocab_size for at in range(_CHECKED)]
    ours, usual = (model.new_cache(_SLOTS) for _ in range(2))
    errors = list[Tensor]()
    for at, one in enumerate(ids):
        expected = model.forward([one], usual)[0]
        if at:
            step.key([ours])
            read, slot = (torch.tensor([number], device=model.device) for number in (one, at))
            logits, _ = step(read, slot, slot, [ours])
            errors.append((logits[0] - expected).norm() / expected.norm())
        else:
            model.forward([one], ours)  # makes the buffers
        for cache in (ours, usual):
            cache.commit(1)
    return float(torch.stack(errors).max())
