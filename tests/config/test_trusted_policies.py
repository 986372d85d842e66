"""A policy that is code of a module runs only where the user named it, never because a file did."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

from chatting import babbler
from command import Done, run
from saved_chats import Chat
from session_files import sum_again
from sirchat import paths
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.config.profile_files import resolve
from sirchat.errors import SettingError
from sirchat.memory.policies import import_typed
from sirchat.saved.autosave import Autosave
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.store import SessionStore

CODE = """
from pathlib import Path
from sirchat.memory.policies.by_position import Sink
Path({ran!r}).touch()
class Mine(Sink):
    pass
"""
MODULES = iter(f"planted{n}" for n in range(100))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def planted(here: Path) -> str:
    """A policy in the current folder that leaves a trace when it is imported."""
    name = next(MODULES)
    (here / f"{name}.py").write_text(CODE.format(ran=str(here / "ran")), encoding="utf-8")
    (here / "theirs.yaml").write_text(f"policy: {name}:Mine\n", encoding="utf-8")
    return f"{name}:Mine"


def was_refused(done: Done, here: Path, policy: str) -> bool:
    told = policy in done.stderr and "--trust-policy" in done.stderr
    return done.returncode == 2 and told and not (here / "ran").exists()


FLAGS = ("--profile", "theirs.yaml")


@pytest.mark.parametrize(
    "words",
    [
        *((), FLAGS, ("eval", "perplexity", *FLAGS)),
        *((one, "talk.txt", *FLAGS) for one in ("compare", "replay", "ask")),
    ],
)
def test_a_profile_cannot_run_code(here: Path, planted: str, words: tuple[str, ...]) -> None:
    (here / "talk.txt").write_text("Hello.\n", encoding="utf-8")
    assert was_refused(run(*words, SIRCHAT_PROFILE="./theirs.yaml"), here, planted)
    if not words:
        paths.user_profiles_dir().mkdir(parents=True)
        for name in ("theirs", "default"):
            shutil.copy(here / "theirs.yaml", paths.user_profiles_dir() / f"{name}.yaml")
        assert "theirs" in run("profiles", "list").stdout
        run("profiles", "show", "theirs")
        done = run()
        assert was_refused(done, here, planted)
        assert len(done.stderr.strip().splitlines()) == 1


def test_what_is_typed_is_trusted(
    here: Path, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = (*FLAGS, "--trust-policy", planted)
    assert "cannot be imported" in run(*trust).stderr  # not from the current folder
    assert not (here / "ran").exists()
    before = list(sys.path)
    assert run("--policy", planted, "--json").returncode == 0  # which may be there
    assert run("policies", "check", planted).returncode == 0
    assert sys.path == before
    assert (here / "ran").exists()
    monkeypatch.syspath_prepend(str(here))
    done = run(*trust, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout.splitlines()[0])["profile"]["policy"] == planted


def test_what_is_typed_in_a_chat_is_trusted(here: Path, planted: str) -> None:
    assert "policy" in Chat().do(f"/policy {planted}")
    assert (here / "ran").exists()
    assert resolve("./theirs.yaml", {}, {}).policy == planted


def test_a_saved_chat_cannot_run_code(here: Path, planted: str) -> None:
    session = Session(babbler(), Profile(policy="sink", max_new_tokens=4))
    list(session.ask("Hello."))
    saving = Autosave(session)
    saving.save()
    ident = saving.id
    saving.close()
    path = paths.sessions_dir() / f"{ident}.sqlite"
    plant(path, planted)
    assert was_refused(run("ask", "--resume", ident or "", "Hello?"), here, planted)
    with pytest.raises(SettingError, match="trust-policy"):
        Chat().do(f"/load {ident}")
    assert not (here / "ran").exists()
    import_typed("other:Policy")
    with SessionStore.open(path) as store, pytest.raises(SettingError, match="trust-policy"):
        saved_profile(store)
    import_typed(planted)
    with SessionStore.open(path) as store:
        assert saved_profile(store).policy == planted


def plant(path: Path, policy: str) -> None:
    """Put another policy into a saved chat."""
    with sqlite3.connect(path) as database:
        ((fields,),) = database.execute("SELECT fields FROM head").fetchall()
        changed = json.loads(fields)
        changed["profile"]["policy"] = policy
        database.execute("UPDATE head SET fields = ?", (json.dumps(changed),))
    database.close()
    sum_again(path)
