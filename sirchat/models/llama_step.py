"""One decode step of a Llama-like model on a GPU, in few kernels, with no numbers from the host.

It uses the model's own weights; layers with the same input are joined in one matrix. Sums and norms
are float32.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sirchat.errors import ModelError
from sirchat.memory.cache import StepRows
from sirchat.models.decoder import signed
from sirchat.models.devices import is_spread
from sirchat.models.model_config import LENGTH_DEPENDENT, LLAMA_KINDS, sliding_window
from sirchat.models.packed import (
    GROUP,
    GpuLinear,
    GpuWeights,
    Int8Linear,
    PackedLinear,
    RefinedHead,
)

if TYPE_CHECKING:
    from sirchat.models.packed_kernels import Rounded

_MIN_SLOT_BOUND = 1024  # slots that a captured step can attend to at least

Kernels = Literal["triton", "torch"]


class AttentionParams(NamedTuple):
    """The sizes of one layer's attention, and the norms of its queries and keys (Qwen 3)."""

    query_heads: int  # H_q
    kv_heads: int  # H
    head_dim: int  # D
    scale: float
    query_norm: Tensor | None
    key_norm: Tensor | None
    epsilon: float


class _Rows(NamedTuple):
    """Rows [B, K]; perhaps also as the product that follows takes them."""

    floats: Tensor  # sums are float32
    rounded: Rounded | None = None  # for packed weights
    normalized: Tensor | None = None  # for several rows and plain weights


class UnusedSlots:
    """Sets unused slots of caches to zero, for attention that reads all slots."""

    def __init__(self) -> None:
        # Of each cache: where its rows are, and how many of its slots may be in use or not zero.
        self._used_slots = WeakKeyDictionary[StepRows, tuple[Hashable, int]]()

    @torch.inference_mode()
    def clear(self, cache: StepRows) -> Hashable:
        """Clear a cache's unused slots if necessary; returns where its buffers are."""
        if cache.pool is None:
            buffers = [tensor.buffer for tensor in cache.tensors if tensor.buffer is not None]
        else:
            buffers = [cache.pool]
        location = tuple((buffer.data_ptr(), buffer.shape) for buffer in buffers)
        former_location, end = self._used_slots.get(cache, (None, 0))
        if location != former_location:
            end = cache.capacity
        if end > cache.length:
            # A slot may have NaN, and a weight of 0 times NaN is NaN.
            for buffer in buffers:
                buffer[:, :, :, cache.length : end] = 0
        self._used_slots[cache] = location, cache.length + 1
        return location


class LlamaStep:
    """Computes the next logits of B conversations, and appends one row to the cache of each.

    Raises ModelError, with the reason, if the model can't be computed so. The hidden states after
    `wanted_layers`, counted from 1, are returned.
    """

    observes_attention, max_batch = True, 16

    def __init__(self, module: Any, kernels: Kernels, wanted_layers: Sequence[int] = ()) -> None:
        if reason := self._reason_against(module):
            raise ModelError(reason)
        if kernels == "triton" and not has_triton():
            raise ModelError("Triton is not installed")
        self.kernels, self.pads_batch = kernels, kernels == "triton"
        self.description = "Triton's kernels" if self.pads_batch else "torch's operations"
        self.vocab_size: int = module.get_output_embeddings().out_features
        self._module = module
        self._wanted_layers = frozenset(wanted_layers)
        self._unused = UnusedSlots()
        self._layers = [_Layer(layer) for layer in module.model.layers]
        self._norm = _Norm(module.model.norm)
        self._head = _Product([module.get_output_embeddings()])

    @staticmethod
    def _reason_against(module: Any) -> str:
        """Why this class can't compute a model's decode step, as text; "" if it can."""
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

    def graph_key(self, caches: Sequence[StepRows]) -> Hashable:
        if self.kernels == "triton":
            return self._slot_bound(caches)
        return tuple(map(self._unused.clear, caches))

    def __call__(
        self,
        ids: Tensor,
        lengths: Tensor,
        positions: Tensor,
        pools: Tensor,
        caches: Any,
        observed_layers: Collection[int] = (),
    ) -> tuple[Tensor, ...]:
        """Compute float32 logits [B, V] and the wanted states [B, layers x d].

        The arguments are those of `StepBody`. With `observed_layers`, also returns the attention
        weights [B, slots], summed over these layers and averaged over heads.
        """
        x = _Rows(self._module.get_input_embeddings()(ids).float())  # [B, d]
        cos, sin = self._module.model.rotary_emb(x.floats[:, None], positions[:, None])  # [B, 1, D]
        rotation = cos[:, 0].float().contiguous(), signed(sin[:, 0].float()).contiguous()
        states, weights = [x.floats[:, :0]], list[Tensor]()
        inputs = [(layer.queries_keys_values, layer.attention_norm) for layer in self._layers]
        following = [*inputs[1:], (self._head, self._norm)]
        for layer_index, (layer, after) in enumerate(zip(self._layers, following, strict=True)):
            rows = self._multiply(layer.queries_keys_values, x, layer.attention_norm).floats
            rows = rows.view(len(rows), -1, layer.attention.head_dim)
            scores = None
            if layer_index in observed_layers:
                shape = len(rows), layer.attention.query_heads, self._slot_bound(caches)
                scores = rows.new_empty(shape)
            attended = self._attend(
                layer_index, layer, rows, rotation, lengths, pools, caches, scores
            )
            if scores is not None:
                weights.append(scores.softmax(-1).mean(1))
            then = layer.gate_up, layer.network_norm
            x = self._multiply(layer.output, attended, added=x.floats, then=then)
            inner = self._multiply(
                layer.gate_up, x, layer.network_norm, gated=True, then=(layer.down, None)
            )
            x = self._multiply(layer.down, inner, added=x.floats, then=after)
            if layer_index + 1 in self._wanted_layers:
                states.append(x.floats)
        logits = self._multiply(self._head, x, self._norm).floats.float()
        summed = (sum(weights[1:], weights[0]),) if weights else ()
        return logits, torch.cat(states, 1), *summed

    def _slot_bound(self, caches: Sequence[StepRows]) -> int:
        """A number of slots that is enough for these caches, and seldom changes."""
        capacity = max(cache.capacity for cache in caches)
        return max(_MIN_SLOT_BOUND, 1 << (capacity - 1).bit_length())

    def _multiply(
        self,
        product: _Product,
        x: _Rows,
        norm: _Norm | None = None,
        *,
        added: Tensor | None = None,
        gated: bool = False,
        then: tuple[_Product, _Norm | None] | None = None,
    ) -> _Rows:
        """Multiply rows [B, K], normalized with `norm`, with a matrix: [B, N].

        `then`: by what the result is multiplied next, after which norm.
        """
        if self.kernels == "triton" and product.packed and not (gated and len(product.packed) > 1):
            return _multiply_packed(product, x, norm, added, gated, then)
        x_floats = x.floats
        if self.kernels == "triton" and product.is_plain and len(x_floats) > 1:
            return _multiply_rows(product, x, norm, added, gated, then)
        if self.kernels == "triton" and product.is_plain:
            from sirchat.models.kernels import multiply_fused

            options: dict[str, Any] = {"bias": product.bias, "added": added, "gated": gated}
            if norm is not None:
                options |= {"norm": norm.weight, "epsilon": norm.epsilon}
            return _Rows(multiply_fused(x_floats, product.weight, **options))
        if norm is not None:
            x_floats = F.rms_norm(x_floats, x_floats.shape[-1:], norm.weight_float32, norm.epsilon)
        y = product(x_floats)
        if gated:
            gate, up = y.chunk(2, 1)
            return _Rows(F.silu(gate).mul_(up))
        return _Rows(y.float() if added is None else added + y)

    def _attend(
        self,
        layer_index: int,
        layer: _Layer,
        rows: Tensor,
        rotation: tuple[Tensor, Tensor],
        lengths: Tensor,
        pools: Tensor,
        caches: Sequence[StepRows],
        scores: Tensor | None,
    ) -> _Rows:
        """Attention of rows [B, H_q + 2 H, D] to each cache and the new row: [B, H_q D]."""
        attention = layer.attention
        if self.kernels == "triton":
            from sirchat.models.kernels import attend

            pool = caches[0].pool
            assert pool is not None
            attended, rounded = attend(
                rows, attention.query_norm, attention.key_norm, attention.epsilon, *rotation,
                pools, lengths, self._slot_bound(caches), layer=layer_index,
                kv_heads=attention.kv_heads, scale=attention.scale, dtype=pool.dtype, scores=scores,
                next_bits=layer.output.rounded_bits
            )  # fmt: skip
            return _Rows(attended.flatten(1), rounded)
        outputs = []
        for index, cache in enumerate(caches):
            assert cache.pool is not None
            one = slice(index, index + 1)
            cos, sin = (part[one] for part in rotation)
            into = None if scores is None else scores[index]
            pool = cache.pool[layer_index]
            out = _attend_by_torch(pool, attention, rows[index], cos, sin, lengths[one], into)
            outputs.append(out.flatten())
        return _Rows(torch.stack(outputs))


def has_triton() -> bool:
    return find_spec("triton") is not None


def _multiply_rows(
    product: _Product,
    x: _Rows,
    norm: _Norm | None,
    added: Tensor | None,
    gated: bool,
    then: tuple[_Product, _Norm | None] | None,
) -> _Rows:
    """`LlamaStep._multiply` for several rows and plain weights, which torch reads only once."""
    from sirchat.models.kernels import add_and_normalize, gate

    rows, dtype = x.normalized, product.weight.dtype
    if rows is None and norm is not None:
        _, rows = add_and_normalize(x.floats, None, norm.weight, norm.epsilon, dtype)
    y = F.linear(x.floats.to(dtype) if rows is None else rows, product.weight, product.bias)
    following, next_norm = then or (None, None)
    next_dtype = following.weight.dtype if following and following.is_plain else None
    if gated:
        return _Rows(gate(*y.chunk(2, 1), dtype=next_dtype or torch.float32))
    if added is None or next_dtype is None or next_norm is None:
        return _Rows(y if added is None else added + y)
    sums, rows = add_and_normalize(added, y, next_norm.weight, next_norm.epsilon, next_dtype)
    return _Rows(sums, normalized=rows)


def _multiply_packed(
    product: _Product,
    x: _Rows,
    norm: _Norm | None,
    added: Tensor | None,
    gated: bool,
    then: tuple[_Product, _Norm | None] | None,
) -> _Rows:
    """`LlamaStep._multiply` by the kernels for packed weights."""
    from sirchat.models.packed_kernels import multiply_packed, round_rows

    rounded, bits, count = x.rounded, product.rounded_bits, len(x.floats)
    epsilon = None if norm is None else norm.epsilon
    if rounded is None:
        rounded = round_rows(x.floats.float(), bits, None if norm is None else norm.weight)
    if len(product.packed) > 1:  # queries, keys and values in blocks of several types
        parts = [multiply_packed(rounded, one, count, epsilon=epsilon)[0] for one in product.packed]
        y = torch.cat(parts, 1)
        return _Rows(y if product.bias is None else y + product.bias)
    following, next_norm = then or (None, None)
    out = multiply_packed(
        rounded,
        product.packed[0],
        count,
        epsilon=epsilon,
        bias=product.bias,
        added=added,
        gated=gated,
        next_bits=0 if following is None else following.rounded_bits,
        next_norm=None if next_norm is None else next_norm.weight,
    )
    return _Rows(*out)


def _attend_by_torch(
    pool: Tensor,
    attention: AttentionParams,
    rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    length: Tensor,
    scores: Tensor | None,
) -> Tensor:
    """`kernels.attend` for one conversation; `pool` [3, H, capacity, D] is that of a layer."""
    query_heads, heads, size, scale, query_norm, key_norm, epsilon = attention
    queries, keys, values = torch.split(rows.float(), [query_heads, heads, heads])
    if query_norm is not None and key_norm is not None:
        queries = F.rms_norm(queries, (size,), query_norm.float(), epsilon)
        keys = F.rms_norm(keys, (size,), key_norm.float(), epsilon)
    queries, keys = (torch.addcmul(x * cos, x.roll(size // 2, -1), sin) for x in (queries, keys))
    new = torch.stack((keys, keys, values))[:, :, None].to(pool.dtype)  # [3, H, 1, D]
    pool.index_copy_(2, length, new)
    sees = torch.arange(pool.shape[2], device=pool.device) <= length
    grouped = queries.view(1, heads, -1, size).to(pool.dtype)
    if scores is not None:
        products = (grouped[0].float() @ pool[0].float().mT) * scale  # [H, G, capacity]
        scores.fill_(-torch.inf)
        scores[:, : len(sees)] = products.masked_fill(~sees, -torch.inf).flatten(0, 1)
    attended = F.scaled_dot_product_attention(
        grouped, pool[None, 0], pool[None, 2], attn_mask=sees[None, None, None], scale=scale
    )
    return attended.float().reshape(query_heads, size)


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
        self.attention = AttentionParams(
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
        self.weight_float32 = self.weight.float()
        self.epsilon: float = norm.variance_epsilon


class _Product:
    """The weights of layers with the same input, in one matrix if all have the same type."""

    def __init__(self, layers: Sequence[Any]) -> None:
        joined = getattr(layers[0], "joined", None)
        matrices = list(layers if joined is None else joined)
        if len(matrices) > 1 and all(isinstance(layer, nn.Linear) for layer in matrices):
            matrices = [_join(matrices)]
        self._matrices = matrices
        first = matrices[0]
        # Whether Triton's kernels can multiply them: plain ones, or packed ones, with rounded rows
        self.is_plain = len(matrices) == 1 and not isinstance(first, PackedLinear)
        if self.is_plain:
            self.weight = first.weight.detach()
        self.packed: list[GpuWeights] = [
            layer.gpu_weights
            for layer in matrices
            if isinstance(layer, GpuLinear | Int8Linear) and layer.in_features % GROUP == 0
        ]
        kinds = {weights.bits for weights in self.packed}  # each has its own order of rounded rows
        if len(self.packed) < len(matrices) or len(kinds) > 1:
            self.packed = []
        self.rounded_bits = self.packed[0].bits if self.packed else 0
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases).detach() if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply rows x [B, K]; returns [B, N] in the type of the weights, or in float32."""
        ys = list[Tensor]()
        for matrix in self._matrices:
            if isinstance(matrix, RefinedHead):
                return matrix.refined_logits(x)
            if isinstance(matrix, PackedLinear):
                ys.append(matrix.multiply_packed(x.bfloat16()))
            else:
                ys.append(F.linear(x.to(matrix.weight.dtype), matrix.weight))
        y = ys[0] if len(ys) == 1 else torch.cat(ys, 1)
        return y if self.bias is None else y + self.bias.float()


def _join(layers: Sequence[Any]) -> nn.Linear:
    """Join layers into one without bias, `joined`; their weights become views of its weights."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    joined = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    start = 0
    for layer in layers:
        rows = weight[start : start + layer.out_features]
        layer.weight = nn.Parameter(rows, requires_grad=False)
        layer.joined = (joined,)  # in a tuple, so that it is no submodule
        start += layer.out_features
    return joined
