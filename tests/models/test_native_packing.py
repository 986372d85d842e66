"""Matrices of GGUF files are packed by the library as by torch's operations, to the last bit."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest
import torch

from native_library import built_library, has_library
from sirchat.models import packed, products
from sirchat.models.gguf import blocks
from sirchat.models.gguf.blocks import NativePacking, split_four_bit, unpack_floats
from sirchat.models.gguf.header import FOUR_BIT, GgufTensor
from sirchat.models.packed import Int4Linear, quantize_int8

pytestmark = has_library

KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
COLUMNS = 512
# Rows of a block, and whether a byte has two that follow one another, on several processors.
LAYOUTS = [(64, False), (32, False), (32, True), (16, True)]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return products.load_library(built_library())


def random_blocks(kind: str, rows: int, rng: np.random.Generator) -> GgufTensor:
    """A matrix of blocks with all values of their bits, and with floats of usual sizes."""
    each, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows, COLUMNS // each, size), np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2))
    for at in halves if kind not in ("Q4_0", "Q5_0", "Q8_0") else (0,):
        floats = rng.normal(0, 1e-2, data.shape[:2]).astype(np.float16)
        data[:, :, at : at + 2] = floats[..., None].view(np.uint8)
    return GgufTensor((rows, COLUMNS), kind, data.reshape(-1))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_has_the_bits_of_torch(
    kind: str, threads: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows = 192
    tensor = random_blocks(kind, rows, np.random.default_rng(len(kind) + threads))
    order, native = torch.randperm(rows), NativePacking(library)
    assert native.can_read(tensor)
    q, scale = quantize_int8(unpack_floats(tensor)[order])
    made = native.eight(tensor, order, torch.empty)
    assert torch.equal(made.q, q)
    assert torch.equal(made.scale, scale)
    if kind not in FOUR_BIT:
        return
    for layout in LAYOUTS:
        for module in (blocks, packed):
            monkeypatch.setattr(module, "four_bit_layout", lambda layout=layout: layout)
        wanted = Int4Linear.of_nibbles(*(part[order] for part in split_four_bit(tensor)))
        four = native.four(tensor, order, torch.empty)
        assert torch.equal(four.packed, wanted.packed)
        assert torch.equal(four.scales, wanted.scales)
