"""`sirchat doctor` and `sirchat paths`: what people need to report a problem, or to leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatting import session, tiny
from command import run
from sirchat import paths
from sirchat.cli.doctor import size_of
from sirchat.saved.autosave import Autosave


def test_a_healthy_installation_has_no_problem(tmp_path: Path) -> None:
    done = run("doctor", SIRCHAT_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "<-" not in done.stdout
    for word in ("torch", "Python", "cores", "tiny: float32 on", "tokens a second"):
        assert word in done.stdout
    found = json.loads(run("doctor", "--json", SIRCHAT_HOME=str(tmp_path)).stdout)
    assert {each["problem"] for each in found} == {""}
    assert [each["name"] for each in found][-3:] == ["memory", "compiled step", "speed"]


def test_the_model_that_a_chat_uses_is_checked(tmp_path: Path) -> None:
    done = run("doctor", SIRCHAT_HOME=str(tmp_path), SIRCHAT_MODEL="tiny-anchor")
    assert "tiny-anchor: float32 on" in done.stdout


def test_problems_are_named_and_end_with_1(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o755)
    (tmp_path / "data").chmod(0o755)
    (tmp_path / "state").touch()
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    done = run("doctor", "-m", str(broken), SIRCHAT_HOME=str(tmp_path))
    assert done.returncode == 1
    problems = [line for line in done.stdout.splitlines() if "<-" in line]
    assert [line.split()[0] for line in problems] == ["data", "state", "model"]
    assert "chmod 700" in problems[0]


def test_what_was_said_and_the_users_name_are_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run("doctor", SIRCHAT_HOME=str(tmp_path / "all"))
    assert str(tmp_path) not in done.stdout
    assert "~/all/data" in done.stdout


def test_paths_say_what_lies_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    assert run("paths").stdout.count("nothing yet") == 7
    chat = session(tiny(), max_new_tokens=4)
    list(chat.ask("Hello."))
    saving = Autosave(chat)
    saving.update()
    saving.close()
    told = run("paths").stdout
    (line,) = (one for one in told.splitlines() if one.startswith("saved chats"))
    assert str(paths.sessions_dir()) in line
    assert "in 2 files" in line  # the chat, and its keys and values
    assert "pip uninstall sirchat" in told
    for kept in (paths.config_dir(), paths.data_dir(), paths.state_dir()):
        assert str(kept) in told


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([], "0 bytes in 0 files"),
        ([5], "5 bytes in 1 file"),
        ([1024, 512], "1.5 KiB in 2 files"),
        ([3 * 2**20], "3.0 MiB in 1 file"),
    ],
)
def test_sizes_in_words(sizes: list[int], words: str, tmp_path: Path) -> None:
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}").write_bytes(bytes(size))
    assert size_of(tmp_path) == words
