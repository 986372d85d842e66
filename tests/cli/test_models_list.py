"""`sirchat models`: what is here, at any width, at once, and nothing of it is trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatting import save_babbler, tiny
from command import run
from gguf_file import write_gguf
from sirchat.chat.session import Session
from sirchat.config.profile import Profile

NAME = "a-model-of-a-name-as-long-as-those-of-the-hub-are-today-Q4_1.gguf"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a GGUF file, a model, and a damaged one whose name has control characters."""
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    write_gguf(tmp_path / "m" / NAME, tiny(), "Q4_1")
    save_babbler(tmp_path / "m" / "babbler")
    (tmp_path / "m" / "\x1b[31mred\x07.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    return Path("m")


@pytest.mark.parametrize("columns", [40, 60, 100, 160])
def test_nothing_is_cut_at_any_width(folder: Path, columns: int) -> None:
    done = run("models", "--in", str(folder), COLUMNS=str(columns))
    assert done.returncode == 0
    for name in ("tiny", "tiny-anchor", "smollm2", f"m/{NAME}", "m/babbler"):
        assert name in done.stdout
    assert "…" not in done.stdout
    lines = done.stdout.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("tiny"))
    about = " ".join(lines[at : at + 4])
    for number in ("llama", "10 MB", "2,048", "1,024", "9.4 MB"):
        assert number in about
    usable = [one for one in lines if "cannot be used" not in one and "not installed" not in one]
    assert max(map(len, usable)) <= max(columns, len(f"m/{NAME}"))


def test_a_damaged_file_is_one_line_without_control_characters(folder: Path) -> None:
    done = run("models", "--in", str(folder))
    (line,) = (one for one in done.stdout.splitlines() if "red" in one)
    assert line.startswith("m/red.gguf: cannot be used: ")
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_json_has_the_same(folder: Path) -> None:
    found = json.loads(run("models", "list", "--json", "--in", str(folder)).stdout)
    by_name = {one["name"]: one for one in found}
    assert by_name["m/babbler"]["context_length"] == 4096
    assert by_name[f"m/{NAME}"]["kind"] == "llama Q4_1"
    assert by_name["m/\x1b[31mred\x07.gguf"]["problem"]
    assert all(one["source"] in ("bundled", "package", "folder", "hub") for one in found)


@pytest.mark.parametrize("budget", ["", "512"])
def test_the_memory_is_what_a_chat_allocates(folder: Path, budget: str) -> None:
    arguments = ["--budget", budget] if budget else []
    found = json.loads(run("models", *arguments, "--json").stdout)
    (told,) = (one for one in found if one["name"] == "tiny")
    chat = Session(tiny(), Profile(device="cpu", budget=int(budget or 1024)))
    list(chat.read_user("Hello."))
    assert told["budget"] == chat.budget
    assert told["kv_cache_bytes"] == chat._engine.cache.nbytes


def test_the_budget_is_no_more_than_the_context_and_all_of_it_under_full(folder: Path) -> None:
    found = json.loads(run("models", "--budget", "999999", "--json").stdout)
    assert found[0]["budget"] == 2048
    found = json.loads(run("models", "--json", SIRCHAT_POLICY="full").stdout)
    assert found[0]["budget"] == 2048


def test_the_list_says_the_largest_budget_that_fits(folder: Path) -> None:
    """tiny takes 500 MB with the program; whoever runs this test has them."""
    found = json.loads(run("models", "--json", "--in", str(folder)).stdout)
    by_name = {one["name"]: one["largest_budget"] for one in found}
    assert by_name["tiny"] in (2048, None)  # None where the system does not say what is free
    assert by_name["m/\x1b[31mred\x07.gguf"] is None
    (title, tiny_line, *_) = run("models", COLUMNS="160").stdout.splitlines()
    assert title.endswith("fits up to")
    assert tiny_line.split()[-1] in ("2,048", "?")


def test_the_default_model_is_marked(folder: Path) -> None:
    lines = run("models", SIRCHAT_MODEL="tiny-anchor", COLUMNS="160").stdout.splitlines()
    assert [one.split()[0] for one in lines if "(default)" in one] == ["tiny-anchor"]


def test_fit_says_what_a_model_takes(folder: Path) -> None:
    shown = run("models", "fit", "tiny").stdout
    for text in ("tiny: llama, 5.0 million weights, context 2,048 tokens", "free memory here: "):
        assert text in shown
    lines = {" ".join(line.split()) for line in shown.splitlines()}
    assert "setting weights loading reading archive fits up to" in lines
    assert "KV cache for a budget of 1,024 2,048" in lines
    assert "as set (float32) 9.4 MB 19 MB" in lines
    assert any(line.startswith("--dtype bfloat16 9.9 MB ") for line in lines)
    assert any(line.startswith("--quantize int8 5.0 MB ") for line in lines)


def test_fit_as_json_agrees_with_the_list(folder: Path) -> None:
    told = json.loads(run("models", "fit", f"m/{NAME}", "--json").stdout)
    first = told["choices"][0]
    listed = json.loads(run("models", "--json", "--in", "m", "--budget", "1024").stdout)
    (row,) = (one for one in listed if one["name"] == f"m/{NAME}")
    assert first["kv_cache_bytes"]["1024"] == row["kv_cache_bytes"]
    assert first["setting"] == ""
    assert told["tokens_per_hour"] == 10_000
    assert {"--dtype float32", "--dtype bfloat16"} & {one["setting"] for one in told["choices"]}


def test_fit_of_a_model_that_is_not_here_says_how_to_pull_it(folder: Path) -> None:
    done = run("models", "fit", "me/other")
    assert done.returncode == 1
    assert done.stderr == (
        "sirchat: model 'me/other' is not on this machine "
        "(to download it: sirchat models pull me/other)\n"
    )


def test_what_is_wrong_is_said(folder: Path) -> None:
    assert "there is no folder 'nowhere'" in run("models", "--in", "nowhere").stderr
    assert "budget can't be" in run("models", "--budget", "many").stderr
    assert run("models", "--json", "list").returncode == 2
