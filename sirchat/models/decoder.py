"""A model like Llama or Gemma 3, computed without transformers: it reads ids into a cache.

Its parts have transformers' names. Products and norms are computed in the number type of the
weights, attention in that of the cache: 16 bits with packed weights, in half the time of float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sirchat.memory.cache import BoundedCache, LayerRotation
from sirchat.memory.key_values import to_device
from sirchat.memory.rope import Rotation
from sirchat.models.attention_hook import OBSERVERS, AttentionCall, report_attention
from sirchat.models.model_config import ConfigValues, DecoderConfig

_NETWORK_ROWS = 256  # rows that a feed-forward network reads at a time, if that takes no longer


class Logits(NamedTuple):
    logits: Tensor  # [1, m, V]


class Decoder(nn.Module):
    """A causal language model with Llama-like layers; a loader sets its weights afterwards.

    `generation_config` says which ids end a reply; if the files have none, `config` says it.
    """

    reports_attention = True  # it reports its attention to observers itself

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.generation_config: ConfigValues = config
        self.model = DecoderBody(config, dtype)
        self.lm_head = _empty_linear(config.hidden_size, config.vocab_size, False, dtype)

    @property
    def device(self) -> torch.device:
        """Where the embeddings and the first layers are."""
        first: Any = self.model.layers[0]
        device: torch.device = first.input_layernorm.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The number type of the weights that are not packed."""
        return self.model.norm.weight.dtype

    @property
    def rotations(self) -> list[LayerRotation]:
        kinds = self.config.attention_kinds
        buffers = self.model.rotary_emb.buffers()
        found = (LayerRotation(Rotation(inv_freq.cpu().clone())) for inv_freq in buffers)
        rotations = dict(zip(sorted(set(kinds)), found, strict=True))
        return [rotations[kind] for kind in kinds]

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        self.model.embed_tokens = embeddings

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head

    def tie_weights(self) -> None:
        """If the config says so, share the weights of the embeddings with the output head."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def split(self, cpu_layers: int, device: torch.device) -> None:
        """Move all but the embeddings and the first layers, which stay on the CPU, to `device`."""
        if isinstance(self.lm_head, nn.Linear) and self.config.tie_word_embeddings:
            # `to` would move a shared parameter for both.
            self.lm_head.weight = nn.Parameter(self.lm_head.weight.detach().to(device))
            self.all_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
        for part in (*self.model.layers[cpu_layers:], self.model.norm, self.lm_head):
            part.to(device)
        self.model.cpu_layers = cpu_layers
        self.hf_device_map = {"model.layers.0": torch.device("cpu"), "model.norm": device}

    def forward(
        self, input_ids: Tensor, *, cache: BoundedCache | None = None, **inputs: Any
    ) -> Logits:
        """Read ids [1, m] as `DecoderBody.forward` does; returns the logits after each id."""
        (hidden,) = self.model(input_ids, cache=cache, **inputs)
        return Logits(self.lm_head(hidden))


class DecoderBody(nn.Module):
    """A `Decoder` without its output head: embeddings, layers and the last norm."""

    kernels: Any = None  # the module of Triton's kernels, on a GPU where they work

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        kind = ScaledEmbedding if _is_gemma(config) else Embedding
        self.embed_tokens: nn.Module = kind(config.vocab_size, size, device="meta", dtype=dtype)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(_Layer(config, index, dtype) for index in layers)
        self.windows = {kind: _window(config, kind) for kind in config.attention_kinds}
        self.norm = _Norm(size, config, dtype)
        self.rotary_emb = _Rotary(config)
        self.cpu_layers = 0  # number of the first layers that are on the CPU, the others elsewhere

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
        cache: BoundedCache | None = None,
    ) -> tuple[Tensor]:
        """Read ids [1, m] after the n slots of the cache; returns normalized states [1, m, d].

        `attention_mask` [1, 1, m, n + m], or a dictionary with one for each kind of layer, is added
        to the scores; None means causal attention. `position_ids` [1, m] are rotary; None means n,
        n + 1, ... `use_cache` is ignored: transformers passes it.
        """
        count, held = input_ids.shape[1], 0 if cache is None else cache.length
        device = input_ids.device
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(held, held + count, device=device)[None]
        cos, sin = self.rotary_emb(x, position_ids)  # [kinds, m, D]
        dtype = (None if cache is None else cache.dtype) or x.dtype
        masks = dict[int | None, Tensor | None]()
        masks_later_keys = self.kernels is not None and dtype.itemsize == 2  # by flash attention
        for kind, window in self.windows.items():
            mask = attention_mask[kind] if isinstance(attention_mask, dict) else attention_mask
            if mask is None and (window is not None or not masks_later_keys):
                mask = _causal_mask(held, count, window, device)
            masks[window] = None if mask is None else mask.to(dtype)
        inputs = _PassInputs(cos, signed(sin), dtype, masks, cache, self.kernels)
        for index, layer in enumerate(self.layers):
            if index and index == self.cpu_layers:
                x, inputs = inputs.moved_with(x, self.norm.weight.device)
            x = layer(x, inputs)
        return (self.norm(x, self.kernels),)


class Linear(nn.Linear):
    """A linear layer without values, because torch imports a thousand files to initialize them."""

    def reset_parameters(self) -> None:
        """Keep the weights uninitialized."""


class Embedding(nn.Embedding):
    """An embedding layer without values, like `Linear`."""

    def reset_parameters(self) -> None:
        """Keep the weights uninitialized."""


class ScaledEmbedding(Embedding):
    """An `Embedding` times the square root of its size d, as in Gemma."""

    embed_scale: Tensor

    def __init__(self, count: int, size: int, **options: Any) -> None:
        super().__init__(count, size, **options)
        self.scalar_embed_scale = size**0.5
        scale = torch.tensor(self.scalar_embed_scale)
        self.register_buffer("embed_scale", scale, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


def signed(sin: Tensor) -> Tensor:
    """Negate the first half of RoPE's sines [..., D]; they multiply a head with swapped halves."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), -1)


class _PassInputs(NamedTuple):
    cos: Tensor  # [kinds, m, D]
    sin: Tensor  # the same, by `signed`
    dtype: torch.dtype  # of attention
    masks: dict[int | None, Tensor | None]  # by window, added to the scores; None: only causal
    cache: BoundedCache | None
    kernels: Any  # Triton's, or None

    def moved_with(self, x: Tensor, device: torch.device) -> tuple[Tensor, Self]:
        """States x [1, m, d] and these inputs on `device`, by one copy."""
        given = {window: mask for window, mask in self.masks.items() if mask is not None}
        x, cos, sin, *moved = to_device([x, self.cos, self.sin, *given.values()], device)
        masks = self.masks | dict(zip(given, moved, strict=True))
        return x, self._replace(cos=cos, sin=sin, masks=masks)


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = _Attention(config, index, dtype)
        self.mlp = _Network(config, dtype)
        self.input_layernorm = _Norm(size, config, dtype)
        self.post_attention_layernorm = _Norm(size, config, dtype)
        self.has_post_norms = _is_gemma(config)  # after attention and after the network, too
        if self.has_post_norms:
            self.pre_feedforward_layernorm = _Norm(size, config, dtype)
            self.post_feedforward_layernorm = _Norm(size, config, dtype)

    def forward(self, x: Tensor, inputs: _PassInputs) -> Tensor:
        output: Tensor = self.self_attn(self.input_layernorm(x, inputs.kernels), inputs)
        if self.has_post_norms:
            x = x + self.post_attention_layernorm(output)
            output = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x, h = self.post_attention_layernorm.of_sum(x, output, inputs.kernels)
            output = self.mlp(h, inputs.kernels)
        return x + output


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        self.layer_idx, kind = index, config.attention_kinds[index]
        scaled_dim = config.query_pre_attn_scalar if _is_gemma(config) else self.head_dim
        self.scaling, self.window = scaled_dim**-0.5, _window(config, kind)
        self.rotation_index = sorted(set(config.attention_kinds)).index(kind)
        query_width = config.num_attention_heads * self.head_dim
        key_width = config.num_key_value_heads * self.head_dim
        has_bias = config.model_type == "qwen2"
        self.q_proj = _empty_linear(size, query_width, has_bias, dtype)
        self.k_proj = _empty_linear(size, key_width, has_bias, dtype)
        self.v_proj = _empty_linear(size, key_width, has_bias, dtype)
        self.o_proj = _empty_linear(query_width, size, False, dtype)
        self._has_norms = config.model_type in ("qwen3", "gemma3_text")
        if self._has_norms:
            self.q_norm = _Norm(self.head_dim, config, dtype)
            self.k_norm = _Norm(self.head_dim, config, dtype)

    def forward(self, h: Tensor, inputs: _PassInputs) -> Tensor:
        # h: the normalized hidden states [1, m, d]
        queries, keys, values = (
            rows.view(1, h.shape[1], -1, self.head_dim)
            for rows in _products((self.q_proj, self.k_proj, self.v_proj), h, inputs.kernels)
        )
        if self._has_norms:
            queries = self.q_norm(queries, inputs.kernels)
            keys = self.k_norm(keys, inputs.kernels)
        cos, sin = (table[self.rotation_index, :, None] for table in (inputs.cos, inputs.sin))
        queries, keys = (_rotated(x, cos, sin).to(inputs.dtype) for x in (queries, keys))
        mask = inputs.masks[self.window]
        values = values.transpose(1, 2).to(inputs.dtype)
        if inputs.cache is not None:
            layer = inputs.cache.layers[self.layer_idx]
            keys, values = layer.update(keys, values)
        shared = keys, values
        if queries.shape[2] == 1 and inputs.dtype.itemsize == 2:
            # Query heads that share a key head are faster as rows of one query: bfloat16 takes a
            # fifth of the time, float16 half.
            queries = queries.view(1, keys.shape[1], -1, self.head_dim)
        if mask is not None and not keys.is_cpu:  # fast kernels with a mask share no keys
            groups = queries.shape[1] // keys.shape[1]
            shared = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        if mask is None and keys.shape[2] > h.shape[1] > 1:
            # `is_causal` counts from the last key here, but below from the first one.
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            attended = flash(queries, *shared, is_causal=True, scale=self.scaling)[0]
        else:
            attended = F.scaled_dot_product_attention(
                queries,
                *shared,
                attn_mask=mask,
                is_causal=mask is None and h.shape[1] > 1,
                scale=self.scaling,
                enable_gqa=queries.shape[1] > shared[0].shape[1],
            )  # [1, H_q, m, D], or [1, H, H_q / H, D]
        attended = attended.reshape(1, -1, h.shape[1], self.head_dim)
        if OBSERVERS.get():
            options = {"scaling": self.scaling}
            rotated_rows = queries.view_as(attended).float(), keys.float()
            report_attention(AttentionCall(self.layer_idx, *rotated_rows, mask, options, None))
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2).to(h.dtype))
        return output


class _Network(nn.Module):
    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.uses_gelu = _is_gemma(config)
        self.gate_proj = _empty_linear(size, inner, False, dtype)
        self.up_proj = _empty_linear(size, inner, False, dtype)
        self.down_proj = _empty_linear(inner, size, False, dtype)

    def forward(self, h: Tensor, kernels: Any = None) -> Tensor:
        if not _NETWORK_ROWS < h.shape[1] <= getattr(self.gate_proj, "max_native_rows", 0):
            return self._output(h, kernels)
        # Of many rows the inner ones take much memory; each has the same bits among fewer.
        parts = h.tensor_split(-(-h.shape[1] // _NETWORK_ROWS), 1)
        return torch.cat([self._output(rows) for rows in parts], 1)

    def _output(self, h: Tensor, kernels: Any = None) -> Tensor:
        gate, up = _products((self.gate_proj, self.up_proj), h, kernels)
        output: Tensor = self.down_proj(gated(gate, up, kernels, uses_gelu=self.uses_gelu))
        return output


def gated(gate: Tensor, up: Tensor, kernels: Any = None, *, uses_gelu: bool) -> Tensor:
    """Activate `gate` by GELU or SiLU, and multiply it with `up`: a feed-forward network's core."""
    if kernels is not None:
        output: Tensor = kernels.gate(gate, up, dtype=gate.dtype)
        return output
    return (F.gelu(gate, approximate="tanh") if uses_gelu else F.silu(gate)).mul_(up)


class _Norm(nn.Module):
    """RMSNorm over the last dimension, in float32; `weight_offset` is added to the weights."""

    def __init__(self, size: int, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta", dtype=dtype))
        self.variance_epsilon, self.weight_offset = config.rms_norm_eps, float(_is_gemma(config))

    def forward(self, x: Tensor, kernels: Any = None) -> Tensor:
        if kernels is not None:
            return self.of_sum(x.contiguous(), None, kernels)[1]
        normed = F.rms_norm(x.float(), x.shape[-1:], None, self.variance_epsilon)
        if self.weight_offset:  # as in transformers, rounded only afterwards
            return normed.mul_(self.weight.float() + self.weight_offset).to(x.dtype)
        return normed.to(x.dtype).mul_(self.weight)

    def of_sum(self, x: Tensor, y: Tensor | None, kernels: Any) -> tuple[Tensor, Tensor]:
        """The sum x + y, or just x, and its norm."""
        if kernels is None:
            x = x if y is None else x + y
            return x, self(x)
        sums, normed = kernels.add_and_normalize(x, y, self.weight, self.variance_epsilon, x.dtype)
        return sums, normed


class _Rotary(nn.Module):
    """Computes the cosines and sines of rotary positions (RoPE), for each kind of layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        for kind in sorted(set(config.attention_kinds)):
            name = f"{kind}_inv_freq" if _is_gemma(config) else "inv_freq"
            self.register_buffer(name, _frequencies(config, kind), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = torch.stack(list(self.buffers()))[:, None]  # [kinds, 1, D / 2]
        angles = position_ids[..., None].float() * inv_freq  # [kinds, m, D / 2]
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _frequencies(config: DecoderConfig, kind: str) -> Tensor:
    """The angular frequencies [D / 2] of RoPE; Llama 3.1 lowers the low ones."""
    parameters, size = config.rope_parameters, config.head_dim
    parameters = parameters.get(kind, parameters)
    plain: Tensor = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size))
    if parameters["rope_type"] == "default":
        return plain
    if parameters["rope_type"] == "linear":
        plain /= parameters["factor"]
        return plain
    low, high, length = (
        parameters[name]
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    wavelengths = 2 * math.pi / plain  # tokens in a full turn, by frequency
    slow = torch.where(wavelengths > length / low, plain / parameters["factor"], plain)
    share = (length / wavelengths - low) / (high - low)
    between = (1 - share) * slow / parameters["factor"] + share * slow
    is_between = ~(wavelengths < length / high) & ~(wavelengths > length / low)
    return torch.where(is_between, between, slow)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE, cos and sin [m, 1, D], to [1, m, H, D]; returns [1, H, m, D]."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin).transpose(1, 2)


def _is_gemma(config: DecoderConfig) -> bool:
    return bool(config.model_type == "gemma3_text")


def _window(config: DecoderConfig, kind: str) -> int | None:
    return int(config.sliding_window) if "sliding" in kind else None


def _causal_mask(held: int, count: int, window: int | None, device: Any) -> Tensor | None:
    """The mask [1, 1, m, n + m] of m ids after n slots; None if torch's causal mask is enough."""
    is_narrow = window is not None and held + count > window
    if not is_narrow and not (held and count > 1):
        return None
    sees = torch.ones(count, held + count, dtype=torch.bool, device=device).tril(held)
    if window is not None:
        sees = sees.triu(held - window + 1)
    return torch.zeros(sees.shape, device=device).masked_fill_(~sees, -math.inf)[None, None]


def _empty_linear(columns: int, rows: int, has_bias: bool, dtype: torch.dtype) -> Any:
    return Linear(columns, rows, bias=has_bias, device="meta", dtype=dtype)


def _products(layers: tuple[Any, ...], h: Tensor, kernels: Any) -> list[Tensor]:
    """Apply several layers to one input, by a single product if their weights are joined."""
    joined = getattr(layers[0], "joined", None)
    # A captured step joins plain weights, too.
    if joined is None or (kernels is None and isinstance(layers[0], nn.Linear)):
        return [layer(h) for layer in layers]
    products = joined[0](h).split([layer.out_features for layer in layers], -1)
    pairs = zip(layers, products, strict=True)
    return [y if layer.bias is None else y + layer.bias for layer, y in pairs]
