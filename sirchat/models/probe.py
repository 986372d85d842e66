"""Detects the rotary embedding (RoPE) of every layer; refuses models that do not allow eviction."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sirchat.errors import ModelError
from sirchat.memory.cache import BoundedCache, LayerKind, LayerRotation, row_layer_indices
from sirchat.memory.rope import Rotation, match_rotation, rotation_error
from sirchat.models.devices import input_device
from sirchat.models.model_config import REFUSED_LAYERS, context_length
from sirchat.models.packed import packed_buffers
from sirchat.text.template_sandbox import syntax_error

_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Of logits, read in passes of 4 and of 1: in float32; with rounded weights or products, which can
# change what experts are chosen. A state that is lost between passes of 1 changes them by 0.16.
_STATE_TOLERANCES = (1e-3, 1e-3), (0.03, 0.1)
_DISTANCES = (1, 17, 301)
# The ids that are tried until two have keys that are not zero.
_FIRST_TRIED, _MAX_TRIED = 5, 32
_MAX_SHOWN = 3  # weights that an error names
# What is wrong with weights of the files, by transformers' names for it.
_WEIGHT_ERRORS = {
    "missing": "lack weights that the model needs",
    "mismatched": "have weights of other shapes than its config.json says",
    "unexpected": "have weights that would be left out",
}
# The ends of names of tensors that change no number here: computed ones, and those of 8-bit caches.
_IGNORED_SUFFIXES = ("inv_freq", ".k_scale", ".v_scale")
# By position, both cached tensors [H, D] of each layer with keys.
_Samples = dict[int, list[tuple[Tensor, Tensor]]]
_CACHE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)


def cache_argument(module: Any, kv_cache: Any) -> dict[str, Any]:
    """The KV cache as a keyword argument: `past_key_values`, or `cache` from transformers 5.24."""
    return {_cache_name(type(module).forward): kv_cache}


def refuse_unusable_tokenizer(module: Any, tokenizer: Any, name: str) -> None:
    """Raise ModelError if the tokenizer has more tokens than the model, without added ones.

    Also raised if the files name no id that ends a text.
    """
    known, tokens = module.config.get_text_config(decoder=True).vocab_size, tokenizer.vocab_size
    if tokens > known:
        raise ModelError(
            f"the tokenizer of {name!r} has {tokens:,} tokens; the model has {known:,}",
            hint="use the tokenizer files that came with this model",
        )
    ends = getattr(module.generation_config, "eos_token_id", None)
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None and not isinstance(end, int):
            raise ModelError(f"the files of {name!r} say eos_token_id: {ends!r}; it must be an id")


def refuse_broken_template(tokenizer: Any, name: str) -> None:
    """Raise ModelError if the chat template can't be compiled, or if none of several is default."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        if "default" not in template:
            names = ", ".join(template)
            raise ModelError(f"{name!r} has chat templates ({names}), but none named default")
        template = template["default"]
    if template and (problem := syntax_error(str(template))):
        raise ModelError(f"the chat template of {name!r} is broken: {problem}")


def refuse_other_weights(module: Any, info: Mapping[str, Any], name: str) -> None:
    """Raise ModelError if files and model differ in their weights; `info` comes from transformers.

    The files may have weights of parts that the model lacks, such as a part for images.
    """
    found = {kind: sorted(info.get(f"{kind}_keys", ()), key=str) for kind in _WEIGHT_ERRORS}
    others = found["unexpected"]
    found["unexpected"] = [key for key in others if _would_be_used(module, key)]
    for kind, what in _WEIGHT_ERRORS.items():
        if keys := found[kind]:
            more = f", and {len(keys) - _MAX_SHOWN} more" if len(keys) > _MAX_SHOWN else ""
            hint = f"they have {others[0]} instead" if others and kind == "missing" else ""
            if keys == ["lm_head.weight"] and not others:
                hint = 'if it is that of the embeddings: "tie_word_embeddings": true in config.json'
            shown = ", ".join(key if isinstance(key, str) else key[0] for key in keys[:_MAX_SHOWN])
            raise ModelError(f"the files of {name!r} {what}: {shown}{more}", hint=hint)


def state_kinds(config: Any) -> list[LayerKind] | None:
    """The kind of each layer of a hybrid model; None if all layers have only keys and values."""
    if not hasattr(config, "num_hidden_layers"):
        return None
    from sirchat.memory.hub_cache import layer_kinds

    kinds = layer_kinds(config)
    return None if all(kind == (True, 0) for kind in kinds) else kinds


def refuse_unsupported_layers(config: Any, name: str) -> None:
    """Raise ModelError for an encoder-decoder model, and for layers that can't run here."""
    listed = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    refused = sorted({str(kind) for kind in listed or []} & set(REFUSED_LAYERS))
    if refused:
        raise ModelError(
            f"{name} has {refused[0]} layers; {REFUSED_LAYERS[refused[0]]}",
            hint="choose a model whose attention layers keep keys and values per token",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; sirchat runs causal language models")
    try:
        kinds = state_kinds(config)
    except KeyError as error:
        raise ModelError(f"{name} has {error.args[0]} layers; sirchat doesn't know them") from error
    if kinds is not None and not any(has_rows for has_rows, _ in kinds):
        raise ModelError(
            f"{name} has no attention layers, so there is nothing to evict",
            hint="choose a model with attention, or with attention beside recurrent layers",
        )


def probe_rotations(
    module: Any, name: str, kinds: list[LayerKind] | None = None
) -> list[LayerRotation]:
    """Detect the rotation (RoPE) of both cached tensors, usually keys and values, of each layer.

    `kinds` are the layer kinds of a hybrid model. Raises ModelError if a layer has no keys and
    values per token, or if these depend on the position otherwise (as learned positions do).
    """
    # For a single token, the hidden states do not depend on the position. So a layer's keys at two
    # positions differ by exactly that layer's rotation, unless they are zero (as padding's may be).
    config = module.config.get_text_config(decoder=True)
    context = context_length(config)
    distances = [d for d in _DISTANCES if context is None or d < context]
    numbers = range(config.num_hidden_layers) if kinds is None else list(row_layer_indices(kinds))
    blank = [LayerRotation(None)] * len(numbers)

    def sampled(token: int, *positions: int) -> _Samples:
        return {p: _cached_rows_of_token(module, token, p, name, blank, kinds) for p in positions}

    visible = list(islice(_visible_tokens(module, name, lambda token: sampled(token, 0)[0]), 2))
    samples = [
        {0: at_start} | sampled(token, *(distances if not at else distances[-1:]))
        for at, (token, at_start) in enumerate(visible)
    ]
    frequencies = {
        key: buffer
        for key, buffer in module.named_buffers()
        if "inv_freq" in key and "original" not in key
    }
    if dims := getattr(config, "rotary_dim", None):  # GPT-J and CodeGen have a table of sines
        frequencies["rotary_dim"] = 1e4 ** -(torch.arange(0, dims, 2) / dims)
    rotations = []
    for at, layer in enumerate(numbers):
        try:
            key, value = (_match_layer(samples, at, tensor, frequencies) for tensor in (0, 1))
        except LookupError as error:
            raise ModelError(
                f"{name} can't run with a limited cache: layer {layer}: {error}",
                hint="models with learned positions, such as GPT-2, cannot move their keys",
            ) from error
        rotations.append(LayerRotation(key=key, value=value))
    if kinds is None:  # else `probe_state` checks it
        _check_a_move(module, lambda: _hub_cache(rotations, 2), name)
    return rotations


def probe_state(
    module: Any, name: str, kinds: list[LayerKind], rotations: list[LayerRotation]
) -> bool:
    """Check that the recurrent state of a hybrid model can be restored and continued.

    Returns True if the state can be continued only by one token at a time. Raises ModelError if a
    copy of the state can't be continued: a turn could then not be undone.
    """
    vocabulary = int(module.config.get_text_config(decoder=True).vocab_size)
    ids = [(7 * at + 5) % vocabulary for at in range(12)]
    is_exact = module.dtype == torch.float32 and next(packed_buffers(module), None) is None
    tolerances = _STATE_TOLERANCES[0 if is_exact else 1]

    def new() -> BoundedCache:
        return _hub_cache(rotations, len(ids), kinds)

    try:
        expected = _read(module, ids, new(), 0)
        for size, tolerance in zip((4, 1), tolerances, strict=True):
            kv_cache = new()
            _read(module, ids[:4], kv_cache, 0)
            for at in range(4, len(ids), size):
                state, rows = kv_cache.state, torch.arange(at)
                _read(module, ids[:3], new(), 0)  # another chat
                _read(module, ids[5:6], kv_cache, at)  # an id that is taken back
                kv_cache.keep(rows)
                kv_cache.state = state
                logits = _read(module, ids[at : at + size], kv_cache, at)
            if (logits - expected).norm() <= tolerance * expected.norm():
                _check_a_move(module, new, name)
                return size == 1
    except _CACHE_ERRORS as error:
        raise ModelError(
            f"{name} can't run with a limited cache: its state can't be kept ({_first_line(error)})"
        ) from error
    raise ModelError(
        f"{name} can't run with a limited cache: the state of its recurrent layers can't be "
        "continued from a copy",
        hint="choose a model whose layers all keep keys and values per token",
    )


@cache
def _cache_name(forward: Any) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def _hub_cache(
    rotations: list[LayerRotation], capacity: int, kinds: list[LayerKind] | None = None
) -> BoundedCache:
    from sirchat.memory.hub_cache import HubCache

    return HubCache(rotations, capacity, kinds=kinds)


def _check_a_move(module: Any, new: Callable[[], BoundedCache], name: str) -> None:
    """Raise ModelError if a moved key of layer 0 differs from one computed at the new position."""

    # Both are read after the same token, which stays for one of them. Models that ignore the given
    # positions fail.
    def row(token: int, is_moved: bool) -> tuple[Tensor, Tensor]:
        kv_cache = new()
        _read(module, [token], kv_cache, 0)
        kv_cache.keep(torch.arange(int(is_moved)))
        _read(module, [token], kv_cache, int(is_moved))
        kv_cache.keep(torch.tensor([int(is_moved)]))
        return kv_cache.layer_keys(0)[0, :, 0].clone(), kv_cache.layer_values(0)[0, :, 0].clone()

    token, (at_start,) = next(_visible_tokens(module, name, lambda token: [row(token, False)]))
    for ours, theirs in zip(row(token, True), at_start, strict=True):
        gap = (ours.float() - theirs.float()).norm()
        if gap > _TOLERANCES[theirs.dtype] * theirs.float().norm():
            raise ModelError(
                f"{name} ({module.config.model_type}) can't run with a limited cache: its keys do "
                "not depend on the given positions",
                hint="models with learned positions cannot move their keys",
            )


def _would_be_used(module: Any, key: str) -> bool:
    """Whether an unknown tensor belongs to a part that the model has."""
    config = module.config.get_text_config(decoder=True)
    layer = re.search(r"\.(?:layers|h)\.(\d+)\.", key)
    predicts_more = getattr(config, "num_nextn_predict_layers", None)
    if layer and predicts_more and int(layer[1]) >= config.num_hidden_layers:
        return False
    prefix, _, rest = key.partition(".")
    owner = module.base_model if prefix == module.base_model_prefix else module
    part = rest.partition(".")[0] if owner is not module else prefix
    return hasattr(owner, part) and not key.endswith(_IGNORED_SUFFIXES)


def _visible_tokens(
    module: Any, name: str, read: Callable[[int], list[Any]]
) -> Iterator[tuple[int, list[Any]]]:
    """Yield ids with what `read` returns for each layer, without zeros, which show no rotation."""
    vocabulary = int(module.config.get_text_config(decoder=True).vocab_size)
    ids = [(_FIRST_TRIED + at) % vocabulary for at in range(min(_MAX_TRIED, vocabulary))]
    layers = ((token, read(token)) for token in ids)
    visible = (
        (token, found)
        for token, found in layers
        if all(tensor.any() for pair in found for tensor in pair if tensor.numel())
    )
    first = next(visible, None)
    if first:
        yield first
        yield from visible
        return
    raise ModelError(
        f"{name} can't run with a limited cache: the keys or values of all {len(ids)} tokens that "
        "were tried are zero, which does not show how they depend on the position"
    )


def _match_layer(
    tokens: list[_Samples], layer: int, tensor: int, frequencies: dict[str, Tensor]
) -> Rotation | None:
    """The rotation of a layer's tensor that the first token shows and all other tokens confirm."""
    first, *others = [
        {position: layers[layer][tensor] for position, layers in samples.items()}
        for samples in tokens
    ]
    tolerance = _TOLERANCES[first[0].dtype]
    rotation = match_rotation(first, frequencies, tolerance)
    if any(rotation_error(other, rotation) > tolerance for other in others):
        raise LookupError("the keys of two tokens depend on the position in different ways")
    return rotation


def _cached_rows_of_token(
    module: Any,
    token: int,
    position: int,
    name: str,
    rotations: list[LayerRotation],
    kinds: list[LayerKind] | None,
) -> list[tuple[Tensor, Tensor]]:
    """Read a token at `position`; returns both cached tensors [H, D] of each layer with keys."""
    config = module.config.get_text_config(decoder=True)
    kv_cache = _hub_cache(rotations, 1, kinds)
    count = len(kv_cache.layers)
    try:
        _read(module, [token], kv_cache, position)
        if len(kv_cache.layers) > count:
            raise ModelError(
                f"{name} ({config.model_type}) cannot be used: it adds layers to its cache"
            )
        return [
            (kv_cache.layer_keys(i)[0, :, 0].clone(), kv_cache.layer_values(i)[0, :, 0].clone())
            for i in range(len(rotations))
        ]
    except _CACHE_ERRORS as error:
        raise ModelError(
            f"{name} ({config.model_type}) cannot be used: its cache has no keys and values per "
            f"token ({_first_line(error)})"
        ) from error


@torch.inference_mode()
def _read(module: Any, ids: list[int], kv_cache: BoundedCache, position: int) -> Tensor:
    """Read ids [m] into the cache, from `position` on; returns the last logits [V]."""
    kv_cache.begin_pass()
    positions = torch.arange(position, position + len(ids), device=input_device(module))
    try:
        logits = module(
            input_ids=torch.tensor([ids], device=input_device(module)),
            position_ids=positions[None],
            use_cache=True,
            **cache_argument(module, kv_cache),
        ).logits
    except RuntimeError as error:  # torch's of a GPU, and of main memory
        # On Windows, torch says "not enough memory".
        if not re.search(r"(out of|can't allocate|not enough) memory", str(error)):
            raise
        raise MemoryError(f"too little memory is free ({_first_line(error)})") from error
    kv_cache.commit(len(ids))
    return torch.as_tensor(logits[0, -1].float())


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
