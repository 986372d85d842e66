"""Builds a small model, with random weights, of any family that the installed transformers has.

A family is the value of `model_type` in a model's config.json. The small model has the default
configuration of its family, but small values for the settings that are sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_MOST_WEIGHTS = 20_000_000

_SETTINGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # multi-head latent attention


def causal_families() -> list[str]:
    """The families (`model_type`) that transformers can load as causal language models."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def language_model_of(family: str) -> str | None:
    """The family of the language model inside a multimodal family; None for any other family."""
    config = CONFIG_MAPPING[family]
    inner = (getattr(config, "sub_configs", None) or {}).get("text_config")
    name = str(getattr(inner, "model_type", "")) or f"{family}_text"
    return name if inner is not None and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None


def small_config(family: str, **own: Any) -> Any:
    """The default configuration of a model family, with small sizes and with the settings `own`."""
    usual = CONFIG_MAPPING[family]().to_dict()
    sizes: dict[str, Any] = {
        name: size
        for size, names in _SETTINGS["sizes"].items()
        for name in names.split()
        if name in usual
    }
    if "kv_lora_rank" in usual:
        sizes |= {name: size for name, size in _LATENT.items() if name in usual}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CONFIG_MAPPING[family](**{**sizes, **tokens, **_SETTINGS["own"].get(family, {}), **own})


def build_small(family: str, **own: Any) -> Any:
    """Build a small model of a family with random weights, which are the same each time.

    Raises any error of transformers, and ValueError if the model would have more than 20 million
    weights.
    """
    config = small_config(family, **own)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    count = sum(weights.numel() for weights in outline.parameters())
    if count > _MOST_WEIGHTS:
        raise ValueError("too many weights even with small sizes")
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).eval()
    for name, weights in module.named_parameters():
        if name.endswith(".temp"):  # a factor of ZAYA's keys, which begins as zero
            torch.nn.init.ones_(weights)
    return module
