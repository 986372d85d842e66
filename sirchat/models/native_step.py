"""The decode step of `step.cpp`: describes a model to it once, and lets it read tokens.

What it can't read, `decode_step.py` reads by torch's operations.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sirchat.memory.cache import BoundedCache
from sirchat.models.decoder import signed
from sirchat.models.model_config import LENGTH_DEPENDENT
from sirchat.models.packed import Int4Linear, Int8Head, Int8Linear, PackedLinear, SharedEmbedding

MOST = 16  # tokens of conversations that are read in one call

_AT_ONCE = 256  # positions whose cosines and sines are computed together
_LIKELIEST = 16  # largest logits of a packed head, which are computed in float32
_LANES = 16  # of a head's numbers, which `step.cpp` loads together

# As in `step.cpp`
_FOUR, _EIGHT = 0, 1
_KINDS = {torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}  # the last of a cache alone
_OF_WEIGHTS = (torch.float32, torch.bfloat16)

Read = tuple[
    int, int, BoundedCache
]  # an id, its rotary position, and the cache of its conversation


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Matrix(ctypes.Structure):
    _fields_ = [
        *_fields("kind n k", ctypes.c_int64),
        *_fields("weights scales", ctypes.c_void_p),
    ]


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

    `graph` is the `StepGraph` of a module. Any thread may call it, one at a time. Raises ValueError
    if the library can't compute such a model.
    """

    def __init__(self, library: ctypes.CDLL, graph: Any, module: Any) -> None:
        first = graph.layers[0]
        self._kept: list[object] = [graph]  # what the description has addresses of
        self._embeddings, self._rotary = module.get_input_embeddings(), module.model.rotary_emb
        self._dtype, self._number_type, self._size = first.dtype, module.dtype, first.size
        self._at_once = _AT_ONCE
        if getattr(self._rotary, "rope_type", "") in LENGTH_DEPENDENT:
            self._at_once = 1  # later positions would change the frequencies
        self._turns = dict[int, tuple[int, int, Tensor]]()
        model = self._described(graph)
        self.vocab_size, self._ids = _rows(model.head), model.embeddings.n
        self._states, self._keys = len(graph.wanted) * model.size, model.keys
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

    def __call__(self, tokens: Sequence[Read]) -> tuple[Tensor, Tensor]:
        """Read tokens, at most `MOST`, into their caches, which they must fit.

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

    def _described(self, graph: Any) -> _Model:
        first, embeddings = graph.layers[0], self._embeddings
        layers = (_Layer * len(graph.layers))()
        for at, (about, layer) in enumerate(zip(layers, graph.layers, strict=True)):
            self._describe(about, layer, first)
            about.is_wanted = at + 1 in graph.wanted
        keys = (first.queries_keys_values.rows // first.size - first.heads) // 2
        if first.size % _LANES or self._turned(0)[2].shape[-1] != first.size:
            raise ValueError(f"heads of {first.size} numbers, or some of them not rotated")
        is_packed = isinstance(graph.head, Int8Head)
        head = [graph.head] if is_packed else graph.head.parts
        bias = graph.head.bias
        self._kept.append(layers)
        return _Model(
            len(graph.norm.weight),
            first.down.parts[0].in_features,
            *(first.heads, keys, first.size, len(layers), len(graph.wanted)),
            *(_KINDS[first.dtype], first.has_gelu),
            self._number_type == torch.bfloat16,
            _LIKELIEST if is_packed else 0,
            first.scale,
            self._embedding_scale(),
            self._table(embeddings),
            self._norm(graph.norm),
            self._product(head, bias),
            layers,
        )

    def _describe(self, about: _Layer, layer: Any, first: Any) -> None:
        if _sizes(layer) != _sizes(first):
            raise ValueError("layers of other sizes")
        about.attention = self._norm(layer.attention_norm)
        about.network = self._norm(layer.network_norm)
        if layer.has_more_norms:
            about.added, about.last = self._norm(layer.added_norm), self._norm(layer.last_norm)
        if layer.head_scales is not None:
            about.heads = _Norm(self._address(layer.head_scales), layer.epsilon)
        for name in ("queries_keys_values", "output", "gate_up", "down"):
            product = getattr(layer, name)
            setattr(about, name, self._product(product.parts, product.bias))
        about.turn = layer.turn
        about.window = sys.maxsize if layer.window is None else layer.window

    def _norm(self, norm: Any) -> _Norm:
        return _Norm(self._address(norm.weight), norm.epsilon)

    def _product(self, parts: Sequence[Any], bias: Tensor | None) -> _Product:
        described = (_Matrix * 3)(*map(self._matrix, parts))
        if bias is not None:
            bias = bias.detach().float()
            if len(bias) != sum(part.out_features for part in parts):
                raise ValueError("a bias of some of the rows")
        return _Product(len(parts), described, None if bias is None else self._address(bias))

    def _matrix(self, layer: Any) -> _Matrix:
        shape = layer.out_features, layer.in_features
        if not isinstance(layer, PackedLinear):
            if layer.out_features < 4 or layer.weight.dtype not in _OF_WEIGHTS:
                raise ValueError(f"weights {list(shape)} of {layer.weight.dtype}")
            return _Matrix(_KINDS[layer.weight.dtype], *shape, self._address(layer.weight), None)
        if not layer.fits_own_products:
            raise ValueError(f"packed weights of the shape {list(shape)}")
        if isinstance(layer, Int4Linear):
            return _Matrix(_FOUR, *shape, *map(self._address, (layer.packed, layer.scales)))
        assert isinstance(layer, Int8Linear)
        return _Matrix(_EIGHT, *shape, *map(self._address, (layer.q, layer.scale)))

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


def _sizes(layer: Any) -> tuple[float, ...]:
    """What all layers of a model must have alike."""
    rows, inner = layer.queries_keys_values.rows, layer.down.parts[0].in_features
    return layer.size, layer.heads, layer.scale, rows, inner
