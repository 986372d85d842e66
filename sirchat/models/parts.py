"""The two parts of a model, module and tokenizer, from its files.

A GGUF file of a Llama-shaped model is read for a CPU without transformers, whose import alone takes
longer than reading the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sirchat.models.gguf.contents import has_blocks, is_supported
from sirchat.models.gguf.header import parse_gguf
from sirchat.models.hub import only_cached
from sirchat.models.probe import refuse_unsupported_layers
from sirchat.models.progress import Progress, reporting, switch_off_bars


def hub_parts(
    name: str,
    source: str,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """Module and tokenizer of a folder, GGUF file or hub id, as transformers reads them."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    switch_off_bars()
    is_gguf = "gguf_file" in options
    if not Path(source).is_dir():
        options = {**options, "local_files_only": only_cached(source)}
    if not is_gguf:  # a GGUF file has no config.json; the probe checks its layers
        config = AutoConfig.from_pretrained(source, **options)
        refuse_unsupported_layers(config.get_text_config(decoder=True), name)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    with reporting(progress) as reports:
        module = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=None if is_gguf else True,
            **options,
            **reports,
        )
    return module.to(device), tokenizer


def gguf_parts(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
    *,
    packs: bool | None,
    for_hub: bool = False,
) -> tuple[Any, Any] | None:
    """Module and tokenizer of a GGUF file; None if only transformers can read it.

    `packs` says whether weights in blocks stay packed; None for yes if there are any.
    """
    file = parse_gguf(path)
    from sirchat.models.gguf import loading, vocabulary

    if not is_supported(file):
        return None
    packs = has_blocks(file) if packs is None else packs
    is_hubs = for_hub or device.type != "cpu"
    load = vocabulary.hub_tokenizer if is_hubs else vocabulary.load_tokenizer
    tokenizer = load(str(path.parent), path.name, file)
    module = loading.load_module(file, dtype, progress, keep_packed=packs, for_hub=is_hubs)
    return module.to(device), tokenizer
