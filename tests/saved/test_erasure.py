"""Saved sessions are private, and erased text is erased from the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from session_files import head_at, new, rows_at, said
from sirchat.saved.store import SessionStore

SECRET = "correct horse battery staple"


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
def test_folder_and_files_are_private_while_open_and_after(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "sessions"
    with SessionStore.create(folder, {}) as session:
        session.append(said("hi"), rows_at(range(3)), head_at(3))
        session.kv.save({"keys": torch.ones(2)}, "stamp")
        suffixes = {".sqlite", ".sqlite-journal", ".safetensors", ".open"}
        assert {path.suffix for path in folder.iterdir()} == suffixes
        assert modes(folder) == {0o600}
        session.replace(said("ho"), rows_at(range(3)), head_at(3))
        assert modes(folder) == {0o600}
    assert [path.suffix for path in folder.iterdir()] == [".sqlite"]
    assert modes(folder) == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}


def written_over(tensors: object, path: Path, metadata: object) -> None:
    path.write_bytes(b"")


def written_anew(tensors: object, path: Path, metadata: object) -> None:
    path.unlink()
    path.write_bytes(b"")


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("library", [written_over, written_anew])
def test_keys_and_values_are_private_however_the_library_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Callable[..., None]
) -> None:
    monkeypatch.setattr("safetensors.torch.save_file", library)
    with SessionStore.create(tmp_path / "saved", {}) as session:
        session.kv.save({}, "stamp")
        assert modes(tmp_path / "saved") == {0o600}


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.iterdir()}


def everything_in(folder: Path) -> bytes:
    return b"\n".join(path.name.encode() + path.read_bytes() for path in folder.iterdir())


turns_and_kinds = st.lists(st.tuples(st.integers(0, 9000), st.booleans()), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=40)
@given(turns_and_kinds, st.integers(0, 3))
@example([(5, True), (9000, True), (0, True), (4000, True)], 1)
def test_erased_text_is_in_no_file(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, bool]], undone: int
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    texts = [f"{'a' * size}{SECRET if secret else ''}{'b' * (size // 2)}" for size, secret in plan]
    with SessionStore.create(folder, {}) as session:
        for index, text in enumerate(texts):
            rows, head = rows_at(range(3 * index, 3 * index + 3)), head_at(3 * index + 3, text=text)
            session.append(said(text, start=index), rows, head)
            session.kv.save({"keys": torch.ones(2)}, text)
        kept = max(0, len(texts) - undone)
        session.truncate(kept, 3 * kept, head_at(3 * kept, text=SECRET))
        assert SECRET.encode() in everything_in(folder)
        clean = [text.replace(SECRET, "") for text in texts[:kept]]
        session.replace(said(*clean), rows_at(range(3 * kept)), head_at(3 * kept))
        assert SECRET.encode() not in everything_in(folder)
        assert session.turns() == said(*clean)
        assert session.kv.load(texts[-1]) is None
    assert SECRET.encode() not in everything_in(folder)


def test_undone_turns_are_overwritten(tmp_path: Path) -> None:
    with SessionStore.open(new(tmp_path, "one")) as session:
        session.append(said(SECRET, start=1), rows_at(range(3, 6)), head_at(6))
        session.truncate(1, 3, head_at(3))
        assert SECRET.encode() not in everything_in(tmp_path)


def test_between_turns_everything_is_in_one_file(tmp_path: Path) -> None:
    with SessionStore.create(tmp_path, {}) as session:
        for index, text in enumerate([SECRET, "two", "three"]):
            seen = 3 * index
            session.append(
                said(text, start=index), rows_at(range(seen, seen + 3)), head_at(seen + 3)
            )
            sizes = {path.suffix: path.stat().st_size for path in tmp_path.iterdir()}
            assert sizes.pop(".sqlite")
            assert sizes.pop(".open")
            assert sizes == {".sqlite-journal": 0}


def test_an_erasure_that_a_crash_interrupted_is_finished_when_the_session_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new(tmp_path, *[f"{number} {SECRET}" * 100 for number in range(40)])
    with monkeypatch.context() as patch, SessionStore.open(path) as session:
        patch.setattr(SessionStore, "_finish_erasing", lambda _: None)
        session.replace(said("clean"), rows_at(range(3)), head_at(3))
    before = path.stat().st_size
    for _ in range(2):
        with SessionStore.open(path) as session:
            assert session.turns() == said("clean")
    assert path.stat().st_size < before / 4
    assert SECRET.encode() not in everything_in(tmp_path)
