"""A Llama-shaped model without transformers: reads a chunk of ids into a cache.

Its parts have transformers' names. Products and norms are computed in the type of the weights,
attention in that of the cache: with packed weights 16 bits, in half of float32's time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sirchat.memory.cache import BoundedCache, LayerRotation
from sirchat.memory.rope import Rotation
from sirchat.models.attention_hook import OBSERVERS, AttentionCall, report_attention
from sirchat.models.model_config import ConfigValues, DecoderConfig


class Logits(NamedTuple):
    """The result of a model's forward pass over m ids."""

    logits: Tensor  # [1, m, V]


class Decoder(nn.Module):
    """A causal language model with layers like Llama's, made without weights: a loader sets them.

    `generation_config` says which ids end a reply; it is `config` if the files have no other.
    """

    has_own_hook = True  # it reports its attention to observers itself

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.generation_config: ConfigValues = config
        self.model = DecoderBody(config, dtype)
        self.lm_head = _empty_linear(config.hidden_size, config.vocab_size, False, dtype)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The number type of the weights that are not packed."""
        return self.model.norm.weight.dtype

    @property
    def rotations(self) -> list[LayerRotation]:
        """The rotary embedding (RoPE) of each layer."""
        key = Rotation(self.model.rotary_emb.inv_freq.cpu().clone())
        return [LayerRotation(key)] * len(self.model.layers)

    def get_input_embeddings(self) -> Any:
        """The module that returns the embeddings of token ids."""
        return self.model.embed_tokens

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        """Replace the module that returns the embeddings of token ids."""
        self.model.embed_tokens = embeddings

    def get_output_embeddings(self) -> Any:
        """The output head, which computes logits from hidden states."""
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        """Replace the output head."""
        self.lm_head = head

    def tie_weights(self) -> None:
        """Use the weights of the embeddings in the output head, too, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: Tensor, *, cache: BoundedCache | None = None, **inputs: Any
    ) -> Logits:
        """Read ids [1, m] as `DecoderBody.forward` does; returns the logits after each id."""
        (hidden,) = self.model(input_ids, cache=cache, **inputs)
        return Logits(self.lm_head(hidden))


class DecoderBody(nn.Module):
    """A `Decoder` without its output head: embeddings, layers and the last norm."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.embed_tokens: nn.Module = Embedding(
            config.vocab_size, size, device="meta", dtype=dtype
        )
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(_Layer(config, number, dtype) for number in layers)
        self.norm = _Norm(size, config.rms_norm_eps, dtype)
        self.rotary_emb = _Rotary(config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
        cache: BoundedCache | None = None,
    ) -> tuple[Tensor]:
        """Read ids [1, m] after the n slots of the cache; returns normalized states [1, m, d].

        `attention_mask` [1, 1, m, n + m] is added to the scores; None for causal attention.
        `position_ids` [1, m] are rotary; None for n, n + 1, ... `use_cache` is transformers'.
        """
        count, held = input_ids.shape[1], 0 if cache is None else cache.length
        device = input_ids.device
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(held, held + count, device=device)[None]
        cos, sin = self.rotary_emb(x, position_ids)  # [1, m, D]
        dtype = (None if cache is None else cache.dtype) or x.dtype
        if attention_mask is None and held and count > 1:
            sees = torch.ones(count, held + count, dtype=torch.bool, device=device).tril(held)
            scores = torch.zeros(sees.shape, device=device)
            attention_mask = scores.masked_fill_(~sees, -math.inf)[None, None]
        mask = None if attention_mask is None else attention_mask.to(dtype)
        reading = _Reading(cos, signed(sin), dtype, mask, cache)
        for layer in self.layers:
            x = layer(x, reading)
        return (self.norm(x),)


class Linear(nn.Linear):
    """A linear layer without weights: torch would import a thousand files to fill them."""

    def reset_parameters(self) -> None:
        """Do nothing."""


class Embedding(nn.Embedding):
    """An embedding layer without weights, like `Linear`."""

    def reset_parameters(self) -> None:
        """Do nothing."""


def signed(sin: Tensor) -> Tensor:
    """Negate the first half of RoPE's sines [..., D], which multiply a head with swapped halves."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), -1)


class _Reading(NamedTuple):
    """What all layers share in one forward pass over m ids."""

    cos: Tensor  # [1, m, D]
    sin: Tensor  # the same, by `signed`
    dtype: torch.dtype  # of attention
    mask: Tensor | None  # added to the scores; None for causal attention
    cache: BoundedCache | None


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = _Attention(config, number, dtype)
        self.mlp = _Network(size, config.intermediate_size, dtype)
        self.input_layernorm = _Norm(size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = _Norm(size, config.rms_norm_eps, dtype)

    def forward(self, x: Tensor, reading: _Reading) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), reading)
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        self.layer_idx, self.scaling = number, self.head_dim**-0.5
        width, narrow = (
            heads * self.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        has_bias = config.model_type == "qwen2"
        self.q_proj = _empty_linear(size, width, has_bias, dtype)
        self.k_proj = _empty_linear(size, narrow, has_bias, dtype)
        self.v_proj = _empty_linear(size, narrow, has_bias, dtype)
        self.o_proj = _empty_linear(width, size, False, dtype)
        if config.model_type == "qwen3":
            self.q_norm = _Norm(self.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = _Norm(self.head_dim, config.rms_norm_eps, dtype)
        self._has_norms = config.model_type == "qwen3"

    def forward(self, h: Tensor, reading: _Reading) -> Tensor:
        # h: the normalized hidden states [1, m, d]
        queries, keys, values = (
            rows.view(1, h.shape[1], -1, self.head_dim)
            for rows in _products((self.q_proj, self.k_proj, self.v_proj), h)
        )
        if self._has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = _rotated(queries, reading), _rotated(keys, reading)
        values = values.transpose(1, 2).to(reading.dtype)
        if reading.cache is not None:
            layer = reading.cache.layers[self.layer_idx]
            keys, values = layer.update(keys, values)
        of_queries = keys, values
        if reading.mask is not None and not keys.is_cpu:  # fast kernels with a mask share no keys
            groups = queries.shape[1] // keys.shape[1]
            of_queries = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        attended = F.scaled_dot_product_attention(
            queries,
            *of_queries,
            attn_mask=reading.mask,
            is_causal=reading.mask is None and queries.shape[2] > 1,
            scale=self.scaling,
            enable_gqa=queries.shape[1] > of_queries[0].shape[1],
        )  # [1, H_q, m, D]
        if OBSERVERS.get():
            options = {"scaling": self.scaling}
            exact = queries.float(), keys.float()
            report_attention(AttentionCall(self.layer_idx, *exact, reading.mask, options, None))
        added: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2).to(h.dtype))
        return added


class _Network(nn.Module):
    def __init__(self, size: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = _empty_linear(size, inner, False, dtype)
        self.up_proj = _empty_linear(size, inner, False, dtype)
        self.down_proj = _empty_linear(inner, size, False, dtype)

    def forward(self, h: Tensor) -> Tensor:
        gate, up = _products((self.gate_proj, self.up_proj), h)
        added: Tensor = self.down_proj(F.silu(gate).mul_(up))
        return added


class _Norm(nn.Module):
    """RMSNorm over the last dimension of a tensor, computed in float32."""

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta", dtype=dtype))
        self.variance_epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), x.shape[-1:], None, self.variance_epsilon)
        return self.weight * normed.to(x.dtype)


class _Rotary(nn.Module):
    """Computes the cosines and sines of rotary positions (RoPE)."""

    inv_freq: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(config), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq  # [1, m, D / 2]
        both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def _frequencies(config: DecoderConfig) -> Tensor:
    """The angular frequencies [D / 2] of RoPE; those of Llama 3.1 have low ones reduced."""
    given, size = config.rope_parameters, config.head_dim
    plain: Tensor = 1.0 / (given["rope_theta"] ** (torch.arange(0, size, 2).float() / size))
    if given["rope_type"] == "default":
        return plain
    low, high, length = (
        given[name]
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    waves = 2 * math.pi / plain  # tokens in a full turn, by frequency
    slow = torch.where(waves > length / low, plain / given["factor"], plain)
    share = (length / waves - low) / (high - low)
    between = (1 - share) * slow / given["factor"] + share * slow
    is_between = ~(waves < length / high) & ~(waves > length / low)
    return torch.where(is_between, between, slow)


def _rotated(x: Tensor, reading: _Reading) -> Tensor:
    """Apply RoPE to [1, m, H, D]; returns [1, H, m, D] in attention's type."""
    cos, sin = reading.cos[:, :, None], reading.sin[:, :, None]
    turned = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
    return turned.to(reading.dtype).transpose(1, 2)


def _empty_linear(columns: int, rows: int, has_bias: bool, dtype: torch.dtype) -> Any:
    return Linear(columns, rows, bias=has_bias, device="meta", dtype=dtype)


def _products(layers: tuple[Any, ...], h: Tensor) -> list[Tensor]:
    """Apply several layers to the same input: by one product if their weights are joined."""
    joined = getattr(layers[0], "joined", None)
    if joined is None:
        return [layer(h) for layer in layers]
    products = joined[0](h).split([layer.out_features for layer in layers], -1)
    pairs = zip(layers, products, strict=True)
    return [y if layer.bias is None else y + layer.bias for layer, y in pairs]
