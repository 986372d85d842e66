"""`sirchat models`: what is here, at any width, at once, and nothing of it is trusted."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from chatting import save_babbler, tiny
from command import run
from gguf_file import write_gguf
from sirchat.chat.session import Session
from sirchat.cli.models import listed_models
from sirchat.config.profile import Profile
from sirchat.config.profile_files import resolve, write_default_setting
from sirchat.errors import SettingError
from sirchat.paths import tiny_model_dir, user_profiles_dir
from sirchat.ui.lists import ListedModel, format_bytes

NAME = "a-model-of-a-name-as-long-as-those-of-the-hub-are-today-Q4_1.gguf"
DAMAGED = "m/\x1b[31mred\x07.gguf"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a GGUF file, a model, and a damaged one whose name has control characters."""
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    write_gguf(tmp_path / "m" / NAME, tiny(), "Q4_1")
    save_babbler(tmp_path / "m" / "babbler")
    (tmp_path / DAMAGED).write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    return Path("m")


@pytest.mark.parametrize("columns", [40, 160])
def test_nothing_is_cut_at_any_width(folder: Path, columns: int) -> None:
    done = run("models", "list", "--in", str(folder), COLUMNS=str(columns))
    assert done.returncode == 0
    for name in ("tiny", "tiny-anchor", "smollm2", f"m/{NAME}", "m/babbler"):
        assert name in done.stdout
    assert "…" not in done.stdout
    lines = done.stdout.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("tiny"))
    about = " ".join(lines[at : at + 4])
    for number in ("llama", "10 MB", "2,048", "1,024", "9.4 MB"):
        assert number in about
    refused = ("cannot be used", "not installed")
    usable = [line for line in lines if not any(word in line for word in refused)]
    assert max(map(len, usable)) <= max(columns, len(f"m/{NAME}"))


def test_a_damaged_file_is_one_line_without_control_characters(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("models", "list", "--in", str(folder))
    (line,) = (one for one in done.stdout.splitlines() if "red" in one)
    assert line.startswith("m/red.gguf: cannot be used: ")
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    models = listed(folder)
    assert models["m/babbler"].found.shape.context_length == 4096  # type: ignore[union-attr]
    assert models[f"m/{NAME}"].found.shape.kind == "llama Q4_1"  # type: ignore[union-attr]
    assert models[DAMAGED].found.problem
    assert {model.found.source for model in models.values()} <= {
        "bundled",
        "package",
        "folder",
        "hub",
    }
    # The budget is no more than the context, and all of it under `full`.
    assert listed(budget="999999")["tiny"].budget == 2048
    monkeypatch.setenv("SIRCHAT_POLICY", "full")
    assert listed()["tiny"].budget == 2048


def test_fit_says_what_a_model_takes_and_agrees_with_the_list(folder: Path) -> None:
    shown = run("models", "fit", "tiny").stdout
    for text in ("tiny: llama, 5.0 million weights, context 2,048 tokens", "free memory here: "):
        assert text in shown
    lines = {" ".join(line.split()) for line in shown.splitlines()}
    assert "setting weights loading KV cache archive fits up to" in lines
    assert any(line.startswith("as set (float32) 20 MB 20 MB 9.4 MB ") for line in lines)
    for begin in ("--dtype bfloat16 9.9 MB ", "--quantize int8 5.0 MB "):
        assert any(line.startswith(begin) for line in lines)
    cache = format_bytes(listed(Path("m"), budget="1024")[f"m/{NAME}"].cache)
    fits = " ".join(run("models", "fit", f"m/{NAME}").stdout.split())
    assert re.search(rf"as set \(packed\) (\S+ \w?B ){{2}}{cache} ", fits)


def listed(*folders: Path, budget: str | None = None) -> dict[str, ListedModel]:
    """The models of the list, by name."""
    return {model.found.name: model for model in listed_models(folders, budget)}


@pytest.mark.parametrize("budget", ["", "512"])
def test_the_memory_is_what_a_chat_allocates(folder: Path, budget: str) -> None:
    told = listed(budget=budget or None)["tiny"]
    chat = Session(tiny(), Profile(device="cpu", budget=int(budget or 1024)))
    list(chat.read_user("Hello."))
    assert told.budget == chat.budget
    assert told.cache == sum(place.cache for place in chat.memory)


def test_the_list_marks_the_default_and_says_the_largest_budget_that_fits(folder: Path) -> None:
    """tiny takes 500 MB with the program; whoever runs this test has them."""
    models = listed(folder)
    assert models["tiny"].largest_budget in (2048, None)  # None: it is not known what is free
    assert models[DAMAGED].largest_budget is None
    lines = run("models", SIRCHAT_MODEL="tiny-anchor", COLUMNS="160").stdout.splitlines()
    assert lines[0].endswith("fits up to")
    assert lines[1].split()[-1] in ("2,048", "?")
    assert [line.split()[0] for line in lines if "(default)" in line] == ["tiny-anchor"]
    for elsewhere in (f"m/{NAME}", str(folder.resolve() / "babbler")):
        lines = run("models", SIRCHAT_MODEL=elsewhere, COLUMNS="200").stdout.splitlines()
        assert [line.split()[0] for line in lines if "(default)" in line] == [elsewhere]
    where = {"SIRCHAT_MODEL": str(Path.cwd() / "m" / NAME), "COLUMNS": "200"}
    lines = run("models", "list", "--in", "m", **where).stdout.splitlines()
    marked = [("(default)" in line, line.split()[0]) for line in lines if NAME in line]
    assert marked == [(True, f"m/{NAME}")]


def test_what_is_wrong_is_said(folder: Path) -> None:
    for name in ("nowhere", "~nosuchuser"):
        assert f"there is no folder '{name}'" in run("models", "list", "--in", name).stderr
    assert "budget can't be" in run("models", "list", "--budget", "many").stderr
    done = run("models", "fit", "me/other")
    assert done.returncode == 1
    assert done.stderr == (
        "sirchat: model 'me/other' is not on this machine "
        "(to download it: sirchat models pull me/other)\n"
    )


# --- the default model


def test_other_lines_of_the_users_defaults_stay_and_the_file_is_private(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SIRCHAT_MODEL", raising=False)
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


def test_the_default_model_is_shown_chosen_and_checked(own_home: Path) -> None:
    def models(*flags: str) -> tuple[int, str, str]:
        done = run("models", "default", *flags, SIRCHAT_HOME=str(own_home), SIRCHAT_MODEL="")
        return done.returncode, done.stdout, done.stderr

    assert models() == (0, "tiny\n", "")
    code, out, err = models("tiny-anchor")
    assert (code, out) == (0, "")
    assert "tiny-anchor is now the default model" in err
    assert models() == (0, "tiny-anchor\n", "")
    assert models(os.path.relpath(tiny_model_dir()))[0] == 0
    assert models() == (0, f"{Path.cwd() / os.path.relpath(tiny_model_dir())}\n", "")
    models("tiny-anchor")
    code, _, err = models("./no-such-model")
    assert code == 1
    assert "no-such-model" in err
    assert models() == (0, "tiny-anchor\n", "")
