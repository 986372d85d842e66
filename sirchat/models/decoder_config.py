"""The config of a Llama-shaped model that `decoder.py` computes.

The config has the same values as transformers' config of the model. So a saved chat recognizes the
model, whether sirchat or transformers has loaded it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

_SHARED: dict[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "attention_dropout": 0.0,
}
_QWEN: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
}
_USUAL: dict[str, dict[str, Any]] = {
    "llama": _SHARED | {"pretraining_tp": 1, "attention_bias": False, "mlp_bias": False},
    "qwen2": _SHARED | _QWEN,
    "qwen3": _SHARED | _QWEN | {"attention_bias": False},
}
"""For each model type: the config values that its GGUF files lack, as transformers sets them."""

_NEEDED = (
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


_UNUSUAL = ("attention_bias", "mlp_bias", "auto_map", "quantization_config", "rope_interleaved")

_ROTATION = {
    *("rope_theta", "rope_type", "factor", "low_freq_factor", "high_freq_factor"),
    "original_max_position_embeddings",
}
"""The names of the RoPE settings that `decoder.py` can apply."""


class ConfigValues:
    """The values of a config file as attributes of an object, as in transformers' configs."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to_dict(self) -> dict[str, Any]:
        """All config values, by name."""
        return dict(self._values)

    def to_diff_dict(self) -> dict[str, Any]:
        """All config values, by name; transformers' method of this name leaves out defaults."""
        return dict(self._values)


class DecoderConfig(ConfigValues):
    """The config of a model that `decoder.py` can compute; the values are attributes.

    Args:
        values: config values, named as in transformers; `can_read` must be true for them.
    """

    head_dim: int

    def __init__(self, values: Mapping[str, Any]) -> None:
        own = dict(values)
        rotation = {**own.pop("rope_parameters", {}), "rope_theta": own.pop("rope_theta")}
        rotation.setdefault("rope_type", "default")
        own["rope_parameters"] = rotation  # in transformers' order, on which the hash depends
        super().__init__(_USUAL[own["model_type"]] | own)
        if "max_window_layers" in self._values:
            self._values["layer_types"] = ["full_attention"] * own["num_hidden_layers"]

    @staticmethod
    def can_read(values: Mapping[str, Any]) -> bool:
        """Whether `decoder.py` can compute a model whose type and sizes are those in `values`.

        `values` are config values, named as in transformers.
        """
        sizes = [values.get(one) for one in _NEEDED]
        are_sizes = all(isinstance(one, int | float) and one > 0 for one in sizes)
        if values.get("model_type") not in _USUAL or not are_sizes:
            return False
        unshared: int = values["num_attention_heads"] % values["num_key_value_heads"]
        odd: int = values["head_dim"] % 2
        return unshared == odd == 0

    @classmethod
    def of_folder(cls, values: Mapping[str, Any]) -> Self | None:
        """Make the config from the `values` in a model folder's `config.json`.

        Returns None if `decoder.py` can't compute the model.
        """
        own: dict[str, Any] = {"pad_token_id": None, "rope_parameters": None, **values}
        scaled, theta = own.pop("rope_scaling", None), own.pop("rope_theta", None)
        rotation = own["rope_parameters"] = {**(own["rope_parameters"] or scaled or {})}
        own["rope_theta"] = rotation.get("rope_theta", theta)
        hidden, heads = own.get("hidden_size"), own.get("num_attention_heads")
        if own.get("head_dim") is None and isinstance(hidden, int) and heads:
            own["head_dim"] = hidden // heads
        if not own.get("use_sliding_window"):
            own |= {"sliding_window": None} if "sliding_window" in own else {}
        kinds = own.get("layer_types") or ["full_attention"]
        is_plain = (
            cls.can_read(own)
            and own["rope_theta"] is not None
            and rotation.get("rope_type", "default") in ("default", "llama3")
            and rotation.keys() <= _ROTATION
            and own.get("hidden_act") == "silu"
            and own.get("sliding_window") is None
            and set(kinds) == {"full_attention"}
            and not any(own.get(name) for name in _UNUSUAL)
            and own.get("pretraining_tp", 1) == 1
            and {"bos_token_id", "eos_token_id", "tie_word_embeddings"} <= own.keys()
        )
        if not is_plain:
            return None
        config = cls(own)
        # What transformers' config does not have must not change the model's fingerprint.
        if own["model_type"] == "qwen2" and "head_dim" not in values:
            config.head_dim = config._values.pop("head_dim")
        return config

    def get_text_config(self, decoder: bool = True) -> Self:
        """Return this config itself, because the model has only a part for text.

        transformers' configs have this method, too; they may describe other parts, such as one for
        images.
        """
        return self
