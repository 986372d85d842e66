"""Session files: what is written is read back, keys and values for their stamp only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attacking import MANY
from session_files import ROW, columns, head_at, new, refusal, rows_at, said
from sirchat.saved import database as files
from sirchat.saved import keys_values
from sirchat.saved.store import Extent, SavedTurn, SessionStore, StateRecord

texts = st.text(max_size=40)
numbers = st.floats(width=32, allow_nan=False).filter(lambda one: one < np.inf)  # as logits are
heads = st.fixed_dictionaries(
    {"log_decay": st.floats(allow_nan=False), "profile": st.dictionaries(texts, texts, max_size=2)}
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(texts, max_size=3), st.integers(0, 9)),
        st.tuples(st.just("truncate"), st.integers(0, 9), st.integers(0, 30)),
        st.tuples(st.just("replace"), st.lists(texts, max_size=3), st.integers(0, 9)),
        st.tuples(st.just("save_head"), st.none(), st.none()),
        st.tuples(st.just("reopen"), st.none(), st.none()),
    ),
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=MANY or 8)
@given(steps, heads, st.none() | st.lists(numbers, max_size=5))
@example([("append", ["a", "b"], 5), ("append", ["c"], 4), ("truncate", 1, 3)], {}, [0.5])
def test_any_turns_rows_and_heads_are_read_back_after_undo_rewriting_and_reopening(
    tmp_path_factory: pytest.TempPathFactory,
    plan: list[tuple[str, Any, Any]],
    fields: dict[str, Any],
    logits: list[float] | None,
) -> None:
    session = SessionStore.create(tmp_path_factory.mktemp("saved"), {"model": "tiny"})
    turns, seen, head = list[SavedTurn](), 0, None
    for number, (step, what, count) in enumerate(plan):
        head = head if step == "reopen" else head_at(seen, logits, **fields, number=number)
        match step:
            case "append":
                new_turns = said(*what, start=len(turns))
                head = head_at(seen + count, logits, **fields, number=number)
                session.append(new_turns, rows_at(range(seen, seen + count)), head)
                turns, seen = turns + new_turns, seen + count
            case "truncate":
                turns, seen = turns[:what], min(seen, count)
                head = head_at(seen, logits, **fields, number=number)
                session.append([], rows_at(range(0)), head, extent=Extent(what, seen))
            case "replace":
                turns, seen = said(*what), count
                head = head_at(seen, logits, **fields, number=number)
                session.append(turns, rows_at(range(seen)), head, extent=Extent(0, 0, 0, 0))
            case "save_head":
                head = head_at(seen, logits, **fields, number=number)
                session.append([], rows_at(range(0)), head)
            case "reopen":
                session.close()
                session = SessionStore.open(session.path)
        check(session, turns, seen, head)
    session.close()


def check(
    session: SessionStore, turns: list[SavedTurn], seen: int, head: StateRecord | None
) -> None:
    assert session.meta == {"model": "tiny"}
    assert session.turns() == turns
    assert columns(session.rows(ROW)) == columns(rows_at(range(seen)))
    assert session.rows(ROW).dtype == ROW
    found = session.state_record()
    if head is None or found is None:
        assert head is found is None
        return
    assert (found.seen, found.fields) == (seen, head.fields)
    assert found.held.dtype == np.int64
    assert found.held.tolist() == head.held.tolist()
    assert (found.logits is None) == (head.logits is None)
    if found.logits is not None and head.logits is not None:
        assert found.logits.dtype == np.float32
        assert found.logits.tobytes() == head.logits.tobytes()


def test_a_link_that_was_planted_beside_a_session_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious", encoding="utf-8")
    with SessionStore.create(tmp_path / "sessions", {}) as session:
        session.path.with_suffix(".safetensors.new").symlink_to(victim)
        session.kv.save({"keys": torch.ones(3)}, "stamp")
        assert session.kv.load("stamp") is not None
    assert victim.read_text(encoding="utf-8") == "precious"


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("anew", [False, True])
def test_keys_and_values_are_private_however_the_library_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    def write(tensors: object, path: Path, metadata: object) -> None:
        if anew:
            path.unlink()
        path.write_bytes(b"")

    monkeypatch.setattr("safetensors.torch.save_file", write)
    with SessionStore.create(tmp_path / "saved", {}) as session:
        session.kv.save({}, "stamp")
        assert modes(tmp_path / "saved") == {0o600}


def test_rows_of_other_fields_are_refused(tmp_path: Path) -> None:
    other = np.dtype([("token_id", np.int32), ("surprisal", np.float64)])
    with SessionStore.open(new(tmp_path, "one")) as session:
        assert "fields that this sirchat does not know" in refusal(lambda: session.rows(other))
        assert "fields that this sirchat does not know" in refusal(
            lambda: session.append([], np.zeros(2, other), head_at(5))
        )
        assert len(session.rows(ROW)) == 3


def test_a_turn_that_does_not_fit_the_rows_leaves_nothing_behind(tmp_path: Path) -> None:
    with SessionStore.open(new(tmp_path, "one")) as session:
        none = rows_at(range(0))
        misfits: list[Callable[[], object]] = [
            lambda: session.append(said("two", start=1), rows_at(range(3, 5)), head_at(4)),
            lambda: session.append([], none, head_at(4), extent=Extent(0, 4)),
            lambda: session.append([], none, head_at(2), extent=Extent(0, 1)),
            lambda: session.append(
                said("two"), rows_at(range(5)), head_at(4), extent=Extent(0, 0, 0, 0)
            ),
            lambda: session.append([], none, head_at(2)),
        ]
        for act in misfits:
            with pytest.raises(ValueError, match=r"rows|tokens"):
                act()
        assert "UNIQUE" in refusal(
            lambda: session.append(said("again"), rows_at(range(3, 4)), head_at(4))
        )
        assert session.turns() == said("one")
        assert len(session.rows(ROW)) == 3


def test_a_chat_of_a_wrong_clock_is_read_like_any_other(tmp_path: Path) -> None:
    times = [0, -1, 253_402_300_800, 10**14, None]
    turns = [replace(turn, time=at) for turn, at in zip(said(*"abcde"), times, strict=True)]
    with SessionStore.create(tmp_path, {}) as session:
        session.append(turns, rows_at(range(3)), head_at(3))
    with SessionStore.open(session.path) as session:
        assert [turn.time for turn in session.turns()] == times


def test_ids_sort_by_time_and_none_is_given_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = iter("aaaa" + "aaaa" + "bbbb")
    monkeypatch.setattr("sirchat.saved.database.secrets.choice", lambda _: next(letters))
    clock = SimpleNamespace(strftime=lambda _: "20261121-1432", time=time.time)
    monkeypatch.setattr(files, "time", clock)
    ids = [new(tmp_path, "hi").stem for _ in range(2)]
    assert ids == ["20261121-1432-aaaa", "20261121-1432-bbbb"]


# Keys and values beside the session.


def test_keys_and_values_are_loaded_for_their_stamp_only(tmp_path: Path) -> None:
    store_of = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {"keys": store_of[:, :2], "values": torch.ones(2, 2, dtype=torch.bfloat16)}
    with SessionStore.create(tmp_path, {}) as session:
        assert session.kv.load("7 tokens") is None
        session.kv.save(tensors, "7 tokens")
        assert session.kv.load("8 tokens") is None
        loaded = session.kv.load("7 tokens")
        assert loaded is not None
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)
        session.kv.save({}, "8 tokens")
        assert torch.equal(loaded["keys"], tensors["keys"])  # a newer file does not change them
        assert session.kv.load("8 tokens") == {}
        session.kv.drop()
        session.kv.drop()
        assert session.kv.load("8 tokens") is None


@pytest.mark.parametrize("kept", [0, 4, 30, 0.5, -1])
def test_a_truncated_file_of_keys_and_values_counts_as_missing(tmp_path: Path, kept: float) -> None:
    with SessionStore.create(tmp_path, {}) as session:
        session.kv.save({"keys": torch.ones(100)}, "stamp")
        file = session.path.with_suffix(".safetensors")
        whole = file.read_bytes()
        file.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
        assert session.kv.load("stamp") is None


def test_keys_and_values_that_cannot_be_written_leave_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with SessionStore.create(tmp_path, {}) as session:
        session.kv.save({"keys": torch.ones(3)}, "old")
        monkeypatch.setattr(keys_values, "sync", fail)
        assert "No space" in refusal(lambda: session.kv.save({"keys": torch.ones(3)}, "new"))
        assert session.kv.load("old") is not None
    unfinished = session.path.with_suffix(".safetensors.new")
    assert not unfinished.exists()
    unfinished.write_bytes(b"half")  # as a crash leaves it
    SessionStore.open(session.path).close()
    assert not unfinished.exists()


SECRET = "correct horse battery staple"


@pytest.mark.usefixtures("open_umask")
def test_folder_and_files_are_private_while_open_and_after(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "sessions"
    with SessionStore.create(folder, {}) as session:
        session.append(said("hi"), rows_at(range(3)), head_at(3))
        session.kv.save({"keys": torch.ones(2)}, "stamp")
        suffixes = {".sqlite", ".sqlite-journal", ".safetensors"}
        assert {path.suffix for path in folder.iterdir()} == suffixes
        assert modes(folder) == {0o600}
        session.append(said("ho"), rows_at(range(3)), head_at(3), extent=Extent(0, 0, 0, 0))
        assert modes(folder) == {0o600}
    assert [path.suffix for path in folder.iterdir()] == [".sqlite"]
    assert modes(folder) == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.iterdir()}


def everything_in(folder: Path) -> bytes:
    return b"\n".join(path.name.encode() + path.read_bytes() for path in folder.iterdir())


turns_and_kinds = st.lists(st.tuples(st.integers(0, 9000), st.booleans()), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=MANY or 8)
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
        head = head_at(3 * kept, text=SECRET)
        session.append([], rows_at(range(0)), head, extent=Extent(kept, 3 * kept))
        assert SECRET.encode() in everything_in(folder)
        clean = [text.replace(SECRET, "") for text in texts[:kept]]
        session.append(
            said(*clean), rows_at(range(3 * kept)), head_at(3 * kept), extent=Extent(0, 0, 0, 0)
        )
        assert SECRET.encode() not in everything_in(folder)
        assert session.turns() == said(*clean)
        assert session.kv.load(texts[-1]) is None
    assert SECRET.encode() not in everything_in(folder)


def test_an_erasure_that_a_crash_interrupted_is_finished_when_the_session_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new(tmp_path, *[f"{number} {SECRET}" * 100 for number in range(40)])
    with monkeypatch.context() as patch, SessionStore.open(path) as session:
        patch.setattr(SessionStore, "_finish_erasing", lambda _: None)
        session.append(said("clean"), rows_at(range(3)), head_at(3), extent=Extent(0, 0, 0, 0))
    before = path.stat().st_size
    for _ in range(2):
        with SessionStore.open(path) as session:
            assert session.turns() == said("clean")
    assert path.stat().st_size < before / 4
    assert SECRET.encode() not in everything_in(tmp_path)
