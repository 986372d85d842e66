"""The archive: each row stored once, found by its position, and dropped over the limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, current_thread, main_thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from chatting import babbler, notices, session
from sirchat.chat.session import Session
from sirchat.memory.archive import (
    SEGMENT_ROWS,
    Archive,
    Segment,
    SegmentFiles,
    _touched_zeros,
)
from sirchat.memory.key_values import KeyValues, Transfer, Transfers, to_device
from sirchat.memory.ledger import Flag, Placement, Role, State

SHAPES = ((2, 4), (2, 4), (1, 3), (1, 5))  # heads and dimensions of two layers' keys and values


def rows(positions: list[int]) -> KeyValues:
    """Rows whose every number is their position."""
    at = np.array(positions, np.int64)
    column = torch.from_numpy(at).float()[None, :, None]
    return KeyValues(at, at % 7, [column.expand(h, len(at), d).contiguous() for h, d in SHAPES])


def check_fetched(archive: Archive, positions: list[int]) -> None:
    found = archive.fetch(np.array(positions, np.int64))
    assert found.positions.tolist() == positions
    assert found.written_at.tolist() == [position % 7 for position in positions]
    for tensor, (heads, dims) in zip(found.tensors, SHAPES, strict=True):
        assert tensor.shape == (heads, len(positions), dims)
        assert (tensor == torch.tensor(positions, dtype=torch.float)[None, :, None]).all()


sets = st.sets(st.integers(0, 3000), min_size=1, max_size=60)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), sets),
        st.tuples(st.just("remove"), sets),
        st.tuples(st.just("truncate"), st.integers(0, 2000)),
    ),
    max_size=12,
)


class Late(Transfers):
    """Copies that arrive late, on a GPU only once they are `free` to: until then they are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.free = 0, Event()

    def to_host(self, tensors: Sequence[Tensor], block: Tensor | None = None) -> Transfer:
        sent, arrived = [one.clone() for one in tensors], [torch.zeros_like(one) for one in tensors]
        for one in tensors:
            one.zero_()  # the rows' place in the cache is used again

        def take() -> list[Tensor]:
            self.free.wait()
            time.sleep(0.001)
            self.arrived += 1
            for one, other in zip(arrived, sent, strict=True):
                one.copy_(other)
            return arrived

        late: Any = SimpleNamespace(ends=["an event"], take=take)
        return late  # type: ignore[no-any-return]


@given(steps, st.booleans(), st.booleans())
def test_it_stores_what_was_added_and_not_removed(
    plan: list[tuple[str, set[int] | int]], on_disk: bool, late: bool
) -> None:
    with TemporaryDirectory() as folder:
        archive = Archive(folder=Path(folder, "archive") if on_disk else None)
        archive.transfers = Late() if late else Transfers()
        if isinstance(archive.transfers, Late):
            archive.transfers.free.set()
        with closing(archive):
            check_plan(archive, plan)


def test_storing_rows_does_not_wait_for_them() -> None:
    archive, late = Archive(), Late()
    archive.transfers = late
    for at in range(5):
        archive.add(rows([at]))
    assert late.arrived == 0
    assert len(archive) == 5
    late.free.set()
    check_fetched(archive, [4, 0])
    assert late.arrived == 5
    for at in range(5, 50):  # they take memory until they have arrived
        archive.add(rows([at]))
    assert late.arrived >= 35


def test_memory_for_the_next_rows_is_taken_ahead_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    archive, half, made = Archive(), SEGMENT_ROWS // 2, Event()

    def make(like: list[Tensor]) -> list[Tensor]:
        assert current_thread() is not main_thread()
        made.set()
        return _touched_zeros(like)

    monkeypatch.setattr("sirchat.memory.archive._touched_zeros", make)
    archive.add(rows(list(range(half))))
    assert not made.is_set()
    archive.add(rows([half]))
    assert made.wait(60)
    archive._files.run(list).result()  # the thread is done with what came before
    assert archive.bytes_by_device() == {"cpu": 2 * archive.nbytes}
    monkeypatch.setattr(torch, "zeros", None)  # with which tensors are made when they are needed
    archive.add(rows(list(range(half + 1, SEGMENT_ROWS + 9))))
    check_fetched(archive, list(range(SEGMENT_ROWS + 9)))


@pytest.mark.gpu
def test_rows_leave_a_gpu_on_a_stream_of_their_own() -> None:
    archive, gpu = Archive(), torch.device("cuda")
    for at in range(0, 40, 2):
        archive.add(rows([at, at + 1]).to(gpu))
        torch.full((2**20,), -1.0, device=gpu)  # may get the memory of those rows
    check_fetched(archive, list(range(40)))
    (back,) = to_device(archive.fetch(np.arange(40)).tensors[:1], gpu)
    assert back.is_cuda
    assert back[0, :, 0].tolist() == list(range(40))


def check_plan(archive: Archive, plan: list[tuple[str, set[int] | int]]) -> None:
    """Compare the archive with a plain set of positions after each step."""
    expected = set[int]()
    archive.add(rows(list(range(5000, 5000 + SEGMENT_ROWS - 3))))  # so that segments fill up
    expected |= set(range(5000, 5000 + SEGMENT_ROWS - 3))
    for step, what in plan:
        if isinstance(what, int):
            archive.truncate(what + 4000)
            expected = {one for one in expected if one < what + 4000}
        elif step == "add":
            archive.add(rows(sorted(what)))
            expected |= what
        else:
            archive.remove(np.array(sorted(what), np.int64))
            expected -= what
        everything = np.arange(8000)
        assert everything[archive.has(everything)].tolist() == sorted(expected)
        assert len(archive) == len(expected)
        if expected:
            check_fetched(archive, sorted(expected, key=lambda one: -one % 11))


def test_a_row_is_stored_once() -> None:
    archive = Archive()
    for _ in range(5):
        archive.add(rows(list(range(SEGMENT_ROWS))))
    once = archive.nbytes
    archive.add(rows([SEGMENT_ROWS]))
    assert archive.nbytes == 2 * once


@pytest.mark.parametrize("positions", [[1, 3], [10**6]])
def test_fetching_rows_that_are_not_stored_is_an_error(positions: list[int]) -> None:
    archive = Archive()
    archive.add(rows([1, 2]))
    with pytest.raises(LookupError):
        archive.fetch(np.array(positions))


def test_the_end_of_a_segment_is_overwritten_on_disk_each_time_some_of_it_is_removed(
    tmp_path: Path,
) -> None:
    with closing(Archive(folder=tmp_path / "a")) as archive:
        archive.add(rows(list(range(1, 2 * SEGMENT_ROWS + 6))))
        sizes = archive.bytes_by_device()
        for start in (SEGMENT_ROWS - 8, SEGMENT_ROWS - 16):
            archive.remove(np.arange(start, SEGMENT_ROWS + 1))
            archive._files.wait()
            numbers = load_file(min((tmp_path / "a").iterdir()))["0"][0, :, 0].tolist()
            assert numbers == [*range(1, start), *[0] * (SEGMENT_ROWS - start + 1)]
        assert archive.bytes_by_device() == sizes
        archive.remove(np.arange(1, SEGMENT_ROWS + 1))
        archive._files.wait()
        assert len(list((tmp_path / "a").iterdir())) == 1


def test_what_is_removed_while_the_disk_is_full_is_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with closing(Archive(folder=tmp_path / "a")) as archive:
        archive.add(rows(list(range(SEGMENT_ROWS))))
        archive._files.wait()
        monkeypatch.setattr("sirchat.memory.archive.save_file", full)
        archive.remove(np.array([17]))
        archive._files.wait()
        assert archive.disk_error
        assert not list((tmp_path / "a").iterdir())
        assert archive.bytes_by_device().keys() == {"cpu"}
        check_fetched(archive, [16, 18])


@pytest.mark.parametrize("removed", ["truncate", "remove"])
def test_rows_added_while_a_segment_is_written_are_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    """As after an undo: a full segment has room again, and gets rows while the disk is slow."""
    go_on = threading.Event()

    def slow(tensors: dict[str, torch.Tensor], path: Path) -> None:
        copied = {name: one.clone() for name, one in tensors.items()}
        assert go_on.wait(60)
        save_file(copied, path)

    with closing(Archive(folder=tmp_path / "a")) as archive:
        archive.add(rows(list(range(SEGMENT_ROWS))))
        archive._files.wait()
        monkeypatch.setattr("sirchat.memory.archive.save_file", slow)
        last = np.arange(SEGMENT_ROWS - 9, SEGMENT_ROWS)
        archive.truncate(int(last[0])) if removed == "truncate" else archive.remove(last)
        archive.add(rows([1000, 1001, 1002]))
        go_on.set()
        archive._files.wait()
        check_fetched(archive, [3, 1000, 1001, 1002])
        assert not list((tmp_path / "a").iterdir())  # nothing that was removed is still there
        archive.add(rows(list(range(2000, 2006))))
        archive._files.wait()
        assert len(list((tmp_path / "a").iterdir())) == 1
        check_fetched(archive, [3, 1000, 1001, 1002, 2000, 2005])


# In a chat.


def long_chat(turns: int = 4, **settings: Any) -> tuple[Session, list[str]]:
    """A chat of about 350 tokens for each turn, and the texts of its notices."""
    chat = session(babbler(), policy="sink", budget=64, recent=8, max_new_tokens=8, **settings)
    told = []
    for n in range(turns):
        events = list(chat.ask(f"{n} word " * 110))
        told += notices(events)
    return chat, told


def test_switching_the_archive_in_a_chat_keeps_the_archived_rows(own_home: Path) -> None:
    chat, _ = long_chat()
    archived = chat.ledger.archived_count
    list(chat.switch("/set", archive="disk"))
    assert chat.ledger.archived_count == archived > 1000
    list(chat.switch("/set", archive_limit="2GiB"))
    list(chat.switch("/set", archive="ram"))
    assert chat.ledger.archived_count == archived
    assert not list(own_home.rglob("*.safetensors"))


def test_a_full_archive_is_reported_once_and_the_chat_goes_on() -> None:
    chat, told = long_chat(archive_limit="150kB")
    assert [text for text in told if "archive is full" in text] == told
    assert len(told) == 1
    assert chat.engine.store.archive.nbytes <= 150_000
    list(chat.switch("/budget", budget=2000))
    assert 64 < chat.resident < chat.seen


def test_reachable_tokens_are_those_that_are_stored_and_not_excluded() -> None:
    chat, _ = long_chat(archive_limit="150kB", system="Be brief.")
    list(chat.switch("/system", system="You are a sailor."))
    is_gone = chat.ledger.column("state") == State.NOT_STORED
    is_excluded = chat.ledger.column("flags") & Flag.EXCLUDED != 0
    assert is_gone.any()
    assert (is_excluded & ~is_gone).any()
    expected = np.flatnonzero(~(is_gone | is_excluded))
    assert chat.engine.store.reachable().tolist() == expected.tolist()


@pytest.mark.parametrize("recall", ["off", "mips"])
def test_a_disk_that_fails_while_rows_are_moved_loses_none_of_them(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, recall: str
) -> None:
    """A search is undone, and what a switch restores is restored, from memory."""
    monkeypatch.setattr("sirchat.memory.archive.SEGMENT_ROWS", 32)
    put = SegmentFiles.put

    def put_at_once(files: SegmentFiles, number: int, segment: Segment) -> None:
        put(files, number, segment)
        files.wait()

    monkeypatch.setattr(SegmentFiles, "put", put_at_once)
    chats = [long_chat(1, archive=place, recall=recall)[0] for place in ("disk", "ram")]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sirchat.memory.archive.save_file", full)
    told = []
    for chat in chats:
        if recall == "off":
            chat.switch("/set", policy="random", budget=128)
        events = list(chat.read_user("What was the word? " * 20))
        chat.switch("/set", budget=100)
        events += chat.ask("And now? " * 20)
        told += notices(events)
    ledgers = [chat.ledger for chat in chats]
    is_read = [one.column("role") != Role.ASSISTANT for one in ledgers]  # replies may differ
    ids = [one.column("token_id")[mask] for one, mask in zip(ledgers, is_read, strict=True)]
    assert ids[0].tolist() == ids[1].tolist()
    assert [one for one in told if "memory: No space left" in one], told
    assert chats[0].ledger.archived_count == chats[1].ledger.archived_count


def test_memory_that_is_full_while_tokens_move_leaves_all_where_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = long_chat(archive="ram")[0]
    store, held = chat.engine.store, chat.ledger.held_positions.copy()
    archived = store.archived()

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Transfers, "to_host", full)
        chosen = Placement(held[len(held) // 2 :], aside=held[: len(held) // 2])
        with pytest.raises(MemoryError):
            store.place(chosen)
        assert not store.has_recall
        assert not store.archive.has(np.setdiff1d(held, archived)).any()
        with pytest.raises(MemoryError):
            store.set_limit(2**30, Path("elsewhere"))
    assert store.archived().tolist() == archived.tolist()
    assert store.archive.has(archived).all()
    gone = store.place(chosen)[0].positions
    assert store.archive.has(gone).all()
    assert all(part.abs().sum() > 0 for part in store.archive.fetch(gone).tensors)
