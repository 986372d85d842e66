"""A decode step (a forward pass for one token) of a Llama-like model, in few, small operations.

transformers runs about fifty operations and a dozen module calls per layer, for any input shape. A
single token needs no mask, no expanded heads and no batch. So this module uses the model's own
weights with half of the operations. Sums and norms are float32 throughout: a model in bfloat16 is
rounded less often than by transformers, and for a model in float32 the logits differ only by
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sirchat.memory.cache import BoundedCache
from sirchat.models.compiled_step import CompiledStep
from sirchat.models.decoder import signed
from sirchat.models.devices import is_spread
from sirchat.models.model_config import sliding_window
from sirchat.models.packed import Int8Head, PackedLinear

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models whose layers are: norm, attention with RoPE, norm, gated feed-forward network."""

_FEW = 8  # most rows that the kernels of packed weights multiply at a time

Update = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function that adds one token's key and value to those that one layer has cached.

The arguments are the layer's number, the key and the value, [1, H, 1, D] each. The function returns
all n + 1 keys and values of the layer, [1, H, n + 1, D] each.
"""


class _Norm(nn.Module):
    """RMSNorm of one vector [d], computed in float32."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = nn.Buffer(norm.weight.detach().float())
        self.epsilon: float = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return F.rms_norm(x, (len(x),), self.weight, self.epsilon)
        mean = torch.dot(x, x).item() / len(x)  # half the time of `rms_norm`
        return (x * self.weight).mul_(1 / sqrt(mean + self.epsilon))

    def of_rows(self, x: Tensor) -> Tensor:
        """Normalize each vector in x [B, d], with exactly the result that each has alone."""
        return torch.stack([self(row) for row in x])

    def extra_repr(self) -> str:
        return f"epsilon={self.epsilon}"


class _Product(nn.Module):
    """Multiplies one vector with the weights of several layers, and joins the products.

    `forward` takes a vector [K] of any number type. It returns a float32 vector [N], where N is the
    number of outputs of all these layers.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        joined = [getattr(one, "joined", None) for one in layers]
        parts = list(layers if joined[0] is None else joined[0])
        odd = next((one for one in parts if not isinstance(one, nn.Linear | PackedLinear)), None)
        if odd is not None:
            raise TypeError(f"{type(odd).__name__} is not a linear layer")
        self.parts = nn.ModuleList(parts)
        self.rows = sum(part.out_features for part in parts)  # N
        biases = [one.bias for one in layers if one.bias is not None]
        self.bias = nn.Buffer(torch.cat(biases).detach().float()) if biases else None
        is_plain = isinstance(layers[0], nn.Linear)
        self.dtype = layers[0].weight.dtype if is_plain else torch.bfloat16

    def forward(self, h: Tensor) -> Tensor:
        row = h[None].to(self.dtype)
        rows = [_of_row(part, row) for part in self.parts]
        y = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        wide = y[0].float()
        return wide if self.bias is None else wide.add_(self.bias)

    def of_rows(self, h: Tensor) -> Tensor:
        """Multiply each vector in h [B, K] with the weights; returns float32 [B, N]."""
        rows = h.to(self.dtype)
        y = torch.cat([_of_rows(part, rows) for part in self.parts], 1).float()
        return y if self.bias is None else y.add_(self.bias)

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}"


def _of_row(layer: Any, row: Tensor) -> Tensor:
    """Multiply a row [1, K] with a layer's weights [N, K] of the same type; returns [1, N]."""
    if isinstance(layer, PackedLinear):
        return layer.of_row(row)
    return torch.mv(layer.weight, row[0])[None]  # half the time of `linear` in bfloat16


def _of_rows(layer: Any, rows: Tensor) -> Tensor:
    """Multiply rows [B, K] with a layer's weights [N, K] of the same type; returns [B, N]."""
    if not isinstance(layer, PackedLinear):
        return F.linear(rows, layer.weight)
    few = torch.split(rows, _FEW)  # unpacking the weights would take more memory, and as much time
    return layer.of_row(rows) if len(few) == 1 else torch.cat([layer.of_row(one) for one in few])


class _Layer(nn.Module):
    """One layer of a Llama-like model, computed for a single token."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        attention, network = layer.self_attn, layer.mlp
        self.attention_norm = _Norm(layer.input_layernorm)
        self.queries_keys_values = _Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.query_norm = getattr(attention, "q_norm", None)  # applied to every head
        self.key_norm = getattr(attention, "k_norm", None)
        self.output = _Product([attention.o_proj])
        self.network_norm = _Norm(layer.post_attention_layernorm)
        self.gate_up = _Product([network.gate_proj, network.up_proj])
        self.down = _Product([network.down_proj])
        self.size: int = attention.head_dim  # D
        self.heads = attention.q_proj.out_features // self.size  # query heads H_q
        self.scale: float = attention.scaling
        self.dtype = dtype
        # In 16 bits, query heads that share a key head are faster as rows of one query: bfloat16
        # takes a fifth of the time, float16 half.
        keys = attention.k_proj.out_features // self.size
        self.shared = self.heads // keys if dtype.itemsize == 2 else 1

    def forward(self, at: int, x: Tensor, cos: Tensor, sin: Tensor, update: Update) -> Tensor:
        """Compute the token's hidden state [d] after this layer from the state `x` before it.

        `at` is the layer's number; `update` adds the token's key and value to the cache.
        """
        x = x + self._attended(at, self.attention_norm(x), cos, sin, update)
        gate, up = self.gate_up(self.network_norm(x)).chunk(2)
        added: Tensor = self.down(F.silu(gate).mul_(up))
        return x + added

    def _attended(self, at: int, h: Tensor, cos: Tensor, sin: Tensor, update: Update) -> Tensor:
        """Compute the output [d] of this layer's attention, which is added to the hidden state.

        `h` [d] is the normalized hidden state. `update` adds the token's key and value to the
        cache.
        """
        size, count = self.size, self.heads
        rows = self.queries_keys_values(h).view(-1, size)  # [H_q + 2 H, D]
        heads = (len(rows) - count) // 2  # key heads H
        turning, values = rows[: count + heads], rows[count + heads :]
        if self.query_norm is not None and self.key_norm is not None:
            turning = torch.cat((self.query_norm(rows[:count]), self.key_norm(turning[count:])))
        # `roll` swaps the two halves of a head; `signed` says why `sin` is right for this.
        turned = torch.addcmul(turning * cos, turning.roll(size // 2, 1), sin)
        new = turned[count:].view(1, heads, 1, size), values.view(1, heads, 1, size)
        keys, values = update(at, *(one.to(self.dtype) for one in new))  # [1, H, n + 1, D]
        if torch.compiler.is_exporting():
            found = _attention(turned[:count].view(heads, -1, size), keys[0], values[0], self.scale)
        else:
            found = F.scaled_dot_product_attention(
                turned[:count].view(1, -1, self.shared, size).to(self.dtype),
                keys,
                values,
                scale=self.scale,
                enable_gqa=count > heads * self.shared,
            )
        added: Tensor = self.output(found.flatten())
        return added

    def of_rows(
        self, at: int, x: Tensor, cos: Tensor, sin: Tensor, updates: Sequence[Update]
    ) -> Tensor:
        """Compute this layer for one token in each of B conversations; returns the states [B, d].

        x [B, d] are the tokens' hidden states before the layer. Each conversation has its own
        `update`, and attention reads the conversations' caches one after the other. Everything else
        is computed for all conversations together.
        """
        size, count = self.size, self.heads
        products = self.queries_keys_values.of_rows(self.attention_norm.of_rows(x))
        rows = products.view(len(x), -1, size)  # [B, H_q + 2 H, D]
        end = (rows.shape[1] + count) // 2  # of the key heads
        turning, values = rows[:, :end], rows[:, end:].to(self.dtype)
        if self.query_norm is not None and self.key_norm is not None:
            normed = self.query_norm(turning[:, :count]), self.key_norm(turning[:, count:])
            turning = torch.cat(normed, 1)
        turned = torch.addcmul(turning * cos, turning.roll(size // 2, 2), sin).to(self.dtype)
        heads = values.shape[1]
        queries = turned[:, :count].view(len(x), -1, self.shared, size)
        new = turned[:, count:, None], values[:, :, None]  # each [B, H, 1, D]
        each = [torch.split(one, 1) for one in (queries, *new)]
        found = []
        for update, query, *pair in zip(updates, *each, strict=True):
            keys, held = update(at, pair[0], pair[1])  # [1, H, n + 1, D]
            grouped = count > heads * self.shared
            found.append(
                F.scaled_dot_product_attention(
                    query, keys, held, scale=self.scale, enable_gqa=grouped
                )
            )
        x = x + self.output.of_rows(torch.cat(found).flatten(1))
        gate, up = self.gate_up.of_rows(self.network_norm.of_rows(x)).chunk(2, 1)
        added: Tensor = self.down.of_rows(F.silu(gate).mul_(up))
        return x + added

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, shared={self.shared}, size={self.size}, scale={self.scale}, "
            f"dtype={self.dtype}"
        )


def _attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Compute one token's attention to the keys and values [H, n, D]; returns float32 [H, G, D].

    The queries are [H, G, D]: G query heads share each of the H key heads. When this code is
    compiled, it needs only the vector instructions that every processor has. On a processor without
    AMX, it takes a third of the time of torch's attention in bfloat16, and a seventh of that in
    float16.
    """
    # `as_strided` makes the compiler compute the queries once, and not anew for each of the n keys.
    once = (queries * scale).as_strided(queries.shape, queries.stride())
    weights = (once[:, :, None] * keys[:, None].float()).sum(-1).softmax(-1)  # [H, G, n]
    return (weights[..., None] * values[:, None].float()).sum(2)


class StepGraph(nn.Module):
    """The whole decode step as one module: computes logits from the embedding of one token.

    The graph has layers, norm and output head, and uses the model's own weights. `torch.export` can
    export it. It also returns the hidden states after the layers whose numbers, counted from 1, are
    in `scored`; a scorer needs these states.
    """

    def __init__(self, module: Any, dtype: torch.dtype, scored: Sequence[int] = ()) -> None:
        super().__init__()
        self.scored = tuple(scored)
        self.layers = nn.ModuleList(_Layer(one, dtype) for one in module.model.layers)
        self.norm = _Norm(module.model.norm)
        head = module.get_output_embeddings()
        self.head = head if isinstance(head, Int8Head) else _Product([head])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, update: Update) -> tuple[Tensor, Tensor]:
        """Compute the float32 logits [V] after a token, and states [layers x d] for a scorer.

        The states are the hidden states after the layers in `scored`.

        Args:
            x: the token's embedding, float32 [d].
            cos, sin: cosines and sines of the token's rotary position, [1, D] each; `signed` has
                made the sines.
            update: adds the token's keys and values to the cache, see `Update`.
        """
        states = [x[:0]]
        for at, layer in enumerate(self.layers):
            x = layer(at, x, cos, sin, update)
            if at + 1 in self.scored:
                states.append(x)
        h, head = self.norm(x), self.head
        logits: Tensor = head.of_vector(h) if isinstance(head, Int8Head) else head(h)
        return logits, torch.cat(states)

    def of_rows(
        self, x: Tensor, cos: Tensor, sin: Tensor, updates: Sequence[Update]
    ) -> tuple[Tensor, Tensor]:
        """Compute logits [B, V] and hidden states [B, layers x d] after a token per conversation.

        The arguments are those of `forward`, for B conversations: x [B, d], cos and sin [B, 1, D],
        and an `Update` for each conversation.
        """
        states = [x[:, :0]]
        for at, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            x = layer.of_rows(at, x, cos, sin, updates)
            if at + 1 in self.scored:
                states.append(x)
        h, head = self.norm.of_rows(x), self.head
        if not isinstance(head, Int8Head):
            return head.of_rows(h), torch.cat(states, 1)
        logits = [head.of_few(rows) for rows in torch.split(h, _FEW)]
        return torch.cat(logits), torch.cat(states, 1)

    def extra_repr(self) -> str:
        return f"scored={self.scored}"


class DecodeStep:
    """Reads single tokens with the weights of a Llama-like model on a CPU, faster than the model.

    Args:
        module: the model, for which `supports` must be true.
        dtype: number type of the keys and values in the cache.
        scored: numbers, counted from 1, of the layers whose hidden states are returned.

    Attributes:
        graph: the computation of the step.
        compiled: the same computation as a compiled program; None while there is no such program.
    """

    def __init__(self, module: Any, dtype: torch.dtype, scored: Sequence[int] = ()) -> None:
        self._embeddings = module.get_input_embeddings()
        self._rotary = module.model.rotary_emb
        self.graph = StepGraph(module, dtype, scored).eval()
        self.compiled: CompiledStep | None = None

    def use(self, program: Path) -> None:
        """Read tokens with the compiled program in the file `program` from now on.

        Raises the errors that `CompiledStep` raises.
        """
        with torch.inference_mode():
            tokens = self._embeddings(torch.arange(1, 5)).float()
        self.compiled = CompiledStep(program, self.graph, tokens)

    @staticmethod
    def supports(module: Any) -> bool:
        """Whether a model is on a CPU and has only layers that `DecodeStep` can compute."""
        config = module.config
        return (
            config.model_type in _KINDS
            and sliding_window(config) is None
            and getattr(config, "hidden_act", "") == "silu"
            and module.device.type == "cpu"
            and not is_spread(module)
            and module.dtype in (torch.float32, torch.bfloat16)
        )

    @torch.inference_mode()
    def read(self, token_id: int, position: int, cache: BoundedCache) -> tuple[Tensor, Tensor]:
        """Read the token `token_id` after the tokens in `cache`; returns logits and hidden states.

        These are the float32 logits [1, V] after the token, and its hidden states [1, layers x d]
        after the layers that a scorer needs. `position` is the token's rotary position. The token's
        keys and values are written into the cache, but `cache.commit` must be called to keep them.
        """
        x = self._embeddings(torch.tensor([token_id]))  # [1, d]
        cos, sin = self._rotary(x, torch.tensor([[position]]))  # [1, 1, D]
        x, cos, sin = x[0].float(), cos[0].float(), signed(sin[0].float())
        if self.compiled is not None and self.compiled.fits(cache):
            logits, states = self.compiled(x, cos, sin, cache)
        else:
            logits, states = self.graph(x, cos, sin, _update_of(cache.layers))
        return logits[None], states[None]

    @torch.inference_mode()
    def read_together(
        self, tokens: Sequence[tuple[int, int, BoundedCache]]
    ) -> tuple[Tensor, Tensor]:
        """Read one token in each of B conversations; returns logits and hidden states for each.

        Each item of `tokens` has a token id, its rotary position and the conversation's cache.
        Returns the logits [B, V] after the tokens, and the hidden states [B, layers x d] after the
        layers that a scorer needs. The results differ from those of `read` by rounding if the
        weights are not packed, or if `read` uses a compiled program. The weights are read from
        memory only once; packed weights, once for every eight conversations.
        """
        ids, positions, caches = zip(*tokens, strict=True)
        x = self._embeddings(torch.tensor(ids))  # [B, d]
        cos, sin = (one[0, :, None].float() for one in self._rotary(x, torch.tensor([positions])))
        updates = [_update_of(cache.layers) for cache in caches]
        return self.graph.of_rows(x.float(), cos, signed(sin), updates)


def _update_of(layers: Sequence[Any]) -> Update:
    return lambda at, key, value: layers[at].update(key, value)
