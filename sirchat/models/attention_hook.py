"""The attention hook: it gives observers the queries, keys and attention weights of every layer.

A function registered with transformers' attention interface calls the usual function, then reports.
No module is patched; logits do not change. A `Decoder` calls `report_attention` itself.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.attention import PassAttention

_PREFIX = "sirchat_hooked_"  # before the name of the original attention function

# Who receives each layer's attention now.
OBSERVERS: ContextVar[tuple[_NumberedObserver, ...]] = ContextVar("observers", default=())


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One layer's attention in a pass over m tokens, to which the last m of the n keys belong."""

    layer: int  # counted from 0 among the layers with keys and values
    queries: Tensor  # [1, H_q, m, D], rotated
    keys: Tensor  # [1, H, n, D], rotated
    # [1, H_q or 1, m, >= n], boolean, or added to the scores; None for plain causal attention
    mask: Any
    options: dict[str, Any]  # the function's other arguments: `scaling`, `sliding_window`, ...
    returned: Tensor | None  # attention weights [1, H_q, m, n], if the function returned any

    @property
    def scale(self) -> float:
        return float(self.options.get("scaling") or self.queries.shape[-1] ** -0.5)

    def weights(self) -> Tensor:
        """The attention weights, float32 [H_q, m, n]; computed if the model returned none."""
        if self.returned is not None and self.returned.ndim == 4:  # some return sums instead
            return self.returned[0].float()
        return attention_weights(self).flatten(0, 1)


class AttentionObserver(Protocol):
    def observe(self, call: AttentionCall) -> None:
        """Receive the attention of one layer in one pass; copy a tensor that is needed later."""


class PassWeights:
    """Records the attention weights of one forward pass, as a mean over heads and `layers`."""

    def __init__(self, layers: Collection[int]) -> None:
        self.layers = frozenset(layers)
        self._sum: Tensor | None = None

    def observe(self, call: AttentionCall) -> None:
        if call.layer in self.layers:
            self.add(call.weights().mean(0))

    def add(self, weights: Tensor) -> None:
        self._sum = weights if self._sum is None else self._sum + weights.to(self._sum.device)

    def mean(self) -> NDArray[np.float32] | None:
        """The mean weights [m, n] of m queries on n cache slots; None if the model showed none."""
        if self._sum is None:
            return None
        weights: NDArray[np.float32] = (self._sum / len(self.layers)).cpu().numpy()
        return weights

    def record(self, length: int, window: int) -> PassAttention | None:
        """The weights on the first `length` cache slots; None if the model showed none."""
        mean = self.mean()
        return None if mean is None else PassAttention.from_weights(mean[:, :length], window)


class CallCounter:
    def __init__(self) -> None:
        self.calls = Counter[int]()

    def observe(self, call: AttentionCall) -> None:
        self.calls[call.layer] += 1


@contextmanager
def observed_by(
    module: Any, observer: AttentionObserver, layer_indices: Mapping[int, int] | None = None
) -> Iterator[None]:
    """Context manager: `observer` receives the attention of each forward pass of `module`.

    `layer_indices` (`LoadedModel.row_layer_indices`): the index that an observer gets for a layer.
    """
    install_hook(module)
    token = OBSERVERS.set((*OBSERVERS.get(), (observer, layer_indices or {})))
    try:
        yield
    finally:
        OBSERVERS.reset(token)


def install_hook(module: Any) -> bool:
    """Make a transformers model report its attention from now on; returns False if it can't."""
    if getattr(module, "reports_attention", False):
        return True
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = module.config._attn_implementation or "eager"
    if original.startswith(_PREFIX):
        return True
    name = _PREFIX + original
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _hooked(original))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    module.set_attn_implementation(name)
    return bool(module.config._attn_implementation == name)


def report_attention(call: AttentionCall) -> None:
    """Pass one layer's attention to all observers, with the layer's index that each expects."""
    for observer, layer_indices in OBSERVERS.get():
        observer.observe(replace(call, layer=layer_indices.get(call.layer, call.layer)))


def attention_weights(call: AttentionCall) -> Tensor:
    """Compute softmax(q k^T scale) as the model does, float32 [H, H_q / H, m, n]."""
    _, heads, rows, dims = call.keys.shape
    count = call.queries.shape[2]
    grouped = call.queries.reshape(heads, -1, dims) * call.scale  # [H, group x m, D]
    logits = (grouped @ call.keys[0].mT).float().view(heads, -1, count, rows)
    if cap := call.options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    if call.mask is not None or count > 1 or call.options.get("sliding_window"):
        logits = _apply_mask(logits, call)
    sinks = call.options.get("s_aux")
    if sinks is None:
        return logits.softmax(-1)
    extra = sinks.float().view(heads, -1, 1, 1).expand(-1, -1, count, 1)  # gets weight, has no row
    return torch.cat((logits, extra), dim=-1).softmax(-1)[..., :-1]


_NumberedObserver = tuple[AttentionObserver, Mapping[int, int]]  # and its `layer_indices`


def _hooked(original: str) -> Callable[..., Any]:
    def attend(
        module: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Any,  # some models pass the mask by this name
        **options: Any,
    ) -> Any:
        out = _attention_function(original, module)(
            module, queries, keys, values, attention_mask, **options
        )
        # Without a number it attends to other things than tokens, such as to layers.
        if (layer := getattr(module, "layer_idx", None)) is not None:
            call = AttentionCall(int(layer), queries, keys, attention_mask, options, out[1])
            report_attention(call)
        return out

    return attend


def _attention_function(name: str, module: Any) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name in ALL_ATTENTION_FUNCTIONS:
        return cast(Callable[..., Any], ALL_ATTENTION_FUNCTIONS[name])
    # `eager` is a function in the source file of the model's own class.
    function = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return cast(Callable[..., Any], function)


def _apply_mask(logits: Tensor, call: AttentionCall) -> Tensor:
    # Scores are [H, group, m, n]. Without a mask, attention is causal, within the window.
    heads, group, count, rows = logits.shape
    if isinstance(call.mask, Tensor):
        mask = call.mask[0, :, -count:, :rows]  # [H_q or 1, m, n]
        mask = mask.reshape(heads, group, count, rows) if len(mask) > 1 else mask[None]
        if mask.dtype == torch.bool:
            return logits.masked_fill(~mask, -torch.inf)
        return logits + mask.float()
    visible = torch.ones(count, rows, dtype=torch.bool, device=logits.device).tril(rows - count)
    if window := call.options.get("sliding_window"):
        visible = visible.triu(rows - count - window + 1)
    return logits.masked_fill(~visible, -torch.inf)
