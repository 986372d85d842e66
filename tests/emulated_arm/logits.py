"""Writes the logits of a GGUF model with four-bit weights: `python logits.py MODEL FILE HOW`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sirchat.models import compiling
from sirchat.models.load import load_model
from sirchat.models.packed import (
    UNLIMITED_ROWS,
    Int4Linear,
    MatmulMethod,
    int4_block_rows,
    set_matmul_method,
)

IDS = [index * 37 % 4000 + 10 for index in range(12)]
CHUNKS = (8, 1, 3)  # many rows, and few


@torch.inference_mode()
def main(name: str, file: str, how: Any) -> None:
    """Read `IDS` with packed weights (`own`: multiplied by our library), or in the type `how`."""
    model = load_model(name, dtype="auto" if how == "own" else how, compile="off")
    if how == "own":
        compiling.build_library(library := Path(file).with_suffix(".so"))
        compiling.load_library(library)
        set_matmul_method(model.module, MatmulMethod(max_native_rows=UNLIMITED_ROWS))
    cache, found, start = model.new_cache(len(IDS)), list[torch.Tensor](), 0
    for count in CHUNKS:
        found.append(model.forward(IDS[start : start + count], cache).float())
        cache.commit(count)
        start += count
    layers = [layer for layer in model.module.modules() if isinstance(layer, Int4Linear)]
    np.savez(
        file,
        logits=torch.cat(found).numpy(),
        block=int4_block_rows(),
        weights=sum(layer.in_features * layer.out_features for layer in layers),
        size=sum(buffer.nbytes for layer in layers for buffer in layer.buffers()),
    )


main(*sys.argv[1:])
