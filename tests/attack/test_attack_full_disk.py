"""A full or missing disk: the chat goes on in memory, says so once, and is saved as soon as it can.

A limit on the size of files stands in for a full disk, as it needs no rights; where a small disk
can be mounted, the same is done on it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from command import run
from saved_chats import SAYINGS, Chat, refusal, resumed
from sirchat.errors import UsageError
from sirchat.memory.archive import SEGMENT_ROWS
from sirchat.paths import data_dir
from sirchat.saved.session_list import list_sessions
from sirchat.ui.typed_input import open_history

pytestmark = pytest.mark.usefixtures("folder")
_FAILS, _WORKS = "not saved now", "saved again"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside, no file grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def shown(chat: Chat, text: str) -> int:
    return chat.out.getvalue().count(text)


def is_saved(chat: Chat) -> bool:
    """Whether all of the chat, once closed, is in the newest file."""
    chat.saved_chat.close()
    return resumed(data_dir() / "sessions", "last")[0].turns == chat.session.turns


def test_a_chat_on_a_full_disk_says_so_once_and_is_saved_when_there_is_room(folder: Path) -> None:
    chat = Chat()
    with largest_file(2**12):
        chat.say(*SAYINGS[:3])
        assert shown(chat, _FAILS) == 1
        assert not list(folder.iterdir()), "an empty chat would be the last one"
    chat.say(SAYINGS[3])
    assert (shown(chat, _FAILS), shown(chat, _WORKS)) == (1, 1)
    assert is_saved(chat)


def test_a_disk_that_fills_later_leaves_what_was_saved_before(folder: Path) -> None:
    chat = Chat()
    chat.say(SAYINGS[0])
    (path,) = folder.glob("*.sqlite")
    with largest_file(path.stat().st_size):
        chat.say(*[f"{words} " * 40 for words in SAYINGS])
        assert "can't be saved" in refusal(chat, "/branch other")
        chat.saved_chat.close()
        assert shown(chat, _FAILS) == 1
        assert shown(chat, "the end of this chat is not saved") == 1
    assert resumed(folder, "last")[0].turns == chat.session.turns[:2]
    assert len(list_sessions(folder).sessions) == 1


def test_where_only_keys_and_values_do_not_fit_the_chat_is_saved_without_them(folder: Path) -> None:
    chat = Chat(save_kv="on")
    with largest_file(100_000):  # the chat takes 86 kB, its keys and values 250 kB
        chat.say(*[f"{words} " * 40 for words in SAYINGS[:2]])
        chat.saved_chat.close()
    (path,) = folder.glob("*.sqlite")
    assert shown(chat, "saved without keys and values") == 1
    assert shown(chat, _FAILS) == 0
    again, has_kept = resumed(folder, "last")
    assert (again.turns, has_kept) == (chat.session.turns, False)
    assert [file.name for file in folder.rglob("*") if file.is_file()] == [path.name]


def test_a_home_that_goes_away_and_comes_back(folder: Path, tmp_path: Path) -> None:
    chat, away = Chat(), tmp_path / "away"
    chat.say(SAYINGS[0])
    (tmp_path / "data").rename(away)
    chat.say(*SAYINGS[1:3])
    assert shown(chat, "was removed while it was in use") == 1
    away.rename(tmp_path / "data")
    chat.say(SAYINGS[3])
    assert shown(chat, _WORKS) == 1
    assert is_saved(chat)


def test_another_file_in_the_place_of_the_chats_is_not_taken_for_it(folder: Path) -> None:
    chat = Chat()
    chat.say(SAYINGS[0])
    (path,) = folder.glob("*.sqlite")
    copy = path.read_bytes()
    path.unlink()
    path.write_bytes(copy)
    chat.say(SAYINGS[1])
    assert shown(chat, "was removed while it was in use") == 1
    chat.do("/save")
    assert is_saved(chat)


@pytest.mark.parametrize("home", ["/dev/null/home", "/proc/home", "read-only"])
def test_where_no_home_can_be_made_a_chat_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    if home == "read-only":
        if os.geteuid() == 0:
            pytest.skip("root writes everywhere")
        (tmp_path / home).mkdir(mode=0o500)
        home = str(tmp_path / home)
    monkeypatch.setenv("SIRCHAT_HOME", home)
    told: list[str] = []
    open_history(told.append).append_string("a line")
    assert len(told) == 1
    chat = Chat(archive="disk")
    chat.say(*SAYINGS)
    assert shown(chat, _FAILS) == 1
    assert "can't be saved" in refusal(chat, "/save")
    chat.saved_chat.close()
    assert shown(chat, "the end of this chat is not saved") == 1


def test_without_a_home_folder_the_error_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.chdir(tmp_path)
    for name in ("SIRCHAT_HOME", "HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(UsageError, match="set SIRCHAT_HOME"):
        data_dir()
    assert not list(tmp_path.iterdir())


def test_an_export_to_a_full_disk_leaves_the_old_file(folder: Path, tmp_path: Path) -> None:
    chat = Chat()
    chat.say(*SAYINGS)
    assert is_saved(chat)
    file = tmp_path / "out"
    file.write_text("old\n")
    with largest_file(16):
        done = run("sessions", "export", "last", str(file), "--force")
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert "can't be written" in refusal(chat, f"/export md {file} --force")
        assert run("sessions", "export", "last", str(tmp_path / "new")).returncode == 1
        assert run("profiles", "init", "mine").returncode == 2
    assert file.read_text() == "old\n"
    assert run("profiles", "init", "mine").returncode == 0
    assert run("sessions", "export", "last", "/dev/full", "--force").returncode == 1
    assert Path("/dev/full").is_char_device()
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["out"]


def test_an_archive_that_does_not_fit_leaves_no_part_of_a_file(folder: Path) -> None:
    with largest_file(2**16):
        chat = Chat(archive="disk", save=False)
        chat.say(*[f"{words} " * 90 for words in SAYINGS[:2]])
        assert len(chat.session.engine.store.archive) > SEGMENT_ROWS
        chat.session.engine.store.archive._files.wait()
        assert not [one for one in data_dir().rglob("archives/*/*") if one.is_file()]
