"""The cache's type, and the products of packed weights, are those measured to be fastest here."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from chatting import tiny
from command import run
from families import loaded
from sirchat.config.profile import Profile
from sirchat.models import measuring
from sirchat.models.load import load_model, load_model_of
from sirchat.models.measuring import HeadShape, fastest_matmul_method, fastest_type, head_shape
from sirchat.models.packed import MatmulMethod, matmul_method_of
from sirchat.paths import compiled_dir

SHAPE = HeadShape(9, 3, 64)


pytestmark = pytest.mark.usefixtures("own_home")


def of_times(monkeypatch: pytest.MonkeyPatch, bfloat16: float, float16: float) -> list[HeadShape]:
    """From now on these are the measured times; returns the shapes that are measured."""
    asked: list[HeadShape] = []

    def measure(shape: HeadShape) -> dict[torch.dtype, float]:
        asked.append(shape)
        return {torch.bfloat16: bfloat16, torch.float16: float16}

    monkeypatch.setattr(measuring, "measure_attention", measure)
    return asked


@pytest.mark.parametrize(
    ("bfloat16", "float16", "wanted"), [(1, 4, torch.bfloat16), (3, 2, torch.float16)]
)
def test_the_faster_type_is_taken_and_stays(
    bfloat16: float, float16: float, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = of_times(monkeypatch, bfloat16, float16)
    assert fastest_type(SHAPE) == wanted
    of_times(monkeypatch, float16, bfloat16)
    assert fastest_type(SHAPE) == wanted, "a chat that resumes gets the same type"
    assert asked == [SHAPE]


def test_another_processor_or_shape_is_measured_anew_but_not_another_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = of_times(monkeypatch, 1, 2)
    fastest_type(SHAPE)
    fastest_type(HeadShape(32, 8, 128))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    fastest_type(SHAPE)
    monkeypatch.setattr(measuring, "processor", lambda: "another")
    fastest_type(SHAPE)
    assert [one.queries for one in asked] == [9, 32, 9]


def test_where_nothing_can_be_written_it_is_measured_at_each_start(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_home / "state").touch()
    asked = of_times(monkeypatch, 1, 2)
    assert fastest_type(SHAPE) == fastest_type(SHAPE) == torch.bfloat16
    assert len(asked) == 2


def test_a_measurement_of_a_models_layers_takes_a_moment_and_names_both_types() -> None:
    shape = head_shape(loaded("llama").module.config)
    assert shape == HeadShape(4, 2, 16)
    taken = measuring.measure_attention(shape)
    assert set(taken) == {torch.bfloat16, torch.float16}
    assert all(0 < seconds < 1 for seconds in taken.values())


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_packed_weights_take_the_measured_type_unless_one_is_set(
    kind: Literal["float16", "bfloat16", "float32"], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_times(monkeypatch, 1, 2)
    packed = load_model("tiny", device="cpu", quantize="int4")
    assert packed.cache_dtype == torch.bfloat16
    assert replace(packed, cache_type=kind).cache_dtype == getattr(torch, kind)
    assert tiny().cache_dtype == torch.float32, "other weights keep their own type"


def test_the_setting_reaches_the_cache_and_the_list_of_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model_of(Profile(device="cpu", cache_dtype="bfloat16", compile="off"))
    cache = model.new_cache(4)
    model.forward([5], cache)
    cache.commit(1)
    assert cache.layer_keys(0).dtype == torch.bfloat16
    sizes = [
        json.loads(run("models", "--json", SIRCHAT_CACHE_DTYPE=kind).stdout)[0]["kv_cache_bytes"]
        for kind in ("float32", "bfloat16")
    ]
    assert sizes[0] == 2 * sizes[1]


def test_products_are_measured_once_and_a_damaged_file_is_measured_anew(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = MatmulMethod("float32", few_4=64, few_8=32, few=32)
    monkeypatch.setattr(measuring, "measure_matmul_method", lambda: slow)
    assert fastest_matmul_method() == slow
    monkeypatch.setattr(measuring, "measure_matmul_method", MatmulMethod)
    assert fastest_matmul_method() == slow, "a chat that resumes multiplies in the same way"
    (kept,) = compiled_dir().iterdir()
    for damaged in ("", "[]", '{"dtype": "int8"}', '{"few": 0}', '{"few": "8"}', '{"fewer": 8}'):
        kept.write_text(damaged)
        assert fastest_matmul_method() == MatmulMethod()
        assert json.loads(kept.read_text()) == MatmulMethod()._asdict()


def test_measuring_products_takes_a_moment() -> None:
    begun = time.perf_counter()
    found = measuring.measure_matmul_method()
    assert found.dtype in ("bfloat16", "float32")
    assert 8 <= found.few <= found.few_4
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_setting_fixes_the_type_to_which_weights_are_unpacked(
    dtype: Literal["bfloat16", "float32"],
) -> None:
    profile = Profile(device="cpu", quantize="int4", unpack_dtype=dtype, compile="off")
    how = matmul_method_of(load_model_of(profile).module)
    assert how is not None
    assert how.dtype == dtype
    assert matmul_method_of(tiny().module) is None
