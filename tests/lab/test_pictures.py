"""The picture of a saved chat's memory: its marks are those of what the session held."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from chatting import babbler, session
from command import refused, run
from sirchat.chat.session import Session
from sirchat.lab.pictures import picture
from sirchat.memory.ledger import Flag
from sirchat.saved.autosave import Autosave
from sirchat.saved.store import SessionStore

SVG = "{http://www.w3.org/2000/svg}"
SAID = "Anna has a red boat near the old lake, and it is green now."


def talk(chat: Session, saving: Autosave, rounds: int) -> list[set[int]]:
    """Reads and saves so many rounds; returns which tokens were held after each."""
    held = []
    for _ in range(rounds):
        list(chat.read_user(SAID))
        list(chat.read_reply("It is."))
        saving.save()
        held.append(set(chat.ledger.held_positions.tolist()))
    return held


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Session, list[set[int]]]:
    """A chat that was saved after each round, and what it held then."""
    chat = session(babbler(), budget=96, policy="sink", recall="off", protect=False)
    saving = Autosave(chat, folder=tmp_path / "data" / "sessions")
    held = talk(chat, saving, 4)
    chat.switch("me", budget=400)  # all are restored
    list(chat.pin("turn 2"))
    held += talk(chat, saving, 1)
    chat.switch("me", budget=128)
    held += talk(chat, saving, 1)
    chat.erase("turn 4")
    held += talk(chat, saving, 1)
    talk(chat, saving, 2)
    for _ in range(2):
        chat.undo()
    saving.save()
    saving.close()
    return chat, held


def drawn(file: Path) -> Counter[str]:
    """The number of marks of each state in a picture."""
    marks = Counter[str]()
    for group in ElementTree.parse(file).iter(f"{SVG}g"):
        for state in ("held", "evicted", "restored", "pinned", "erased", "unknown"):
            if group.get("id") == state:
                parts = list(group.iter(f"{SVG}use")) or [
                    path for path in group.iter(f"{SVG}path") if path.get("id") is None
                ]
                marks[state] += len(parts)
    return marks


def test_the_marks_are_those_of_what_was_held_after_each_round(
    saved: tuple[Session, list[set[int]]], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    chat, held = saved
    wanted, ledger = Counter[str](), chat.ledger
    rounds, flags = ledger.column("round"), ledger.column("flags")
    for position in range(chat.seen):
        if flags[position] & Flag.ERASED:
            continue
        after = held[int(rounds[position]) - 1 :]  # from the round in which it was read
        runs = [is_held for is_held, _ in groupby(position in one for one in after)]
        wanted["held"] += runs.count(True)
        wanted["evicted"] += False in runs  # what is not held is seen between these marks
        wanted["restored"] += runs[1:].count(True)
    for state, flag in (("pinned", Flag.PINNED), ("erased", Flag.ERASED)):
        wanted[state] = int(np.count_nonzero(flags & flag))
    file = tmp_path / "memory.svg"
    done = run("sessions", "map", "last", "--out", str(file), SIRCHAT_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert drawn(file) == wanted
    assert min(wanted.values()) > 5
    text = " ".join("".join(ElementTree.parse(file).getroot().itertext()).split())
    assert f"{chat.resident} of {chat.seen} tokens held" in text
    assert "Anna" not in file.read_text("utf-8")
    assert file.stat().st_mode & 0o777 == 0o600
    (path,) = (tmp_path / "data" / "sessions").glob("*.sqlite")
    with SessionStore.open(path) as store:
        known = store.held_by_turn()  # also after erasing, and without what was undone
    assert list(known) == [1, 3, 5, 7, 9, 11, 13]
    assert set(known[13].tolist()) == set(chat.ledger.held_positions.tolist())


def test_drawing_says_nothing_else(tmp_path: Path) -> None:
    """A chat without turns has no height, and the fonts of matplotlib lack some characters."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "data" / "sessions"
    folder.mkdir(parents=True)
    SessionStore.create(folder, {}).close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        words = ("sessions", "map", "last", "--out", str(tmp_path / "a.svg"))
        assert run(*words, SIRCHAT_HOME=str(tmp_path)).stderr == f"wrote {tmp_path}/a.svg\n"
        picture(lambda axes: None, "png", "會話")
    assert not caught


def test_what_is_not_saved_is_not_drawn_but_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chat = session(babbler(), budget=96, policy="sink", recall="off")
    saving = Autosave(chat, folder=tmp_path / "data" / "sessions")
    for _ in range(3):  # rounds, then one that is saved
        list(chat.read_user(SAID))
        list(chat.read_reply("It is."))
    talk(chat, saving, 1)
    saving.close()
    file = tmp_path / "memory.svg"
    run("sessions", "map", "last", "--out", str(file), SIRCHAT_HOME=str(tmp_path))
    evicted = chat.seen - chat.resident
    assert drawn(file) == Counter(held=chat.resident, evicted=evicted, unknown=1)
    why = "hatched: not known, read again, as after /erase, or not saved then"
    assert why in file.read_text("utf-8")


def test_a_branch_knows_what_was_held_before_it(tmp_path: Path) -> None:
    chat = session(babbler(), budget=96, policy="sink", recall="off")
    saving = Autosave(chat, folder=tmp_path / "data" / "sessions")
    talk(chat, saving, 3)
    branch = saving.branch("other")
    for one in (saving, branch):
        one.close()
    files = (SessionStore.read(path) for path in (tmp_path / "data" / "sessions").glob("*.sqlite"))
    first, second = (
        {turn: at.tolist() for turn, at in file.held_by_turn().items()} for file in files
    )
    assert first == second
    assert len(first) > 2


def test_a_picture_may_be_a_png_and_replaces_a_file_only_with_force(
    saved: tuple[Session, list[set[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be drawn is an error of one line: another kind, or a missing part of sirchat."""
    pytest.importorskip("matplotlib")
    file = tmp_path / "memory.png"
    words = ("sessions", "map", "last", "--out", str(file))
    file.write_text("mine")
    done = run(*words, SIRCHAT_HOME=str(tmp_path))
    assert (done.returncode, file.read_text()) == (2, "mine")
    assert "--force replaces it" in done.stderr
    assert run(*words, "--force", SIRCHAT_HOME=str(tmp_path)).returncode == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    for module, name, said in (
        ("none", "a.jpg", r"--out can't be .*a\.jpg"),
        ("matplotlib.figure", "a.svg", r"sirchat\[plots\]"),
        ("sirchat.lab", "a.svg", r"this command needs sirchat\.lab, which is not installed"),
    ):
        with monkeypatch.context() as hidden:
            hidden.setitem(sys.modules, module, None)
            out = ("--out", str(tmp_path / name))
            code, error = refused("sessions", "map", "last", *out, SIRCHAT_HOME=str(tmp_path))
        assert code == 2
        assert re.search(said, error)
