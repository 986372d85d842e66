"""Keys and values of evicted tokens are saved while a chat goes on, and belong to the chat."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from held_rows import contents, same
from saved_chats import Chat, resumed
from sirchat.cli.sessions import sessions_list
from sirchat.memory.key_values import KeyValues
from sirchat.memory.ledger import State
from sirchat.saved import autosave
from sirchat.saved.session_list import copy_session, list_sessions, make_room, remove_session
from sirchat.ui.lists import format_bytes

LONG = "some words and more of them, " * 24  # fills a file
MIN_FILE_TOKENS = 64  # tokens in a file


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autosave, "MIN_FILE_TOKENS", MIN_FILE_TOKENS)


@pytest.fixture
def chat(folder: Path) -> Chat:
    """A chat that has evicted more tokens than a file takes."""
    chat = Chat()
    chat.say("My name is Anna.", LONG, LONG)
    assert len(chat.session.engine.store.archived()) > 2 * MIN_FILE_TOKENS
    return chat


def only(folder: Path) -> str:
    return list_sessions(folder).sessions[0].id


def files(folder: Path, ident: str = "*") -> list[Path]:
    return sorted(folder.glob(f"{ident}.kv/*"))


def is_equal(one: KeyValues, other: KeyValues) -> bool:
    pairs = zip(one.tensors, other.tensors, strict=True)
    numbers = (one.positions == other.positions).all() and (
        one.written_at == other.written_at
    ).all()
    return bool(numbers) and all(a.equal(b) for a, b in pairs)


def test_after_a_crash_a_chat_has_the_first_written_keys_of_what_it_had_evicted(
    chat: Chat, folder: Path
) -> None:
    chat.crash()
    assert not list(folder.glob("*.safetensors"))
    again, _ = resumed(folder, only(folder))
    before = chat.session.engine.store.archived()
    lost = np.setdiff1d(before, again.engine.store.archived())
    assert len(lost) < MIN_FILE_TOKENS
    assert set(again.ledger.column("state")[lost]) <= {State.NOT_STORED}
    assert is_equal(
        again.engine.store.archive.fetch(again.engine.store.archived()),
        chat.session.engine.store.archive.fetch(again.engine.store.archived()),
    )


def test_with_what_is_saved_at_its_end_a_chat_has_all(chat: Chat, folder: Path) -> None:
    chat.saved_chat.close()
    again, _ = resumed(folder, only(folder))
    assert again.engine.store.archived().tolist() == chat.session.engine.store.archived().tolist()
    assert is_equal(
        again.engine.store.archive.fetch(again.engine.store.archived()),
        chat.session.engine.store.archive.fetch(again.engine.store.archived()),
    )
    assert same(contents(again.engine), contents(chat.session.engine))
    (at_end,) = folder.glob("*.safetensors")
    assert at_end.stat().st_size < sum(file.stat().st_size for file in files(folder))


def test_files_are_private_listed_and_go_with_the_chat(
    chat: Chat, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = files(folder)
    assert [part.stat().st_mode & 0o777 for part in parts] == [0o600] * len(parts)
    assert parts[0].parent.stat().st_mode & 0o777 == 0o700
    size = format_bytes(sum(file.stat().st_size for file in parts))
    sessions_list()
    assert f"keys and values take {size} of at most 4GiB" in capsys.readouterr().err
    chat.crash()
    remove_session(folder / f"{only(folder)}.sqlite")
    assert not list(folder.glob("*.kv"))


def test_past_the_limit_of_all_chats_the_oldest_keys_and_values_go_and_no_text(
    chat: Chat, folder: Path
) -> None:
    every, said = files(folder), [turn.text for turn in chat.session.turns]
    for number, part in enumerate(every):
        os.utime(part, (number + 1, number + 1))
    sizes = [part.stat().st_size for part in every]
    assert make_room(folder, sum(sizes)) == 0
    assert make_room(folder, sum(sizes) - 1) == sizes[0]
    assert files(folder) == every[1:]
    chat.do("/set save_kv_limit 1kB")
    chat.saved_chat.close()
    assert not files(folder)
    assert not list(folder.glob("*.safetensors"))
    again, _ = resumed(folder, only(folder))
    assert [turn.text for turn in again.turns] == said


@pytest.mark.parametrize("settings", [{"save_kv": "off"}, {"archive": "off"}, {"save": False}])
def test_where_they_are_not_wanted_there_are_no_files(
    folder: Path, settings: dict[str, Any]
) -> None:
    Chat(**settings).say("My name is Anna.", LONG, LONG)
    assert not files(folder)


def test_what_is_undone_is_in_no_file_and_what_is_said_instead_is(chat: Chat, folder: Path) -> None:
    start = int(np.flatnonzero(chat.session.ledger.column("turn") == 3)[0])
    chat.do("/undo")
    chat.do("/undo")
    assert chat.session.seen <= start
    for file in files(folder):
        assert load_file(file)["positions"].max() < chat.session.seen
    chat.crash()
    again, _ = resumed(folder, only(folder))
    assert (
        not len(again.engine.store.archived())
        or again.engine.store.archived().max() < chat.session.seen
    )


def test_a_file_of_another_text_is_never_used(chat: Chat, folder: Path, tmp_path: Path) -> None:
    kept = shutil.copytree(files(folder)[0].parent, tmp_path / "kept")
    for _ in range(3):
        chat.do("/undo")
    chat.say("My name is Bert.", LONG.replace("some", "other"))
    chat.crash()
    ident = only(folder)
    shutil.rmtree(folder / f"{ident}.kv", ignore_errors=True)
    shutil.copytree(kept, folder / f"{ident}.kv")  # as if they had not been deleted
    again, _ = resumed(folder, ident)
    assert not len(again.engine.store.archived())
    assert not files(folder)


def test_a_damaged_file_is_ignored_and_deleted(chat: Chat, folder: Path) -> None:
    first, second = files(folder)[:2]
    content = bytearray(first.read_bytes())
    content[-9] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:5000])
    chat.crash()
    again, _ = resumed(folder, only(folder))
    assert not {first, second} & {*files(folder)}
    lost = again.ledger.column("state") == State.NOT_STORED
    assert lost.sum() >= 2 * MIN_FILE_TOKENS


def test_erasing_leaves_no_file_of_before_and_saves_the_rest_again(
    chat: Chat, folder: Path
) -> None:
    before = {file: file.read_bytes() for file in files(folder)}
    rows = chat.session.engine.store.archived()
    erased = [rank.row.position for rank in chat.session.why("Anna")]
    chat.do("/erase Anna --yes")
    after = {file: file.read_bytes() for file in files(folder)}
    assert after
    assert not set(before.items()) & set(after.items())
    chat.crash()
    again, _ = resumed(folder, only(folder))
    assert np.setdiff1d(rows, again.engine.store.archived()).tolist()[: len(erased)] == erased


def test_over_the_limit_the_newest_are_kept_and_the_oldest_are_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autosave, "AUTO_KV_BYTES", 90 * 1024)
    chat = Chat(policy="sink")
    chat.say("My name is Anna.", LONG)
    first = files(folder)
    chat.say(*[LONG] * 3)
    assert first[0] not in files(folder)
    assert sum(file.stat().st_size for file in files(folder)) < 96 * 1024
    chat.crash()
    again, _ = resumed(folder, only(folder))
    assert again.engine.store.archived().min() > MIN_FILE_TOKENS
    assert {rank.state for rank in again.why("Anna")} == {"rereadable"}


def test_over_the_limit_of_the_archive_what_is_evicted_is_saved_as_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirchat.memory.archive.SEGMENT_ROWS", 4 * MIN_FILE_TOKENS)
    chat = Chat(policy="sink", archive_limit="110kB")
    for number in range(20):
        chat.say(f"{number} is blue. " * 20)
        positions = [load_file(file)["positions"].numpy() for file in files(folder)]
        archived = chat.session.engine.store.archived()
        assert len(np.setdiff1d(archived, np.concatenate([[], *positions]))) < MIN_FILE_TOKENS
    assert {0, 8, 4} == set(chat.session.engine.store.archive.bits(archived).tolist())
    chat.saved_chat.close()
    (at_end,) = folder.glob("*.safetensors")
    assert len(load_file(at_end)["positions"]) < chat.session.resident + MIN_FILE_TOKENS


def test_a_branch_and_a_copy_have_their_own_files(chat: Chat, folder: Path) -> None:
    ident = only(folder)
    copy = copy_session(folder, ident, "copy")
    copy.close()
    chat.do("/branch other")
    chat.crash()
    branch = chat.saved_chat._autosave.id
    assert len({ident, copy.id, branch}) == 3
    remove_session(folder / f"{ident}.sqlite")
    for one in (copy.id, branch):
        again, _ = resumed(folder, one)
        assert len(again.engine.store.archived()) > 2 * MIN_FILE_TOKENS - 1
