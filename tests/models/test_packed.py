"""Weights that stay packed: the same products as from unpacked ones, in less memory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from chatting import tiny
from families import build
from gguf_file import write_gguf
from plain_model import load_model
from sirchat.errors import ModelError
from sirchat.models.model import LoadedModel
from sirchat.models.packed import (
    Int4Linear,
    Int8Head,
    Int8Linear,
    MatmulMethod,
    SharedEmbedding,
    Unpacked,
    quantize_int4,
    quantize_int8,
    set_matmul_method,
)
from sirchat.models.packing import pack_module
from warm_python import warm_python

FEW_AND_MANY = [1, 5, 32, 33, 200]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("rows", FEW_AND_MANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bits_multiply_like_the_weights_that_they_stand_for(
    rows: int, dtype: torch.dtype
) -> None:
    q = torch.randint(0, 16, (192, 96), dtype=torch.uint8)
    scale, minimum = torch.rand(192, 3) * 0.1, -torch.rand(192, 3)
    weight = (q.view(192, 3, 32) * scale[..., None] + minimum[..., None]).view(192, 96)
    bias, x = torch.randn(192).to(dtype), torch.randn(2, rows, 96).to(dtype)
    found = Int4Linear.from_values(q, scale, minimum, bias)(x)
    assert (found.dtype, found.shape) == (dtype, (2, rows, 192))
    assert relative(found, x.float() @ weight.T + bias.float()) < 0.01
    assert (
        relative(Int4Linear.from_values(q, scale, minimum).unpacked().T, weight) < 0.004
    )  # bfloat16


@pytest.mark.parametrize("rows", FEW_AND_MANY)
def test_eight_bits_multiply_like_the_weights_that_they_stand_for(rows: int) -> None:
    weight, x = torch.randn(50, 96), torch.randn(rows, 96)
    q, scale = quantize_int8(weight)
    layer = Int8Linear(q, scale)
    stored = q.float() * scale.float()[:, None]
    assert relative(stored, weight) < 0.01
    assert relative(layer(x), x @ stored.T) < 0.01
    assert torch.equal(layer.rows(torch.tensor([[3, 7]])), stored[[3, 7]][None])
    in_place = torch.empty_like(q)
    assert torch.equal(quantize_int8(weight, in_place)[1], scale)
    assert torch.equal(in_place, q)


@pytest.mark.parametrize("rows", FEW_AND_MANY)
@pytest.mark.parametrize("bias", [True, False])
def test_the_largest_logits_are_not_rounded_to_bfloat16(rows: int, bias: bool) -> None:
    q, scale = quantize_int8(torch.randn(2_000, 96))
    more = torch.randn(2_000) if bias else None
    x = 10 * torch.randn(rows, 96)
    found, exact = Int8Head(q, scale, more)(x), x @ (q.float() * scale.float()[:, None]).T
    exact = exact if more is None else exact + more
    assert found.dtype == torch.float32
    assert relative(found, exact) < 0.01
    top = exact.topk(5).indices
    torch.testing.assert_close(found.gather(1, top), exact.gather(1, top), rtol=1e-5, atol=1e-3)
    assert torch.equal(found.topk(5).indices, top)


def test_rounding_to_four_bits_errs_by_at_most_half_a_step() -> None:
    assert [Int4Linear.fits(*shape) for shape in ((64, 32), (63, 32), (64, 31))] == [1, 0, 0]
    weight = torch.randn(64, 64)
    q, scale, minimum = quantize_int4(weight)
    again = (q.view(64, 2, 32) * scale[..., None] + minimum[..., None]).view(64, 64)
    assert ((again - weight).abs() <= scale.repeat_interleave(32, 1) / 2 + 1e-5).all()


@pytest.fixture(scope="module", params=["Q4_0", "Q4_1", "Q8_0"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as a GGUF file of packed weights."""
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / f"tiny-{request.param}.gguf"
    return write_gguf(path, tiny(), request.param)


def random_layer(kind: Any) -> Any:
    weight = torch.randn(64, 96)
    if kind is Int4Linear:
        return Int4Linear.from_values(*quantize_int4(weight))
    return Int8Linear(*quantize_int8(weight))


@pytest.mark.parametrize("kind", [Int4Linear, Int8Linear])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_many_rows_are_multiplied_by_weights_of_the_type_that_is_fast_here(
    kind: Any, dtype: Unpacked
) -> None:
    layer, x = random_layer(kind), torch.randn(40, 96)
    set_matmul_method(
        layer,
        MatmulMethod(dtype, max_kernel_rows_4bit=8, max_kernel_rows_8bit=8),
    )
    exact = layer.unpacked(torch.float64)
    exact = exact if kind is Int4Linear else exact * layer.scale.double()
    assert relative(layer(x), x.double() @ exact) < (1e-6 if dtype == "float32" else 0.01)


def test_a_large_vocabulary_is_unpacked_in_parts() -> None:
    weight, x = torch.randn(5000, 32), torch.randn(40, 32)
    layer = Int8Linear(*quantize_int8(weight))
    exact = layer.unpacked(torch.float32) * layer.scale.float()
    assert relative(layer(x), x @ exact) < 0.01
    assert relative(layer(x)[:, 4096:], (x @ exact)[:, 4096:]) < 0.01


def size(model: LoadedModel) -> int:
    tensors = [*model.module.parameters(), *model.module.buffers()]
    return sum(one.numel() * one.element_size() for one in tensors)


@pytest.mark.slow
def test_a_gguf_file_stays_packed_and_gives_nearly_the_same_logits(file: Path) -> None:
    packed = load_model(str(file), dtype="float32", quantize="packed")
    unpacked = load_model(str(file), quantize="none")
    assert (packed.precision, unpacked.precision) == ("float32 with packed weights", "float32")
    assert size(packed) < 1.1 * file.stat().st_size < 0.5 * size(unpacked)
    ids = list(range(10, 90))
    found, wanted = (one.forward(ids, one.new_cache(96)) for one in (packed, unpacked))
    assert relative(found, wanted) < 0.05  # eight bits a row are coarser than Q8_0
    one_by_one, decoded = packed.new_cache(96), list[torch.Tensor]()
    for token in ids:
        decoded.append(packed.forward([token], one_by_one)[0])
        one_by_one.commit(1)
    assert relative(torch.stack(decoded), wanted) < 0.05


@pytest.mark.parametrize("file", ["Q4_1"], indirect=True)
def test_keys_and_values_of_packed_weights_take_half_of_the_memory(file: Path) -> None:
    """The products were rounded to bfloat16 before: nothing is lost but by the rotation."""
    model = load_model(str(file))
    cache = model.new_cache(32)
    model.forward(list(range(10, 30)), cache)
    cache.commit(20)
    assert cache.layer_keys(0).dtype == cache.layer_values(0).dtype == model.cache_dtype
    assert model.cache_dtype.itemsize == 2
    assert model.dtype == torch.float32


@pytest.mark.parametrize("file", ["Q8_0"], indirect=True)
def test_by_default_weights_stay_packed_unless_a_type_is_asked_for(file: Path) -> None:
    assert load_model(str(file)).precision == "float32 with packed weights"
    assert load_model(str(file), dtype="bfloat16").precision == "bfloat16"
    assert load_model(str(file), dtype="float32").precision == "float32"


@pytest.mark.slow
def test_on_processors_without_avx512_four_bits_are_packed_as_their_kernel_needs_them() -> None:
    chosen = "four_bits_multiply_like or (stays_packed and Q4_1)"
    code = f"""
import pytest, sys
from sirchat.models.packed import int4_block_rows
assert int4_block_rows() == 32
sys.exit(pytest.main([{__file__!r}, "-q", "-n0", "-pno:cacheprovider", "-k", {chosen!r}]))
"""
    run_with("avx2", code)


@pytest.mark.parametrize("file", ["Q4_0"], indirect=True)
def test_a_text_is_read_where_avx512_is_hidden_from_torch_alone(file: Path) -> None:
    """On a processor with AMX torch's attention would fail."""
    code = f"""
from sirchat.models.load import load_model
model = load_model({str(file)!r}, quantize="packed", cache_dtype="bfloat16", compile="off")
assert model.forward(list(range(80)), model.new_cache(96)).isfinite().all()
"""
    run_with("avx2", code, onednn_isa_limit="")


def test_pairs_of_rows_are_packed_as_on_arm() -> None:
    # Without AVX2 the kernel has the order of rows of that for ARM, in blocks of 32 instead of 16.
    code = """
import torch
from sirchat.models import packed
from sirchat.models.packed import Int4GpuLinear, Int4Linear
assert packed.int4_layout() == (32, True)
q = torch.randint(0, 16, (192, 96), dtype=torch.uint8)
scale, minimum, x = torch.rand(192, 3) * 0.1, -torch.rand(192, 3), torch.randn(3, 96)
layer, plain = (kind.from_values(q, scale, minimum) for kind in (Int4Linear, Int4GpuLinear))
found, wanted = layer(x), x @ plain.unpacked(torch.float32)
assert (found - wanted).norm() / wanted.norm() < 0.01
again = Int4Linear.from_nibbles(plain.nibbles.view(192, 3, 16), scale, minimum)
assert torch.equal(again.packed, layer.packed) and torch.equal(again.scales, layer.scales)
assert torch.equal(layer.unpacked(), plain.unpacked())
for row in range(0, 192, 2):  # a byte for each pair of rows and each column
    at = layer.packed.flatten()[row // 32 * 96 * 16 :].view(-1, 16)[:96, row % 32 // 2]
    assert torch.equal(at, q[row] | q[row + 1] << 4)
"""
    run_with("default", code)


def run_with(capability: str, code: str, onednn_isa_limit: str = "AVX2") -> None:
    """Run a program in a process that has no faster instructions than these."""
    # torch's attention asks oneDNN whether there is AMX, which needs what is hidden from torch.
    env = os.environ | {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": onednn_isa_limit}
    env["CXX"] = "none"  # a library for these instructions alone takes long to build
    env = {name: value for name, value in env.items() if value}
    done = subprocess.run([*warm_python(), "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.06), ("int4", 0.3)])
def test_any_model_can_be_rounded(quantize: str, error: float) -> None:
    rounded = load_model("tiny", quantize=quantize)
    assert isinstance(rounded.module.get_input_embeddings(), SharedEmbedding)
    ids = list(range(10, 90))
    found, wanted = (one.forward(ids, one.new_cache(96)) for one in (rounded, tiny()))
    assert relative(found, wanted) < error
    assert rounded.vocab_size == tiny().vocab_size


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_embeddings_with_a_scale_keep_it_when_they_are_rounded(model_type: str) -> None:
    module, ids = build(model_type, {"head_dim": 16}), torch.arange(10, 50)[None]
    with torch.inference_mode():
        wanted = module(ids).logits
        pack_module(module, 8)
        assert relative(module(ids).logits, wanted) < 0.06


def test_what_cant_be_done_is_said() -> None:
    with pytest.raises(ModelError, match="can't stay packed"):
        load_model("tiny", quantize="packed")
