"""A decode step (a forward pass for one token) of a `Decoder` or a model like Llama, in few steps.

transformers runs about fifty operations and a dozen module calls per layer. A single token needs no
mask, no expanded heads and no batch, so half of them are enough, with the model's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sirchat.memory.cache import BoundedCache
from sirchat.models.decoder import Decoder, gated, signed
from sirchat.models.devices import is_spread
from sirchat.models.model_config import LLAMA_KINDS, sliding_window
from sirchat.models.native_step import MOST, NativeStep, Read
from sirchat.models.packed import Int8Head, PackedLinear

_FEW = 8  # most rows that the kernels of packed weights multiply at a time

# Adds one token's key and value, [1, H, 1, D] each, to what a layer (by number) has cached; returns
# all n + 1 keys and values of the layer, [1, H, n + 1, D] each.
Update = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class DecodeStep:
    """Reads single tokens with the weights of a Llama-like model on a CPU, faster than the model.

    `supports` must be true for the module. `dtype` is the cache's number type; `wanted` are the
    layers, counted from 1, whose hidden states are returned; `native` is used once it is set.
    """

    def __init__(self, module: Any, dtype: torch.dtype, wanted: Sequence[int] = ()) -> None:
        self._embeddings = module.get_input_embeddings()
        self._rotary = module.model.rotary_emb
        self.graph = StepGraph(module, dtype, wanted).eval()
        self.native: NativeStep | None = None

    @staticmethod
    def supports(module: Any) -> bool:
        """Whether a model is on a CPU and has only layers that `DecodeStep` can compute."""
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
        """Read a token at a rotary position into the cache, which then must be committed.

        Returns float32 logits [1, V], and the states [1, layers x d] that an encoder needs.
        """
        if self.native is not None and self.native.fits(token_id, cache):
            return self.native([(token_id, position, cache)])
        x = self._embeddings(torch.tensor([token_id]))  # [1, d]
        cos, sin = self._rotary(x, torch.tensor([[position]]))  # [kinds, 1, D]
        cos, sin = cos.float(), signed(sin.float())
        logits, states = self.graph(x[0].float(), cos, sin, _writer_of(cache))
        return logits[None], states[None]

    @torch.inference_mode()
    def read_together(self, tokens: Sequence[Read]) -> tuple[Tensor, Tensor]:
        """Read one token (id, position, cache) in each of B conversations, the weights only once.

        Returns logits [B, V] and states [B, layers x d]; by torch's operations they differ from
        those of `read` by rounding if the weights are not packed.
        """
        native = self.native
        if native is not None and all(native.fits(one, cache) for one, _, cache in tokens):
            parts = [native(tokens[at : at + MOST]) for at in range(0, len(tokens), MOST)]
            logits, states = zip(*parts, strict=True)
            return torch.cat(logits), torch.cat(states)
        ids, positions, caches = zip(*tokens, strict=True)
        x = self._embeddings(torch.tensor(ids))  # [B, d]
        turns = self._rotary(x, torch.tensor([positions]))  # each [kinds, B, D]
        cos, sin = (turn[:, :, None].float() for turn in turns)
        updates = [_writer_of(cache) for cache in caches]
        return self.graph.forward_batch(x.float(), cos, signed(sin), updates)


class StepGraph(nn.Module):
    """The whole decode step by torch's operations, from a token's embedding to its logits.

    It also returns the states after the layers in `wanted`, counted from 1.
    """

    def __init__(self, module: Any, dtype: torch.dtype, wanted: Sequence[int] = ()) -> None:
        super().__init__()
        self.wanted = tuple(wanted)
        self.layers = nn.ModuleList(_StepLayer(layer, dtype) for layer in module.model.layers)
        self.norm = _StepNorm(module.model.norm)
        head = module.get_output_embeddings()
        self.head = head if isinstance(head, Int8Head) else _Product([head])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, update: Update) -> tuple[Tensor, Tensor]:
        """Compute float32 logits [V] and states [layers x d] from an embedding, float32 [d].

        cos and sin are [kinds, 1, D] each; `signed` has made the sines.
        """
        states = [x[:0]]
        for number, layer in enumerate(self.layers):
            x = layer(number, x, cos, sin, update)
            if number + 1 in self.wanted:
                states.append(x)
        h, head = self.norm(x), self.head
        logits: Tensor = head.logits_of_state(h) if isinstance(head, Int8Head) else head(h)
        return logits, torch.cat(states)

    def forward_batch(
        self, x: Tensor, cos: Tensor, sin: Tensor, updates: Sequence[Update]
    ) -> tuple[Tensor, Tensor]:
        """Do what `forward` does for B conversations, one token each.

        x is [B, d], cos and sin are [kinds, B, 1, D]; `updates` has a function for each one.
        """
        states = [x[:, :0]]
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, _StepLayer)
            x = layer.forward_batch(number, x, cos, sin, updates)
            if number + 1 in self.wanted:
                states.append(x)
        h, head = self.norm.forward_batch(x), self.head
        if not isinstance(head, Int8Head):
            return head.forward_batch(h), torch.cat(states, 1)
        logits = [head.logits_of_states(rows) for rows in torch.split(h, _FEW)]
        return torch.cat(logits), torch.cat(states, 1)


class _StepLayer(nn.Module):
    """One layer, for one token or for one token in each of B conversations.

    Unlike `decoder.py`, it keeps sums and norms in float32, and joins the products of one input.
    """

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        attention, network = layer.self_attn, layer.mlp
        self.attention_norm = _StepNorm(layer.input_layernorm)
        self.queries_keys_values = _Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = _Product([attention.o_proj])
        self.has_more_norms = getattr(layer, "has_more_norms", False)
        self.network_norm = _StepNorm(layer.post_attention_layernorm)
        if self.has_more_norms:
            self.added_norm = self.network_norm  # of what attention adds
            self.network_norm = _StepNorm(layer.pre_feedforward_layernorm)
            self.last_norm = _StepNorm(layer.post_feedforward_layernorm)
        self.gate_up = _Product([network.gate_proj, network.up_proj])
        self.down = _Product([network.down_proj])
        self.size: int = attention.head_dim  # D
        self.heads = attention.q_proj.out_features // self.size  # query heads H_q
        self.scale: float = attention.scaling
        self.has_gelu: bool = getattr(network, "has_gelu", False)
        self.turn: int = getattr(attention, "turn", 0)
        self.window: int | None = getattr(attention, "window", None)
        self.dtype = dtype
        # In 16 bits, query heads that share a key head are faster as rows of one query: bfloat16
        # takes a fifth of the time, float16 half.
        keys = attention.k_proj.out_features // self.size
        self.shared = self.heads // keys if dtype.itemsize == 2 else 1
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        scales = [
            _StepNorm(norm).weight.expand(count, -1)
            for norm, count in zip(norms, (self.heads, keys), strict=True)
            if norm is not None
        ]
        # Of each query and key head, [H_q + H, D], as Qwen 3 and Gemma 3 have them.
        self.head_scales = nn.Buffer(torch.cat(scales)) if scales else None
        self.epsilon: float = getattr(norms[0], "variance_epsilon", 0.0)

    def forward(self, number: int, x: Tensor, cos: Tensor, sin: Tensor, update: Update) -> Tensor:
        """Compute the token's state [d] after layer `number` from the state x before it."""
        turn = cos[self.turn], sin[self.turn]
        added: Tensor = self._attended(number, self.attention_norm(x), *turn, update)
        x = x + (self.added_norm(added) if self.has_more_norms else added)
        gate, up = self.gate_up(self.network_norm(x)).chunk(2)
        added = self.down(gated(gate, up, has_gelu=self.has_gelu))
        added = self.last_norm(added) if self.has_more_norms else added
        return x + added

    def forward_batch(
        self, number: int, x: Tensor, cos: Tensor, sin: Tensor, updates: Sequence[Update]
    ) -> Tensor:
        """Do what `forward` does for B conversations, x [B, d]; attention takes them in turn."""
        products = self.queries_keys_values.forward_batch(self.attention_norm.forward_batch(x))
        turn = cos[self.turn], sin[self.turn]
        turned, values = self._turned(products.view(len(x), -1, self.size), *turn)
        turned, values = turned.to(self.dtype), values.to(self.dtype)
        queries = turned[:, : self.heads].view(len(x), -1, self.shared, self.size)
        new = turned[:, self.heads :, None], values[:, :, None]  # each [B, H, 1, D]
        each = [torch.split(tensor, 1) for tensor in (queries, *new)]
        attended = []
        for update, query, key, value in zip(updates, *each, strict=True):
            attended.append(self._attention(query, *map(self._near, update(number, key, value))))
        added = self.output.forward_batch(torch.cat(attended).flatten(1))
        x = x + (self.added_norm.forward_batch(added) if self.has_more_norms else added)
        gate, up = self.gate_up.forward_batch(self.network_norm.forward_batch(x)).chunk(2, 1)
        added = self.down.forward_batch(gated(gate, up, has_gelu=self.has_gelu))
        return x + (self.last_norm.forward_batch(added) if self.has_more_norms else added)

    def _attended(self, number: int, h: Tensor, cos: Tensor, sin: Tensor, update: Update) -> Tensor:
        """Compute what attention adds to the state [d], from the normalized state h [d]."""
        size, count = self.size, self.heads
        turned, values = self._turned(self.queries_keys_values(h).view(-1, size), cos, sin)
        heads = len(values)  # key heads H
        new = turned[count:].view(1, heads, 1, size), values.view(1, heads, 1, size)
        rows = update(number, new[0].to(self.dtype), new[1].to(self.dtype))
        keys, values = map(self._near, rows)
        queries = turned[:count]
        queries = queries.view(1, -1, self.shared, size).to(self.dtype)
        attended = self._attention(queries, keys, values)
        added: Tensor = self.output(attended.flatten())
        return added

    def _turned(self, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Split heads [..., H_q + 2 H, D]; returns queries and keys, rotated (RoPE), and values."""
        end = (rows.shape[-2] + self.heads) // 2  # of the key heads
        turning, values = torch.split(rows, [end, rows.shape[-2] - end], -2)
        if self.head_scales is not None:
            turning = F.rms_norm(turning, (self.size,), None, self.epsilon) * self.head_scales
        # `roll` swaps the two halves of a head; `signed` says why `sin` is right for this.
        return torch.addcmul(turning * cos, turning.roll(self.size // 2, -1), sin), values

    def _near(self, rows: Tensor) -> Tensor:
        """Those of a layer's rows [1, H, n, D] that its window has."""
        if self.window is None:
            return rows
        return rows[:, :, -self.window :]

    def _attention(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        is_grouped = self.heads > keys.shape[1] * self.shared
        return F.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, enable_gqa=is_grouped
        )


class _StepNorm(nn.Module):
    """RMSNorm of one vector [d], computed in float32."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = nn.Buffer(norm.weight.detach().float() + getattr(norm, "added", 0.0))
        self.epsilon: float = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.dot(x, x).item() / len(x)  # half the time of `rms_norm`
        return (x * self.weight).mul_(1 / sqrt(mean + self.epsilon))

    def forward_batch(self, x: Tensor) -> Tensor:
        """Normalize each vector in x [B, d], with exactly the result that each has alone."""
        return torch.stack([self(row) for row in x])


class _Product(nn.Module):
    """Multiplies a vector [K] with the weights of several layers: all outputs, float32 [N]."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        joined = getattr(layers[0], "joined", None)
        parts = list(layers if joined is None else joined)
        for part in parts:
            if not isinstance(part, nn.Linear | PackedLinear):
                raise TypeError(f"{type(part).__name__} is not a linear layer")
        self.parts = nn.ModuleList(parts)
        self.rows = sum(part.out_features for part in parts)  # N
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = nn.Buffer(torch.cat(biases).detach().float()) if biases else None
        is_plain = isinstance(layers[0], nn.Linear)
        self.dtype = layers[0].weight.dtype if is_plain else torch.float32

    def forward(self, h: Tensor) -> Tensor:
        row, rows = h[None].to(self.dtype), list[Tensor]()
        part: Any
        for part in self.parts:
            if isinstance(part, PackedLinear):
                rows.append(part.multiply_few(row))
            else:  # half the time of `linear` in bfloat16
                rows.append(torch.mv(part.weight, row[0])[None])
        y = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        wide = y[0].float()
        return wide if self.bias is None else wide.add_(self.bias)

    def forward_batch(self, h: Tensor) -> Tensor:
        """Multiply each vector in h [B, K]; returns float32 [B, N]."""
        rows = h.to(self.dtype)
        y = torch.cat([_multiply_batch(part, rows) for part in self.parts], 1).float()
        return y if self.bias is None else y.add_(self.bias)


def _multiply_batch(layer: Any, rows: Tensor) -> Tensor:  # [B, K] -> [B, N]
    if not isinstance(layer, PackedLinear):
        return F.linear(rows, layer.weight)
    # unpacking the weights would take more memory, and as much time
    few = torch.split(rows, max(_FEW, layer.own_rows))
    return (
        layer.multiply_few(rows)
        if len(few) == 1
        else torch.cat([layer.multiply_few(part) for part in few])
    )


def _writer_of(cache: BoundedCache) -> Update:
    layers = cache.layers
    return lambda number, key, value: layers[number].update(key, value)
