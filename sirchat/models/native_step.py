"""The decode step of `step.cpp`: describes a model to it once, and lets it read tokens.

What it can't read, the model itself reads.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sirchat.memory.cache import BoundedCache
from sirchat.models.decoder import signed
from sirchat.models.model_config import LENGTH_DEPENDENT
from sirchat.models.packed import Int8Head, PackedLinear, SharedEmbedding

MAX_BATCH = 16  # tokens of conversations that are read in one call

_AT_ONCE = 256  # positions whose cosines and sines are computed together
_LIKELIEST = 16  # largest logits of a packed head, which are computed in float32
_LANES = 16  # of a head's numbers, which `step.cpp` loads together

# As in `step.cpp`
_PACKED = {4: 0, 5: 1, 8: 2}  # by bits
_KINDS = {torch.float32: 3, torch.bfloat16: 4, torch.float16: 5}  # the last of a cache alone
_OF_WEIGHTS = (torch.float32, torch.bfloat16)

TokenToRead = tuple[
    int, int, BoundedCache
]  # an id, its rotary position, and the cache of its conversation


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
        *_fields("turn window is_wanted", ctypes.c_int64),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *_fields("size inner queries keys head_size layer_count wanted", ctypes.c_int64),
        *_fields("cache_kind has_gelu rounds_embeddings refined", ctypes.c_int64),
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
        ("apart", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
    ]


class NativeStep:
    """Reads one token in each of a few conversations by the library of `step.cpp`.

    `dtype` is the cache's number type; `wanted` are the layers, counted from 1, whose hidden states
    are returned. Any thread may call it, one at a time. Raises ValueError if the library can't
    compute such a model.
    """

    def __init__(
        self, library: ctypes.CDLL, module: Any, dtype: torch.dtype, wanted: Sequence[int] = ()
    ) -> None:
        self._kept = list[object]()  # what the description has addresses of
        self._embeddings, self._rotary = module.get_input_embeddings(), module.model.rotary_emb
        self._dtype, self._number_type = dtype, module.dtype
        self._size: int = module.model.layers[0].self_attn.head_dim
        self._at_once = _AT_ONCE
        if getattr(self._rotary, "rope_type", "") in LENGTH_DEPENDENT:
            self._at_once = 1  # later positions would change the frequencies
        self._turns = dict[int, tuple[int, int, Tensor]]()
        model = self._described(module, wanted)
        self.vocab_size, self._ids = _rows(model.head), model.embeddings.n
        self._states, self._keys = len(wanted) * model.size, model.keys
        new, end = library.sirchat_new_step, library.sirchat_end_step
        new.restype, new.argtypes = ctypes.c_void_p, [ctypes.POINTER(_Model)]
        end.restype, end.argtypes = None, [ctypes.c_void_p]
        self._read = library.sirchat_read
        numbers, addresses = [ctypes.c_int64] * 2, [ctypes.c_void_p] * 2
        self._read.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Token), *numbers, *addresses]
        self._read.restype = None
        self._step = new(ctypes.byref(model))
        # At the end of the process another thread may still read.
        weakref.finalize(self, end, self._step).atexit = False

    def fits(self, token_id: int, cache: BoundedCache) -> bool:
        """Whether it can read a token: it knows the id, and the cache has room and its type."""
        if cache.pool is None and not cache.length:
            nothing = torch.empty(1, self._keys, 0, self._size, dtype=self._dtype)
            for layer in cache.row_layers:
                layer.update(nothing, nothing)
        pool = cache.pool
        has_room = cache.length < cache.capacity and 0 <= token_id < self._ids
        return pool is not None and pool.dtype == self._dtype and has_room

    def __call__(self, tokens: Sequence[TokenToRead]) -> tuple[Tensor, Tensor]:
        """Read tokens, at most `MAX_BATCH`, into their caches, which they must fit.

        Returns float32 logits [B, V] and the states [B, layers x d] of the wanted layers.
        """
        given = (_Token * len(tokens))(*(self._token(*one) for one in tokens))
        logits = torch.empty(len(tokens), self.vocab_size)
        states = torch.empty(len(tokens), self._states)
        count, threads = len(tokens), torch.get_num_threads()
        self._read(self._step, given, count, threads, logits.data_ptr(), states.data_ptr())
        return logits, states

    def _token(self, token_id: int, position: int, cache: BoundedCache) -> _Token:
        block, at = divmod(position, self._at_once)
        cos, sin, _ = self._turns.get(block) or self._turned(block)
        skipped, rows = 4 * at * self._size, cache.pool
        assert rows is not None
        apart = self._at_once * self._size
        addresses = cos + skipped, sin + skipped, apart, rows.data_ptr()
        return _Token(token_id, cache.length, cache.capacity, *addresses)

    @torch.inference_mode()
    def _turned(self, block: int) -> tuple[int, int, Tensor]:
        """Addresses of the cosines and sines [kinds, positions, D] of a block of positions."""
        start, x = block * self._at_once, torch.empty(0, dtype=self._number_type)
        turns = self._rotary(x, torch.arange(start, start + self._at_once)[None])
        cos, sin = (turn.float() for turn in turns)
        both = torch.stack((cos, signed(sin)))
        size = 4 * both[0].numel()
        found = self._turns[block] = both.data_ptr(), both.data_ptr() + size, both
        return found

    @torch.no_grad()
    def _described(self, module: Any, wanted: Sequence[int]) -> _Model:
        described, layers = (_Layer * len(module.model.layers))(), module.model.layers
        attention, network, head = (
            layers[0].self_attn,
            layers[0].mlp,
            module.get_output_embeddings(),
        )
        for at, (about, layer) in enumerate(zip(described, layers, strict=True), 1):
            if _sizes(layer) != _sizes(layers[0]):
                raise ValueError("layers of other sizes")
            self._describe(about, layer)
            about.is_wanted = at in wanted
        if self._size % _LANES or self._turned(0)[2].shape[-1] != self._size:
            raise ValueError(f"heads of {self._size} numbers, or some of them not rotated")
        self._kept.append(described)
        heads = (one.out_features // self._size for one in (attention.q_proj, attention.k_proj))
        return _Model(
            len(module.model.norm.weight),
            network.down_proj.in_features,
            *(*heads, self._size, len(layers), len(wanted)),
            *(_KINDS[self._dtype], getattr(network, "has_gelu", False)),
            self._number_type == torch.bfloat16,
            _LIKELIEST if isinstance(head, Int8Head) else 0,
            attention.scaling,
            self._embedding_scale(),
            self._table(self._embeddings),
            self._norm(module.model.norm),
            self._product(head),
            described,
        )

    def _describe(self, about: _Layer, layer: Any) -> None:
        attention, network = layer.self_attn, layer.mlp
        about.attention = self._norm(layer.input_layernorm)
        about.network = self._norm(layer.post_attention_layernorm)
        if getattr(layer, "has_post_norms", False):
            about.added, about.last = about.network, self._norm(layer.post_feedforward_layernorm)
            about.network = self._norm(layer.pre_feedforward_layernorm)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        if (norm := getattr(attention, "q_norm", None)) is not None:
            # of each query and key head, [H_q + H, D], as Qwen 3 and Gemma 3 have them
            each = zip((norm, attention.k_norm), projections, strict=False)
            scales = [_scale(one).repeat(of.out_features // self._size) for one, of in each]
            about.heads = _Norm(self._address(torch.cat(scales)), norm.variance_epsilon)
        about.queries_keys_values = self._product(*projections)
        about.output = self._product(attention.o_proj)
        about.gate_up = self._product(network.gate_proj, network.up_proj)
        about.down = self._product(network.down_proj)
        about.turn, window = getattr(attention, "turn", 0), getattr(attention, "window", None)
        about.window = sys.maxsize if window is None else window

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
            if layer.out_features < 4 or layer.weight.dtype not in _OF_WEIGHTS:
                raise ValueError(f"weights {list(shape)} of {layer.weight.dtype}")
            return _Matrix(_KINDS[layer.weight.dtype], *shape, self._address(layer.weight), None)
        if not layer.fits_native_products:
            raise ValueError(f"packed weights of the shape {list(shape)}")
        weights = (self._address(getattr(layer, name)) for name in layer.row_dims)
        return _Matrix(_PACKED[layer.bits], *shape, *weights)

    def _table(self, embeddings: Any) -> _Matrix:
        if isinstance(embeddings, SharedEmbedding):
            return self._matrix(embeddings.head)
        weight = embeddings.weight
        if weight.dtype not in _OF_WEIGHTS:
            raise ValueError(f"embeddings of {weight.dtype}")
        return _Matrix(_KINDS[weight.dtype], *weight.shape, self._address(weight), None)

    def _embedding_scale(self) -> float:
        """What embeddings are multiplied by, rounded to their type."""
        scale = getattr(self._embeddings, "scalar_embed_scale", 1.0)
        if isinstance(self._embeddings, SharedEmbedding):
            scale = self._embeddings.scale
        return float(torch.tensor(scale, dtype=self._number_type))

    def _address(self, tensor: Tensor) -> int:
        if not tensor.is_contiguous():
            raise ValueError("weights that are not in one piece")
        self._kept.append(tensor)
        return tensor.data_ptr()


def _rows(product: _Product) -> int:
    return sum(product.parts[at].n for at in range(product.count))


def _scale(norm: Any) -> Tensor:
    scale: Tensor = norm.weight.float() + getattr(norm, "added", 0.0)
    return scale


def _sizes(layer: Any) -> tuple[float, ...]:
    """What all layers of a model must have alike."""
    one, inner = layer.self_attn, layer.mlp.down_proj.in_features
    rows = one.q_proj.out_features, one.k_proj.out_features
    return one.head_dim, one.scaling, *rows, inner
