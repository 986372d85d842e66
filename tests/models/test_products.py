"""The library compiled here: products near exact and always the same, packing without loss."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gguf_models import random_blocks, random_model, wait_for_writer, write_model
from native_library import built_library, has_library, loaded_library
from plain_model import load_model
from sirchat.config.profile import Profile
from sirchat.engine.reader import Reader
from sirchat.memory.ledger import Ledger
from sirchat.models import compiling, load
from sirchat.models.fit import compute_fit
from sirchat.models.gguf import prepared
from sirchat.models.gguf.blocks import NativePacking, unpack_floats
from sirchat.models.gguf.header import BLOCK_LAYOUTS
from sirchat.models.listing import find_model
from sirchat.models.packed import (
    GROUP,
    UNLIMITED_ROWS,
    BlockLinear,
    Int4Linear,
    Int8Linear,
    MatmulMethod,
    PackedLinear,
    has_matrix_units,
    int4_block_rows,
    packed_buffers,
    set_matmul_method,
)
from sirchat.models.packing import quantize_int8
from sirchat.models.surprisal import surprisal_of_states
from sirchat.paths import compiled_dir, make_private_dir

pytestmark = has_library

ATTACK = int(os.environ.get("SIRCHAT_ATTACK", 1))


@pytest.fixture(scope="module", autouse=True)
def native() -> NativePacking:
    return NativePacking(compiling.load_library(built_library()))


def rounded(x: Tensor) -> Tensor:
    """What the rows become: in each group of 32 columns, 255 steps from the largest number on."""
    groups = x.view(len(x), -1, GROUP)
    step = groups.abs().amax(-1, keepdim=True) / 127
    return torch.nan_to_num(groups / step).round().mul(step).view_as(x)


def four_bits(rows: int, columns: int, seed: int) -> Int4Linear:
    made = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (rows, columns), generator=made)
    scale, minimum = (torch.rand(2, rows, columns // GROUP, generator=made) * 2 - 1).unbind()
    layer = Int4Linear.from_values(q.to(torch.uint8), scale, minimum * 8)
    set_matmul_method(layer, MatmulMethod(max_native_rows=2**30))
    return layer


def blocks(kind: str) -> Callable[[int, int, int], BlockLinear]:
    def make(rows: int, columns: int, seed: int) -> BlockLinear:
        layout = BLOCK_LAYOUTS[kind]
        count, rows = -(-columns // layout.columns), rows // 16 * 16
        tensor = random_blocks(kind, rows, np.random.default_rng(seed), count * layout.columns)
        native = NativePacking(loaded_library())
        layer = native.pack_blocks(tensor, torch.arange(rows))
        set_matmul_method(layer, MatmulMethod(max_native_rows=2**30))
        return layer

    return make


def eight_bits(rows: int, columns: int, seed: int) -> Int8Linear:
    made = torch.Generator().manual_seed(seed)
    q = torch.randint(-127, 128, (rows, columns), generator=made)
    layer = Int8Linear(q.to(torch.int8), torch.randn(rows, generator=made).bfloat16())
    set_matmul_method(layer, MatmulMethod(max_native_rows=2**30))
    return layer


MAKERS = st.sampled_from([eight_bits, *map(blocks, BLOCK_LAYOUTS)])
ALL = [four_bits, eight_bits, *map(blocks, ("Q4_1", "Q5_0", "Q4_K", "Q6_K"))]


def exact_weights(layer: Any) -> Tensor:
    """The weights [K, N] that a layer stands for."""
    weights: Tensor = layer.unpacked(torch.float64)
    return weights * layer.scale.double() if isinstance(layer, Int8Linear) else weights


@settings(max_examples=12 * ATTACK)
@given(st.data())
def test_products_err_only_by_the_rounding_of_the_rows(data: Any) -> None:
    block, seed = int4_block_rows(), data.draw(st.integers(0, 99))
    columns = 32 * data.draw(st.integers(1, 9))
    layer: Any
    if data.draw(st.booleans()):
        layer = four_bits(block * data.draw(st.integers(1, 5)), columns, seed)
    else:
        layer = data.draw(MAKERS)(data.draw(st.integers(16, 90)), columns, seed)
    size = (data.draw(st.integers(1, 21)), layer.in_features)
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    x *= 10.0 ** data.draw(st.integers(-20, 20))
    if data.draw(st.booleans()):
        x[-1, :GROUP] = 0
    exact = rounded(x).double() @ exact_weights(layer)
    torch.testing.assert_close(layer(x).double(), exact, rtol=0, atol=2e-5 * exact.norm().item())


@pytest.fixture(scope="module")
def tiles(native: NativePacking) -> None:
    if not has_matrix_units():
        pytest.skip("needs matrix units (AMX)")


@settings(max_examples=20 * ATTACK)
@given(st.data())
def test_of_many_rows_tiles_round_numbers_and_weights_to_bfloat16_alone(
    tiles: None, data: Any
) -> None:
    block, seed = int4_block_rows(), data.draw(st.integers(0, 99))
    columns, rows = 32 * data.draw(st.integers(1, 40)), data.draw(st.integers(33, 100))
    layer: Any
    if data.draw(st.booleans()):
        layer = four_bits(block * data.draw(st.integers(1, 6)), columns, seed)
    else:
        layer = data.draw(MAKERS)(data.draw(st.integers(16, 300)), columns, seed)
    is_eight = isinstance(layer, Int8Linear)
    weights = exact_weights(layer) if is_eight else layer.unpacked(torch.bfloat16).double()
    x = torch.randn(rows, layer.in_features, generator=torch.Generator().manual_seed(seed))
    exact = x.bfloat16().double() @ weights
    torch.testing.assert_close(layer(x).double(), exact, rtol=0, atol=2e-6 * exact.norm().item())


@pytest.mark.parametrize("make", ALL)
def test_a_row_has_the_same_bits_among_any_number_of_many(tiles: None, make: Any) -> None:
    layer = make(5 * int4_block_rows(), 160, 7)
    x = torch.randn(100, layer.in_features)
    left, right = torch.randn(2, 64, 64).bfloat16()  # multiplied by tiles of torch
    of_torch, wanted = left @ right, layer(x)
    for some in (slice(33), slice(60, 100), slice(1, 98)):
        assert torch.equal(layer(x[some]), wanted[some])
        assert torch.equal(left @ right, of_torch)
    try:
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert torch.equal(layer(x), wanted)
    finally:
        torch.set_num_threads(1)


@settings(max_examples=10 * ATTACK)
@given(size=st.integers(16, 900), rows=st.integers(1, 70), seed=st.integers(0, 99), data=st.data())
def test_tiles_tell_the_surprisal_of_any_vocabulary(
    tiles: None, size: int, rows: int, seed: int, data: Any
) -> None:
    make, made = data.draw(MAKERS), torch.Generator().manual_seed(seed)
    head: Any = make(size, 96, seed)
    weights = exact_weights(head)
    if isinstance(head, BlockLinear):  # these become bfloat16
        weights = head.unpacked(torch.bfloat16).double()
    x = torch.randn(rows, head.in_features, generator=made) / weights.norm(dim=0).mean()
    ids = torch.arange(rows) * 7 % head.out_features
    logits = torch.log_softmax(x.double() @ weights, -1)
    found = surprisal_of_states(head, x, ids)
    wanted = -logits.gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-4)
    assert torch.equal(surprisal_of_states(head, x[:1], ids[:1]), found[:1])


@settings(max_examples=8 * ATTACK)
@given(rows=st.integers(2, 32), make=st.sampled_from(ALL))
def test_a_row_has_the_same_bits_alone_among_others_and_with_any_number_of_threads(
    rows: int, make: Any
) -> None:
    layer = make(5 * int4_block_rows(), 160, rows)
    x = torch.randn(rows, layer.in_features)
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(layer(x), alone)
    assert torch.equal(layer(x[1:]), alone[1:])
    try:
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert torch.equal(layer(x), alone)
            assert torch.equal(layer(x[:1]), alone[:1])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["eight bits", *BLOCK_LAYOUTS])
def test_without_tiles_surprisal_errs_by_what_is_rounded_of_other_logits(kind: str) -> None:
    if has_matrix_units():
        pytest.skip("this processor has tiles")
    # of eight bits a whole block of tokens, and fewer than the library multiplies together
    head = eight_bits(1030, 256, 3) if kind == "eight bits" else blocks(kind)(336, 256, 3)
    weights = exact_weights(head)
    x, ids = torch.randn(40, 256) / weights.norm(dim=0).mean(), torch.arange(40) * 8
    wanted = -torch.log_softmax(x.double() @ weights, -1).gather(1, ids[:, None])[:, 0]
    found = surprisal_of_states(head, x, ids)
    error = (found - wanted).abs()
    assert error.mean() < 0.01 * wanted.std()
    assert error.max() < 0.05 * wanted.std()


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("make", ALL)
def test_what_is_no_number_stays_none(make: Any, rows: int) -> None:
    layer = make(int4_block_rows(), 64, 0)
    x = torch.randn(rows, layer.in_features)
    x[0, 5], x[2, 40] = torch.nan, torch.inf
    found = layer(x).isfinite()
    assert found[1].all()
    assert not found[0].any()
    assert not found[2].any()


@pytest.mark.parametrize(("own", "size"), [(UNLIMITED_ROWS, 384), (64, 1000), (0, 1000)])
def test_passes_are_small_where_they_take_no_longer(own: int, size: int) -> None:
    model = load_model("tiny", quantize="int4", device="cpu")
    set_matmul_method(model.module, MatmulMethod(max_native_rows=own))
    reader = Reader(model, model.new_cache(8), Ledger())
    assert reader.pass_size(1000, is_observed=False) == size
    assert reader.pass_size(7, is_observed=False) == 7


# Packing of a GGUF file's matrices

KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_has_the_bits_of_torch(
    kind: str, threads: int, native: NativePacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows = 192
    tensor = random_blocks(kind, rows, np.random.default_rng(len(kind) + threads))
    order = torch.randperm(rows)
    assert native.can_pack_eight_bits(tensor)
    q, scale = quantize_int8(unpack_floats(tensor)[order])
    made = native.pack_eight_bits(tensor, order)
    assert torch.equal(made.q, q)
    assert torch.equal(made.scale, scale)
    assert BlockLinear.fits(kind, *tensor.shape) is (kind in BLOCK_LAYOUTS)
    if kind in BLOCK_LAYOUTS:
        own = native.pack_blocks(tensor, order)
        assert torch.equal(own.unpacked(torch.float32).T, unpack_floats(tensor)[order])


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
        wait_for_writer()
        return {one.bits for one in plain.module.modules() if isinstance(one, PackedLinear)}

    assert bits_without_the_library() == {8}
    ids = list(range(3, 23))
    with torch.inference_mode():
        wanted = original(torch.tensor([ids])).logits[0, -1]
    monkeypatch.setattr(BlockLinear, "join_layers", None)  # which would copy them
    for _ in range(2):
        model = load_model(str(path), device="cpu", compile="on")
        wait_for_writer()
        monkeypatch.setattr(load, "parse_gguf", None)  # the second time, the file is mapped
        layers = model.module.model.layers[0]
        projections = layers.self_attn.q_proj, layers.mlp.gate_proj, layers.mlp.down_proj
        assert [one.bits for one in projections] == [5, 5, 6]
        for name, layer in layers.named_modules():
            if isinstance(layer, BlockLinear):
                weight = original.model.layers[0].get_submodule(name).weight
                assert torch.equal(layer.unpacked(torch.float32).T, weight), name
        assert layers.mlp.gate_proj.joined[0] is layers.mlp.up_proj.joined[0]
        assert layers.self_attn.q_proj.joined[0] is layers.self_attn.v_proj.joined[0]
        cache = model.new_cache(32)
        model.forward(ids[:-1], cache)
        cache.commit(len(ids) - 1)
        alone, together = model.forward(ids[-1:], cache)[0], model.forward(ids, model.new_cache(32))
        for found in (alone, together[-1]):
            assert (found - wanted).norm() < 0.1 * wanted.norm()  # of all that is rounded
    assert bits_without_the_library() == {8}
    held = sum(one.nbytes for one in packed_buffers(model.module))
    held += sum(one.nbytes for one in model.module.parameters())
    said = compute_fit(find_model(str(path)), Profile(device="cpu"), None).choices[0]
    assert said.weights == pytest.approx(held, rel=0.02)
    assert said.loading == pytest.approx(held, rel=0.02)  # nothing is copied, or unpacked


# Compilation for other processors


@pytest.mark.skipif(ATTACK == 1, reason="builds the library once more")
def test_processors_without_avx512_have_it_too(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from sirchat.models import packed, compiling
flags, path = compiling._flags(), Path({str(tmp_path)!r}) / "library.so"
assert packed.int4_block_rows() == 32
compiling._flags = lambda: [*flags, "-mno-avxvnni"]
compiling.build_library(path)
compiling.load_library(path)  # which compares it with torch's products
"""
    env = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ziglang") is None, reason="needs the package ziglang")
@pytest.mark.parametrize(
    "target",
    [
        "x86_64-windows-gnu -march=x86_64_v3",
        "x86_64-windows-gnu -march=x86_64_v4",
        "aarch64-macos -mcpu=apple_m1",
        "aarch64-linux-gnu -mcpu=neoverse_n1",
        "x86_64-linux-gnu -march=x86_64_v3",
        "x86_64-linux-gnu -march=x86_64_v4",
    ],
)
def test_clang_compiles_it_for_other_systems(tmp_path: Path, target: str) -> None:
    include = Path(torch.__file__).parent / "include"
    command = [sys.executable, "-m", "ziglang", "c++", "-std=c++17", "-O1", "-fPIC", f"-I{include}"]
    command += [
        "-target",
        *target.split(),
        "-c",
        str(compiling._MAIN_SOURCE),
        "-o",
        str(tmp_path / "x.o"),
    ]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
