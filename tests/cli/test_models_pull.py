"""`sirchat models pull`: a model of the hub is downloaded, and what was interrupted goes on."""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from huggingface_hub import constants

from command import Done, run
from fake_hub import FakeHub, fake_hub
from sirchat.paths import tiny_model_dir
from terminal import Terminal

LARGE = random.Random(0).randbytes(24 * 2**20)  # the hub's library writes 10 MiB at a time
FILES = {
    "config.json": (tiny_model_dir() / "config.json").read_bytes(),
    "tokenizer.json": (tiny_model_dir() / "tokenizer.json").read_bytes(),
    "model.safetensors": LARGE,
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"import os",
    "consolidated.safetensors": LARGE,
    "onnx/model.safetensors": b"another kind",
    "README.md": b"# A model",
}
GGUFS = {"q4.gguf": LARGE[: 9 * 2**20], "q8.gguf": LARGE, "README.md": b""}
ENCODER = FILES | {"config.json": b'{"architectures": ["BertModel"], "model_type": "bert"}'}
ENCODER |= {"modules.json": b"[]", "1_Pooling/config.json": b"{}"}
ENCODER |= {"1_Pooling/pytorch_model.bin": b"a pickle"}
PICKLED = {"config.json": b"{}", "pytorch_model.bin": b"a pickle"}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    models = {"me/small": FILES, "me/ggufs": GGUFS, "me/old": PICKLED, "me/encoder": ENCODER}
    with fake_hub(models) as hub:
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def environment(cache: Path, url: str) -> dict[str, str]:
    settings = {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": url, "SIRCHAT_HOME": str(cache.parent)}
    # Other tests may have said that there is no hub.
    settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    return {**os.environ, **settings, "COLUMNS": "120"}


def sirchat(cache: Path, url: str, *arguments: str) -> Done:
    """Run a command; what the hub's library reads as it is imported is changed in it."""
    links = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    where = {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": links, "HF_HUB_CACHE": str(cache)}
    how = {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    with patch.dict(vars(constants), where | how):
        return run(*arguments, **environment(cache, url))


def error_of(cache: Path, url: str, *arguments: str) -> str:
    done = sirchat(cache, url, "models", "pull", *arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


def test_weights_config_and_tokenizer_come_and_nothing_that_could_run(
    hub: FakeHub, cache: Path
) -> None:
    done = sirchat(cache, hub.url, "models", "pull", "me/small")
    assert done.returncode == 0, done.stderr
    assert "sirchat -m me/small" in done.stderr
    assert done.stdout == ""
    (snapshot,) = (cache / "models--me--small" / "snapshots").iterdir()
    there = {file.name for file in snapshot.iterdir()}
    assert there == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (snapshot / "model.safetensors").read_bytes() == LARGE
    listed = sirchat(cache, hub.url, "models").stdout
    assert any(line.lstrip().startswith("me/small") for line in listed.splitlines()), listed


def test_a_sentence_encoder_comes_and_its_use_is_named(hub: FakeHub, cache: Path) -> None:
    done = sirchat(cache, hub.url, "models", "pull", "me/encoder")
    assert done.returncode == 0, done.stderr
    assert "sirchat -m" not in done.stderr
    assert "it has a BertModel, which does not generate text, but may serve as --rec" in done.stderr
    (snapshot,) = (cache / "models--me--encoder" / "snapshots").iterdir()
    there = {str(file.relative_to(snapshot)) for file in snapshot.glob("1_*/*")}
    assert there == {"1_Pooling/config.json"}


def test_what_is_here_is_not_fetched_again_and_a_log_has_few_lines(
    hub: FakeHub, cache: Path
) -> None:
    first, again = (sirchat(cache, hub.url, "models", "pull", "me/small") for _ in range(2))
    assert first.returncode == again.returncode == 0
    assert hub.ranges("model.safetensors") == [""]
    assert len(first.stderr.splitlines()) <= 4
    assert "\x1b" not in first.stderr


def test_an_interrupted_download_goes_on_where_it_stopped(hub: FakeHub, cache: Path) -> None:
    """The terminal shows a bar meanwhile, and has none afterwards."""
    hub.stalls_after = 15 * 2**20
    command = (sys.executable, "-m", "sirchat", "models", "pull", "me/small")
    environ = environment(cache, hub.url)
    del environ["COLUMNS"]
    with Terminal(*command, home=cache.parent, columns=60, environ=environ) as shown:
        shown.wait_screen(r"model\.safetensors .* [\d.]+/25\.\d MB ")
        assert len(shown.text.splitlines()) == 1
        assert hub.stalled.wait(60)
        time.sleep(1)  # what was sent is written
        shown.send("\x03")
        shown.wait_screen("what was downloaded stays; the same command ")
        assert "%" not in shown.text
        assert shown.ended() == 130
    (part,) = (cache / "models--me--small" / "blobs").glob("*.part")
    assert 0 < part.stat().st_size < len(LARGE)
    there = part.stat().st_size
    hub.stalls_after = -1
    assert sirchat(cache, hub.url, "models", "pull", "me/small").returncode == 0
    assert hub.ranges("model.safetensors") == ["", f"bytes={there}-"]
    (snapshot,) = (cache / "models--me--small" / "snapshots").iterdir()
    assert (snapshot / "model.safetensors").read_bytes() == LARGE
    assert not list((cache / "models--me--small" / "blobs").glob("*.part"))


def test_a_hub_that_never_sends_the_rest_is_given_up(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's attempts
    hub.ends_after = 12 * 2**20
    done = sirchat(cache, hub.url, "models", "pull", "me/small")
    assert done.returncode == 0, done.stderr  # in three parts
    assert len(hub.ranges("model.safetensors")) == 3
    hub.ends_after = 0
    assert "run the same command again to continue" in error_of(
        cache, hub.url, "me/ggufs", "--file", "q4.gguf"
    )


def test_what_arrived_damaged_is_refused_and_fetched_again(hub: FakeHub, cache: Path) -> None:
    wanted = ("me/ggufs", "--file", "q8.gguf")
    assert sirchat(cache, hub.url, "models", "pull", *wanted).returncode == 0
    (blob,) = (file for file in (cache / "models--me--ggufs" / "blobs").iterdir() if file.is_file())
    part = blob.with_name(f"{blob.name}.part")
    (cache / "models--me--ggufs" / "snapshots").rename(cache / "gone")
    blob.unlink()
    part.write_bytes(b"damage" * 1000)
    done = sirchat(cache, hub.url, "models", "pull", *wanted)
    assert (done.returncode, "is damaged" in done.stderr) == (1, True)
    assert sirchat(cache, hub.url, "models", "pull", *wanted).returncode == 0
    assert blob.read_bytes() == LARGE


@pytest.mark.parametrize("size", [len(LARGE) - 1, 2 * len(LARGE)])
def test_an_answer_of_another_length_is_damaged_and_leaves_nothing(
    size: int, hub: FakeHub, cache: Path
) -> None:
    hub.sends = size
    done = sirchat(cache, hub.url, "models", "pull", "me/ggufs", "--file", "q8.gguf")
    assert (done.returncode, "is damaged" in done.stderr) == (1, True)
    assert not list(cache.rglob("*.part"))


def test_what_is_too_large_for_the_web_is_left_to_the_library_of_the_hub(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 2**20)
    assert "`hf_xet`" in error_of(cache, hub.url, "me/ggufs", "--file", "q8.gguf")


def test_a_gguf_file_is_chosen_and_named_for_the_chat(hub: FakeHub, cache: Path) -> None:
    assert "choose a file with --file: q4.gguf, q8.gguf" in error_of(cache, hub.url, "me/ggufs")
    wrong = error_of(cache, hub.url, "me/ggufs", "--file", "q5.gguf")
    assert "did you mean q" in wrong
    done = sirchat(cache, hub.url, "models", "pull", "me/ggufs", "--file", "q4.gguf")
    assert "sirchat -m me/ggufs/q4.gguf" in done.stderr
    assert hub.ranges("q8.gguf") == []


def test_what_cannot_be_had_is_one_line(hub: FakeHub, cache: Path) -> None:
    assert "the hub has no model 'me/smal'" in error_of(cache, hub.url, "me/smal")
    assert "has no safetensors" in error_of(cache, hub.url, "me/old")
    hub.gated.add("me/small")
    gated = error_of(cache, hub.url, "me/small")
    assert "accepted its terms" in gated
    assert "hf auth login" in gated


@pytest.mark.parametrize("kind", ["refusing", "silent"])
def test_a_hub_that_cannot_be_reached_fails_within_two_seconds(kind: str, cache: Path) -> None:
    with socket.socket() as hub:
        hub.bind(("127.0.0.1", 0))
        if kind == "silent":  # it accepts and never answers
            hub.listen()
        url = f"http://127.0.0.1:{hub.getsockname()[1]}"
        for arguments in (["models", "pull", "me/small"], ["ask", "-m", "me/small", "Hello"]):
            began = time.monotonic()
            done = sirchat(cache, url, *arguments)
            taken = time.monotonic() - began
            assert done.returncode == 1
            assert "the hub can't be reached" in done.stderr
            assert done.stderr.count("\n") == 1
            assert taken < 2.5


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (401, "Invalid credentials in Authorization header", "hf auth login"),
        (403, "Nobody may", "answers 403 Nobody may"),
        (429, "", "answers 429 Too Many Requests (wait"),
        (503, "", "answers 503 Service Unavailable"),
    ],
)
def test_a_hub_that_refuses_to_answer_is_told_with_its_reason(
    status: int, code: str, told: str, hub: FakeHub, cache: Path
) -> None:
    hub.refuses = status, code
    for where in ("api", "file"):
        hub.refused = where
        line = error_of(cache, hub.url, "me/ggufs", "--file", "q4.gguf")
        assert told in line
        assert "can't be reached" not in line


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("https://huggingface.co/me/small", "sirchat models pull me/small"),
        ("hf.co/me/small/tree/main", "sirchat models pull me/small"),
        ("me/small/", "sirchat models pull me/small"),
        ("me/ggufs/q8.gguf", "sirchat models pull me/ggufs --file q8.gguf"),
        (
            "https://huggingface.co/me/ggufs/blob/main/a/q8.gguf?download=true",
            "sirchat models pull me/ggufs --file a/q8.gguf",
        ),
        ("foo bar", "a model on the hub is OWNER/NAME"),
        ("me/--", "a model on the hub is OWNER/NAME"),
        ("https://example.com/me/small", "a model on the hub is OWNER/NAME"),
    ],
)
def test_a_name_that_the_hub_can_not_have_is_told_with_what_to_type(
    name: str, hint: str, hub: FakeHub, cache: Path
) -> None:
    line = error_of(cache, hub.url, name)
    assert f"{name!r} can't be a model on the hub ({hint}" in line
