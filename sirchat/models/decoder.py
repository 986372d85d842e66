"""A Llama-shaped model on a CPU, without transformers: reads a chunk of ids into a cache.

The model's parts have the same names as in transformers, so the model is loaded, packed, scored and
compiled like a model of transformers. `decode_step.py` reads a single token faster.

Matrix products and norms are computed in the type of the weights, attention in the type of the
cache. Products with packed weights are rounded to bfloat16. Then the cache is bfloat16, too:
attention takes half of the time that it takes in float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sirchat.memory.cache import BoundedCache
from sirchat.memory.cache_layers import LayerRotation
from sirchat.memory.rope import Rotation
from sirchat.models.attention_hook import AttentionCall, is_observed, report
from sirchat.models.model_config import ConfigValues, DecoderConfig


class Logits(NamedTuple):
    """The result of a model's forward pass over m ids: logits [1, m, V]."""

    logits: Tensor


class Decoder(nn.Module):
    """A causal language model with layers like Llama's; it is made without weights.

    A loader sets the weights later.

    Attributes:
        config: the model's sizes and settings.
        generation_config: an object with the ids that end a reply. It is `config`, unless the
            model's files have a config for generation.
        has_own_hook: always true: the model reports its attention to observers itself.
    """

    has_own_hook = True

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.generation_config: ConfigValues = config
        self.model = DecoderBody(config, dtype)
        self.lm_head = _matrix(config.hidden_size, config.vocab_size, False, dtype)

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The number type of those model weights that are not packed in four or eight bits."""
        return self.model.norm.weight.dtype

    @property
    def rotations(self) -> list[LayerRotation]:
        """The rotary position embedding (RoPE) of each layer."""
        key = Rotation(self.model.rotary_emb.inv_freq.clone())
        return [LayerRotation(key)] * len(self.model.layers)

    def get_input_embeddings(self) -> Any:
        """The module that returns the embeddings of token ids."""
        return self.model.embed_tokens

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        """Replace the module that returns the embeddings of token ids."""
        self.model.embed_tokens = embeddings

    def get_output_embeddings(self) -> Any:
        """The model's output head, which computes logits from hidden states."""
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        """Replace the model's output head, which computes logits from hidden states."""
        self.lm_head = head

    def tie_weights(self) -> None:
        """Use the weights of the embeddings in the output head, too, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
        cache: BoundedCache | None = None,
    ) -> Logits:
        """Read ids [1, m] after the n rows of the cache; returns the logits after each id.

        Args:
            input_ids: the m ids.
            attention_mask: [1, 1, m, n + m], numbers that are added to the scores of attention;
                None for causal attention.
            position_ids: [1, m], rotary positions; None for n, n + 1, ...
            use_cache: must be true; the argument exists because models of transformers have it.
            cache: the KV cache. The keys and values of the ids are written into it, and its
                `commit` must be called to keep them. None for no cache.
        """
        (hidden,) = self.model(input_ids, attention_mask, position_ids, use_cache, cache)
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
        """Compute the normalized hidden states [1, m, d] after the last layer.

        The states are returned as the only item of a tuple. The arguments are those of
        `Decoder.forward`.
        """
        count, held = input_ids.shape[1], 0 if cache is None else cache.length
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(held, held + count)[None]
        cos, sin = self.rotary_emb(x, position_ids)  # [1, m, D]
        kind = (None if cache is None else cache.dtype) or x.dtype
        if attention_mask is None and held and count > 1:
            sees = torch.ones(count, held + count, dtype=torch.bool).tril(held)
            attention_mask = torch.zeros(sees.shape).masked_fill_(~sees, -math.inf)[None, None]
        mask = None if attention_mask is None else attention_mask.to(kind)
        reading = _Reading(cos, signed(sin), kind, mask, cache)
        for layer in self.layers:
            x = layer(x, reading)
        return (self.norm(x),)


class _Reading(NamedTuple):
    """What all layers share in one forward pass over m ids.

    Attributes:
        cos, sin: cosines and sines of the rotary positions, [1, m, D] each; `signed` has made the
            sines.
        kind: the number type of attention.
        mask: numbers that are added to the scores of attention; None for causal attention.
        cache: the KV cache; None for no cache.
    """

    cos: Tensor
    sin: Tensor
    kind: torch.dtype
    mask: Tensor | None
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
        """Compute the hidden states [1, m, d] after this layer from the states `x` before it."""
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
        self.q_proj = _matrix(size, width, has_bias, dtype)
        self.k_proj = _matrix(size, narrow, has_bias, dtype)
        self.v_proj = _matrix(size, narrow, has_bias, dtype)
        self.o_proj = _matrix(width, size, False, dtype)
        if config.model_type == "qwen3":
            self.q_norm = _Norm(self.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = _Norm(self.head_dim, config.rms_norm_eps, dtype)
        self._has_norms = config.model_type == "qwen3"

    def forward(self, h: Tensor, reading: _Reading) -> Tensor:
        """Compute the attention's output [1, m, d], which is added to the hidden states.

        `h` [1, m, d] are the normalized hidden states.
        """
        queries, keys, values = (
            one.view(1, h.shape[1], -1, self.head_dim)
            for one in _products((self.q_proj, self.k_proj, self.v_proj), h)
        )
        if self._has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = (_rotated(one, reading) for one in (queries, keys))
        values = values.transpose(1, 2).to(reading.kind)
        if reading.cache is not None:
            layer = reading.cache.layers[self.layer_idx]
            keys, values = layer.update(keys, values)
        found = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=reading.mask,
            is_causal=reading.mask is None and queries.shape[2] > 1,
            scale=self.scaling,
            enable_gqa=queries.shape[1] > keys.shape[1],
        )  # [1, H_q, m, D]
        if is_observed():
            options = {"scaling": self.scaling}
            exact = queries.float(), keys.float()
            report(AttentionCall(self.layer_idx, *exact, reading.mask, options, None))
        added: Tensor = self.o_proj(found.transpose(1, 2).flatten(2).to(h.dtype))
        return added


class Linear(nn.Linear):
    """A linear layer that is made without weights; a loader sets them later.

    torch would import a thousand files to fill the new weights with random numbers.
    """

    def reset_parameters(self) -> None:
        """Do nothing; torch's own method would fill the layer's weights with random numbers."""


class Embedding(nn.Embedding):
    """An embedding layer that is made without weights, like `Linear`; a loader sets them later."""

    def reset_parameters(self) -> None:
        """Do nothing; torch's own method would fill the embeddings with random numbers."""


class _Network(nn.Module):
    def __init__(self, size: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = _matrix(size, inner, False, dtype)
        self.up_proj = _matrix(size, inner, False, dtype)
        self.down_proj = _matrix(inner, size, False, dtype)

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
        """Compute cosines and sines of m rotary positions, [1, m, D] each, in the type of `x`."""
        angles = position_ids[..., None].float() * self.inv_freq  # [1, m, D / 2]
        both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def _frequencies(config: DecoderConfig) -> Tensor:
    """The angular frequencies [D / 2] of the rotary embedding (RoPE) that a config describes.

    If this is the RoPE of Llama 3.1, its low frequencies are reduced.
    """
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


def signed(sin: Tensor) -> Tensor:
    """Negate the first half of the last dimension of RoPE's sines [..., D].

    To rotate a head, these sines are multiplied with the head after its two halves are swapped.
    """
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), -1)


def _rotated(x: Tensor, reading: _Reading) -> Tensor:
    """Apply RoPE to queries or keys [1, m, H, D]; returns [1, H, m, D] in attention's type."""
    cos, sin = reading.cos[:, :, None], reading.sin[:, :, None]
    turned = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
    return turned.to(reading.kind).transpose(1, 2)


def _matrix(columns: int, rows: int, has_bias: bool, dtype: torch.dtype) -> Any:
    return Linear(columns, rows, bias=has_bias, device="meta", dtype=dtype)


def _products(layers: tuple[Any, ...], h: Tensor) -> list[Tensor]:
    """Apply several layers to the same input `h`; returns the output of each layer.

    If the layers' weights are joined into one matrix, one product computes all outputs.
    """
    joined = getattr(layers[0], "joined", None)
    if joined is None:
        return [layer(h) for layer in layers]
    parts = joined[0](h).split([layer.out_features for layer in layers], -1)
    return [y if one.bias is None else y + one.bias for one, y in zip(layers, parts, strict=True)]
