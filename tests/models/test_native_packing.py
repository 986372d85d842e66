"""Matrices of GGUF files are packed by the library as by torch's operations, to the last bit.

Those of five bits have the values of the file.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gguf_models import random_model, write_model
from native_library import built_library, has_library
from sirchat.config.profile import Profile
from sirchat.models import load, packed, prepared, products
from sirchat.models.compiling import use_compiled
from sirchat.models.fit import compute_fit
from sirchat.models.gguf import blocks
from sirchat.models.gguf.blocks import NativePacking, split_four_bit, unpack_floats
from sirchat.models.gguf.header import FIVE_BIT, FOUR_BIT, GgufTensor
from sirchat.models.gguf.prepared import WRITER_THREAD
from sirchat.models.listing import find_model
from sirchat.models.load import load_model
from sirchat.models.packed import Int4Linear, PackedLinear, quantize_int8
from sirchat.paths import compiled_dir, make_private_dir

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
    made = native.pack_eight_bits(tensor, order, torch.empty)
    assert torch.equal(made.q, q)
    assert torch.equal(made.scale, scale)
    if kind in FIVE_BIT:
        own = native.pack_five_bits(tensor, order, torch.empty)
        assert torch.equal(own.unpacked(torch.float32).T, unpack_floats(tensor)[order])
    if kind not in FOUR_BIT:
        return
    for layout in LAYOUTS:
        for module in (blocks, packed):
            monkeypatch.setattr(module, "int4_layout", lambda layout=layout: layout)
        wanted = Int4Linear.from_nibbles(*(part[order] for part in split_four_bit(tensor)))
        four = native.pack_four_bits(tensor, order, torch.empty)
        assert torch.equal(four.packed, wanted.packed)
        assert torch.equal(four.scales, wanted.scales)


def wait_for_the_writer() -> None:
    for thread in threading.enumerate():
        if thread.name == WRITER_THREAD:
            thread.join()


def test_a_file_of_five_bits_is_read_and_mapped_in_these_with_its_own_values(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind_of(name: str, shape: tuple[int, ...]) -> str:
        return "F32" if len(shape) < 2 else "Q6_K" if "down" in name else "Q5_0"

    make_private_dir(compiled_dir())
    (compiled_dir() / products.library_name()).symlink_to(built_library())
    monkeypatch.setattr(prepared, "MIN_GGUF_BYTES", 0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 320}
    original = random_model("qwen2", tie_word_embeddings=True, **sizes)
    path = write_model(own_home / "model.gguf", original, "qwen2", kind_of)

    def bits_without_the_library() -> set[int]:
        with monkeypatch.context() as patch:
            patch.setattr(load, "wait_for_library", lambda: None)
            plain = load_model(str(path), device="cpu", compiles=True)
        wait_for_the_writer()
        return {one.bits for one in plain.module.modules() if isinstance(one, PackedLinear)}

    assert bits_without_the_library() == {8}
    ids = list(range(3, 23))
    with torch.inference_mode():
        wanted = original(torch.tensor([ids])).logits[0, -1]
    for _ in range(2):
        model = load_model(str(path), device="cpu", compiles=True)
        use_compiled(model, "on")
        wait_for_the_writer()
        monkeypatch.setattr(load, "parse_gguf", None)  # the second time, the file is mapped
        layers = model.module.model.layers[0]
        projections = layers.self_attn.q_proj, layers.mlp.gate_proj, layers.mlp.down_proj
        assert [one.bits for one in projections] == [5, 5, 8]
        gate = original.model.layers[0].mlp.gate_proj.weight
        assert torch.equal(projections[1].unpacked(torch.float32).T, gate)
        cache = model.new_cache(32)
        model.forward(ids[:-1], cache)
        cache.commit(len(ids) - 1)
        alone, together = model.forward(ids[-1:], cache)[0], model.forward(ids, model.new_cache(32))
        for found in (alone, together[-1]):
            assert (found - wanted).norm() < 0.1 * wanted.norm()  # of all that is rounded
    assert bits_without_the_library() == {8}
    held = sum(one.nbytes for one in packed.packed_buffers(model.module))
    held += sum(one.nbytes for one in model.module.parameters())
    said = compute_fit(find_model(str(path)), Profile(device="cpu"), None).choices[0]
    assert said.weights == pytest.approx(held, rel=0.02)
    assert said.working == 0
    off = Profile(device="cpu", compile="off")
    assert compute_fit(find_model(str(path)), off, None).choices[0].working > 0
