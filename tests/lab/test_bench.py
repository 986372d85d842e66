"""`sirchat bench`: its subcommands, records, and the model that it makes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chatting import babbler, tiny
from command import hostile_modules, run
from gguf_file import write_gguf
from sirchat.lab.bench import everything
from sirchat.lab.bench.made_model import CONTEXT, write_model
from sirchat.lab.bench.peers import SirLLM
from sirchat.lab.bench.ratio import SHAPES, BenchOptions, Ratio, bench_model, some_ids
from sirchat.models.load import load_model
from warm_python import fresh_once, warm_program


def results(*arguments: str) -> list[dict[str, Any]]:
    """What `sirchat bench ARGUMENTS --json` measured."""
    done = run("bench", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", [[], ["decode"]], ids=["alone", "decode"])
def test_decode_is_measured_by_default(command: list[str], endless: str) -> None:
    sizes = ("--cache", "64", "--rounds", "2", "--seen", "100,300")
    found = results(*command, "--model", endless, *sizes)
    kinds = ["decode"] * 5 + ["prefill"] * 2 + ["decode"] * 2
    assert [r["name"].split()[0] for r in found] == kinds
    assert all(r["low"] <= r["median"] <= r["high"] for r in found)
    names = [r["name"] for r in found]
    assert names[1] == "decode against generate with a static cache"
    assert names[2] == "decode against reading the weights once"
    assert re.fullmatch(r"\d+ MiB of weights a token: .* \d+\.\d GB/s, .* GB/s", found[2]["note"])


@pytest.mark.slow
def test_panel_says_what_it_writes(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sirchat.lab.bench.panel.BLOCK_SECONDS", 0.2)
    (found,) = results("panel", "--model", endless, "--cache", "64", "--rounds", "2")
    assert found["median"] > 0
    assert "kB/s to the terminal" in found["note"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert run("bench", "panel", "--rounds", "2").returncode == 2


def test_training_compares_masks() -> None:
    (found,) = results("training", "--tokens", "64", "--rounds", "2", "--device", "cpu")
    assert found["name"] == "a training step of 64 tokens, mask dense against none"
    assert found["low"] <= found["median"] <= found["high"]


@pytest.mark.slow
def test_recall_times_a_turn_and_the_search_by_size(endless: str) -> None:
    sizes = ["--archived", "300,900", "--retrievers", "words,meaning", "--cache", "64"]
    found = results("recall", "--model", endless, *sizes, "--rounds", "2", "--device", "cpu")
    names = [
        re.fullmatch(r"turn with recall (\w+) against a turn without, ([\d,]+) .*", r["name"])
        for r in found
    ]
    archived = [(one[1], int(one[2].replace(",", "")) // 300) for one in names if one]
    assert archived == [("words", 1), ("meaning", 1), ("words", 3), ("meaning", 3)]
    for one in found:
        assert one["ours_ms"] > 0 < one["other_ms"]
        search = re.search(r"search ([\d.]+) ms", one["note"])
        assert search
        assert 0 < float(search[1]) < one["ours_ms"] * 3


@pytest.mark.slow
def test_archive_says_what_it_took(endless: str) -> None:
    sizes = ("--tokens", "4000", "--archive-limit", "1MiB")
    ram, disk = results("archive", "--model", endless, *sizes)
    assert (ram["place"], disk["place"]) == ("ram", "disk")
    assert ram["disk"] == 0 < disk["disk"] <= 2**20
    assert all(one["tokens"] == 4000 and 0 < one["archive"] <= 2**20 for one in (ram, disk))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--panel", "--rounds", "24"], ["--panel", "sirchat bench panel"]),
        (["--attention"], ["--attention", "sirchat bench attention"]),
        (["--json", "--limits=9", "--archive-limit", "1MiB"], ["sirchat bench archive --tokens"]),
        (["--training", "4096"], ["--training", "sirchat bench training --tokens"]),
        (["--rounds", "5", "panel"], ["--rounds", "panel"]),
        (["--json", "panel"], ["--json", "panel"]),
        (["panel", "--seen", "100,300"], ["--seen"]),
        (["decode", "--seen", "much"], ["--seen", "EARLY,LATE"]),
        (["--seen", "100,300"], ["--seen", "--cache", "1024"]),
        (["--cache", "63"], ["--cache", "64"]),
        (["attention", "--rounds", "1"], ["--rounds", "2"]),
        (["archive"], ["--tokens"]),
        (["archive", "--tokens", "9", "--archive-limit", "much"], ["--archive-limit", "much"]),
        (["training", "--tokens", "1"], ["--tokens", "2"]),
        (["panel", "--device", "gpu"], ["--device", "gpu", "cuda"]),
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


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [True, False])
def test_llama_cpp_is_timed_on_the_same_file(crashes: bool, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = write_gguf(tmp_path / "babbler.gguf", babbler(), "Q8_0")
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, crashes=crashes), encoding="utf-8")
    python.chmod(0o700)
    sizes = ["--cache", "64", "--rounds", "2", "--seen", "100,100", "--device", "cpu"]
    found = results("decode", "--model", str(model), "--llama-cpp", str(python), *sizes)
    of_peer = {r["name"]: r for r in found if "llama.cpp" in r["name"]}
    assert of_peer["decode against llama.cpp"]["other_ms"] == pytest.approx(500 / 8)
    assert of_peer["prefill against llama.cpp"]["other_ms"] == pytest.approx(500 / 64)
    assert ("crashed" in of_peer["decode against llama.cpp"]["note"]) is crashes


SIR_LLM = """
from types import SimpleNamespace
log = open({log!r}, "w", buffering=1)

class Cache:
    def evict_for_space_token_entropy(self, past, entropy, coming):
        print("evict", len(past), entropy, coming, file=log)
        return past[1:], entropy[1:]

class Evaluator:
    def __init__(self, model, tokenizer, options): ...
    def _greedy_generate_token_entropy(self, ids, continue_len, past, entropy):
        (ids,) = ids.tolist()
        print("read", ids, continue_len, file=log)
        return (past or []) + ids, [8.0] * len(ids), None

def enable_streaming_llm(model, start_size, recent_size, token_entropy_size):
    print("load", model.vocab_size, start_size, recent_size, token_entropy_size, file=log)
    print("printed by the library")
    return Cache()
"""
"""In the place of SirLLM's code: it evicts the first token, and notes what it is called with."""


@pytest.mark.slow
def test_sirllms_code_evicts_and_decays_before_each_turn(endless: str, tmp_path: Path) -> None:
    package = tmp_path / "sir_llm"
    package.mkdir()
    text = SIR_LLM.format(log=str(tmp_path / "log"))
    for name in ("__init__", "enable_streaming_llm"):
        (package / f"{name}.py").write_text(text if name != "__init__" else "", encoding="utf-8")
    (package / "eval_utils.py").write_text(
        "from sir_llm.enable_streaming_llm import Evaluator", encoding="utf-8"
    )
    model = bench_model(endless, "cpu", "float32")
    with SirLLM(warm_program(tmp_path / "python")) as code:
        code.load(model, held=20)
        blocks = code.time_reading(model, BenchOptions(cache=16, rounds=2))
        assert next(blocks) > 0
    ids = some_ids(model, 16)
    assert (tmp_path / "log").read_text(encoding="utf-8").splitlines() == [
        f"load {model.vocab_size} 4 0 16",
        f"read {ids[:8]} 1",
        f"evict 8 {[8.0] * 8} 8",
        f"read {ids[8:]} 1",
        f"evict 15 {[7.2] * 7 + [8.0] * 8} 8",
        f"read {ids[:8]} 1",
    ]


@pytest.mark.slow
def test_a_start_is_timed_in_fresh_processes_that_run_nothing_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    run_by_worker = SimpleNamespace(**vars(sys) | {"executable": fresh_once(tmp_path / "fresh")})
    hostile_modules(tmp_path)  # only now: warm programs have begun elsewhere
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sirchat.lab.bench.start.sys", run_by_worker)
    model = write_gguf(tmp_path / "tiny.gguf", tiny(), "Q8_0")
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, crashes=True), encoding="utf-8")
    python.chmod(0o700)
    flags = ["start", "--model", str(model), "--llama-cpp", str(python), "--tokens", "50,100"]
    found = results(*flags, "--rounds", "1")
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


@pytest.mark.slow
def test_a_start_that_fails_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_by_worker = SimpleNamespace(**vars(sys) | {"executable": warm_program(tmp_path / "python")})
    monkeypatch.setattr("sirchat.lab.bench.start.sys", run_by_worker)
    done = run("bench", "start", "--quantize", "packed")
    assert done.returncode == 1
    assert "can't stay packed" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "flag", "python", "words"),
    [
        ("tiny", "--sirllm", "/no/such/python", ["/no/such/python"]),
        ("tiny", "--sirllm", "/bin/false", ["/bin/false", "transformers==4.33.0"]),
        ("tiny", "--llama-cpp", sys.executable, ["--llama-cpp", "'tiny'", "GGUF"]),
        ("GGUF", "--llama-cpp", "/no/such/python", ["/no/such/python"]),
        ("GGUF", "--llama-cpp", "/bin/false", ["/bin/false", "pip install llama-cpp-python"]),
    ],
)
def test_without_the_peers_code_there_is_one_line(
    model: str, flag: str, python: str, words: list[str], tmp_path: Path
) -> None:
    if model == "GGUF":
        pytest.importorskip("gguf")
        model = str(write_gguf(tmp_path / "tiny.gguf", tiny(), "Q8_0"))
    done = run("bench", "decode", "--model", model, flag, python, "--device", "cpu")
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.slow
def test_the_memory_of_a_model_is_within_a_tenth_of_what_is_said() -> None:
    # In a process of its own: in this one, memory that other tests freed would be used again.
    command = [sys.executable, "-m", "sirchat", "bench", "memory", "--model", "tiny", "--json"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    weights, cache, both = json.loads(done.stdout)["results"]
    assert (weights["name"], cache["name"]) == ("weights", "KV cache at 2,048")
    for one in (weights, cache, both):
        assert one["said"] == pytest.approx(one["tensors"], rel=0.1)
    assert both["grew"] > weights["tensors"]


SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 128}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 3000}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3", False)])
def test_a_made_model_is_loaded_packed_and_computes(
    tmp_path: Path, kind: str, family: str, tied: bool
) -> None:
    shape = SMALL | {"model_type": family, "tie_word_embeddings": tied}
    model = load_model(str(write_model(tmp_path / "made.gguf", shape, kind)))
    config = model.module.config.to_dict()
    assert {name: config[name] for name in shape} == shape
    assert config["max_position_embeddings"] == CONTEXT
    assert "packed" in model.precision
    assert model.decode_step is not None
    assert model.tokenizer is not None
    assert model.tokenizer.backend_tokenizer.id_to_token(2999) == "<unused-2999>"
    assert model.tokenizer.decode(model.tokenizer.encode("hello there")) == "hello there"
    logits = model.module(torch.tensor([[5, 6, 7, 2999]])).logits
    assert 0.1 < logits.std() < 10
    weights = model.module.model.layers[1].mlp.down_proj.unpacked().float()
    assert 0.01 < weights.std() < 0.03
    assert abs(weights.mean()) < 0.004


def test_other_programs_read_the_same_fields(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    shape = SMALL | {"model_type": "qwen3", "tie_word_embeddings": False}
    read = gguf.GGUFReader(write_model(tmp_path / "made.gguf", shape))
    said = {name: field.contents() for name, field in read.fields.items()}
    assert said["general.architecture"] == "qwen3"
    assert said["qwen3.block_count"] == 2
    assert said["qwen3.attention.key_length"] == 128
    assert len(said["tokenizer.ggml.tokens"]) == said["qwen3.vocab_size"] == 3000
    assert "<|assistant|>" in said["tokenizer.chat_template"]
    tensors = {one.name: one for one in read.tensors}
    assert list(tensors["blk.1.ffn_down.weight"].shape) == [512, 256]
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == "Q4_K"
    assert tensors["output.weight"].tensor_type.name == "Q6_K"
    assert tensors["blk.0.attn_k_norm.weight"].data.tolist() == [1.0] * 128


def test_the_command_writes_a_shape_and_never_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "135m", SHAPES["135m"] | SMALL)
    path = tmp_path / "made.gguf"
    assert run("bench", "make-model", "135m", str(path)).returncode == 0
    assert path.stat().st_size > 1_000_000
    again = run("bench", "make-model", "135m", str(path))
    assert again.returncode == 2
    assert f"{path} exists already" in again.stderr
    other = run("bench", "make-model", "2b", str(tmp_path / "b.gguf"))
    assert other.returncode == 2
    assert "135m, 1b, 4b, 8b" in other.stderr
    wrong = run("bench", "make-model", "135m", str(tmp_path / "b.gguf"), "--type", "Q8_0")
    assert "--type 'Q8_0' is none of Q4_0, Q4_1, Q4_K" in wrong.stderr
    assert not (tmp_path / "b.gguf").exists()


def record(processor: str, **medians: float) -> dict[str, Any]:
    results = [{"name": name, "median": value} for name, value in medians.items()]
    start = [{"name": "loading", "unit": "s", "ours": 2.0, "ratio": None}]
    measured = {"decode": {"results": results}, "start": {"results": start}}
    about = {"processor": processor, "features": ["avx2"]}
    return {"model": "tiny", "machine": about, "benchmarks": measured}


def test_two_records_are_shown_side_by_side(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(record("Old", decode=0.5, gone=1.0)))
    second.write_text(json.dumps(record("New", decode=0.25)))
    done = run("bench", "compare", str(first), str(second), COLUMNS="100")
    assert done.returncode == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:2] == ["first: Old (avx2)", "second: New (avx2)"]
    assert "decode: decode 0.500 0.250 0.500" in lines
    assert "decode: gone 1.000 nan nan" in lines
    assert "start: loading, s 2.000 2.000 1.000" in lines


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": 3}'])
def test_what_is_no_record_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    done = run("bench", "compare", str(path), str(path))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) <= 2
    assert "record" in done.stderr


def test_everything_is_measured_in_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    ratio = Ratio("decode", ours_ms=1, other_ms=2, median=0.5, low=0.4, high=0.6, pairs=2)
    for name in ("bench_start", "bench_decode", "bench_recall"):
        found = [] if name == "bench_start" else [ratio]
        monkeypatch.setattr(everything, name, lambda *_, found=found, **__: found)
    arguments = ("--model", "tiny", "--compile", "off", "--rounds", "2")
    found = json.loads(run("bench", "all", *arguments, "--json").stdout)
    assert set(found["benchmarks"]) == {"decode", "start", "recall"}
    assert found["machine"] == found["benchmarks"]["decode"]["machine"]
    assert found["benchmarks"]["recall"]["cache_dtype"] == "float32"
    shown = run("bench", "all", *arguments, COLUMNS="100").stdout
    assert "decode: decode  0.500" in shown
    assert found["machine"]["processor"] in shown
