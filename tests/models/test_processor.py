"""What suits the processor: types and products by its features, threads by its free cores."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from chatting import tiny
from plain_model import load_model
from sirchat.cli.models import listed_models
from sirchat.config.profile import Profile
from sirchat.models import compiling, devices
from sirchat.models.compiling import Features, fastest_method, max_native_rows, processor_features
from sirchat.models.devices import (
    cpu_quota,
    describe_threads,
    free_thread_count,
    load_of_others,
    physical_cores,
    thread_count,
    use_threads,
)
from sirchat.models.load import load_model_of
from sirchat.models.new_thread import call_in_new_thread
from sirchat.models.packed import UNLIMITED_ROWS, MatmulMethod, matmul_method_of
from warm_python import warm_python

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


# Threads


@pytest.mark.parametrize(
    ("cores", "allowed", "quota", "load", "threads"),
    [
        (8, 8, None, 0.0, 8),
        (8, 8, None, 0.4, 8),
        (8, 8, None, 3.2, 5),
        (8, 8, None, 40.0, 1),  # never none
        (8, 2, None, 3.0, 2),  # the others are busy, not ours
        (64, 64, 2.5, 0.0, 2),
        (64, 64, 0.5, 0.0, 1),
        (2, 2, None, 1.0, 1),
    ],
)
def test_threads_are_the_cores_that_are_allowed_and_free(
    cores: int, allowed: int, quota: float | None, load: float, threads: int
) -> None:
    assert thread_count(cores, allowed, quota, load) == threads


@pytest.mark.parametrize(
    ("last_minute", "now", "load"),
    [
        (3.2, 9, 3.2),  # they still run
        (3.2, 1, 0.0),  # just this program: the others have ended
        (0.1, 9, 0.1),  # they have just begun, and may end soon
        (0.3, 0, 0.0),
    ],
)
def test_the_load_is_what_still_runs_and_does_not_give_way(
    last_minute: float, now: int, load: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loadavg").write_text(f"{last_minute} 1.00 1.00 {now}/300 12345\n")
    monkeypatch.setattr("os.getloadavg", lambda: (last_minute, 1.0, 1.0))
    running = [False]
    monkeypatch.setattr(devices, "is_learning", lambda: running[0])
    assert load_of_others(tmp_path / "loadavg") == load
    assert load_of_others(tmp_path / "none") == last_minute
    running[0] = True  # with all cores, of which it gives each away
    assert load_of_others(tmp_path / "loadavg") == 0


def test_two_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        path = tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(siblings + "\n")
    assert physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({0, 7, 8}, tmp_path) == 3  # of two nothing is known


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b", {"cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        ("0::/a/b", {"cpu.max": "400000 100000", "a/b/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"c/cpu.max": "150000 100000"}, None),  # of other processes
        ("4:memory:/a\n1:cpu,cpuacct:/a", {"cpu/a": "-1 100000"}, None),
        ("4:memory:/\n1:cpu,cpuacct:/a", {"cpu": "-1 100000", "cpu/a": "50000 100000"}, 0.5),
    ],
)
def test_the_quota_of_a_container_is_the_least_of_its_groups(
    groups: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    write("proc/self/cgroup", groups)
    for name, text in files.items():
        if name.endswith("cpu.max"):
            write(f"sys/fs/cgroup/{name}", text)
        else:
            for of, number in zip(("quota", "period"), text.split(), strict=True):
                write(f"sys/fs/cgroup/{name}/cpu.cfs_{of}_us", number)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("wanted", "environment", "threads"),
    [
        (3, {"OMP_NUM_THREADS": "7"}, 3),
        (0, {"SIRCHAT_THREADS": "4", "OMP_NUM_THREADS": "7"}, 4),
        (0, {"OMP_NUM_THREADS": "7"}, None),  # torch has read it itself
        (0, {}, 5),
        (0, {"SIRCHAT_THREADS": "0"}, 5),
    ],
)
def test_what_the_user_sets_is_not_overridden(
    wanted: int, environment: dict[str, str], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr("sirchat.models.devices.free_thread_count", lambda: 5)
    use_threads(wanted, environment)
    assert asked == ([] if threads is None else [threads])


def test_the_header_says_why_there_are_fewer_threads_than_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sirchat.models.devices.physical_cores", lambda _: 2)
    monkeypatch.setattr("sirchat.models.devices.cpu_quota", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for name in ("OMP_NUM_THREADS", "SIRCHAT_THREADS"):
        monkeypatch.delenv(name, raising=False)
    device, told = torch.device("cpu"), "1 thread (other programs kept 1 of 2 cores busy)"
    assert describe_threads(device, was_free=True) == told
    assert describe_threads(device) == "1 thread"  # a setting chose it
    for name in ("OMP_NUM_THREADS", "SIRCHAT_THREADS"):
        with monkeypatch.context() as said:
            said.setenv(name, "1")
            assert describe_threads(device, was_free=True) == "1 thread"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert describe_threads(device, was_free=True) == "2 threads"


def test_the_header_names_threads_on_a_cpu_only() -> None:
    assert free_thread_count() >= 1
    assert describe_threads(torch.device("cpu")) == "1 thread"
    assert describe_threads(torch.device("cuda")) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_a_thread_that_has_ended_keeps_no_workers() -> None:
    """Workers of a thread that only waits slow down the workers of the one that generates."""
    script = (
        "import sys, threading, time; from pathlib import Path; import torch\n"
        "from sirchat.models.new_thread import call_in_new_thread\n"
        "torch.set_num_threads(3)\n"
        "count = lambda: len(list(Path('/proc/self/task').iterdir()))\n"
        "before = count()\n"
        "def work():\n"
        "    torch.ones(600, 600).exp().sum()\n"
        "    return count(), threading.current_thread() is threading.main_thread()\n"
        "during, in_main = call_in_new_thread(work)\n"
        "end = time.monotonic() + 60\n"
        "while count() > before and time.monotonic() < end:\n"
        "    time.sleep(0.01)\n"
        "print(during - before, in_main, count() - before)\n"
    )
    found = subprocess.run(
        [*warm_python(), "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    workers, in_main, left = found.stdout.split()
    assert (int(workers) > 1, in_main, left) == (True, "False", "0")


def test_an_error_in_the_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        call_in_new_thread(lambda: 1 // 0)
