"""Products and attention by the library compiled here: near exact, and always the same."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from made_once import made_once
from sirchat.engine.reader import Reader
from sirchat.memory.ledger import Ledger
from sirchat.models import compiling, products
from sirchat.models.compiling import products_in_words, use_compiled
from sirchat.models.load import load_model
from sirchat.models.model import LoadedModel
from sirchat.models.packed import (
    ANY_ROWS,
    GROUP,
    Int4Linear,
    Int8Linear,
    MatmulMethod,
    four_bit_block,
    matmul_method_of,
    set_matmul_method,
)
from sirchat.models.processor import own_rows
from sirchat.paths import compiled_dir, private_dir

pytestmark = pytest.mark.skipif(
    products.compiler() is None or not products.suits_processor(),
    reason="needs a C++ compiler and AVX2",
)

ATTACK = int(os.environ.get("SIRCHAT_ATTACK", 1))


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("products") / products.library_name()
    made_once(tmp_path_factory, path, products.build_library)
    products.load_library(path)
    return path


def rounded(x: Tensor) -> Tensor:
    """What the rows become: in each group of 32 columns, 255 steps from the largest number on."""
    groups = x.view(len(x), -1, GROUP)
    step = groups.abs().amax(-1, keepdim=True) / 127
    return torch.nan_to_num(groups / step).round().mul(step).view_as(x)


def four_bits(rows: int, columns: int, seed: int) -> Int4Linear:
    made = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (rows, columns), generator=made)
    scale, minimum = (torch.rand(2, rows, columns // GROUP, generator=made) * 2 - 1).unbind()
    layer = Int4Linear.of_values(q.to(torch.uint8), scale, minimum * 8)
    set_matmul_method(layer, MatmulMethod(own=2**30))
    return layer


def eight_bits(rows: int, columns: int, seed: int) -> Int8Linear:
    made = torch.Generator().manual_seed(seed)
    q = torch.randint(-127, 128, (rows, columns), generator=made)
    layer = Int8Linear(q.to(torch.int8), torch.randn(rows, generator=made).bfloat16())
    set_matmul_method(layer, MatmulMethod(own=2**30))
    return layer


def exact_weights(layer: Any) -> Tensor:
    """The weights [K, N] that a layer stands for."""
    weights: Tensor = layer.unpacked(torch.float64)
    return weights if isinstance(layer, Int4Linear) else weights * layer.scale.double()


@settings(max_examples=20 * ATTACK)
@given(st.data())
def test_products_err_only_by_the_rounding_of_the_rows(data: Any) -> None:
    block, seed = four_bit_block(), data.draw(st.integers(0, 99))
    columns = 32 * data.draw(st.integers(1, 9))
    layer: Any
    if data.draw(st.booleans()):
        layer = four_bits(block * data.draw(st.integers(1, 5)), columns, seed)
    else:
        layer = eight_bits(data.draw(st.integers(16, 90)), columns, seed)
    size = (data.draw(st.integers(1, 21)), layer.in_features)
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    x *= 10.0 ** data.draw(st.integers(-20, 20))
    if data.draw(st.booleans()):
        x[-1, :GROUP] = 0
    exact = rounded(x).double() @ exact_weights(layer)
    torch.testing.assert_close(layer(x).double(), exact, rtol=0, atol=2e-5 * exact.norm().item())


@settings(max_examples=8 * ATTACK)
@given(rows=st.integers(2, 40), make=st.sampled_from([four_bits, eight_bits]))
def test_a_row_has_the_same_bits_alone_among_others_and_with_any_number_of_threads(
    rows: int, make: Any
) -> None:
    layer, x = make(5 * four_bit_block(), 160, rows), torch.randn(rows, 160)
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


@settings(max_examples=8 * ATTACK)
@given(st.data())
def test_attention_to_the_held_rows_is_exact_with_any_number_of_threads(data: Any) -> None:
    heads, group, held = (data.draw(st.integers(1, most)) for most in (3, 9, 400))
    size, free = 64 * data.draw(st.integers(1, 2)), data.draw(st.integers(0, 9))
    queries = torch.randn(heads, group, size) * data.draw(st.sampled_from([0.1, 3, 100]))
    rows = torch.randn(2, heads, held + free, size).bfloat16()
    rows[:, :, held:] = torch.nan  # no token is there
    keys, values = rows[:, :, :held]
    exact = (queries.double() @ keys.double().mT * log(2)).softmax(-1) @ values.double()
    found = torch.ops.sirchat.attend(queries, keys, values)
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3)
    if queries.abs().max() < 20:
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    try:
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert torch.equal(torch.ops.sirchat.attend(queries, keys, values), found)
    finally:
        torch.set_num_threads(1)


def test_attention_to_what_is_no_number_is_none() -> None:
    rows = torch.randn(2, 1, 200, 64).bfloat16()
    rows[0, 0, 150, 7] = torch.nan
    assert torch.ops.sirchat.attend(torch.randn(1, 2, 64), *rows).isnan().all()


@pytest.mark.parametrize("make", [four_bits, eight_bits])
def test_what_is_no_number_stays_none(make: Any) -> None:
    layer, x = make(four_bit_block(), 64, 0), torch.randn(3, 64)
    x[0, 5], x[2, 40] = torch.nan, torch.inf
    found = layer(x).isfinite()
    assert found[1].all()
    assert not found[0].any()
    assert not found[2].any()


@pytest.mark.parametrize(
    ("has_amx", "said"), [(False, "yes"), (True, "yes, of up to 64 tokens at once")]
)
def test_a_model_uses_a_library_that_is_there_and_that_only_its_owner_can_write(
    library: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, has_amx: bool, said: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    there = private_dir(compiled_dir()) / library.name
    there.write_bytes(library.read_bytes())
    for mode, used in ((0o620, 0), (0o600, own_rows())):
        there.chmod(mode)
        model = packed()
        use_compiled(model, "auto")
        assert model_rows(model) == used
        foreign = "could have been changed by others" in products_in_words(model)
        assert foreign == (mode == 0o620)
    assert products_in_words(model) == said
    model = packed()
    use_compiled(model, "off")
    assert model_rows(model) == 0


def test_a_chat_has_it_made_in_the_background_and_multiplies_by_it(
    library: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = own_home / "python"  # it takes the arguments of the compiling process
    copies = f'umask 077; mkdir -p "$(dirname "$4")"; cp {shlex.quote(str(library))} "$4.new"'
    worker.write_text(f'#!/bin/sh\n{copies}; mv "$4.new" "$4"')
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    model, ids = packed(), list(range(10, 60))
    use_compiled(model, "auto")
    assert (model_rows(model), products_in_words(model)) == (0, "not yet")
    before = model.forward(ids, model.new_cache(60))
    thread = compiling.compile_in_background(model)
    assert thread is not None
    thread.join(60)
    assert model_rows(model) == own_rows()
    after = model.forward(ids, model.new_cache(60))
    assert not torch.equal(after, before)
    assert (after - before).norm() < 0.06 * before.norm()


@pytest.mark.parametrize(("own", "size"), [(ANY_ROWS, 384), (64, 1000), (0, 1000)])
def test_passes_are_small_where_they_take_no_longer(own: int, size: int) -> None:
    model = packed()
    set_matmul_method(model.module, MatmulMethod(own=own))
    reader = Reader(model, model.new_cache(8), Ledger())
    assert reader.pass_size(1000, is_observed=False) == size
    assert reader.pass_size(7, is_observed=False) == 7


def packed() -> LoadedModel:
    return load_model("tiny", quantize="int4", device="cpu")


def model_rows(model: LoadedModel) -> int:
    how = matmul_method_of(model.module)
    assert how is not None
    return how.own


def test_a_damaged_library_is_not_loaded(library: Path, tmp_path: Path) -> None:
    code = library.read_bytes()
    for damaged in (b"", code[: len(code) // 2], code[:5000] + b"x" + code[5001:]):
        path = tmp_path / "damaged.so"
        path.write_bytes(damaged)
        with pytest.raises(products.DamagedProgramError):
            products.refuse_damaged(path)


@pytest.mark.skipif(ATTACK == 1, reason="builds the library once more")
def test_processors_without_avx512_have_it_too(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from sirchat.models import packed, products
flags, path = products._flags(), Path({str(tmp_path)!r}) / "products.so"
assert packed.four_bit_block() == 32
products._flags = lambda: [*flags, "-mno-avxvnni"]
products.build_library(path)
products.load_library(path)  # which compares it with torch's products
"""
    env = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
