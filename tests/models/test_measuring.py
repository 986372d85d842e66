"""The cache's type, and the products of packed weights, suit the processor, whatever the noise."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import nn

from attacking import MANY
from chatting import tiny
from command import run
from families import loaded
from gguf_file import write_gguf
from sirchat.config.profile import Profile
from sirchat.models import measuring
from sirchat.models.doctor import run_checks
from sirchat.models.ending_thread import call_in_new_thread
from sirchat.models.load import load_model, load_model_of
from sirchat.models.measuring import (
    HeadShape,
    check_in_background,
    choices_for,
    choose_matmul_method,
    head_shape,
    measure_choices,
)
from sirchat.models.packed import Int4Linear, Int8Linear, MatmulMethod, matmul_method_of
from sirchat.paths import compiled_dir

pytestmark = pytest.mark.usefixtures("own_home")


HEADS = HeadShape(9, 3, 64)


class Packed(nn.Module):
    """A module with a packed layer [N, 32] of eight bits, one of four, and attention of `heads`."""

    def __init__(self, heads: HeadShape = HEADS, rows: int = 64, *, has_four: bool = True) -> None:
        super().__init__()
        ones = torch.ones(rows, dtype=torch.bfloat16)
        self.eight = Int8Linear(torch.ones(rows, 32, dtype=torch.int8), ones)
        if has_four:
            packed = torch.zeros(rows, 16, dtype=torch.uint8)
            self.four = Int4Linear(packed, ones.repeat(2).view(1, rows, 2))
        sizes = {"num_attention_heads": heads.queries, "num_key_value_heads": heads.keys}
        values = {**sizes, "head_dim": heads.size}
        text = SimpleNamespace(to_dict=lambda: values)
        self.config = SimpleNamespace(get_text_config=lambda decoder: text)


class Processor(NamedTuple):
    """What work takes on a processor, in microseconds, and what is to be chosen there."""

    capability: str
    has_bfloat16: bool
    attention: tuple[float, float]  # bfloat16, float16
    kernel: float  # a row by the kernel for packed weights
    unpacking: tuple[float, float]  # four bits to bfloat16, to float32
    product: tuple[float, float]  # of a row with unpacked weights
    cache_type: str
    products: MatmulMethod


PROCESSORS = {
    "AVX-512 BF16": Processor(
        *("AVX512", True, (96, 464), 10, (400, 350), (4, 18)),
        *("bfloat16", MatmulMethod("bfloat16", 32, 8, 8)),
    ),
    "AVX-512 without BF16": Processor(
        *("AVX512", False, (96, 464), 10, (500, 350), (21, 17)),
        *("bfloat16", MatmulMethod("float32", 64, 64, 64)),
    ),
    "AVX2": Processor(
        *("AVX2", False, (100, 468), 24, (400, 450), (600, 17)),
        *("bfloat16", MatmulMethod("float32", 64, 32, 32)),
    ),
    "AMX": Processor(
        *("AVX512", True, (60, 100), 9, (500, 350), (1, 19)),
        *("bfloat16", MatmulMethod("bfloat16", 32, 8, 8)),
    ),
    "features that say too little": Processor(
        *("AVX2", False, (300, 100), 24, (400, 450), (3, 17)),
        *("float16", MatmulMethod("bfloat16", 32, 8, 8)),
    ),
}


@dataclass
class FakeClock:
    """A clock that moves only while a way is timed; `noise(way, number)` multiplies its time."""

    now: float = 0.0
    works: int = 0  # ways that were asked for, as numbers of `noise`
    noise: Callable[[int, str, int], float] = lambda work, way, number: 1.0

    def way(self, name: str, microseconds: float) -> Callable[[], None]:
        work, number = self.works, 0

        def run() -> None:
            nonlocal number
            self.now += microseconds / 1e6 * self.noise(work, name, number)
            number += 1

        return run

    def get_clock_info(self, name: str) -> Any:
        return SimpleNamespace(resolution=1e-9)

    def thread_time(self) -> float:
        return self.now


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Processor], FakeClock]:
    """Makes this machine that processor, whose times a fake clock tells."""

    def become(there: Processor) -> FakeClock:
        clock = FakeClock()

        def multiply(layer: Any, rows: int, is_unpacked: bool = False) -> Any:
            clock.works += 1
            ways = {"kernel": clock.way("kernel", there.kernel * rows)}
            for at, name in enumerate(("bfloat16", "float32")):
                before = 0 if is_unpacked else there.unpacking[at] / (8 if layer.bits == 8 else 1)
                ways[name] = clock.way(name, before + there.product[at] * rows)
            return ways

        def attend(shape: HeadShape) -> Any:
            clock.works += 1
            names = ("bfloat16", "float16")
            return {n: clock.way(n, t) for n, t in zip(names, there.attention, strict=True)}

        monkeypatch.setattr(measuring, "time", clock)
        monkeypatch.setattr(measuring, "ways_to_multiply", multiply)
        monkeypatch.setattr(measuring, "ways_to_attend", attend)
        # Another test of this process may have loaded the library.
        monkeypatch.setattr(measuring, "has_own_products", lambda: False)
        monkeypatch.setattr(measuring, "_has_bfloat16", lambda: there.has_bfloat16)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: there.capability)
        return clock

    return become


def disturbed(seed: int, rounds: list[list[int]], work: int, way: str, number: int) -> float:
    """One round and the warm-up halve or double the time of any way; three others may double it."""
    draw = random.Random(f"{seed} {work} {way} {number}")
    anyhow, *slow = rounds[work]
    if seed and number in (anyhow, 0):
        return draw.choice((0.5, 1, 2))
    return draw.choice((1, 2)) if seed and number in slow else 1


@pytest.mark.parametrize("name", PROCESSORS)
def test_on_each_processor_the_fastest_ways_are_chosen_however_some_rounds_are_disturbed(
    name: str, on: Callable[[Processor], FakeClock]
) -> None:
    there, module = PROCESSORS[name], Packed()
    for seed in range(MANY or 40):
        clock = on(there)
        rounds = [random.Random(f"{seed} {work}").sample(range(8), 4) for work in range(9)]

        clock.noise = partial(disturbed, seed, rounds)
        choices = measure_choices(module)
        assert choices[:2] == (there.cache_type, there.products), seed
        assert choices_for(module) == choices, "later starts do the same"


def test_before_anything_was_measured_the_features_decide(
    on: Callable[[Processor], FakeClock],
) -> None:
    for there in PROCESSORS.values():
        on(there)
        choices = choices_for(Packed())
        assert choices.cache_type == "bfloat16"
        assert choices.products.dtype == ("bfloat16" if there.has_bfloat16 else "float32")
        assert choices.times == {}
    assert not compiled_dir().exists(), "a start measures nothing"


def test_another_way_is_taken_only_if_it_saves_a_third() -> None:
    taken = {"kernel": [3.0, 3.0, 3.0], "bfloat16": [2.1, 2.1, 2.1], "float32": [1.9, 9.0, 2.2]}
    assert measuring.fastest(taken, "kernel") == "kernel"
    taken["float32"] = [1.9, 1.9, 9.0]
    assert measuring.fastest(taken, "kernel") == "float32"


def test_a_hopeless_way_is_timed_only_twice() -> None:
    taken = measuring.time_ways({"quick": int, "slow": lambda: sum(range(300_000))}, rounds=4)
    assert (len(taken["quick"]), len(taken["slow"])) == (4, 1)


def wait_for(thread: threading.Thread | None) -> None:
    assert thread is not None
    thread.join()


def test_in_the_background_it_is_measured_once_and_again_when_a_third_is_lost(
    on: Callable[[Processor], FakeClock],
) -> None:
    module, known = Packed(), PROCESSORS["AVX-512 BF16"]
    on(known)
    wait_for(check_in_background(module))
    first = choices_for(module)
    assert first.products == known.products
    assert first.times["512 rows"] == {"bfloat16": pytest.approx(2.448), "float32": 9.566}
    # Now bfloat16 takes 1.4 times as long as float32: not enough to change anything.
    on(known._replace(product=(26, 18)))
    wait_for(check_in_background(module))
    assert choices_for(module) == first
    on(known._replace(product=(36, 18)))
    wait_for(check_in_background(module))
    assert choices_for(module).products.dtype == "float32"
    on(known._replace(attention=(464, 96)))
    wait_for(check_in_background(module))
    assert choices_for(module).cache_type == "float16"


def test_the_check_leaves_threads_and_random_numbers_of_others_as_they_are() -> None:
    def others() -> tuple[int, int, list[int]]:
        later = call_in_new_thread(torch.get_num_threads)
        return torch.get_num_threads(), later, torch.random.get_rng_state().tolist()

    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = others()
        wait_for(check_in_background(Packed(has_four=False)))
        assert others() == before
    finally:
        torch.set_num_threads(usual)
    assert check_in_background(nn.Linear(3, 3)) is None, "nothing to choose"


def test_another_processor_or_shape_is_measured_anew_but_not_another_number_of_threads(
    on: Callable[[Processor], FakeClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(PROCESSORS["AVX2"])
    measure_choices(Packed())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert choices_for(Packed()).times
    assert not choices_for(Packed(HeadShape(32, 8, 128))).times
    assert not choices_for(Packed(rows=128)).times
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert not choices_for(Packed()).times
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(measuring, "processor", lambda: "another")
    assert not choices_for(Packed()).times


def test_what_can_not_be_written_or_read_is_as_if_nothing_was_measured(
    own_home: Path, on: Callable[[Processor], FakeClock]
) -> None:
    on(PROCESSORS["AVX-512 BF16"])
    (own_home / "state").touch()
    assert measure_choices(Packed()).times
    assert not choices_for(Packed()).times
    (own_home / "state").unlink()
    good = measure_choices(Packed())
    (kept,) = compiled_dir().iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    whole = json.loads(kept.read_text(encoding="utf-8"))
    for changed in (
        {"cache_type": "int8"},
        {"products": {"dtype": "int8"}},
        {"products": {"few": 0}},
        {"products": {"few": "8"}},
        {"products": {"fewer": 8}},
        {"times": {"attention": {"float16": "fast"}}},
        {"times": 3},
    ):
        kept.write_text(json.dumps(whole | changed), encoding="utf-8")
        assert not choices_for(Packed()).times, changed
    for damaged in ("", "[]", "{}", "\0"):
        kept.write_text(damaged, encoding="utf-8")
        assert not choices_for(Packed()).times
    wait_for(check_in_background(Packed()))
    assert choices_for(Packed()) == good


def test_real_layers_are_measured_in_a_moment() -> None:
    model = load_model("tiny", device="cpu", quantize="int4")
    assert head_shape(loaded("llama").module.config) == HeadShape(4, 2, 16)
    choices = measure_choices(model.module)
    choose_matmul_method(model.module, "auto")
    assert matmul_method_of(model.module) == choices.products._replace(own=0)
    assert set(choices.times["attention"]) == {"bfloat16", "float16"}
    assert set(choices.times["512 rows"]) == {"bfloat16", "float32"}
    assert all(ms > 0 for ways in choices.times.values() for ms in ways.values())
    assert sum(ms for ways in choices.times.values() for ms in ways.values()) < 500
    assert model.cache_dtype == getattr(torch, choices.cache_type)
    for kind in ("float16", "bfloat16", "float32"):
        assert replace(model, cache_type=kind).cache_dtype == getattr(torch, kind)
    assert tiny().cache_dtype == torch.float32, "other weights keep their own type"


def test_doctor_says_what_was_measured_and_measures_anew(
    tmp_path: Path, on: Callable[[Processor], FakeClock]
) -> None:
    pytest.importorskip("gguf")
    on(PROCESSORS["AVX-512 BF16"]._replace(product=(4, 1)))
    model = write_gguf(tmp_path / "tiny.gguf", tiny(), "Q8_0")

    def doctor(*, measures: bool) -> dict[str, str]:
        found = run_checks(str(model), measures=measures)
        early = takewhile(lambda finding: finding.name != "memory", found)
        return {finding.name: finding.value for finding in early}

    usual = doctor(measures=False)
    assert usual["unpacked weights"] == "bfloat16, to read more than 32 tokens at once"
    assert "doctor --measure" in usual["measured, in ms"]
    measured = doctor(measures=True)
    assert measured["unpacked weights"].startswith("float32")
    assert "512 rows: bfloat16 2.1, float32 0.556" in measured["measured, in ms"]
    later = doctor(measures=False)
    for name in ("cache", "unpacked weights", "measured, in ms"):
        assert later[name] == measured[name], "later starts choose so, too"


SETTINGS = (
    "",
    "ATEN_CPU_CAPABILITY=avx2",
    "ATEN_CPU_CAPABILITY=default",
    *(f"ONEDNN_MAX_CPU_ISA={most}" for most in ("AVX2", "AVX512_CORE", "AVX512_CORE_BF16")),
)
PROGRAM = """
import collections, pathlib, sys, torch
from types import SimpleNamespace as Made
from torch import nn
from sirchat.models.measuring import measure_choices
from sirchat.models.packed import Int8Linear, Int4Linear, quantize_int4, quantize_int8
from sirchat.models.products import build_library, compiler, load_library, suits_processor
if suits_processor() and compiler():
    build_library(pathlib.Path("products.so"))
    load_library(pathlib.Path("products.so").absolute())
module, counted = nn.Module(), collections.Counter()
rows, columns = int(sys.argv[2]), int(sys.argv[3])
weight = torch.randn(rows, columns)
module.eight = Int8Linear(*quantize_int8(weight))
if Int4Linear.fits(rows, columns):
    module.four = Int4Linear.of_values(*quantize_int4(weight))
values = dict(num_attention_heads=9, num_key_value_heads=3, head_dim=64)
module.config = Made(get_text_config=lambda decoder: Made(to_dict=lambda: values))
for _ in range(int(sys.argv[1])):
    cached, method, times = measure_choices(module)
    counted[" ".join(map(str, (cached, *method)))] += 1
print("; ".join(f"{count} x {chosen}" for chosen, count in counted.items()))
print({work: {way: round(ms, 2) for way, ms in ways.items()} for work, ways in times.items()})
"""
"""Measures so many times for a layer [rows, columns]; prints each choice, and the last times."""


@pytest.mark.skipif(not MANY, reason="needs SIRCHAT_ATTACK, the number of times")
@pytest.mark.parametrize("sizes", ["1536 576", "8192 2048"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_choice_is_the_same_each_time_beside_three_busy_processes(
    setting: str, sizes: str, own_home: Path
) -> None:
    """`SIRCHAT_ATTACK=20 pytest -s` prints what is chosen."""
    environ = os.environ | dict([setting.split("=")] if setting else [])
    environ |= {"SIRCHAT_HOME": str(own_home), "PYTHONPATH": os.pathsep.join(sys.path)}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        command = [sys.executable, "-c", PROGRAM, str(MANY), *sizes.split()]
        done = subprocess.run(
            command, cwd=own_home, env=environ, capture_output=True, text=True, check=True
        )
    finally:
        for process in busy:
            process.kill()
            process.wait()
    sys.stdout.write(f"{setting or 'all instructions'}, {sizes}: {done.stdout}")
    assert done.stdout.startswith(f"{MANY} x "), done.stdout


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_setting_fixes_the_type_to_which_weights_are_unpacked(
    dtype: Literal["bfloat16", "float32"],
) -> None:
    profile = Profile(device="cpu", quantize="int4", unpack_dtype=dtype, compile="off")
    how = matmul_method_of(load_model_of(profile).module)
    assert how is not None
    assert how.dtype == dtype
    assert matmul_method_of(tiny().module) is None
