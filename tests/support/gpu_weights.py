"""Random packed weights of all kinds, in the layout of a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gguf_models import random_blocks
from sirchat.models import packing
from sirchat.models.gguf.blocks import split_blocks, unpack_floats
from sirchat.models.gguf.header import BLOCK_LAYOUTS
from sirchat.models.packed import (
    BlockGpuHead,
    BlockGpuLinear,
    GpuLinear,
    GpuWeights,
    Int4GpuLinear,
    Int8Linear,
)

BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
KINDS_OF_WEIGHTS = ["int8", "int4", *BLOCKS]


def packed(kind: str, rows: int, columns: int) -> tuple[GpuWeights, Tensor]:
    """Weights as the kernel reads them, and their values in float64."""
    layer: GpuLinear | Int8Linear
    if kind == "int8":
        q, scale = torch.randint(-127, 128, (rows, columns)), torch.rand(rows).bfloat16()
        layer = Int8Linear(q.to(torch.int8), scale)
        return layer.gpu_weights, q * scale.double()[:, None]
    if kind == "int4":
        q = torch.randint(0, 16, (rows, columns // 32, 32))
        scales = torch.rand(rows, columns // 32, 2).bfloat16()
        nibbles = q[..., :16] | q[..., 16:] << 4  # GGUF's order
        layer = Int4GpuLinear(nibbles.to(torch.uint8).view(rows, -1), scales)
        values = (q - 8) * scales[..., :1].double() + scales[..., 1:].double()
        return layer.gpu_weights, values.view(rows, columns)
    tensor = random_blocks(kind, rows, np.random.default_rng(rows), columns)
    layer = BlockGpuLinear(*split_blocks(tensor, torch.get_default_device()))
    return layer.gpu_weights, unpack_floats(tensor).double().to(torch.get_default_device())


def fill_with_blocks(module: Any, kinds: str) -> None:
    """Replace the matrices of a module by random blocks, as a loader does; last kind: values."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            shape = layer.out_features, np.random.default_rng(len(name)), layer.in_features
            kind = kinds.split(", ")[-name.endswith("v_proj")]
            parts = split_blocks(random_blocks(kind, *shape), module.device)
            is_head = layer is module.get_output_embeddings()
            packed_layer = (BlockGpuHead if is_head else BlockGpuLinear)(*parts, bias=layer.bias)
            module.set_submodule(name, packed_layer)
            packing.fuse_projections(module, name)


def column_count(kind: str, columns: int) -> int:
    """The number of columns rounded up to whole blocks."""
    size = BLOCK_LAYOUTS[kind].columns if kind in BLOCK_LAYOUTS else 32
    return -(-columns // size) * size
