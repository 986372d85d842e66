"""One decode step of a Llama-like model on a GPU, in few kernels and without numbers of the host.

Its weights are the model's own: those of layers with the same input are joined in one matrix. Sums
and norms are float32.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sirchat.errors import ModelError
from sirchat.memory.cache import BoundedCache
from sirchat.models.decoder import signed
from sirchat.models.devices import is_spread
from sirchat.models.model_config import LENGTH_DEPENDENT, LLAMA_KINDS, sliding_window
from sirchat.models.packed import GROUP, Int4GpuLinear, Int8Head, Int8Linear, PackedLinear

_LEAST_BOUND = 1024

Kernels = Literal["triton", "torch"]


class AttentionParams(NamedTuple):
    """The sizes of one layer's attention, and the norms of its queries and keys (Qwen 3)."""

    queries: int  # H_q
    keys: int  # H
    size: int  # D
    scale: float
    query_norm: Tensor | None
    key_norm: Tensor | None
    epsilon: float


class UnusedSlots:
    """Sets slots of caches that are not in use to zero, for attention that reads all slots."""

    def __init__(self) -> None:
        # Of each cache, where its rows are, and how many slots have been used since.
        self._known = WeakKeyDictionary[BoundedCache, tuple[Hashable, int]]()

    @torch.inference_mode()
    def clear(self, cache: BoundedCache) -> Hashable:
        """Clear a cache's slots, where that is due; returns where its rows are."""
        tensors = [tensor for layer in cache.row_layers for tensor in layer.tensors]
        apart = [tensor.buffer for tensor in tensors if tensor.buffer is not None]
        buffers = apart if cache.pool is None else [cache.pool]
        place = tuple((buffer.data_ptr(), buffer.shape) for buffer in buffers)
        before, most = self._known.get(cache, (None, 0))
        most, length = (most if before == place else cache.capacity), cache.length
        if most > length:
            # What a slot has may be no numbers, and a weight of 0 times NaN is NaN.
            for buffer in buffers:
                buffer[:, :, :, length:most] = 0
        self._known[cache] = place, length + 1
        return place


class LlamaStep:
    """Computes the next logits of B conversations, and appends one row to the cache of each.

    Raises ModelError if it can't, and says why. `wanted` are the layers, counted from 1, whose
    hidden states are returned.
    """

    observes, most = True, 16

    def __init__(self, module: Any, kernels: Kernels, wanted: Sequence[int] = ()) -> None:
        if reason := self._reason_against(module):
            raise ModelError(reason)
        if kernels == "triton" and not has_triton():
            raise ModelError("Triton is not installed")
        self.kernels, self.pads = kernels, kernels == "triton"
        self.about = "Triton's kernels" if self.pads else "torch's operations"
        self.vocab_size: int = module.get_output_embeddings().out_features
        self._module = module
        self._wanted = frozenset(wanted)
        self._unused = UnusedSlots()
        self._layers = [_Layer(layer) for layer in module.model.layers]
        self._norm = _Norm(module.model.norm)
        self._head = _Product([module.get_output_embeddings()])

    @staticmethod
    def _reason_against(module: Any) -> str:
        """Why a model's decode step can't be computed by this class, as text, or ""."""
        config = module.config
        if config.model_type not in LLAMA_KINDS or getattr(config, "hidden_act", "") != "silu":
            return f"its layers ({config.model_type}) are not like Llama's"
        if sliding_window(config) is not None:
            return "it has sliding-window layers"
        if is_spread(module):
            return "it is spread over several devices"
        if getattr(module.model.rotary_emb, "rope_type", "default") in LENGTH_DEPENDENT:
            return "its positions depend on the number of tokens"
        size = module.model.layers[0].self_attn.head_dim
        if size < GROUP // 2 or size & (size - 1):
            return f"its heads have {size} dimensions, which is no power of two from 16 on"
        return ""

    def key(self, caches: Sequence[BoundedCache]) -> Hashable:
        """What a captured step depends on, beside the number of caches."""
        if self.kernels == "triton":
            return self._bound(caches)
        return tuple(map(self._unused.clear, caches))

    def __call__(
        self,
        ids: Tensor,
        lengths: Tensor,
        positions: Tensor,
        places: Tensor,
        caches: Any,
        observed: Collection[int] = (),
    ) -> tuple[Tensor, ...]:
        """Compute float32 logits [B, V] and wanted states [B, layers x d].

        `ids`, `lengths` (the new rows' slots) and rotary `positions` are int64 [B], `places` [2, B]
        the addresses and capacities of the caches' pools. With layers `observed`, also returns the
        attention weights [B, slots], as a sum over these layers and a mean over heads.
        """
        x = self._module.get_input_embeddings()(ids).float()  # [B, d]
        cos, sin = self._module.model.rotary_emb(x[:, None], positions[:, None])  # [B, 1, D]
        turn = cos[:, 0].float().contiguous(), signed(sin[:, 0].float()).contiguous()
        states, weights = [x[:, :0]], list[Tensor]()
        for number, layer in enumerate(self._layers):
            rows = self._multiply(layer.queries_keys_values, x, layer.attention_norm)
            rows = rows.view(len(x), -1, layer.heads.size)
            scores = None
            if number in observed:
                scores = x.new_empty((len(x), layer.heads.queries, self._bound(caches)))
            attended = self._attend(
                number, layer.heads, rows, turn, lengths, places, caches, scores
            )
            if scores is not None:
                weights.append(scores.softmax(-1).mean(1))
            x = self._multiply(layer.output, attended.flatten(1), added=x)
            inner = self._multiply(layer.gate_up, x, layer.network_norm, gated=True)
            x = self._multiply(layer.down, inner, added=x)
            if number + 1 in self._wanted:
                states.append(x)
        logits = self._multiply(self._head, x, self._norm)
        summed = (sum(weights[1:], weights[0]),) if weights else ()
        return logits, torch.cat(states, 1), *summed

    def _bound(self, caches: Sequence[BoundedCache]) -> int:
        most = max(cache.capacity for cache in caches)
        return max(_LEAST_BOUND, 1 << (most - 1).bit_length())

    def _multiply(
        self,
        product: _Product,
        x: Tensor,
        norm: _Norm | None = None,
        *,
        added: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """Multiply x, float32 [B, K], normalized first, with a matrix: float32 [B, N].

        With `gated`, the matrix's halves are those of a gate and of what it opens.
        """
        # With more rows, torch's products read plain weights only once; those of Triton do not.
        if self.kernels == "triton" and (len(x) == 1 or product.bits < 16) and product.parts == 1:
            from sirchat.models.kernels import multiply

            return multiply(
                x,
                product.weight,
                product.scales,
                bits=product.bits,
                norm=None if norm is None else norm.weight,
                epsilon=0.0 if norm is None else norm.epsilon,
                bias=product.bias,
                added=added,
                gated=gated,
            )
        if norm is not None:
            x = F.rms_norm(x, x.shape[-1:], norm.wide, norm.epsilon)
        y = product(x)
        if gated:
            gate, up = y.chunk(2, 1)
            return F.silu(gate).mul_(up)
        return y.float() if added is None else added + y

    def _attend(
        self,
        number: int,
        heads: AttentionParams,
        rows: Tensor,
        turn: tuple[Tensor, Tensor],
        lengths: Tensor,
        places: Tensor,
        caches: Sequence[BoundedCache],
        scores: Tensor | None,
    ) -> Tensor:
        """Attention of rows [B, H_q + 2 H, D] to each cache and itself: [B, H_q, D].

        `scores` [B, H_q, slots] gets the scaled products, -inf where a slot is not used.
        """
        if self.kernels == "triton":
            from sirchat.models.kernels import attend

            pool = caches[0].pool
            assert pool is not None
            return attend(
                rows, heads.query_norm, heads.key_norm, heads.epsilon, *turn, places, lengths,
                self._bound(caches), layer=number, heads=heads.keys, scale=heads.scale,
                dtype=pool.dtype, scores=scores,
            )  # fmt: skip
        attended = []
        for at, cache in enumerate(caches):
            assert cache.pool is not None
            cos, sin = (part[at : at + 1] for part in turn)
            one = lengths[at : at + 1]
            into = None if scores is None else scores[at]
            pool = cache.pool[number]
            attended.append(_attend_with_mask(pool, heads, rows[at], cos, sin, one, into))
        return torch.stack(attended)


def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def _attend_with_mask(
    pool: Tensor,
    heads: AttentionParams,
    rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    length: Tensor,
    scores: Tensor | None,
) -> Tensor:
    """What `kernels.attend` computes, for one conversation: a layer's pool [3, H, capacity, D]."""
    parts = [heads.queries, heads.keys, heads.keys]
    queries, keys, values = torch.split(rows.float(), parts)
    if heads.query_norm is not None and heads.key_norm is not None:
        queries = F.rms_norm(queries, (heads.size,), heads.query_norm.float(), heads.epsilon)
        keys = F.rms_norm(keys, (heads.size,), heads.key_norm.float(), heads.epsilon)
    queries, keys = (
        torch.addcmul(x * cos, x.roll(heads.size // 2, -1), sin) for x in (queries, keys)
    )
    new = torch.stack((keys, keys, values))[:, :, None].to(pool.dtype)  # [3, H, 1, D]
    pool.index_copy_(2, length, new)
    sees = torch.arange(pool.shape[2], device=pool.device) <= length
    grouped = queries.view(1, heads.keys, -1, heads.size).to(pool.dtype)
    if scores is not None:
        products = (grouped[0].float() @ pool[0].float().mT) * heads.scale  # [H, G, capacity]
        scores.fill_(-torch.inf)
        scores[:, : len(sees)] = products.masked_fill(~sees, -torch.inf).flatten(0, 1)
    attended = F.scaled_dot_product_attention(
        grouped, pool[None, 0], pool[None, 2], attn_mask=sees[None, None, None], scale=heads.scale
    )
    return attended.float().reshape(heads.queries, heads.size)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, network = layer.self_attn, layer.mlp
        self.attention_norm = _Norm(layer.input_layernorm)
        self.queries_keys_values = _Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = _Product([attention.o_proj])
        self.network_norm = _Norm(layer.post_attention_layernorm)
        self.gate_up = _Product([network.gate_proj, network.up_proj])
        self.down = _Product([network.down_proj])
        size = attention.head_dim
        query_norm = getattr(attention, "q_norm", None)
        self.heads = AttentionParams(
            attention.q_proj.out_features // size,
            attention.k_proj.out_features // size,
            size,
            attention.scaling,
            None if query_norm is None else query_norm.weight.detach(),
            None if query_norm is None else attention.k_norm.weight.detach(),
            0.0 if query_norm is None else query_norm.variance_epsilon,
        )


class _Norm:
    def __init__(self, norm: Any) -> None:
        self.weight: Tensor = norm.weight.detach()
        self.wide = self.weight.float()
        self.epsilon: float = norm.variance_epsilon


class _Product:
    """The weights of several layers with one input, in one matrix where all have the same type."""

    def __init__(self, layers: Sequence[Any]) -> None:
        joined = getattr(layers[0], "joined", None)
        matrices = list(layers if joined is None else joined)
        if len(matrices) > 1 and all(isinstance(layer, nn.Linear) for layer in matrices):
            matrices = [_join(matrices)]
        self._matrices = matrices
        self.parts = len(matrices)
        first = matrices[0]
        self.bits = first.bits if isinstance(first, PackedLinear) else 16
        self.scales: Tensor | None = None
        if isinstance(first, Int8Linear):
            self.weight, self.scales = first.q, first.scale
        elif isinstance(first, Int4GpuLinear):
            self.weight, self.scales = first.nibbles, first.scales
        else:
            self.weight = first.weight.detach()
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases).detach().float() if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply rows x [B, K]; returns [B, N] in the type of the weights, or in float32."""
        ys = list[Tensor]()
        for matrix in self._matrices:
            if isinstance(matrix, Int8Head):
                return matrix.refined_logits(x)
            if isinstance(matrix, PackedLinear):
                ys.append(matrix.multiply_packed(x.bfloat16()))
            else:
                ys.append(F.linear(x.to(matrix.weight.dtype), matrix.weight))
        y = ys[0] if len(ys) == 1 else torch.cat(ys, 1)
        return y if self.bias is None else y + self.bias


def _join(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer without bias with the rows of all; the layers' weights become views of its own."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    joined = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    start = 0
    for layer in layers:
        rows = weight[start : start + layer.out_features]
        layer.weight = nn.Parameter(rows, requires_grad=False)
        start += layer.out_features
    return joined
