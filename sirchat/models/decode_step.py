"""One decode step of a Llama-shaped model with few, small operations.

transformers runs some fifty operations and a dozen module calls a layer, for any shape of input. A
single token needs no mask, no expanded heads and no batch: here the same weights are used with half
of the operations. Sums and norms are float32 throughout, so a model in bfloat16 is rounded less
often than by transformers; in float32 the logits are the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sirchat.memory.cache import BoundedCache
from sirchat.models.packed import Int8Head, PackedLinear
from sirchat.models.probe import sliding_window

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with these layers: norm, rotated attention, norm, gated feed-forward network."""

Product = Callable[[Tensor], Tensor]
"""Weights times a vector [K] of any type: a float32 vector [N]."""


@dataclass(frozen=True, eq=False)
class _Norm:
    """RMSNorm of a vector [d], in float32."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, norm: Any) -> _Norm:
        return cls(norm.weight.detach().float(), norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        mean = torch.dot(x, x).item() / len(x)
        return (x * self.weight).mul_(1 / sqrt(mean + self.epsilon))


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer's weights, ready for vectors."""

    attention_norm: _Norm
    queries_keys_values: Product
    query_norm: Any  # of every head, or None
    key_norm: Any
    output: Product
    network_norm: _Norm
    gate_up: Product
    down: Product
    heads: int  # query heads H_q
    scale: float


class DecodeStep:
    """Reads one token with the weights of a transformers model on a CPU.

    Args:
        module: the model; `supports` says which.
        dtype: type of the cache's keys and values.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._embeddings = module.get_input_embeddings()
        self._rotary = module.model.rotary_emb
        self._size: int = module.model.layers[0].self_attn.head_dim
        self._dtype = dtype
        self._layers = [_layer(one) for one in module.model.layers]
        self._norm = _Norm.of(module.model.norm)
        head = module.get_output_embeddings()
        self._head = head.of_vector if isinstance(head, Int8Head) else _product([head])

    @staticmethod
    def supports(module: Any) -> bool:
        """Whether the model is on a CPU and has the layers computed here, and no others."""
        config = module.config
        return (
            config.model_type in _KINDS
            and sliding_window(config) is None
            and getattr(config, "hidden_act", "") == "silu"
            and module.device.type == "cpu"
            and module.dtype in (torch.float32, torch.bfloat16)
        )

    @torch.inference_mode()
    def logits(self, token_id: int, position: int, cache: BoundedCache) -> Tensor:
        """Float32 logits [1, V] after `token_id`, which is read behind the cache's rows.

        As in a forward pass its keys and values are written, and count after `commit`. `position`
        is the rotary one.
        """
        x = self._embeddings(torch.tensor([token_id]))  # [1, d]
        cos, sin = self._rotary(x, torch.tensor([[position]]))  # [1, 1, D]
        x, cos, sin = x[0].float(), cos[0].float(), _signed(sin[0].float())
        for layer, held in zip(self._layers, cache.layers, strict=True):
            x = x + self._attended(layer, layer.attention_norm(x), held, cos, sin)
            gate, up = layer.gate_up(layer.network_norm(x)).chunk(2)
            x = x + layer.down(F.silu(gate).mul_(up))
        return self._head(self._norm(x))[None]

    def _attended(self, layer: _Layer, h: Tensor, held: Any, cos: Tensor, sin: Tensor) -> Tensor:
        """What attention adds to the state [d], whose norm is `h`; `sin` is `_signed`."""
        size, count = self._size, layer.heads
        rows = layer.queries_keys_values(h).view(-1, size)  # [H_q + 2 H, D]
        heads = (len(rows) - count) // 2  # key heads H
        turning, values = rows[: count + heads], rows[count + heads :]
        if layer.query_norm is not None:
            turning = torch.cat((layer.query_norm(rows[:count]), layer.key_norm(turning[count:])))
        # The two halves of a head, swapped.
        turned = torch.addcmul(turning * cos, turning.roll(size // 2, 1), sin).to(self._dtype)
        new = (turned[count:].view(1, heads, 1, size), values.view(1, heads, 1, size))
        keys, values = held.update(new[0], new[1].to(self._dtype))  # [1, H, n + 1, D]
        # In float16 query heads that share a key head are faster as rows of one query.
        shared = count // heads if self._dtype == torch.float16 else 1
        queries = turned[:count].view(1, -1, shared, size)
        found = F.scaled_dot_product_attention(
            queries, keys, values, scale=layer.scale, enable_gqa=count > heads * shared
        )
        return layer.output(found.flatten())


def _layer(layer: Any) -> _Layer:
    attention, network = layer.self_attn, layer.mlp
    return _Layer(
        attention_norm=_Norm.of(layer.input_layernorm),
        queries_keys_values=_product([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        output=_product([attention.o_proj]),
        network_norm=_Norm.of(layer.post_attention_layernorm),
        gate_up=_product([network.gate_proj, network.up_proj]),
        down=_product([network.down_proj]),
        heads=attention.q_proj.out_features // attention.head_dim,
        scale=attention.scaling,
    )


def _product(layers: Sequence[Any]) -> Product:
    """The products of several layers' weights with the same vector, one after the other."""
    joined = [getattr(one, "joined", None) for one in layers]
    rows = [_of_row(one) for one in (layers if joined[0] is None else joined[0])]
    biases = [one.bias for one in layers if one.bias is not None]
    bias = torch.cat(biases).detach().float() if biases else None
    dtype = layers[0].weight.dtype if isinstance(layers[0], nn.Linear) else torch.bfloat16

    def product(h: Tensor) -> Tensor:
        row = h[None].to(dtype)
        y = rows[0](row) if len(rows) == 1 else torch.cat([one(row) for one in rows], 1)
        wide = y[0].float()
        return wide if bias is None else wide.add_(bias)

    return product


def _of_row(layer: Any) -> Callable[[Tensor], Tensor]:
    """The product of a layer's weights [N, K] with a row [1, K], in the weights' type: [1, N]."""
    if isinstance(layer, PackedLinear):
        return layer.row_product()
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"no linear layer: {type(layer).__name__}")
    weight = layer.weight.detach()
    return lambda row: torch.mv(weight, row[0])[None]  # half the time of `linear` in bfloat16


def _signed(sin: Tensor) -> Tensor:
    """Sines [1, D] for halves that were swapped, without the minus of a rotation."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[:, :half], sin[:, half:]), -1)
