"""The decode step of `step.cpp`: describes a model to the library once, then lets it read tokens.

Tokens that the library can't read are read by the model itself.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sirchat.memory.cache import BoundedCache, StepRows
from sirchat.models.decoder import Decoder, signed
from sirchat.models.devices import is_spread
from sirchat.models.model_config import LENGTH_DEPENDENT, LLAMA_KINDS, sliding_window
from sirchat.models.packed import (
    REFINED_LOGITS,
    BlockLinear,
    PackedLinear,
    RefinedHead,
    SharedEmbedding,
)

MAX_BATCH = 16  # tokens of conversations that are read in one call

_POSITIONS_PER_BLOCK = 256  # whose cosines and sines are computed together
_HEAD_DIM_MULTIPLE = 16  # numbers that `step.cpp` loads together

# As in `step.cpp`
_KIND_OF_BITS = {4: 0, 8: 1}
_KIND_OF_TYPE = {torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}  # float16 only in a cache
_WEIGHT_TYPES = (torch.float32, torch.bfloat16)

# An id, its rotary position, and the cache of its conversation.
TokenToRead = tuple[int, int, StepRows]


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Matrix(ctypes.Structure):
    _fields_ = [*_fields("kind n k", ctypes.c_int64), *_fields("weights scales", ctypes.c_void_p)]


class _Product(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int64), ("parts", _Matrix * 3), ("bias", ctypes.c_void_p)]


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_double)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_fields("attention added network last heads", _Norm),
        *_fields("queries_keys_values output gate_up down", _Product),
        *_fields("rotation_index window is_wanted", ctypes.c_int64),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *_fields("size inner queries keys head_size layer_count wanted", ctypes.c_int64),
        *_fields("cache_kind uses_gelu rounds_embeddings refined", ctypes.c_int64),
        *_fields("scale embedding_scale", ctypes.c_double),
        ("embeddings", _Matrix),
        ("norm", _Norm),
        ("head", _Product),
        ("layers", ctypes.POINTER(_Layer)),
    ]


class _Token(ctypes.Structure):
    _fields_ = [
        *_fields("id held capacity", ctypes.c_int64),
        *_fields("cos sin", ctypes.c_void_p),
        ("rotation_stride", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
    ]


class NativeStep:
    """Reads a token in each of a few conversations, or a few of one, by the library of `step.cpp`.

    `supports` must be true for the module. `dtype` is the number type of the cache. The hidden
    states after `wanted_layers`, counted from 1, are returned. Any thread may call the step, one at
    a time. Raises ValueError if the library can't compute the model.
    """

    @staticmethod
    def supports(module: Any) -> bool:
        """Whether a model is on a CPU and has only layers that `step.cpp` can compute."""
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
            and module.dtype in _WEIGHT_TYPES
        )

    def __init__(
        self,
        library: ctypes.CDLL,
        module: Any,
        dtype: torch.dtype,
        wanted_layers: Sequence[int] = (),
    ) -> None:
        self._kept_alive = list[object]()  # what the description has addresses of
        self._embeddings, self._rotary = module.get_input_embeddings(), module.model.rotary_emb
        self.dtype, self._number_type = dtype, module.dtype
        self._head_dim: int = module.model.layers[0].self_attn.head_dim
        self._positions_per_block = _POSITIONS_PER_BLOCK
        if getattr(self._rotary, "rope_type", "") in LENGTH_DEPENDENT:
            self._positions_per_block = 1  # later positions would change the frequencies
        self._rotations = dict[int, tuple[int, int, Tensor]]()
        model = self._describe_model(module, wanted_layers)
        self.vocab_size, self._id_count = _row_count(model.head), model.embeddings.n
        self._state_size, self._kv_heads = len(wanted_layers) * model.size, model.keys
        new, end = library.sirchat_new_step, library.sirchat_end_step
        new.restype, new.argtypes = ctypes.c_void_p, [ctypes.POINTER(_Model)]
        end.restype, end.argtypes = None, [ctypes.c_void_p]
        self._read = library.sirchat_read
        numbers, addresses = [ctypes.c_int64] * 2, [ctypes.c_void_p] * 2
        self._read.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Token), *numbers, *addresses]
        self._read.restype = ctypes.c_bool
        if not (step := new(ctypes.byref(model))):
            raise MemoryError("no memory is free for a native step")
        self._step = step
        # At the end of the process another thread may still read.
        weakref.finalize(self, end, self._step).atexit = False

    def fits(self, ids: Sequence[int], cache: StepRows) -> bool:
        """Whether the step can read a few ids into a cache: it has room and `dtype`."""
        if isinstance(cache, BoundedCache) and cache.pool is None and not cache.length:
            nothing = torch.empty(1, self._kv_heads, 0, self._head_dim, dtype=self.dtype)
            for layer in cache.row_layers:
                layer.update(nothing, nothing)
        pool = cache.pool
        has_room = len(ids) <= MAX_BATCH and cache.length + len(ids) <= cache.capacity
        are_valid = all(0 <= token_id < self._id_count for token_id in ids)
        return pool is not None and pool.dtype == self.dtype and has_room and are_valid

    @torch.inference_mode()
    def read(
        self, ids: Sequence[int], positions: Sequence[int], cache: BoundedCache
    ) -> tuple[Tensor, Tensor]:
        """Read ids [m] at rotary positions, which `fits` says fit; the caller commits the cache.

        Returns float32 logits [m, V] and the states [m, layers x d] of the wanted layers.
        """
        numbered = enumerate(zip(ids, positions, strict=True))
        return self._read_tokens([self._token(*token, cache, index) for index, token in numbered])

    @torch.inference_mode()
    def read_together(self, tokens: Sequence[TokenToRead]) -> tuple[Tensor, Tensor]:
        """Read one token (id, position, cache) in each of B conversations; reads the weights once.

        Returns logits [B, V] and states [B, layers x d]. Raises ValueError if one doesn't fit.
        """
        if not all(self.fits([token_id], cache) for token_id, _, cache in tokens):
            raise ValueError("a cache has no room")
        parts = (tokens[at : at + MAX_BATCH] for at in range(0, len(tokens), MAX_BATCH))
        results = (self._read_tokens([self._token(*one) for one in part]) for part in parts)
        logits, states = zip(*results, strict=True)
        return torch.cat(logits), torch.cat(states)

    def _read_tokens(self, tokens: list[_Token]) -> tuple[Tensor, Tensor]:
        tokens_in_c = (_Token * len(tokens))(*tokens)
        logits = torch.empty(len(tokens), self.vocab_size)
        states = torch.empty(len(tokens), self._state_size)
        count, threads = len(tokens), torch.get_num_threads()
        addresses = logits.data_ptr(), states.data_ptr()
        if not self._read(self._step, tokens_in_c, count, threads, *addresses):
            raise MemoryError("no memory is free to read a token")
        return logits, states

    def _token(self, token_id: int, position: int, cache: StepRows, index: int = 0) -> _Token:
        """Describe an id to be read into a cache after `index` others."""
        block, in_block = divmod(position, self._positions_per_block)
        cos, sin, _ = self._rotations.get(block) or self._rotation_block(block)
        offset, pool = 4 * in_block * self._head_dim, cache.pool  # bytes of float32
        assert pool is not None
        rotation_stride = self._positions_per_block * self._head_dim
        addresses = cos + offset, sin + offset, rotation_stride, pool.data_ptr()
        return _Token(token_id, cache.length + index, cache.capacity, *addresses)

    @torch.inference_mode()
    def _rotation_block(self, block: int) -> tuple[int, int, Tensor]:
        """Addresses of cosines and sines [kinds, positions, D] for a block of positions."""
        start, x = block * self._positions_per_block, torch.empty(0, dtype=self._number_type)
        cos_sin = self._rotary(x, torch.arange(start, start + self._positions_per_block)[None])
        cos, sin = (table.float() for table in cos_sin)
        both = torch.stack((cos, signed(sin)))
        size = both[0].nbytes
        entry = self._rotations[block] = both.data_ptr(), both.data_ptr() + size, both
        return entry

    @torch.no_grad()
    def _describe_model(self, module: Any, wanted_layers: Sequence[int]) -> _Model:
        described, layers = (_Layer * len(module.model.layers))(), module.model.layers
        attention, network = layers[0].self_attn, layers[0].mlp
        head = module.get_output_embeddings()  # None: only states are computed
        for index, (description, layer) in enumerate(zip(described, layers, strict=True), 1):
            if _sizes_of_layer(layer) != _sizes_of_layer(layers[0]):
                raise ValueError("layers of other sizes")
            self._describe_layer(description, layer)
            description.is_wanted = index in wanted_layers
        rotated_dim = self._rotation_block(0)[2].shape[-1]
        if self._head_dim % _HEAD_DIM_MULTIPLE or rotated_dim != self._head_dim:
            raise ValueError(f"heads of {self._head_dim} numbers, or some of them not rotated")
        self._kept_alive.append(described)
        heads = (one.out_features // self._head_dim for one in (attention.q_proj, attention.k_proj))
        return _Model(
            len(module.model.norm.weight),
            network.down_proj.in_features,
            *(*heads, self._head_dim, len(layers), len(wanted_layers)),
            *(_KIND_OF_TYPE[self.dtype], getattr(network, "uses_gelu", False)),
            self._number_type == torch.bfloat16,
            REFINED_LOGITS if isinstance(head, RefinedHead) else 0,
            attention.scaling,
            self._embedding_scale(),
            self._embedding_matrix(self._embeddings),
            _Norm() if head is None else self._norm(module.model.norm),
            _Product() if head is None else self._product(head),
            described,
        )

    def _describe_layer(self, description: _Layer, layer: Any) -> None:
        attention, network = layer.self_attn, layer.mlp
        description.attention = self._norm(layer.input_layernorm)
        description.network = self._norm(layer.post_attention_layernorm)
        if getattr(layer, "has_post_norms", False):
            description.added = description.network
            description.last = self._norm(layer.post_feedforward_layernorm)
            description.network = self._norm(layer.pre_feedforward_layernorm)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        if (norm := getattr(attention, "q_norm", None)) is not None:
            # of each query and key head, [H_q + H, D], as Qwen 3 and Gemma 3 have them
            norms = zip((norm, attention.k_norm), projections, strict=False)
            scales = [_scale(n).repeat(x.out_features // self._head_dim) for n, x in norms]
            description.heads = _Norm(self._address(torch.cat(scales)), norm.variance_epsilon)
        description.queries_keys_values = self._product(*projections)
        description.output = self._product(attention.o_proj)
        description.gate_up = self._product(network.gate_proj, network.up_proj)
        description.down = self._product(network.down_proj)
        description.rotation_index = getattr(attention, "rotation_index", 0)
        window = getattr(attention, "window", None)
        description.window = sys.maxsize if window is None else window

    def _norm(self, norm: Any) -> _Norm:
        return _Norm(self._address(_scale(norm)), norm.variance_epsilon)

    def _product(self, *layers: Any) -> _Product:
        joined = getattr(layers[0], "joined", None)
        parts = layers if joined is None else joined
        described = (_Matrix * 3)(*map(self._matrix, parts))
        biases = [layer.bias.float() for layer in layers if layer.bias is not None]
        if biases and len(biases) < len(layers):
            raise ValueError("a bias of some of the rows")
        bias = self._address(torch.cat(biases)) if biases else None
        return _Product(len(parts), described, bias)

    def _matrix(self, layer: Any) -> _Matrix:
        shape = layer.out_features, layer.in_features
        if not isinstance(layer, PackedLinear):
            if not isinstance(layer, nn.Linear):
                raise ValueError(f"a {type(layer).__name__}")
            if layer.out_features < 4 or layer.weight.dtype not in _WEIGHT_TYPES:
                raise ValueError(f"weights {list(shape)} of {layer.weight.dtype}")
            kind = _KIND_OF_TYPE[layer.weight.dtype]
            return _Matrix(kind, *shape, self._address(layer.weight), None)
        if not layer.fits_native_products:
            raise ValueError(f"packed weights of the shape {list(shape)}")
        weights = (self._address(getattr(layer, name)) for name in layer.row_dims)
        if isinstance(layer, BlockLinear):
            return _Matrix(layer.blocks.shape[2], *shape, *weights)
        return _Matrix(_KIND_OF_BITS[layer.bits], *shape, *weights)

    def _embedding_matrix(self, embeddings: Any) -> _Matrix:
        if isinstance(embeddings, SharedEmbedding):
            return self._matrix(embeddings.head)
        weight = embeddings.weight
        if weight.dtype not in _WEIGHT_TYPES:
            raise ValueError(f"embeddings of {weight.dtype}")
        return _Matrix(_KIND_OF_TYPE[weight.dtype], *weight.shape, self._address(weight), None)

    def _embedding_scale(self) -> float:
        scale = getattr(self._embeddings, "scalar_embed_scale", 1.0)
        if isinstance(self._embeddings, SharedEmbedding):
            scale = self._embeddings.scale
        return float(torch.tensor(scale, dtype=self._number_type))

    def _address(self, tensor: Tensor) -> int:
        if not tensor.is_contiguous():
            raise ValueError("weights that are not in one piece")
        self._kept_alive.append(tensor)
        return tensor.data_ptr()


def _row_count(product: _Product) -> int:
    return sum(product.parts[index].n for index in range(product.count))


def _scale(norm: Any) -> Tensor:
    scale: Tensor = norm.weight.float() + getattr(norm, "weight_offset", 0.0)
    return scale


def _sizes_of_layer(layer: Any) -> tuple[float, ...]:
    """The sizes that must be equal in all layers of a model."""
    attention, inner = layer.self_attn, layer.mlp.down_proj.in_features
    rows = attention.q_proj.out_features, attention.k_proj.out_features
    return attention.head_dim, attention.scaling, *rows, inner
