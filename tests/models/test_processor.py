"""The cache's type, and how packed weights are multiplied, suit the processor's features."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from chatting import tiny
from plain_model import load_model
from sirchat.cli.models import listed_models
from sirchat.config.profile import Profile
from sirchat.models import compiling
from sirchat.models.compiling import Features, fastest_method, max_native_rows, processor_features
from sirchat.models.load import load_model_of
from sirchat.models.packed import UNLIMITED_ROWS, MatmulMethod, matmul_method_of

pytestmark = pytest.mark.usefixtures("own_home")

AVX2, AVX512 = Features("AVX2", False, False), Features("AVX512", False, False)
BFLOAT16, AMX = Features("AVX512", True, False), Features("AVX512", True, True)
IN_FLOAT32 = MatmulMethod("float32", 64, 32, UNLIMITED_ROWS)


@pytest.mark.parametrize(
    ("found", "method"),
    [
        (BFLOAT16, MatmulMethod("bfloat16", 32, 8, UNLIMITED_ROWS)),
        (AMX, MatmulMethod("bfloat16", 32, 8, 64)),
        (AVX512, MatmulMethod("float32", 64, 64, UNLIMITED_ROWS)),
        (AVX2, IN_FLOAT32),
        (Features("DEFAULT", False, False), IN_FLOAT32),  # as on ARM without bfloat16
        (Features("DEFAULT", True, False), MatmulMethod("bfloat16", 32, 8, UNLIMITED_ROWS)),
    ],
)
def test_the_features_decide_how_packed_weights_are_multiplied(
    found: Features, method: MatmulMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These were the fastest ways where all were measured: AVX2, AVX-512 with and without BF16."""
    assert fastest_method(found) == method
    monkeypatch.setattr(compiling, "processor_features", lambda: found)
    for has_matrix_units, own in ((False, method.max_native_rows), (True, UNLIMITED_ROWS)):
        monkeypatch.setattr(compiling, "has_matrix_units", lambda has=has_matrix_units: has)
        assert max_native_rows() == own
    model = load_model("tiny", device="cpu", quantize="int4")
    assert matmul_method_of(model.module) == method._replace(max_native_rows=0), (
        "products.cpp is not loaded"
    )


@pytest.mark.parametrize(
    ("machine", "answers", "most", "wanted"),
    [
        ("x86_64", {"bf16", "onednn"}, "", BFLOAT16),
        ("AMD64", {"amx", "onednn"}, "DEFAULT", AMX),
        ("x86_64", {"bf16", "amx", "onednn"}, "AVX512_CORE_AMX", AMX),
        ("x86_64", {"bf16", "amx", "onednn"}, "AVX512_CORE_BF16", BFLOAT16),
        ("x86_64", {"bf16", "amx", "onednn"}, "AVX512_CORE_VNNI", AVX512),
        ("x86_64", {"bf16", "amx"}, "AVX2", AVX512),
        ("x86_64", {"onednn"}, "", AVX512),
        ("aarch64", {"onednn"}, "", BFLOAT16),
        ("aarch64", set[str](), "", AVX512),
    ],
)
def test_features_are_those_that_torch_and_onednn_may_use(
    machine: str, answers: set[str], most: str, wanted: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: "bf16" in answers)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: "amx" in answers)
    monkeypatch.setattr(compiling, "has_fast_bfloat16", lambda: "onednn" in answers)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    assert processor_features() == wanted


def test_the_cache_of_packed_weights_has_two_bytes_a_number_or_what_is_set() -> None:
    model = load_model("tiny", device="cpu", quantize="int4")
    assert model.cache_dtype == torch.bfloat16
    for kind in ("float16", "bfloat16", "float32"):
        assert replace(model, cache_type=kind).cache_dtype == getattr(torch, kind)
    assert tiny().cache_dtype == torch.float32, "other weights keep their own type"


def test_the_setting_reaches_the_cache_and_the_list_of_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model_of(Profile(device="cpu", cache_dtype="bfloat16", compile="off"))
    cache = model.new_cache(4)
    model.forward([5], cache)
    cache.commit(1)
    assert cache.layer_keys(0).dtype == torch.bfloat16
    sizes = list[int]()
    for kind in ("float32", "bfloat16"):
        monkeypatch.setenv("SIRCHAT_CACHE_DTYPE", kind)
        sizes.append(listed_models((), None)[0].cache or 0)
    assert sizes[0] == 2 * sizes[1] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_setting_fixes_the_type_to_which_weights_are_unpacked(
    dtype: Literal["bfloat16", "float32"],
) -> None:
    profile = Profile(device="cpu", quantize="int4", unpack_dtype=dtype, compile="off")
    how = matmul_method_of(load_model_of(profile).module)
    assert how is not None
    assert how.dtype == dtype
    assert matmul_method_of(tiny().module) is None
