"""Matrices of GGUF files are packed by the library with the file's values, to the last bit.

In eight bits, where a format or shape is not the library's own, they are as by torch's operations.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from gguf_models import random_blocks, random_model, write_model
from native_library import built_library, has_library
from plain_model import load_model
from sirchat.config.profile import Profile
from sirchat.models import compiling, load, packed
from sirchat.models.fit import compute_fit
from sirchat.models.gguf import prepared
from sirchat.models.gguf.blocks import NativePacking, unpack_floats
from sirchat.models.gguf.header import BLOCK_LAYOUTS
from sirchat.models.gguf.prepared import WRITER_THREAD
from sirchat.models.listing import find_model
from sirchat.models.packed import BlockLinear, PackedLinear, quantize_int8
from sirchat.paths import compiled_dir, make_private_dir

pytestmark = has_library

KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return compiling.load_library(built_library())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_has_the_bits_of_torch(
    kind: str, threads: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows = 192
    tensor = random_blocks(kind, rows, np.random.default_rng(len(kind) + threads))
    order, native = torch.randperm(rows), NativePacking(library)
    assert native.can_pack_eight_bits(tensor)
    q, scale = quantize_int8(unpack_floats(tensor)[order])
    made = native.pack_eight_bits(tensor, order)
    assert torch.equal(made.q, q)
    assert torch.equal(made.scale, scale)
    assert BlockLinear.fits(kind, *tensor.shape) is (kind in BLOCK_LAYOUTS)
    if kind in BLOCK_LAYOUTS:
        own = native.pack_blocks(tensor, order)
        assert torch.equal(own.unpacked(torch.float32).T, unpack_floats(tensor)[order])


def wait_for_the_writer() -> None:
    for thread in threading.enumerate():
        if thread.name == WRITER_THREAD:
            thread.join()


def test_a_file_is_read_and_mapped_in_its_own_bits_and_values(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind_of(name: str, shape: tuple[int, ...]) -> str:
        return "F32" if len(shape) < 2 else "Q6_K" if "down" in name else "Q5_0"

    make_private_dir(compiled_dir())
    (compiled_dir() / compiling.library_name()).symlink_to(built_library())
    monkeypatch.setattr(prepared, "MIN_GGUF_BYTES", 0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 320}
    original = random_model("qwen2", tie_word_embeddings=True, **sizes)
    path = write_model(own_home / "model.gguf", original, "qwen2", kind_of)

    def bits_without_the_library() -> set[int]:
        with monkeypatch.context() as patch:
            patch.setattr(load, "wait_for_library", lambda: None)
            plain = load_model(str(path), device="cpu", compile="auto")
        wait_for_the_writer()
        return {one.bits for one in plain.module.modules() if isinstance(one, PackedLinear)}

    assert bits_without_the_library() == {8}
    ids = list(range(3, 23))
    with torch.inference_mode():
        wanted = original(torch.tensor([ids])).logits[0, -1]
    for _ in range(2):
        model = load_model(str(path), device="cpu", compile="on")
        wait_for_the_writer()
        monkeypatch.setattr(load, "parse_gguf", None)  # the second time, the file is mapped
        layers = model.module.model.layers[0]
        projections = layers.self_attn.q_proj, layers.mlp.gate_proj, layers.mlp.down_proj
        assert [one.bits for one in projections] == [5, 5, 6]
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
