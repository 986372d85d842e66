"""Weights that stay packed on a GPU: those of a CPU, in the order in which its kernels read them.

Where a GPU is needed, it is a simulated one, but for the last test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf")

from chatting import tiny
from gguf_file import write_gguf
from gguf_models import random_model, write_model
from plain_model import load_model
from simulated_devices import DEVICES, refuses_waits, simulated_devices
from sirchat.config.profile import Profile
from sirchat.models import load, packed, packing
from sirchat.models.decoder import Decoder
from sirchat.models.fit import compute_fit
from sirchat.models.gguf.blocks import split_four_bit
from sirchat.models.gguf.header import BLOCKS, FOUR_BIT, GgufTensor
from sirchat.models.listing import find_model
from sirchat.models.model import LoadedModel
from sirchat.models.packed import (
    Int4GpuLinear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    matmul_method_of,
    quantize_int4,
    quantize_int8,
)

CHUNKS = 33, 1
IDS = [3 + (11 * at) % 170 for at in range(sum(CHUNKS))]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A simulated GPU, which models are loaded to unless they are to be on the CPU."""

    def pick(name: str) -> torch.device:
        return torch.device("cpu") if name == "cpu" else DEVICES[0]

    monkeypatch.setattr(load, "pick_device", pick)
    with simulated_devices():
        yield DEVICES[0]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu().float() - wanted.float()).norm() / wanted.float().norm())


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
            assert isinstance(other, Int4GpuLinear), name
        assert torch.equal(other.unpacked().cpu(), layer.unpacked()), name
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


def write_case(path: Path, case: str, kind: str) -> Path:
    """A random model whose matrices are of a type of blocks; some of Q6_K beside Q4_K."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    sizes["tie_word_embeddings"] = case == "qwen2"

    def kind_of(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) < 2 or "gate_inp" in name:
            return "F32"
        is_other = "embd" in name or "down" in name
        return kind if not is_other else "Q6_K" if kind == "Q4_K" else "Q8_0"

    return write_model(path, random_model(case, **sizes), case, kind_of)


CASES = {"qwen2": "Q4_0", "llama": "Q4_K", "qwen3moe": "Q4_1"}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with the name of a case."""
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    return write_case(path, request.param, CASES[request.param])


@pytest.mark.slow
def test_a_gguf_file_stays_packed_as_on_a_cpu(case: Path, gpu: torch.device) -> None:
    here, there = load_model(str(case), device="cpu"), load_model(str(case))
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
