"""Reads a model's config: context length, window and unsupported layers; the config of a `Decoder`.

Imports no slow library, so that models are listed quickly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Self

from sirchat.errors import ModelError, format_value

# Models whose layers are: norm, attention with RoPE, norm, gated feed-forward network.
LLAMA_KINDS = ("llama", "mistral", "qwen2", "qwen3")

# For each kind of layer that can't run here: the reason, as an error message gives it.
REFUSED_LAYERS = {
    "indexed_attention": "each picks the tokens to attend to by an index of its own, from which "
    "sirchat can't evict",
    "compressed_sparse_attention": "they store several tokens in one row, so no single token can "
    "be evicted",
}

ORIGINAL_LENGTH = "original_max_position_embeddings"
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Whole numbers of a config that must be above 0; and numbers of it and its RoPE, with their limits,
# outside of which a model writes nonsense. A list has one for each layer, or dimension.
_INTEGER_KEYS = (
    *(*_LENGTH_KEYS, "vocab_size", "hidden_size", "num_hidden_layers", "sliding_window"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
_NUMBER_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "factor"), (1, 1e12)),
    **dict.fromkeys(("short_factor", "long_factor", "low_freq_factor"), (0, 1e12)),
    **dict.fromkeys(("high_freq_factor", "attention_factor", ORIGINAL_LENGTH), (0, 1e12)),
    **dict.fromkeys(("beta_fast", "beta_slow", "query_pre_attn_scalar"), (0, 1e12)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (0, 1e12)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), (0, 0.5)),
    "partial_rotary_factor": (0, 1),
}
# Rotations (RoPE) that change their frequencies beyond a length: keys that are already in the cache
# would be wrong for the new frequencies, so the context ends there. `su` was the name of longrope.
LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
_MAX_FILE_BYTES = 1 << 24  # most bytes of a config.json; usual ones have a few kilobytes
_MAX_INTEGER = 1 << 32  # larger numbers count as invalid

_COMMON: dict[str, Any] = {"initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0}
_SILU = {"hidden_act": "silu"}
_QWEN: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
}
_GEMMA3: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "_sliding_window_pattern": 6,  # each sixth layer attends to all tokens
}
# For each model type that a `Decoder` computes: the config values that its GGUF files lack, as
# transformers sets them.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | _SILU | {"pretraining_tp": 1, "attention_bias": False, "mlp_bias": False},
    "qwen2": _COMMON | _SILU | _QWEN,
    "qwen3": _COMMON | _SILU | _QWEN | {"attention_bias": False},
    "gemma3_text": _COMMON | _GEMMA3,
}
_SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)
_UNSUPPORTED = ("attention_bias", "mlp_bias", "auto_map", "quantization_config", "rope_interleaved")
_ROPE_KEYS = {
    *("rope_theta", "rope_type", "factor", "low_freq_factor", "high_freq_factor"),
    ORIGINAL_LENGTH,
}


def load_config(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises ModelError if the file is missing, too large or no object."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelError(f"{path} can't be read: it is missing or too large")
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read: {type(error).__name__}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} can't be read: it is not a JSON object")
    return config


def context_length(config: Any) -> int | None:
    """The number of tokens that a model was trained for; None if the config does not say it.

    `config` is a config of transformers or a `ConfigValues`; invalid numbers count as missing.
    """
    lengths = (positive_int(getattr(config, name, None)) for name in _LENGTH_KEYS)
    limit = next(filter(None, lengths), None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if limit is None or not isinstance(rope, dict):
        return limit
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part.get("rope_type", part.get("type")) in LENGTH_DEPENDENT:
            original = positive_int(part.get(ORIGINAL_LENGTH))
            original = original or positive_int(getattr(config, ORIGINAL_LENGTH, None))
            limit = min(limit, original or limit)
    return limit


def refuse_invalid_numbers(config: Any, name: str) -> None:
    """Raise ModelError if a config's sizes, or its numbers for RoPE or norms, make no sense."""
    said = config.to_dict()
    rope = said.get("rope_parameters") or said.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    parts = [said, rope, *(part for part in rope.values() if isinstance(part, dict))]
    for key, part in product((*_INTEGER_KEYS, *_NUMBER_LIMITS), parts):
        value = part.get(key)
        if key == "sliding_window" and not (value and part.get("use_sliding_window", True)):
            continue
        least, most = _NUMBER_LIMITS.get(key, (1, _MAX_INTEGER))
        kind = "number" if key in _NUMBER_LIMITS else "whole number"
        for number in value if isinstance(value, list) else [value]:
            is_number = isinstance(number, int | float if kind == "number" else int)
            is_number = is_number and not isinstance(number, bool)
            if number is not None and not (is_number and number > 0 and least <= number <= most):
                limits = f"above 0, from {least:g} to {most:g}"
                rule = f"its config.json must have a {kind} {limits}"
                raise ModelError(f"{name} has {key} {format_value(value)}; {rule}")


def sliding_window(config: Any) -> int | None:
    """The width in tokens of a model's sliding-window layers; None if it has no such layers."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    if (
        window
        and getattr(config, "use_sliding_window", True)
        and (not kinds or any("sliding" in str(kind) for kind in kinds))
    ):
        return int(window)
    return None


def positive_int(value: object, limit: int = _MAX_INTEGER) -> int | None:
    """Return `value` if it is a whole number from 1 to `limit`, else None."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= limit:
        return value
    return None


class ConfigValues:
    """The values of a config file as attributes, as in transformers' configs."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def update(self, **values: Any) -> None:
        self._values.update(values)

    to_diff_dict = to_dict  # transformers' method of this name leaves out defaults


class DecoderConfig(ConfigValues):
    """The config of a `Decoder`, for values of transformers' config that `can_read` accepts.

    It keeps transformers' values, so that a saved chat recognizes the model, whoever loaded it.
    """

    head_dim: int

    def __init__(self, values: Mapping[str, Any]) -> None:
        values = dict(values)
        given, theta = values.pop("rope_parameters", {}), values.pop("rope_theta")
        # in transformers' order, on which the hash depends
        if values["model_type"] == "gemma3_text":
            near = values.pop("rope_local_base_freq", 10_000.0)
            bases = {"sliding_attention": near, "full_attention": theta}
            values["rope_parameters"] = {
                kind: {"rope_type": "default", **given.get(kind, {}), "rope_theta": bases[kind]}
                for kind in {**given, **bases}
            }
        else:
            rope = values["rope_parameters"] = {**given, "rope_theta": theta}
            rope.setdefault("rope_type", "default")
        super().__init__(_DEFAULTS[values["model_type"]] | values)
        layers, pattern = values["num_hidden_layers"], self._values.get("_sliding_window_pattern")
        if pattern or "max_window_layers" in self._values:
            self._values["layer_types"] = [
                "sliding_attention" if pattern and (at + 1) % pattern else "full_attention"
                for at in range(layers)
            ]

    @property
    def attention_kinds(self) -> list[str]:
        """The kind of each layer: `full_attention` or `sliding_attention`."""
        kinds: list[str] = self._values.get("layer_types") or []
        return kinds or ["full_attention"] * self.num_hidden_layers

    @staticmethod
    def can_read(values: Mapping[str, Any]) -> bool:
        """Whether `decoder.py` can compute a model of this type and these sizes."""
        sizes = [values.get(name) for name in _SIZE_KEYS]
        are_sizes = all(isinstance(size, int | float) and size > 0 for size in sizes)
        if values.get("model_type") not in _DEFAULTS or not are_sizes:
            return False
        unshared: int = values["num_attention_heads"] % values["num_key_value_heads"]
        odd: int = values["head_dim"] % 2
        rope = values.get("rope_parameters", {})
        scaling = rope.get("full_attention", rope).get("rope_type", "default")
        is_known = scaling in ("default", "llama3", "linear")
        if values["model_type"] == "gemma3_text":
            is_known = scaling in ("default", "linear")
            is_known = is_known and not values.get("final_logit_softcapping")
            is_known = is_known and positive_int(values.get("sliding_window")) is not None
        return unshared == odd == 0 and is_known

    @classmethod
    def of_folder(cls, values: Mapping[str, Any]) -> Self | None:
        """Make the config from the values of config.json; None if `decoder.py` can't compute it."""
        said: dict[str, Any] = {"pad_token_id": None, "rope_parameters": None, **values}
        scaling, theta = said.pop("rope_scaling", None), said.pop("rope_theta", None)
        rope = said["rope_parameters"] = {**(said["rope_parameters"] or scaling or {})}
        said["rope_theta"] = rope.get("rope_theta", theta)
        hidden, heads = said.get("hidden_size"), said.get("num_attention_heads")
        if said.get("head_dim") is None and isinstance(hidden, int) and heads:
            said["head_dim"] = hidden // heads
        if not said.get("use_sliding_window"):
            said |= {"sliding_window": None} if "sliding_window" in said else {}
        kinds = said.get("layer_types") or ()
        is_plain = (
            cls.can_read(said)
            and said["rope_theta"] is not None
            and rope.keys() <= _ROPE_KEYS
            and said.get("hidden_act") == "silu"
            and said.get("sliding_window") is None
            and (not kinds or len(kinds) == said["num_hidden_layers"])
            and all(kind == "full_attention" for kind in kinds)
            and not any(said.get(name) for name in _UNSUPPORTED)
            and said.get("pretraining_tp", 1) == 1
            and {"bos_token_id", "eos_token_id", "tie_word_embeddings"} <= said.keys()
        )
        if not is_plain:
            return None
        config = cls(said)
        # What transformers' config does not have must not change the model's fingerprint.
        if said["model_type"] == "qwen2" and "head_dim" not in values:
            config.head_dim = config._values.pop("head_dim")
        return config

    def get_text_config(self, decoder: bool = True) -> Self:
        """Return this config, because the model has only a part for text."""
        return self
