"""Detects the rotary embedding of every layer; refuses models that do not allow eviction."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sirchat.errors import ModelError
from sirchat.memory.cache import BoundedCache
from sirchat.memory.cache_layers import LayerRotation
from sirchat.memory.rope import Rotation, match_rotation

_PER_TOKEN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_MISSING = {
    "indexed_attention": "each picks the tokens to attend to by an index of its own, from which "
    "sirchat can't evict",
    "compressed_sparse_attention": "they store several tokens in one row, so no single token can "
    "be evicted",
}
"""For a kind of layers, why sirchat can't run it."""

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_DISTANCES = (1, 17, 301)
_PROBE_TOKEN = 5
_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def cache_argument(module: Any, kv_cache: Any) -> dict[str, Any]:
    """The argument of `module.forward` that passes the KV cache.

    It is called `cache` from transformers 5.24 on, and `past_key_values` before.
    """
    return {_cache_name(type(module).forward): kv_cache}


@cache
def _cache_name(forward: Any) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def context_length(config: Any) -> int:
    """Number of tokens that the model was trained for.

    Some rotations change their frequencies beyond a certain length (dynamic NTK, longrope). Then
    that length is returned, since keys that are already in the cache could not be changed.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    declared = [int(getattr(config, name)) for name in names if getattr(config, name, None)]
    limit = declared[0] if declared else 2048
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(p for p in rope.values() if isinstance(p, dict))]:
        if parameters.get("rope_type") in _LENGTH_DEPENDENT:
            original = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, int(original or limit))
    return limit


def sliding_window(config: Any) -> int | None:
    """Width of the model's sliding-window layers, in tokens; None without such layers."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    if (
        window
        and getattr(config, "use_sliding_window", True)
        and (not kinds or "sliding_attention" in kinds)
    ):
        return int(window)
    return None


def refuse_foreign_tokenizer(module: Any, tokenizer: Any, name: str) -> None:
    """Raise ModelError if the tokenizer has more tokens than the model; added ones don't count."""
    known, tokens = module.config.get_text_config(decoder=True).vocab_size, tokenizer.vocab_size
    if tokens > known:
        raise ModelError(
            f"the tokenizer of {name!r} has {tokens:,} tokens; the model has {known:,}",
            hint="use the tokenizer files that came with this model",
        )


def refuse_stateful_layers(config: Any, name: str) -> None:
    """Raise ModelError for layers without keys and values per token, and for encoder-decoders."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    odd = sorted({str(kind) for kind in kinds} - _PER_TOKEN_LAYERS - {"attention"})
    if odd:
        missing = _MISSING.get(
            odd[0], "they do not store tokens separately, so no token can be evicted"
        )
        raise ModelError(
            f"{name} has {odd[0]} layers; {missing}",
            hint="choose a model whose layers all keep keys and values per token",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; sirchat runs causal language models")


def probe_rotations(module: Any, name: str) -> list[LayerRotation]:
    """The rotations of both cached tensors (usually keys and values) of every layer.

    Raises ModelError if a layer has no keys and values per token, or if they depend on the position
    in another way than a known rotation (learned positions, for example).
    """
    config = module.config.get_text_config(decoder=True)
    refuse_stateful_layers(config, name)
    distances = [d for d in _DISTANCES if d < context_length(config)]
    samples = {position: _sample(module, config, position, name) for position in (0, *distances)}
    frequencies = {
        key: buffer
        for key, buffer in module.named_buffers()
        if "inv_freq" in key and "original" not in key
    }
    if dims := getattr(config, "rotary_dim", None):  # GPT-J and CodeGen have a table of sines
        frequencies["rotary_dim"] = 1e4 ** -(torch.arange(0, dims, 2) / dims)
    rotations = []
    for layer in range(config.num_hidden_layers):
        try:
            found = [_match(samples, layer, slot, frequencies) for slot in (0, 1)]
        except LookupError as error:
            raise ModelError(
                f"{name} can't run with a limited cache: layer {layer}: {error}",
                hint="models with learned positions, such as GPT-2, cannot move their keys",
            ) from error
        rotations.append(LayerRotation(key=found[0], value=found[1]))
    _check_a_move(module, config, rotations, samples[0][0], name)
    return rotations


@torch.inference_mode()
def _check_a_move(
    module: Any,
    config: Any,
    rotations: list[LayerRotation],
    at_start: tuple[Tensor, Tensor],
    name: str,
) -> None:
    """Raise ModelError if a moved key differs from a key computed at its new position.

    One token is read twice and the first copy is evicted: the key and value left in
    layer 0 must equal `at_start`, computed at position 0. Models that ignore positions fail this.
    """
    kv_cache = BoundedCache(rotations, capacity=2)
    ids = [[_probe_token(config)] * 2]
    module(
        input_ids=torch.tensor(ids, device=module.device),
        use_cache=True,
        **cache_argument(module, kv_cache),
    )
    kv_cache.commit(2)
    kv_cache.keep(torch.tensor([1]))
    moved = (kv_cache.layer_keys(0)[0, :, 0], kv_cache.layer_values(0)[0, :, 0])
    for ours, theirs in zip(moved, at_start, strict=True):
        gap = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-30)
        if gap > _TOLERANCE[theirs.dtype]:
            raise ModelError(
                f"{name} ({config.model_type}) can't run with a limited cache: its keys "
                "do not depend on the given positions",
                hint="models with learned positions cannot move their keys",
            )


def _probe_token(config: Any) -> int:
    return min(_PROBE_TOKEN, int(config.vocab_size) - 1)


def _match(
    samples: dict[int, list[tuple[Tensor, Tensor]]],
    layer: int,
    slot: int,
    frequencies: dict[str, Tensor],
) -> Rotation | None:
    by_position = {position: layers[layer][slot] for position, layers in samples.items()}
    return match_rotation(by_position, frequencies, _TOLERANCE[by_position[0].dtype])


@torch.inference_mode()
def _sample(module: Any, config: Any, position: int, name: str) -> list[tuple[Tensor, Tensor]]:
    """Both cached tensors [H, D] of each layer after one token is read at `position`."""
    layers = config.num_hidden_layers
    kv_cache = BoundedCache([LayerRotation(None)] * layers, capacity=1)
    device = module.device
    try:
        module(
            input_ids=torch.tensor([[_probe_token(config)]], device=device),
            position_ids=torch.tensor([[position]], device=device),
            use_cache=True,
            **cache_argument(module, kv_cache),
        )
        kv_cache.commit(1)
        return [
            (kv_cache.layer_keys(i)[0, :, 0].clone(), kv_cache.layer_values(i)[0, :, 0].clone())
            for i in range(layers)
        ]
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"{name} ({config.model_type}) cannot be used: its cache has no keys and values per "
            f"token ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error
