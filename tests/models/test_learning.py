"""A process in the background learns a model's sentence encoder: once, and without harm."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chatting import tiny
from sirchat.cli.flags import open_session
from sirchat.config.profile import Profile
from sirchat.models import learning
from sirchat.models.learning import learn_in_background, why_no_encoder
from sirchat.paths import encoder_files

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such process there")

Learns = Callable[[str], Path]


@pytest.fixture
def learns(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Learns:
    """Lets tiny count as large, and a process do what a line of the shell says, not `sirchat`.

    Returns the file into which each process writes its id.
    """
    monkeypatch.setattr(learning, "_SHARED_FOLDER", own_home)
    monkeypatch.setattr(learning, "_MIN_LAYERS", 1)
    python, ids = own_home / "python", own_home / "ids"

    def prepare(line: str) -> Path:
        python.write_text(f'#!/bin/sh\necho "$$ $@" >> {ids}\n{line}\n')
        python.chmod(stat.S_IRWXU)
        monkeypatch.setattr(sys, "executable", str(python))
        return ids

    return prepare


def learn() -> str:
    return learn_in_background("tiny", tiny().module)


def wait(until: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not until():
        assert time.monotonic() < end
        time.sleep(0.02)


def has_ended() -> bool:
    return not learning.is_learning()


def started(ids: Path) -> list[str]:
    return ids.read_text().splitlines() if ids.exists() else []


def test_one_process_is_started_and_the_user_is_told_once(learns: Learns) -> None:
    assert why_no_encoder("tiny") == "none; sirchat train encoder --model tiny makes one"
    ids = learns("echo '12,000 of 40,000 tokens, 3 min left' >&2; exec sleep 60")
    told = learn()
    assert told.startswith("learning what words mean to this model, in the background")
    assert "while processors are free (some 1 min of their time)" in told
    assert learn() == "", "a second chat"
    wait(lambda: started(ids))
    pid, *command = started(ids)[0].split()
    assert command[:6] == ["-P", "-m", "sirchat", "train", "encoder", "--model"]
    try:
        assert os.getpriority(os.PRIO_PROCESS, int(pid)) == 19
        assert os.getsid(int(pid)) == int(pid), "closing the chat's terminal does not end it"
        assert why_no_encoder("tiny").startswith("none yet, it is learned in the background")
        wait(lambda: "12,000" in why_no_encoder("tiny"))
        assert "tries again" not in why_no_encoder("other")
        assert "background" not in why_no_encoder("other")
    finally:
        os.kill(int(pid), signal.SIGKILL)
    wait(has_ended)
    assert len(started(ids)) == 1


def test_one_is_learned_at_a_time_by_all_homes_of_a_user(
    learns: Learns, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = learns("exec sleep 60")
    assert learn()
    monkeypatch.setenv("SIRCHAT_HOME", str(own_home / "other"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_home / "data"))  # cron and ssh have none
    try:
        assert learn() == ""
        assert why_no_encoder("tiny").startswith("none; sirchat train"), "in this home, that is"
    finally:
        wait(lambda: started(ids))
        os.kill(int(started(ids)[0].split()[0]), signal.SIGKILL)
    wait(has_ended)
    assert learn()
    wait(lambda: len(started(ids)) == 2)
    os.kill(int(started(ids)[1].split()[0]), signal.SIGKILL)
    wait(has_ended)


def test_a_killed_process_leaves_nothing_broken_and_is_started_thrice_at_most(
    learns: Learns,
) -> None:
    ids = learns("kill -9 $$")
    for _ in range(3):
        assert learn()
        wait(has_ended)
    assert learn() == ""
    assert len(started(ids)) == 3
    assert why_no_encoder("tiny").startswith("none; learning was stopped; sirchat train encoder")
    assert not tiny().encoder.size


def test_what_failed_is_said_and_tried_thrice_at_most_by_the_same_version(
    learns: Learns, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = learns("echo 'sirchat: the model is damaged' >&2; exit 1")
    for _ in range(3):
        assert learn()
        wait(has_ended)
    assert why_no_encoder("tiny") == (
        "none, it can't be learned: the model is damaged; sirchat train encoder --model tiny "
        "tries again"
    )
    assert learn() == ""
    monkeypatch.setattr(learning, "__version__", "99.0")
    assert learn()
    wait(has_ended)
    assert len(started(ids)) == 4


@pytest.mark.parametrize("why", ["small", "no memory", "learned meanwhile", "no lab", "no room"])
def test_nothing_starts_where_it_can_t_be(
    why: str, learns: Learns, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = learns("true")
    if why == "small":
        monkeypatch.setattr(learning, "_MIN_LAYERS", 24)
    elif why == "no memory":
        monkeypatch.setattr(learning, "free_memory", lambda: 2**30)
    elif why == "learned meanwhile":
        encoder_files("tiny")[0].parent.mkdir(parents=True)
        encoder_files("tiny")[0].touch()
    elif why == "no lab":
        monkeypatch.setattr(learning, "_PACKAGE", own_home)
    else:
        (own_home / "state").write_text("a file in place of the folder")
    assert learn() == ""
    assert not started(ids)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_chat_starts_it_unless_the_setting_is_off(is_wanted: bool, learns: Learns) -> None:
    ids = learns("true")
    profile = Profile(learn_encoder=is_wanted, compile="off", save=False)
    session = open_session(profile, False, None)
    notices = [getattr(event, "text", "") for event in session.opening_events()]
    assert any("learning what words mean" in text for text in notices) == is_wanted
    if is_wanted:
        wait(lambda: started(ids))
    wait(has_ended)
    assert len(started(ids)) == is_wanted
