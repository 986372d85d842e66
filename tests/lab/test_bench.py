"""`sirchat bench`: its subcommands."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chatting import babbler, tiny
from command import hostile_modules, run
from gguf_file import write_gguf
from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.lab.bench import start, start_worker
from sirchat.lab.bench.ratio import BenchOptions, bench_model, compare
from warm_python import fresh_once, warm_program


def results(*arguments: str) -> list[dict[str, Any]]:
    """What `sirchat bench ARGUMENTS --json` measured."""
    done = run("bench", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return found


def test_decode_is_measured_by_default(endless: str) -> None:
    sizes = ("--cache", "64", "--rounds", "2", "--seen", "100,200", "--compile", "off")
    found = results("--model", endless, *sizes)
    kinds = ["decode"] * 4 + ["prefill"] * 2 + ["decode"] * 2
    names = [r["name"] for r in found]
    compiled = "decode with the compiled step against without"
    if compiled in names:  # where tests have a library in C++
        assert names.pop(3) == compiled
    assert [name.split()[0] for name in names] == kinds
    assert all(r["low"] <= r["median"] <= r["high"] for r in found)
    assert names[1] == "decode against generate with a static cache"
    assert names[2] == "decode against reading the weights once"
    assert re.fullmatch(r"\d+ MiB of weights a token: .* \d+\.\d GB/s, .* GB/s", found[2]["note"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "5", "start"], ["--rounds", "start"]),
        (["--json", "start"], ["--json", "start"]),
        (["start", "--seen", "100,300"], ["--seen"]),
        (["decode", "--seen", "much"], ["--seen", "EARLY,LATE"]),
        (["--seen", "100,300"], ["--seen", "--cache", "1024"]),
        (["--cache", "63"], ["--cache", "64"]),
        (["decode", "--rounds", "1"], ["--rounds", "2"]),
        (["start", "--tokens", "much"], ["tokens", "much"]),
        (["start", "--tokens", ""], ["--tokens"]),
        (["decode", "--device", "gpu"], ["--device", "gpu", "cuda"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_wrong_usage_gets_one_line_that_helps(arguments: list[str], words: list[str]) -> None:
    done = run("bench", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


STAND_IN = """#!{python}
import json, sys
for line in sys.stdin:
    command = json.loads(line)
    if command[0] == "load" and command[-1] and {crashes}:
        sys.exit(9)
    print(0.5, flush=True)
"""
"""In the place of a Python with llama-cpp-python; it needs half a second for everything."""


def test_llama_cpp_is_timed_on_the_same_file_and_said_to_crash_where_it_does(
    tmp_path: Path,
) -> None:
    pytest.importorskip("gguf")
    model = write_gguf(tmp_path / "babbler.gguf", babbler(), "Q8_0")
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, crashes=True), encoding="utf-8")
    python.chmod(0o700)
    sizes = ["--cache", "64", "--rounds", "2", "--seen", "100,100", "--device", "cpu"]
    peer = ["--llama-cpp", str(python), "--compile", "off"]
    found = results("decode", "--model", str(model), *peer, *sizes)
    of_peer = {r["name"]: r for r in found if "llama.cpp" in r["name"]}
    assert of_peer["decode against llama.cpp"]["other_ms"] == pytest.approx(500 / 8)
    assert of_peer["prefill against llama.cpp"]["other_ms"] == pytest.approx(500 / 64)
    assert "crashed" in of_peer["decode against llama.cpp"]["note"]


def test_a_start_is_timed_in_fresh_processes_that_run_nothing_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    run_by_worker = SimpleNamespace(**vars(sys) | {"executable": fresh_once(tmp_path / "fresh")})
    hostile_modules(tmp_path)  # only now: warm programs have begun elsewhere
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sirchat.lab.bench.start.sys", run_by_worker)
    chatting = SimpleNamespace(**vars(sys) | {"executable": warm_program(tmp_path / "warm")})
    monkeypatch.setattr("sirchat.lab.bench.start_prompt.sys", chatting)
    model = write_gguf(tmp_path / "babbler.gguf", babbler(), "Q8_0")
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, crashes=False), encoding="utf-8")
    python.chmod(0o700)
    flags = ["start", "--model", str(model), "--llama-cpp", str(python), "--tokens", "50,100"]
    found = results(*flags, "--rounds", "1", "--compile", "off")
    units = ["s", "s", "s", "s", "MiB", "MiB", "s", "s", "ms", "MiB", "s", "s", "s", "ms", "ms"]
    assert [r["unit"] for r in found] == units
    loads, found = found[:2], found[2:]
    load, first, resident, peak, few, paste, decode, most, prompt, ready, reply, *echoes = found
    echo, longest = echoes
    assert [one["name"][:30] for one in loads] == [
        "loading the model the first time"[:30],
        "the first time, from the start of the process"[:30],
    ]
    assert 0 < loads[0]["ours"] < loads[1]["ours"]
    assert loads[0]["other"] == 0.5
    assert few["name"] == "first token after 50 in an empty cache"
    assert paste["name"] == "first token after 100 in an empty cache"
    assert 0 < decode["ours"] < 1000 * paste["ours"]
    assert 0 < resident["ours"] <= peak["ours"] <= most["ours"]
    assert load["low"] is load["high"] is None  # of one start there are no quartiles
    assert 0 < prompt["ours"] < ready["ours"] < reply["ours"]
    assert 0 < echo["ours"] <= longest["ours"]
    assert load["other"] == paste["other"] == 0.5
    assert first["ours"] > load["ours"] > 0
    assert load["ratio"] == pytest.approx(load["ours"] / 0.5)
    assert prompt["other"] is prompt["ratio"] is None  # nothing to compare it with
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("model", "python", "words"),
    [
        ("tiny", sys.executable, ["--llama-cpp", "'tiny'", "GGUF"]),
        ("GGUF", "/no/such/python", ["/no/such/python"]),
        ("GGUF", "/bin/false", ["/bin/false", "pip install llama-cpp-python"]),
    ],
)
def test_without_the_peers_code_there_is_one_line(
    model: str, python: str, words: list[str], tmp_path: Path
) -> None:
    if model == "GGUF":
        pytest.importorskip("gguf")
        model = str(write_gguf(tmp_path / "tiny.gguf", tiny(), "Q8_0"))
    done = run("bench", "decode", "--model", model, "--llama-cpp", python, "--device", "cpu")
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_both_sides_have_the_threads_that_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sirchat.models.devices.free_thread_count", lambda: 2)
    monkeypatch.delenv("SIRCHAT_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # of the time when llama.cpp began
        bench_model("tiny", "cpu")
        assert torch.get_num_threads() == 1
        monkeypatch.setenv("SIRCHAT_THREADS", "1")
        torch.set_num_threads(2)
        monkeypatch.setattr("sirchat.lab.bench.ratio.bench_model", lambda *_, **__: tiny())
        start_worker._figures("135m", "cpu", "auto", "auto", "off", "8", "", "1", "0")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(usual)


def test_a_chat_starts_with_all_that_the_command_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list[str]()

    def started(flags: list[str]) -> dict[str, float]:
        given.extend(flags)
        return dict.fromkeys(("prompt", "ready", "reply", "echo", "echo_most"), 1.0)

    names = ("load", "first", "resident", "peak", "decode", "most", "paste 8")
    monkeypatch.setattr(start, "_ours", lambda *_, **__: dict.fromkeys(names, 1.0))
    monkeypatch.setattr("sirchat.lab.bench.start_prompt.time_prompt", started)
    start.bench_start(Profile(model="tiny", compile="off"), 1, None, (8,), with_chat=True)
    assert "--compile=off" in given
    assert f"--threads={torch.get_num_threads()}" in given


def test_the_memory_of_a_start_is_the_systems_whatever_the_size_of_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {
        "statm": "9 4 1 1 0 1 0",
        "status": "VmPeak:\t 99 kB\nVmHWM:\t 80 kB\nVmRSS:\t 64 kB\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path, *_: files[path.name])
    assert start_worker.resident_memory() == 64 * 1024  # of pages of 16 KiB
    assert start_worker.most_memory() == 80 * 1024


def test_random_weights_are_not_timed_in_the_layout_of_a_gpu_on_a_cpu() -> None:
    with pytest.raises(ModelError, match="no blocks to keep"):
        bench_model("135m", "cpu", quantize="packed")


def test_quartiles_are_among_the_ratios() -> None:
    ours, other = (partial(iter, side) for side in ([9.0, 1.0, 4.0], [9.0, 1.0, 1.0]))
    ratio = compare("", ours, other, BenchOptions(rounds=2))
    assert (ratio.low, ratio.median, ratio.high) == (1.75, 2.5, 3.25)
