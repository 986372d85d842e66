"""Weights that stay packed: the same products as from unpacked ones, in less memory.

On a GPU they are those of a CPU, in the order in which its kernels read them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf")

from chatting import tiny
from families import build
from gguf_file import write_gguf
from gguf_models import random_model, write_model
from native_library import built_library
from plain_model import load_model
from simulated_devices import DEVICES, refuses_waits, simulated_devices
from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models import compiling, load, packed, packing
from sirchat.models.decoder import Decoder
from sirchat.models.fit import compute_fit
from sirchat.models.gguf.blocks import split_four_bit
from sirchat.models.gguf.header import BLOCKS, FOUR_BIT, GgufTensor
from sirchat.models.listing import find_model
from sirchat.models.model import LoadedModel
from sirchat.models.packed import (
    BlockGpuHead,
    BlockGpuLinear,
    BlockHead,
    BlockLinear,
    Int4GpuLinear,
    Int4Linear,
    Int8Head,
    Int8Linear,
    MatmulMethod,
    PackedLinear,
    SharedEmbedding,
    Unpacked,
    matmul_method_of,
    set_matmul_method,
)
from sirchat.models.packing import pack_module, quantize_int4, quantize_int8
from sirchat.paths import compiled_dir, make_private_dir
from warm_python import warm_python

FEW_AND_MANY = [1, 5, 32, 33, 200]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu().float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("rows", FEW_AND_MANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unpacked", ["bfloat16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_those_of_the_weights_that_a_layer_stands_for(
    bits: int, unpacked: Unpacked, dtype: torch.dtype, rows: int
) -> None:
    weight, bias = torch.randn(192, 96), torch.randn(192).to(dtype)
    layer: Int4Linear | Int8Linear
    if bits == 4:
        q, scale, minimum = quantize_int4(weight)
        layer = Int4Linear.from_values(q, scale, minimum, bias)
        stored = (q.view(192, 3, 32) * scale[..., None] + minimum[..., None]).view(192, 96)
        exact = layer.unpacked(torch.float64).T
    else:
        q, scale = quantize_int8(weight)
        layer, stored = Int8Linear(q, scale, bias), q.float() * scale.float()[:, None]
        exact = stored.double()
    assert relative(exact, stored) < 0.004  # as bfloat16
    set_matmul_method(layer, MatmulMethod(unpacked))
    x = torch.randn(2, rows, 96).to(dtype)
    found = layer(x)
    assert (found.dtype, found.shape) == (dtype, (2, rows, 192))
    # Few rows are rounded to bfloat16, and many as the method says.
    is_exact = rows > 32 and unpacked == "float32" and dtype == torch.float32
    assert relative(found, x.double() @ exact.T + bias.double()) < (1e-6 if is_exact else 0.01)


def test_rounding_to_eight_bits_can_be_done_in_place() -> None:
    weight = torch.randn(50, 96)
    q, scale = quantize_int8(weight)
    stored = q.float() * scale.float()[:, None]
    assert relative(stored, weight) < 0.01
    assert torch.equal(Int8Linear(q, scale).rows(torch.tensor([[3, 7]])), stored[[3, 7]][None])
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
    path = tmp_path_factory.mktemp("gguf") / f"tiny-{request.param}.gguf"
    return write_gguf(path, tiny(), request.param)


@pytest.mark.slow
def test_a_gguf_file_stays_packed_and_gives_nearly_the_same_logits(file: Path) -> None:
    packed = load_model(str(file), dtype="float32", quantize="packed")
    unpacked = load_model(str(file), quantize="none")
    assert (packed.precision, unpacked.precision) == ("float32 with packed weights", "float32")
    assert held_bytes(packed) < 1.1 * file.stat().st_size < 0.5 * held_bytes(unpacked)
    ids = list(range(10, 90))
    found, wanted = (one.forward(ids, one.new_cache(96)) for one in (packed, unpacked))
    assert relative(found, wanted) < 0.05  # eight bits a row are coarser than Q8_0
    one_by_one, decoded = packed.new_cache(96), list[Tensor]()
    for token in ids:
        decoded.append(packed.forward([token], one_by_one)[0])
        one_by_one.commit(1)
    assert relative(torch.stack(decoded), wanted) < 0.05


@pytest.mark.parametrize("file", ["Q4_0"], indirect=True)
def test_a_text_is_read_where_avx512_is_hidden_from_torch_alone(file: Path) -> None:
    """On a processor with AMX torch's attention would fail."""
    code = f"""
from sirchat.models.load import load_model
model = load_model({str(file)!r}, quantize="packed", cache_dtype="bfloat16", compile="off")
assert model.forward(list(range(80)), model.new_cache(96)).isfinite().all()
"""
    run_with("avx2", code, onednn_isa_limit="")


@pytest.mark.parametrize(
    ("capability", "layout"),
    [
        ("avx2", (32, False)),  # each byte has a row and the 16th after it
        ("default", (32, True)),  # and the next, as on ARM, where blocks have 16 rows
    ],
)
def test_without_avx512_four_bits_are_packed_as_their_kernel_needs_them(
    capability: str, layout: tuple[int, bool]
) -> None:
    code = f"""
import torch
from sirchat.models import packed
from sirchat.models.packed import Int4GpuLinear, Int4Linear
assert packed.int4_layout() == {layout}
q = torch.randint(0, 16, (192, 96), dtype=torch.uint8)
scale, minimum, x = torch.rand(192, 3) * 0.1, -torch.rand(192, 3), torch.randn(3, 96)
layer, plain = (kind.from_values(q, scale, minimum) for kind in (Int4Linear, Int4GpuLinear))
found, wanted = layer(x), x @ plain.unpacked(torch.float32)
assert (found - wanted).norm() / wanted.norm() < 0.01
again = Int4Linear.from_nibbles(plain.nibbles.view(192, 3, 16), scale, minimum)
assert torch.equal(again.packed, layer.packed) and torch.equal(again.scales, layer.scales)
assert torch.equal(layer.unpacked(), plain.unpacked())
"""
    run_with(capability, code)


def run_with(capability: str, code: str, onednn_isa_limit: str = "AVX2") -> None:
    """Run a program in a process that has no faster instructions than these."""
    # torch's attention asks oneDNN whether there is AMX, which needs what is hidden from torch.
    env = os.environ | {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": onednn_isa_limit}
    env["CXX"] = "none"  # a library for these instructions alone takes long to build
    env = {name: value for name, value in env.items() if value}
    done = subprocess.run([*warm_python(), "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.06), ("int4", 0.3)])
def test_any_model_can_be_rounded(quantize: Any, error: float) -> None:
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


# On a GPU; a simulated one, but for the last test.

CHUNKS = 33, 1
IDS = [3 + (11 * at) % 170 for at in range(sum(CHUNKS))]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A simulated GPU, which models are loaded to unless they are to be on the CPU."""

    def pick(name: str) -> torch.device:
        return torch.device("cpu") if name == "cpu" else DEVICES[0]

    monkeypatch.setattr(load, "pick_device", pick)
    with simulated_devices():
        yield DEVICES[0]


def random_four_bits(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values q, scales and minima as `Int4Linear.from_values` takes them."""
    q = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    groups = rows, columns // 32
    return q, torch.rand(groups) * 0.1, -torch.rand(groups)


def test_each_byte_has_two_weights_and_each_group_a_scale_and_a_zero() -> None:
    q, scale, minimum = random_four_bits(3, 64)
    layer = Int4GpuLinear.from_values(q, scale, minimum)
    weights = layer.unpacked(torch.float32).T
    zero = (minimum + 8 * scale).bfloat16()
    assert (layer.nibbles.dtype, layer.scales.dtype) == (torch.uint8, torch.bfloat16)
    for n in range(3):
        for g in range(2):
            assert torch.equal(
                layer.scales[n, g], torch.stack([scale[n, g].bfloat16(), zero[n, g]])
            )
            for j in range(16):
                byte, places = int(layer.nibbles[n, 16 * g + j]), (32 * g + j, 32 * g + 16 + j)
                assert [byte & 15, byte >> 4] == [int(q[n, k]) for k in places]
            step, start = (np.float32(float(x)) for x in layer.scales[n, g])
            wanted = [np.float32(int(one) - 8) * step + start for one in q[n, 32 * g : 32 * g + 32]]
            assert weights[n, 32 * g : 32 * g + 32].tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [*FOUR_BIT, "int4"])
def test_the_weights_are_those_of_a_cpu_to_the_last_bit(kind: str, dtype: torch.dtype) -> None:
    here: Int4Linear
    if kind == "int4":
        given = quantize_int4(torch.randn(128, 256))
        here, there = Int4Linear.from_values(*given), Int4GpuLinear.from_values(*given)
    else:
        _, values, size = BLOCKS[kind]
        blocks = np.random.default_rng(0).integers(0, 128, (128 * 256 // values, size), np.uint8)
        blocks[:, 1], blocks[:, 3] = 30, 30  # else the floats of the blocks may not be numbers
        taken = split_four_bit(GgufTensor((128, 256), kind, blocks.reshape(-1)))
        here, there = Int4Linear.from_nibbles(*taken), Int4GpuLinear.from_nibbles(*taken)
    assert torch.equal(here.unpacked(dtype), there.unpacked(dtype))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_multiplied_in_their_type_with_a_part_of_the_weights_at_a_time(
    bits: int, dtype: torch.dtype, rows: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_UNPACKED_ROWS", 16)
    weight, bias = torch.randn(50, 96), torch.randn(50).to(dtype)  # 50: no multiple of any block
    layer: PackedLinear
    if bits == 4:
        layer = Int4GpuLinear.from_values(*quantize_int4(weight), bias)
        exact = layer.unpacked(torch.float64)
    else:
        layer = Int8Linear(*quantize_int8(weight), bias)
        exact = layer.unpacked(torch.float64) * layer.scale.double()
    x = torch.randn(2, rows, 96).to(dtype)
    found = layer.to(gpu)(x.to(gpu))
    assert (found.shape, found.dtype, found.device) == ((2, rows, 50), dtype, gpu)
    error = 1e-6 if dtype == torch.float32 else 0.006
    assert relative(found, x.double() @ exact + bias.double()) < error
    few = layer.multiply_packed(x[0].to(gpu, torch.bfloat16))
    assert relative(few, x[0].double() @ exact) < 0.006


def test_large_sums_of_whole_numbers_stay_finite_in_float16(gpu: torch.device) -> None:
    layer = Int8Linear(*quantize_int8(0.01 * torch.ones(4, 1024))).to(gpu)
    x = torch.full((1, 1024), 2.0, dtype=torch.float16)
    assert layer(x.to(gpu)).tolist() == [pytest.approx([20.48] * 4, rel=0.01)]


def test_joined_layers_share_their_rows() -> None:
    parts = [Int4GpuLinear.from_values(*random_four_bits(rows, 64)) for rows in (40, 10, 10)]
    wanted, x, start = [part.unpacked() for part in parts], torch.randn(3, 64), 0
    joined = Int4GpuLinear.join_layers(parts)
    for part in parts:
        part.take_rows(joined, start)
        start += part.out_features
    assert torch.equal(joined.unpacked(), torch.cat(wanted, 1))
    for part, weights in zip(parts, wanted, strict=True):
        assert torch.equal(part.unpacked(), weights)
        assert part.nibbles.untyped_storage().data_ptr() == joined.nibbles.data_ptr()
    torch.testing.assert_close(joined(x), torch.cat([part(x) for part in parts], 1))


def matrices(model: LoadedModel) -> dict[str, PackedLinear]:
    return {n: one for n, one in model.module.named_modules() if isinstance(one, PackedLinear)}


def check_same_weights(there: LoadedModel, here: LoadedModel) -> None:
    """Every packed matrix on the GPU has the values that it has on the CPU."""
    ours, theirs = matrices(there), matrices(here)
    assert ours.keys() == theirs.keys()
    for name, layer in theirs.items():
        other = ours[name]
        if isinstance(layer, Int8Linear):
            assert isinstance(other, Int8Linear), name
            assert torch.equal(other.scale.cpu(), layer.scale), name
        else:
            kinds: dict[Any, Any] = {BlockLinear: BlockGpuLinear, BlockHead: BlockGpuHead}
            assert isinstance(other, kinds.get(type(layer), Int4GpuLinear)), name
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(other.unpacked(dtype).cpu(), layer.unpacked(dtype)), name
        assert (other.joined is None) == (layer.joined is None), name


def tensors(model: LoadedModel) -> list[Tensor]:
    """The tensors of a model with those of embeddings that are packed on their own."""
    embeddings = model.module.get_input_embeddings()
    heads = getattr(embeddings, "_head", ())
    return [
        one for owner in (model.module, *heads) for one in (*owner.parameters(), *owner.buffers())
    ]


def held_bytes(model: LoadedModel) -> int:
    return sum({one.data_ptr(): one.nbytes for one in tensors(model)}.values())


def logits(model: LoadedModel) -> Tensor:
    """The logits of ids that are read in chunks."""
    kv_cache, found, start = model.new_cache(len(IDS)), list[Tensor](), 0
    for count in CHUNKS:
        found.append(model.forward(IDS[start : start + count], kv_cache))
        kv_cache.commit(count)
        start += count
    return torch.cat(found).cpu()


def write_case(path: Path, case: str, kind: str, **more: Any) -> Path:
    """A random model whose matrices are of a type of blocks; some of Q6_K beside Q4_K."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    sizes |= {"tie_word_embeddings": case == "qwen2", **more}

    def kind_of(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) < 2 or "gate_inp" in name:
            return "F32"
        is_other = any(part in name for part in ("embd", "down", "attn_v"))
        return kind if not is_other else "Q6_K" if kind == "Q4_K" else "Q8_0"

    return write_model(path, random_model(case, **sizes), case, kind_of)


CASES = {"qwen2": "Q4_0", "llama": "Q4_K", "qwen3moe": "Q4_1"}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with the name of a case."""
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    return write_case(path, request.param, CASES[request.param])


@pytest.mark.slow
def test_a_gguf_file_stays_packed_as_on_a_cpu(
    case: Path, gpu: torch.device, own_home: Path
) -> None:
    make_private_dir(compiled_dir())
    (compiled_dir() / compiling.library_name()).symlink_to(built_library())
    here, there = load_model(str(case), device="cpu", compile="on"), load_model(str(case))
    check_same_weights(there, here)
    assert {one.device for one in tensors(there)} == {gpu}
    assert there.precision == "bfloat16 with packed weights"
    assert there.cache_dtype == torch.bfloat16
    assert matmul_method_of(there.module) is None  # nothing is measured
    assert held_bytes(there) <= held_bytes(here) < 1.3 * case.stat().st_size
    assert isinstance(there.module, Decoder) == (case.stem != "qwen3moe")
    errors = [relative(*rows) for rows in zip(logits(there), logits(here), strict=True)]
    assert np.median(errors) < 0.03  # a token may get another expert, if two are as likely
    said = compute_fit(find_model(str(case)), Profile(device="cuda"), None).choices[0]
    assert said.precision == "packed"
    assert said.weights == pytest.approx(held_bytes(there), rel=0.01)
    if case.stem == "qwen2":
        assert load_model(str(case), dtype="bfloat16").precision == "bfloat16"  # as is asked for


def test_any_number_of_rows_keeps_its_blocks_on_a_gpu(tmp_path: Path, gpu: torch.device) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 24}
    path = write_case(tmp_path / "model.gguf", "qwen3", "Q5_0", **heads)
    there = load_model(str(path))
    key = there.module.model.layers[0].self_attn.k_proj
    assert isinstance(key, BlockGpuLinear)
    assert (key.out_features, key.bits) == (72, 5)
    said = compute_fit(find_model(str(path)), Profile(device="cuda"), None).choices[0]
    assert said.weights == pytest.approx(held_bytes(there), rel=0.01)


def test_any_model_is_rounded_as_on_a_cpu_before_it_is_moved(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize: Any = "int4"
    pack, packed_from = packing.pack_module, list[str]()

    def noted(module: Any, *how: Any) -> None:
        packed_from.append(module.device.type)
        pack(module, *how)

    monkeypatch.setattr(load, "pack_module", noted)
    here, there = (load_model("tiny", device=at, quantize=quantize) for at in ("cpu", "auto"))
    assert packed_from == ["cpu", "cpu"]
    check_same_weights(there, here)
    assert {one.device for one in tensors(there)} == {gpu}
    profile = Profile(device="cuda", quantize=quantize)
    said = compute_fit(find_model("tiny"), profile, None).choices[0]
    assert said.weights == pytest.approx(held_bytes(there), rel=0.01)


def test_rows_of_any_number_are_packed_in_four_bits(endless: str, gpu: torch.device) -> None:
    how: Any = {"quantize": "int4", "dtype": "float32"}
    here, there = (load_model(endless, device=at, **how) for at in ("cpu", "auto"))
    assert relative(logits(there), logits(here)) < 0.05
    assert {one.bits for name, one in matrices(there).items() if name != "lm_head"} == {4}
    assert there.cache_dtype == torch.float32  # as it is asked for
    profile = Profile(device="cuda", **how)
    said, cache = compute_fit(find_model(endless), profile, None).choices[0], there.new_cache(1024)
    there.forward([1], cache)
    assert said.weights == pytest.approx(held_bytes(there), rel=0.01)
    assert said.cache == cache.nbytes


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_nothing_waits_for_the_gpu_while_ids_are_read(
    quantize: Any, endless: str, gpu: torch.device
) -> None:
    model = load_model(endless, quantize=quantize)
    kv_cache, ids = model.new_cache(40), torch.tensor([IDS[:5]], device=gpu)
    with torch.inference_mode(), refuses_waits():
        for _ in range(2):
            found = model.module(ids, cache=kv_cache).logits
            kv_cache.commit(5)
    assert found.shape == (1, 5, model.vocab_size)


def test_a_folder_on_a_gpu_is_read_without_transformers(endless: str, gpu: torch.device) -> None:
    here, there = (load_model(endless, dtype="float32", device=at) for at in ("cpu", "auto"))
    assert isinstance(there.module, Decoder)
    assert there.device == gpu
    assert {one.key.inv_freq.device.type for one in there.rotations if one.key} == {"cpu"}
    torch.testing.assert_close(logits(there), logits(here), rtol=1e-4, atol=1e-4)
    visible = torch.rand(9, 29) < 0.5
    visible[:, 20:] = torch.ones(9, 9, dtype=torch.bool).tril()
    found = []
    for model in (there, here):
        kv_cache = model.new_cache(40)
        model.forward(IDS[:20], kv_cache)
        kv_cache.commit(20)
        read = model.forward(IDS[20:29], kv_cache, visible=visible, positions=range(50, 59))
        found.append(read.cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", ["packed", "int8", "int4"])
def test_on_a_gpu_the_logits_are_those_of_the_cpu(quantize: Any, tmp_path: Path) -> None:
    name = "tiny" if quantize != "packed" else str(write_gguf(tmp_path / "a.gguf", tiny(), "Q4_0"))
    here, there = (load_model(name, device=at, quantize=quantize) for at in ("cpu", "cuda"))
    check_same_weights(there, here)
    assert {one.device.type for one in tensors(there)} == {"cuda"}
    assert held_bytes(there) <= held_bytes(here)
    assert relative(logits(there), logits(here)) < 0.05
