"""Loads the two parts of a model, module and tokenizer, from its files.

A Llama-shaped model is read for a CPU without transformers, whose import alone takes longer than
reading the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from sirchat.models.decoder import Decoder
from sirchat.models.decoder_config import ConfigValues, DecoderConfig
from sirchat.models.gguf.contents import has_blocks, is_supported, refuse_misread
from sirchat.models.gguf.header import parse_gguf
from sirchat.models.hub import only_cached
from sirchat.models.placement import Spread
from sirchat.models.probe import refuse_unsupported_layers
from sirchat.models.progress import Progress, reporting, switch_off_bars
from sirchat.text.tokenizer import tokenizer_of_folder


def hub_parts(
    name: str,
    source: str,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
    options: dict[str, Any],
    spread: Spread | None = None,
) -> tuple[Any, Any]:
    """Load module and tokenizer of a folder, a GGUF file or a hub id with transformers.

    The module is on `device`; with `spread`, its parts are on the devices that `spread` names.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    switch_off_bars()
    is_gguf = "gguf_file" in options
    if not Path(source).is_dir():
        options = {**options, "local_files_only": only_cached(source)}
    if not is_gguf:  # a GGUF file has no config.json; the probe checks its layers
        config = AutoConfig.from_pretrained(source, **options)
        refuse_unsupported_layers(config.get_text_config(decoder=True), name)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    placed: dict[str, Any] = {}
    if spread is not None and not is_gguf:
        trusts = options["trust_remote_code"]
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trusts
            )
        placed = spread.options(outline)
    with reporting(progress) as reports:
        module = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=None if is_gguf else True,
            **options,
            **placed,
            **reports,
        )
    if spread is None:
        return module.to(device), tokenizer
    spread.dispatch(module) if is_gguf else spread.finish(module)
    return module, tokenizer


def gguf_parts(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
    *,
    packs: bool | None,
    for_hub: bool = False,
    spread: Spread | None = None,
) -> tuple[Any, Any] | None:
    """Load module and tokenizer of a GGUF file; returns None if only transformers can read it.

    `packs` says whether weights in blocks of few bits stay packed; None means that they do, if the
    file has any. With `spread`, no weights stay packed, and the module's parts are moved to the
    devices that `spread` names.
    """
    file = parse_gguf(path)
    from sirchat.models.gguf import loading, vocabulary

    if not is_supported(file):
        refuse_misread(file)
        return None
    packs = spread is None and (has_blocks(file) if packs is None else packs)
    is_hubs = for_hub or device.type != "cpu"
    load = vocabulary.hub_tokenizer if is_hubs else vocabulary.load_tokenizer
    tokenizer = load(str(path.parent), path.name, file)
    module = loading.load_module(file, dtype, progress, keep_packed=packs, for_hub=is_hubs)
    if spread is None:
        return module.to(device), tokenizer
    spread.dispatch(module)
    return module, tokenizer


def folder_parts(
    folder: Path, dtype: torch.dtype, progress: Progress | None
) -> tuple[Any, Any] | None:
    """Load module and tokenizer of a folder with safetensors files, on the CPU.

    Returns None if transformers must read the folder instead. transformers can read more models,
    and its errors say what is wrong with a damaged folder.
    """
    try:
        config = DecoderConfig.of_folder(_json_of(folder / "config.json"))
        if config is None or not _is_whole(config, weights := _shapes(folder)):
            return None
        module = Decoder(config, dtype)
        if (generation := folder / "generation_config.json").exists():
            module.generation_config = ConfigValues(_json_of(generation))
        if not _read_weights(module, weights, progress):
            return None
        # For Qwen, transformers reads the tokenizer's files in another way.
        tokenizer = tokenizer_of_folder(folder) if config.model_type == "llama" else None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, SafetensorError):
        return None
    if tokenizer is None:
        from transformers import AutoTokenizer

        switch_off_bars()
        # Without it, transformers may ask on standard input whether to run a folder's code.
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return module, tokenizer


def _json_of(path: Path) -> dict[str, Any]:
    values = json.loads(path.read_text("utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return values


_Weights = dict[str, tuple[Path, tuple[int, ...]]]


def _shapes(folder: Path) -> _Weights:
    """For each weight in a folder's safetensors files, by its name: the file and the shape."""
    found: _Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                found[name] = path, tuple(file.get_slice(name).get_shape())
    return found


def _is_whole(config: DecoderConfig, weights: _Weights) -> bool:
    """Whether the weights agree with the config: they have its last layer and its embeddings' size.

    This is checked before a model is made.
    """
    last = f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight"
    embedding = weights.get("model.embed_tokens.weight")
    sizes = config.vocab_size, config.hidden_size
    return last in weights and embedding is not None and embedding[1] == sizes


def _read_weights(module: Decoder, weights: _Weights, progress: Progress | None) -> bool:
    """Read the weights from their files into a module.

    Returns False if the names or shapes of the weights differ from those of the module's
    parameters.
    """
    wanted = dict(module.named_parameters())
    if module.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    if {name: tuple(one.shape) for name, one in wanted.items()} != {
        name: shape for name, (_, shape) in weights.items()
    }:
        return False
    done = 0
    for path in dict.fromkeys(path for path, _ in weights.values()):
        with safe_open(path, framework="pt") as file:
            for name in (one for one, (of, _) in weights.items() if of == path):
                owner, _, own = name.rpartition(".")
                weight = file.get_tensor(name).to(wanted[name].dtype)
                setattr(module.get_submodule(owner), own, nn.Parameter(weight))
                done += 1
                if progress is not None:
                    progress("Reading weights", done, len(weights))
    module.tie_weights()
    return True
