"""Pipes, devices, sockets, folders, links in circles and huge files in the place of any file.

Each is refused in one line, or left out, at once: none is waited for, and none is read without end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest

from attacking import THINGS, attack
from chatting import save_babbler
from command import run
from plain_model import load_model
from saved_chats import resumed, saved
from sirchat.config.profile_files import list_profiles, load_profile
from sirchat.errors import SessionError
from sirchat.lab.studies.facts_in_dialogue.dialogue import load_dialogues
from sirchat.lab.studies.long_talk import long_talks
from sirchat.lab.studies.reading import read_data_text
from sirchat.lab.studies.retrieval import dialogues_of_file
from sirchat.lab.studies.sirllm_files import dailydialog
from sirchat.lab.studies.study import data_name
from sirchat.lab.training.anchor_data import load_text
from sirchat.models.listing import find_model, find_models
from sirchat.saved.search import search_sessions
from sirchat.saved.session_list import find_session, list_sessions, remove_session
from sirchat.saved.store import SessionStore
from sirchat.text.text_file import load_text_file
from sirchat.ui.attaching import attach_mentions

NAMES = ["x", "\x1b[31mred", "\u202etxt", "a\nb", "\udcff", "é" * 30, "-x", " ", "~", "x@y"]


@cache
def _model(folder: Path) -> Path:
    return save_babbler(folder)


def _in_model(name: str) -> Callable[[Path, Callable[[Path], None]], None]:
    """Replace a file of a model's folder, and load the model, look for it and list it."""

    def act(path: Path, make: Callable[[Path], None]) -> None:
        path.mkdir()
        for one in _model(path.parent.parent / "model").iterdir():
            if one.name != name:
                (path / one.name).symlink_to(one)
        make(path / name)
        find_models([path])
        load_model(str(path), device="cpu")

    return act


def _as_gguf(path: Path, make: Callable[[Path], None]) -> None:
    path = path.with_name(f"{path.name}.gguf")
    make(path)
    find_models([path.parent])
    try:
        find_model(str(path))
    finally:
        load_model(str(path), device="cpu")


def _as_profile(path: Path, make: Callable[[Path], None]) -> None:
    profiles = path.parent / "config" / "profiles"
    profiles.mkdir(parents=True)
    make(profiles / f"{path.name}.yaml")
    make(profiles / "default.yaml")
    list_profiles()
    if not (profiles / "default.yaml").is_fifo():  # waiting for a pipe that is named is right
        load_profile(str(profiles / "default.yaml"))


def _as_chat(path: Path, make: Callable[[Path], None]) -> None:
    folder = path.parent / "data" / "sessions"
    good = find_session(folder, saved(folder, "good", save_kv="on"))
    strange = folder / f"{path.name}.sqlite"
    make(strange)
    good.with_suffix(".safetensors").unlink()
    make(good.with_suffix(".safetensors"))
    assert [entry.path for entry in list_sessions(folder).sessions] == [good]
    assert find_session(folder, "last") == good
    assert not resumed(folder, "good")[1]
    for act in (SessionStore.open, remove_session):
        with pytest.raises(SessionError):
            act(strange)
    search_sessions(folder, "words")


def _as_transcript(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    if path.is_fifo():  # a transcript may come through a pipe, and is waited for
        return
    done = run("replay", f"./{path.name}", SIRCHAT_HOME=str(path.parent))
    assert done.returncode in (1, 2), done
    assert len(done.stderr.splitlines()) == 1, done.stderr


def _with(read: Callable[[Path], object]) -> Callable[[Path, Callable[[Path], None]], None]:
    def act(path: Path, make: Callable[[Path], None]) -> None:
        make(path)
        read(path)

    return act


PLACES: dict[str, Callable[[Path, Callable[[Path], None]], None]] = {
    **{f"model's {name}": _in_model(name) for name in (
        "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
        "generation_config.json", "chat_template.jinja",
    )},
    "gguf": _as_gguf,
    "profile": _as_profile,
    "chat": _as_chat,
    "transcript": _as_transcript,
    "file to read": _with(lambda path: load_text_file(str(path))),
    "attached": _with(lambda path: attach_mentions(f'see @"{path}", @{path} and', print)),
    "folder attached": _with(lambda path: attach_mentions(f'see @"{path.parent}"', print)),
    "text of a study": _with(read_data_text),
    "conversations": _with(load_dialogues),
    "needle": _with(dialogues_of_file),
    "questions": _with(dailydialog),
    "long talk": _with(lambda path: list(long_talks(path))),
    "training": _with(lambda path: list(load_text(path))),
    "name of data": _with(data_name),
}  # fmt: skip


def test_a_strange_thing_in_the_place_of_a_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirchat.models.listing.BUNDLED", ())
    monkeypatch.setattr("sirchat.models.listing.PACKAGED", ())

    # What would be read without end, and what would be waited for.
    fixed = [("model's tokenizer.json", "zero"), ("model's chat_template.jinja", "pipe")]

    def meet(random: Random) -> None:
        folder = tmp_path / str(random.random())
        folder.mkdir()
        monkeypatch.setenv("SIRCHAT_HOME", str(folder))
        monkeypatch.chdir(folder)
        drawn = random.choice(sorted(PLACES)), random.choice(sorted(THINGS))
        place, thing = fixed.pop() if fixed else drawn
        PLACES[place](folder / random.choice(NAMES), THINGS[thing])

    attack(meet, few=4)


def test_a_folder_that_is_attached_sends_no_file_that_a_link_in_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text("said")
    for name, target in (("b.txt", "../secret.txt"), ("c.txt", "nowhere"), ("d.txt", "d.txt")):
        (folder / name).symlink_to(target)
    message = attach_mentions(f"see @{folder}", lambda note: None)
    assert re.findall(r"(?m)^```.*/(.+)$", message) == ["a.txt"]
    assert "secret" not in message


def test_names_of_thousands_of_letters_are_refused_in_a_short_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    name = "a" * 4000
    for command in (
        ("replay", name), ("replay", f"/{name}/x"), ("--profile", name), ("--profile", f"./{name}"),
        ("ask", "x", "--model", f"./{name}.gguf"), ("ask", "x", "--model", f"/{name}"),
        ("sessions", "show", name), ("sessions", "export", "last", name), ("compare", name),
    ):  # fmt: skip
        done = run(*command)
        assert done.returncode in (1, 2), command
        assert len(done.stderr) < 1200, command
        assert len(done.stderr.splitlines()) == 1, done.stderr
    assert len(run("sessions", "list", SIRCHAT_HOME="/" + "a/" * 3000).stderr) < 500
