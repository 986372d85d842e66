"""The attention hook: gives observers the queries, keys and attention weights of every layer.

sirchat registers an attention function of its own with transformers' attention interface. This
function calls the model's usual attention function, then passes the arguments and the result to the
observers. A model of transformers uses this function after `install_hook`. No module is patched,
and the logits do not change. A model of `decoder.py` calls `report` itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sirchat.memory.cache_layers import LayerRotation
from sirchat.memory.rope import unrotated

_NAME = "sirchat_hooked_"


@dataclass(frozen=True)
class LayerQueries:
    """The attention queries [H_q, m, D] that one layer computed for m tokens, not rotated.

    `scale` multiplies the product of query and key; `heads` is the number of key heads.
    """

    queries: Tensor
    scale: float
    heads: int

    def match(self, keys: Tensor) -> bool:
        """Whether they can be compared with cached `keys` [H, n, D]."""
        return (self.heads, self.queries.shape[-1]) == (keys.shape[0], keys.shape[-1])


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments and the result of one layer's attention in one forward pass over m tokens.

    There are H_q query heads, H key heads, and n keys of D numbers in each key head. The last m of
    these keys belong to the m tokens.

    Attributes:
        layer: the layer's number, counted from 0 among the layers with keys and values.
        queries: the tokens' queries [1, H_q, m, D], rotated.
        keys: [1, H, n, D], rotated.
        mask: the model's mask, [1, H_q or 1, m, >= n]: boolean, or numbers that are added to the
            scores; None for plain causal attention.
        options: the other arguments of the attention function, such as `scaling` and
            `sliding_window`.
        returned: attention weights [1, H_q, m, n] that the attention function returned; None if it
            returned none.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    mask: Any
    options: dict[str, Any]
    returned: Tensor | None

    @property
    def scale(self) -> float:
        """The factor by which attention multiplies the scores q k^T before the softmax."""
        return float(self.options.get("scaling") or self.queries.shape[-1] ** -0.5)

    def weights(self) -> Tensor:
        """The layer's attention weights, float32 [H_q, m, n]: query heads, tokens, keys.

        If the model's attention function returned no weights, this method computes them from the
        queries and the keys.
        """
        if self.returned is not None and self.returned.ndim == 4:  # some return sums instead
            return self.returned[0].float()
        return attention_weights(self).flatten(0, 1)

    def mean_weights(self) -> Tensor:
        """The layer's attention weights averaged over all heads, float32 [m, n]: tokens, keys."""
        return self.weights().mean(0)


class AttentionObserver(Protocol):
    """Protocol of an object that receives each layer's queries, keys and attention weights."""

    def observe(self, call: AttentionCall) -> None:
        """Receive the attention of one layer in one forward pass.

        An observer that needs a tensor of `call` later must copy the tensor.
        """


class QueryRecorder:
    """An attention observer that records every layer's queries in one or more forward passes."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[Tensor, int]]] = {}  # by layer: queries, first slot
        self._shape: dict[int, tuple[float, int]] = {}  # by layer: scale, number of key heads

    @property
    def is_empty(self) -> bool:
        """Whether this recorder has recorded no layer's queries yet."""
        return not self._parts

    @property
    def passes(self) -> list[int]:
        """The number of recorded passes for each layer of which queries were recorded, in order."""
        return [len(self._parts[layer]) for layer in sorted(self._parts)]

    def observe(self, call: AttentionCall) -> None:
        start = call.keys.shape[2] - call.queries.shape[2]
        self._parts.setdefault(call.layer, []).append((call.queries[0].clone(), start))
        self._shape[call.layer] = call.scale, call.keys.shape[1]

    def queries(self, rotations: Sequence[LayerRotation]) -> list[LayerQueries]:
        """The recorded queries of each layer, with their rotation (RoPE) undone.

        The list ends before the first layer of which no queries were recorded.

        Args:
            rotations: the rotary embedding of each layer with keys and values.
        """
        out = []
        for layer, rotation in enumerate(rotations):
            parts = [
                unrotated(queries, torch.arange(start, start + queries.shape[1]), rotation.key)
                for queries, start in self._parts.get(layer, [])
            ]
            if not parts:
                break
            scale, heads = self._shape[layer]
            out.append(LayerQueries(torch.cat(parts, dim=1), scale=scale, heads=heads))
        return out


_Observing = tuple[AttentionObserver, Mapping[int, int]]  # and the layers' numbers

_OBSERVERS: ContextVar[tuple[_Observing, ...]] = ContextVar("observers", default=())


@contextmanager
def observed_by(
    module: Any, observer: AttentionObserver, numbers: Mapping[int, int] | None = None
) -> Iterator[None]:
    """Context manager: `observer` receives the attention of each forward pass of `module`.

    The observer receives nothing if the model's attention function cannot be replaced. `numbers` is
    needed if some layers have no keys and values. It maps the number of each layer with keys and
    values to the number that the observer gets (see `LoadedModel.layer_numbers`).
    """
    install_hook(module)
    token = _OBSERVERS.set((*_OBSERVERS.get(), (observer, numbers or {})))
    try:
        yield
    finally:
        _OBSERVERS.reset(token)


def is_observed() -> bool:
    """Whether an observer now receives each layer's attention, because `observed_by` is active."""
    return bool(_OBSERVERS.get())


def install_hook(module: Any) -> bool:
    """Make a transformers model report its attention to observers from now on.

    Returns whether the model's attention function could be replaced by one that reports. While
    there are no observers, reporting takes no time. A `Decoder` (sirchat's own kind of model) is
    not changed, because it always reports its attention.
    """
    if getattr(module, "has_own_hook", False):
        return True
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual = module.config._attn_implementation or "eager"
    if usual.startswith(_NAME):
        return True
    name = _NAME + usual
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _hooked(usual))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[usual])
    module.set_attn_implementation(name)
    return bool(module.config._attn_implementation == name)


def _hooked(usual: str) -> Callable[..., Any]:
    """Make an attention function that calls the one named `usual`, then reports to observers."""

    def attend(
        module: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Any,  # some models pass the mask by this name
        **options: Any,
    ) -> Any:
        out = _function(usual, module)(module, queries, keys, values, attention_mask, **options)
        if module.layer_idx is not None:
            layer = int(module.layer_idx)
            report(AttentionCall(layer, queries, keys, attention_mask, options, out[1]))
        return out

    return attend


def report(call: AttentionCall) -> None:
    """Pass one layer's attention to all active observers.

    `call.layer` is the layer's number among all layers of the model. The observers get its number
    among the layers with keys and values.
    """
    for observer, numbers in _OBSERVERS.get():
        observer.observe(replace(call, layer=numbers.get(call.layer, call.layer)))


def _function(name: str, module: Any) -> Callable[..., Any]:
    """Find the attention function of a transformers model by its name.

    For `eager`, this is the function in the source file of the model's own class.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name in ALL_ATTENTION_FUNCTIONS:
        found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return found
    own: Callable[..., Any] = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return own


def attention_weights(call: AttentionCall) -> Tensor:
    """Compute one layer's attention weights, softmax(q k^T scale), as the model does.

    Returns float32 [H, H_q / H, m, n] for m tokens and n keys. With grouped-query attention, each
    of the H key heads is shared by H_q / H neighbouring query heads; H_q is the number of query
    heads.
    """
    _, heads, rows, dims = call.keys.shape
    count = call.queries.shape[2]
    grouped = call.queries.reshape(heads, -1, dims) * call.scale  # [H, group x m, D]
    logits = (grouped @ call.keys[0].mT).float().view(heads, -1, count, rows)
    if cap := call.options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    if call.mask is not None or count > 1 or call.options.get("sliding_window"):
        logits = _masked(logits, call)
    sinks = call.options.get("s_aux")
    if sinks is None:
        return logits.softmax(-1)
    extra = sinks.float().view(heads, -1, 1, 1).expand(-1, -1, count, 1)  # gets weight, has no row
    return torch.cat((logits, extra), dim=-1).softmax(-1)[..., :-1]


def _masked(logits: Tensor, call: AttentionCall) -> Tensor:
    """Apply the attention mask to the scores `logits` [H, group, m, n].

    A boolean mask sets the scores of hidden keys to minus infinity; a mask of numbers is added to
    the scores. If `call` has no mask, attention is causal, and a sliding window hides older keys.
    """
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
