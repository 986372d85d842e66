"""The attention hook: gives observers the queries, keys and attention weights of every layer.

A hooked model of transformers runs with an attention function that sirchat registers with
transformers' attention interface under a new name. It calls the model's usual attention function,
and passes arguments and result to the observers. No module is patched, and the logits do not
change. A model of `decoder.py` calls `report` itself.
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
from sirchat.memory.retrieval import LayerQueries, unrotated

_NAME = "sirchat_hooked_"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments and the result of one layer's attention in one forward pass over m tokens.

    There are n keys of D numbers, the new ones included, H_q query heads and H key heads.

    Attributes:
        layer: the layer's number, from 0, among those with keys and values.
        queries: [1, H_q, m, D], rotated; they belong to the last m rows of the keys.
        keys: [1, H, n, D], rotated.
        mask: the model's mask, [1, H_q or 1, m, >= n]: boolean, or numbers that are added to the
            scores; None for plain causal attention.
        options: the other arguments, such as `scaling` and `sliding_window`.
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
        """Factor by which the scores are multiplied before the softmax."""
        return float(self.options.get("scaling") or self.queries.shape[-1] ** -0.5)

    def weights(self) -> Tensor:
        """Attention weights [H_q, m, n], float32.

        If the attention function does not return them, they are computed from queries and keys.
        """
        if self.returned is not None and self.returned.ndim == 4:  # some return sums instead
            return self.returned[0].float()
        return attention_weights(self).flatten(0, 1)

    def mean_weights(self) -> Tensor:
        """Attention weights [m, n], float32, averaged over the heads."""
        return self.weights().mean(0)


class OfAllHeads(Protocol):
    """Combines the tensors that several processes compute, each for its own attention heads."""

    @property
    def count(self) -> int:
        """Number of processes."""

    def mean(self, one: Tensor) -> Tensor:
        """The mean over all processes of the tensor `one` that each of them gives."""

    def joined(self, one: Tensor, dim: int) -> Tensor:
        """On rank 0, the tensors of all processes joined along `dim`; elsewhere `one` itself."""


class AttentionObserver(Protocol):
    """Receives queries, keys and attention weights from every layer of a hooked model."""

    def observe(self, call: AttentionCall) -> None:
        """Called once per layer and forward pass; must copy the tensors that it keeps for later."""

    def combine(self, heads: OfAllHeads) -> None:
        """Called after a pass that several processes computed: combine the records of all heads."""


class QueryRecorder:
    """Records the queries that every layer computes, in one or more forward passes."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[Tensor, int]]] = {}  # by layer: queries, first slot
        self._shape: dict[int, tuple[float, int]] = {}  # by layer: scale, number of key heads

    @property
    def is_empty(self) -> bool:
        """Whether no layer was observed yet."""
        return not self._parts

    @property
    def passes(self) -> list[int]:
        """How often each layer was observed; layers are in the order of their numbers."""
        return [len(self._parts[layer]) for layer in sorted(self._parts)]

    def observe(self, call: AttentionCall) -> None:
        start = call.keys.shape[2] - call.queries.shape[2]
        self._parts.setdefault(call.layer, []).append((call.queries[0].clone(), start))
        self._shape[call.layer] = call.scale, call.keys.shape[1]

    def combine(self, heads: OfAllHeads) -> None:
        for layer, parts in self._parts.items():
            scale, own = self._shape[layer]
            self._parts[layer] = [(heads.joined(one, 0), start) for one, start in parts]
            self._shape[layer] = scale, own * heads.count

    def queries(self, rotations: Sequence[LayerRotation]) -> list[LayerQueries]:
        """Each layer's queries, before rotation; the list ends before the first unobserved layer.

        Args:
            rotations: the rotation of each layer with keys and values.
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

    It receives nothing if the model's attention function cannot be replaced. If some layers have no
    keys and values, `numbers` gives the numbers of the other layers, as `layer_numbers` returns
    them.
    """
    install_hook(module)
    token = _OBSERVERS.set((*_OBSERVERS.get(), (observer, numbers or {})))
    try:
        yield
    finally:
        _OBSERVERS.reset(token)


def is_observed() -> bool:
    """Whether any observer now receives the attention of forward passes."""
    return bool(_OBSERVERS.get())


def install_hook(module: Any) -> bool:
    """Make a transformers model use the hooked attention function from now on.

    Returns whether the model's attention function could be replaced. Without observers the hook
    takes no time. A model that reports its attention itself is not changed.
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
    """A function that calls the attention function named `usual`, then reports to observers."""

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
    """Pass a layer's attention to the observers; `call.layer` counts all layers of the model."""
    for observer, numbers in _OBSERVERS.get():
        observer.observe(replace(call, layer=numbers.get(call.layer, call.layer)))


def _function(name: str, module: Any) -> Callable[..., Any]:
    """The attention function called `name`; for `eager`, the one in the model's own source file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name in ALL_ATTENTION_FUNCTIONS:
        found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return found
    own: Callable[..., Any] = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return own


def attention_weights(call: AttentionCall) -> Tensor:
    """The attention weights, softmax(q k^T scale), as the model computes them.

    Returns float32 [H, H_q / H, m, n]; see `AttentionCall`.

    With grouped-query attention, H_q / H neighbouring query heads share one key head.
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
    """The logits [H, group, m, n], set to minus infinity for the rows that the mask hides."""
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
