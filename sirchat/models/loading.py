"""Loads a model by its name: chooses device, number types, packing, and the way to read files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from sirchat.errors import ModelError
from sirchat.models.devices import (
    DeviceName,
    DtypeName,
    pick_device,
    pick_dtype,
)
from sirchat.models.measuring import (
    CacheTypeName,
    UnpackName,
    choose_products,
)
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.names import locate, unloadable
from sirchat.models.packed import (
    four_bit_block,
)
from sirchat.models.packing import pack_module
from sirchat.models.parts import folder_parts, gguf_parts, hub_parts
from sirchat.models.placement import spread_of
from sirchat.models.probe import (
    refuse_foreign_tokenizer,
)
from sirchat.models.progress import Progress, no_warnings
from sirchat.models.threads import use_threads

Quantize = Literal["auto", "none", "packed", "int8", "int4"]
"""The setting `quantize`: how a CPU stores the weights of a model.

`none` unpacks the weights of a GGUF file; `packed` keeps them packed. `auto` means `packed` if the
file has weights in blocks of few bits, if the CPU can compute with packed weights, and if no dtype
was given; else `none`. `int8` rounds every matrix to eight bits with a scale for each row. `int4`
rounds every matrix to four bits with a scale and a minimum for each 32 weights, or to eight bits if
the shape of the matrix does not allow four.
"""


@no_warnings()
def load_model(
    name: str,
    *,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    threads: int = 0,
    quantize: Quantize = "auto",
    unpack: UnpackName = "auto",
    cache_type: CacheTypeName = "auto",
    for_hub: bool = False,
    device_map: str = "off",
    rows: int = 0,
) -> LoadedModel:
    """Load a model by its name: a bundled model, `smollm2`, a folder, a GGUF file, or a hub id.

    Weights are read from safetensors or GGUF only. With `for_hub`, module and tokenizer are always
    those of transformers, which can generate and be saved. `device`, `dtype`, `threads`, `quantize`
    and `device_map` are settings of `Profile`; `unpack` is the setting `unpack_dtype`, `cache_type`
    is `cache_dtype`. A device map leaves room for the KV cache of `rows` tokens. Raises
    ModelError if the model can't be loaded, or if tokens can't be evicted from its cache.
    """
    target, spread = pick_device(device), None
    if device_map != "off":
        spread = spread_of(name, device_map, rows, dtype, device=device, quantize=quantize)
        target, for_hub = spread.main_device, True
    if target.type == "cpu" or spread is not None:
        use_threads(threads)
    source, gguf = locate(name)
    try:
        if quantize not in ("auto", "none") and target.type != "cpu":
            raise ModelError(f"quantize={quantize} works on a CPU only, not on {target.type}")
        kind, found = pick_dtype(dtype, target), None
        if gguf:
            path, packs = Path(source) / gguf["gguf_file"], _packing(quantize, dtype, target)
            how: dict[str, Any] = {"for_hub": for_hub, "spread": spread}
            found = gguf_parts(path, target, kind, progress, packs=packs, **how)
        elif target.type == "cpu" and not for_hub and Path(source).is_dir():
            found = folder_parts(Path(source), kind, progress)
        if quantize == "packed" and not (gguf and found):
            why = f"the weights of {name!r} can't stay packed (in four or eight bits)"
            raise ModelError(why, hint="--quantize int8 works with any model")
        if found is None:
            options = {"trust_remote_code": trust_remote_code, **gguf}
            found = hub_parts(name, source, target, kind, progress, options, spread=spread)
        module, tokenizer = found
        refuse_foreign_tokenizer(module, tokenizer, name)
        if quantize in ("int8", "int4"):
            pack_module(module, 8 if quantize == "int8" else 4)
        choose_products(module, unpack)
        return replace(wrap_model(name, module.eval(), tokenizer), cache_type=cache_type)
    except ModelError:
        raise
    except Exception as error:  # for damaged files, the libraries raise all kinds of errors
        raise unloadable(name, error) from error


def _packing(quantize: Quantize, dtype: DtypeName, device: torch.device) -> bool | None:
    """Decide whether the weights of a GGUF file stay packed.

    Returns None if this depends on the file: its weights stay packed if they are in blocks of few
    bits.
    """
    if quantize == "auto" and dtype == "auto" and device.type == "cpu":
        return None if four_bit_block() else False
    return quantize == "packed"
