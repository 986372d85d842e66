"""An archive over its limit: exact tokens, then 8 bits a number, then 4, then the text alone."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from chatting import babbler, session, tiny
from saved_chats import Chat, resumed
from sirchat.chat.events import Recalled
from sirchat.chat.rereading import copy_session
from sirchat.chat.session import Session
from sirchat.memory.archive import SEGMENT_ROWS, Archive
from sirchat.memory.key_values import KeyValues, Tiers
from sirchat.memory.ledger import Flag, State
from sirchat.saved.autosave import Autosave

NONE = np.zeros(0, np.int64)
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def random_rows(start: int, count: int, seed: int, kind: str = "float32", far: float = 0) -> Any:
    """Keys and values of tokens, whose first number is the same for all but for some noise."""
    draw = torch.Generator().manual_seed(seed)
    tensors = []
    for heads, dims in ((2, 4), (2, 4), (1, 3), (1, 5)):
        numbers = torch.randn(heads, count, dims, generator=draw)
        numbers *= 10 ** torch.randn(heads, count, 1, generator=draw)
        numbers[..., 0] += far
        tensors.append(numbers.to(TYPES[kind]))
    at = np.arange(start, start + count)
    return KeyValues(at, at % 7, tensors)


@pytest.mark.parametrize("bits", [[0] * 6, [8] * 6, [8, 8, 0, 0, 4, 4]])
def test_tokens_that_come_in_one_tensor_are_stored_in_their_tiers(bits: list[int]) -> None:
    block, at, archive = torch.randn(4, 2, 6, 8), np.arange(6), Archive()
    archive.restore_tiers(Tiers(np.array(bits, np.uint8), [torch.zeros(2, 1, 8)] * 4))
    archive.add(KeyValues(at, at, list(block), block=block))
    assert archive.bits(at).tolist() == bits
    for one, expected in zip(archive.fetch(at).tensors, block, strict=True):
        torch.testing.assert_close(one, expected, atol=0.5, rtol=0)


def in_tiers(archive: Archive) -> dict[int, list[int]]:
    """The archived positions of each tier."""
    bits = archive.bits(archive.positions)
    return {int(tier): archive.positions[bits == tier].tolist() for tier in np.unique(bits)}


def shrink(archive: Archive, held: NDArray[np.int64] = NONE) -> list[int]:
    """Bring the archive within its limit; returns the positions of the deleted tokens."""
    gone = list[int]()
    archive.shrink(held, lambda positions: gone.extend(positions.tolist()))
    return gone


def full(*_: object) -> None:
    raise MemoryError


def filled(segments: int, limit: float, **rows: Any) -> tuple[Archive, KeyValues]:
    """An archive of full segments and a limit, in sizes of one; and what was put into it."""
    archive, seed = Archive(), rows.pop("seed", 1)
    everything = random_rows(0, segments * SEGMENT_ROWS, seed, **rows)
    for number in range(segments):
        at = np.arange(number * SEGMENT_ROWS, (number + 1) * SEGMENT_ROWS)
        archive.add(everything.take(at))
        archive.limit = archive.limit or int(limit * archive.nbytes)
        shrink(archive)
    return archive, everything


@given(st.integers(0, 2**16), st.sampled_from(list(TYPES)), st.sampled_from([0.0, 3.0, 90.0]))
def test_rounded_numbers_are_within_half_a_step(seed: int, kind: str, far: float) -> None:
    """A step is the power of two from which on 127 steps reach all numbers of a head."""
    archive, exact = filled(6, 2.5, seed=seed, kind=kind, far=far)
    tiers = in_tiers(archive)
    assert set(tiers) == {0, 8, 4}
    for bits, positions in tiers.items():
        at = np.array(positions)
        found = archive.fetch(at)
        assert (found.written_at == at % 7).all()
        for tensor, whole in zip(found.tensors, exact.tensors, strict=True):
            numbers = whole[:, at].float()
            if bits == 0:
                assert torch.equal(tensor, whole[:, at])
                continue
            centre = whole[:, :SEGMENT_ROWS].float().mean(1, keepdim=True).to(TYPES[kind])
            most = (numbers - centre.float()).abs().amax(-1, keepdim=True)
            step = 2 ** torch.ceil(torch.log2(most / 127.1))
            coarse = 0 if bits == 8 else most / 7 + step  # 4 bits are rounded from 8
            of_type = numbers.abs() * torch.finfo(TYPES[kind]).eps + 1e-6
            assert ((tensor.float() - numbers).abs() <= (step + coarse) / 2 + of_type).all()


def test_the_oldest_go_down_first_and_bytes_stay_within_the_limit() -> None:
    archive, _ = filled(12, 3)
    assert archive.nbytes <= (archive.limit or 0)
    tiers = in_tiers(archive)
    assert max(tiers[4]) < min(tiers[8]) < max(tiers[8]) < min(tiers[0])
    assert archive.positions.tolist() == list(range(archive.positions[0], 12 * SEGMENT_ROWS))
    assert archive.positions[0] > 0


def test_a_restored_token_goes_down_later_each_time_it_was_restored() -> None:
    archive, exact = filled(2, 4)
    often, once, never = 7, 9, 11
    archive.note_restored(np.array([often]))
    archive.note_restored(np.array([often, once]))
    exact_until = dict.fromkeys((often, once, never), 0)
    for number in range(2, 20):
        archive.add(random_rows(number * SEGMENT_ROWS, SEGMENT_ROWS, number))
        shrink(archive)
        for at in exact_until:
            if archive.bits(np.array([at]))[0] == 0 and archive.has(np.array([at])).all():
                exact_until[at] = number
                found = archive.fetch(np.array([at])).tensors
                assert all(
                    torch.equal(one, whole[:, at : at + 1])
                    for one, whole in zip(found, exact.tensors, strict=True)
                )
    assert exact_until[never] < exact_until[once] < exact_until[often] < 19


def test_a_held_token_is_stored_as_the_cache_has_it_when_it_is_evicted_again() -> None:
    archive, exact = filled(2, 2.5)
    held = np.array([3, 5])
    archive.add(random_rows(2 * SEGMENT_ROWS, SEGMENT_ROWS, 2))
    shrink(archive, held)
    assert not archive.has(held).any()
    assert archive.has(np.array([4])).all()
    archive.add(exact.take(held))
    assert torch.equal(archive.fetch(held).tensors[0], exact.tensors[0][:, held])
    rounded = archive.fetch(np.array([4]))
    archive.remove(np.array([4]))
    archive._bits[4] = 8  # as if the cache had it meanwhile
    archive.add(rounded)
    again = archive.fetch(np.array([4]))
    assert all(map(torch.equal, again.tensors, rounded.tensors))


def test_what_is_removed_is_overwritten_in_every_tier() -> None:
    archive, _ = filled(8, 2.5)
    first = np.array([at[5] for at in in_tiers(archive).values()])
    homes = archive._addresses[first]
    archive.remove(first)
    assert not archive.has(first).any()
    for slot in homes.tolist():
        segment = archive._segments[slot // SEGMENT_ROWS]
        assert not any(tensor[:, slot % SEGMENT_ROWS].any() for tensor in segment.tensors)


def test_a_far_lower_limit_takes_work_in_proportion_to_the_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sirchat.memory.archive.SEGMENT_ROWS", 4)
    calls = Counter[int]()
    for segments in (40, 160):
        archive = Archive()
        archive.add(random_rows(0, 4 * segments, 1))
        archive.limit = archive.nbytes // 20
        sys.setprofile(lambda *_, number=segments: calls.update([number]))
        shrink(archive)
        sys.setprofile(None)
    assert calls[160] < 5 * calls[40]


@pytest.mark.parametrize("failing", ["quantized", "Segment"])
def test_memory_that_is_full_while_tokens_go_down_loses_none(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    archive, exact = filled(3, 4)
    archive.note_restored(np.array([7]))
    archive.limit = archive.nbytes - 1
    with monkeypatch.context() as patch:
        patch.setattr(f"sirchat.memory.archive.{failing}", full)
        for _ in range(2):
            with pytest.raises(MemoryError):
                shrink(archive)
    assert archive.positions.tolist() == exact.positions.tolist()
    assert all(map(torch.equal, archive.fetch(exact.positions).tensors, exact.tensors))
    assert not shrink(archive)
    assert archive.positions.tolist() == exact.positions.tolist()
    assert 7 in in_tiers(archive)[0]
    assert 8 in in_tiers(archive)[8]


def test_what_was_deleted_before_memory_was_full_is_known_to_be_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    archive, _ = filled(12, 3)
    before, gone = set(archive.positions.tolist()), set[int]()
    archive.note_restored(np.array([max(in_tiers(archive)[4])]))
    archive.limit = 1
    monkeypatch.setattr("sirchat.memory.archive.Segment", full)
    with pytest.raises(MemoryError):
        archive.shrink(NONE, lambda positions: gone.update(positions.tolist()))
    assert gone
    assert before - gone == set(archive.positions.tolist())


def test_tokens_that_could_not_be_stored_are_not_stored_in_fewer_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    archive, exact = Archive(), random_rows(0, 3 * SEGMENT_ROWS, 1)
    stored, failed, later = np.split(exact.positions, [200, SEGMENT_ROWS + 9])
    archive.add(exact.take(stored))
    with monkeypatch.context() as patch:
        patch.setattr("sirchat.memory.key_values.Transfers.to_host", full)
        with pytest.raises(MemoryError):
            archive.add(exact.take(failed))
    archive.add(exact.take(later))
    archive.limit, copy = archive.nbytes - 1, Archive()
    copy.copy_from(archive)
    shrink(archive)
    assert archive.bits(stored).all()
    for one in (archive, copy):
        assert one.positions.tolist() == [*stored, *later]
        one.add(exact.take(failed))
        found = one.fetch(failed).tensors
        assert all(map(torch.equal, found, exact.take(failed).tensors))


# In a chat.


@pytest.fixture(autouse=True)
def short_segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "chat" in request.node.name:
        monkeypatch.setattr("sirchat.memory.archive.SEGMENT_ROWS", 64)


LIMIT = 40_000  # bytes: two and a half segments of 64 tokens
SMALL: dict[str, Any] = {"policy": "sink", "budget": 64, "recent": 8, "max_new_tokens": 8}
SAID = ["My name is Anna.", "I keep a pelican at home.", *(f"{n} is blue. " * 20 for n in range(8))]


def told(**options: Any) -> Session:
    chat = session(babbler(), archive_limit=str(LIMIT), **SMALL | options)
    for text in SAID:
        list(chat.ask(text))
    return chat


def counted(chat: Session) -> dict[str, tuple[int, int]]:
    """Tokens and bytes of each tier, by the store's tensors alone."""
    tokens, sizes = Counter[str](), Counter[str]()
    for segment in chat.engine.store.archive._segments.values():
        of_byte = segment.tensors[0].dtype == torch.uint8
        dims = segment.tensors[0].shape[-1] - 2
        half = chat.engine.cache.layer_keys(0).shape[-1] // 2
        name = ("in 4 bits" if dims == half else "in 8 bits") if of_byte else "exact"
        tokens[name] += int((segment.positions >= 0).sum())
        sizes[name] += sum(tensor.numel() * tensor.element_size() for tensor in segment.tensors)
    return {name: (tokens[name], sizes[name]) for name in tokens}


def numbers_of(chat: Session, at: NDArray[np.int64]) -> list[torch.Tensor]:
    return chat.engine.store.archive.fetch(at).tensors


def test_a_chat_stays_within_the_limit_and_stats_say_what_the_store_holds() -> None:
    chat = Chat(archive_limit=str(LIMIT), **SMALL)
    for text in SAID:
        chat.say(text)
        found = counted(chat.session)
        assert sum(size for _, size in found.values()) <= LIMIT
        said = " ".join(chat.do("/stats").split())
        shown = dict(re.findall(r"([\d,]+) tokens? (exact|in 8 bits|in 4 bits|as text)", said))
        is_text = chat.session.ledger.column("state") == State.NOT_STORED
        is_text &= chat.session.ledger.column("flags") & Flag.ERASED == 0
        expected = {name: tokens for name, (tokens, _) in found.items()}
        expected |= {"as text": int(is_text.sum())} if is_text.any() else {}
        assert {name: int(n.replace(",", "")) for n, name in shown.items()} == expected
    assert set(expected) == {"exact", "in 8 bits", "in 4 bits", "as text"}


def test_a_chat_says_what_is_restored_from_fewer_bits() -> None:
    chat = Chat(archive_limit=str(LIMIT), recall="words", **SMALL)
    chat.session.switch("/set", archive_limit=f"{20 * LIMIT}")
    chat.say(*SAID[:4])
    archive = chat.session.engine.store.archive
    chat.session.switch("/set", archive_limit=str(archive.nbytes - 1))
    assert "restored from" not in chat.do("/recall") + chat.do("/why pelican")
    events = list(chat.session.read_user("Is it a pelican?"))
    (came,) = [event for event in events if isinstance(event, Recalled)]
    assert [turn.bits for turn in came.turns if "pelican" in turn.text] == [8]
    assert {row.flags[0] for row in chat.session.tokens(came.positions)} == {"8 bits"}
    for line in ("/why pelican", "/panel full"):
        assert "restored from 8 bits" in " ".join(chat.do(line).split()), line
    assert re.search(r"restored from .*\n.* 8 bits ", chat.do("/recall"))


def test_a_resumed_chat_has_the_same_tokens_in_the_same_tiers(tmp_path: Path) -> None:
    chat = session(babbler(), archive_limit=str(LIMIT), **SMALL)
    saving = Autosave(chat, folder=tmp_path)
    for text in SAID:
        list(chat.ask(text))
        saving.save()
    at = chat.engine.store.archived()
    assert set(in_tiers(chat.engine.store.archive)) == {0, 8, 4}
    saving.close()
    again, was_saved = resumed(tmp_path, saving.id)
    assert was_saved
    for other in (copy_session(chat), again):
        assert other is not None
        assert other.engine.store.archived().tolist() == at.tolist()
        bits = other.engine.store.archive.bits(at)
        assert bits.tolist() == chat.engine.store.archive.bits(at).tolist()
        assert all(map(torch.equal, numbers_of(other, at), numbers_of(chat, at)))


@pytest.mark.parametrize("archive", ["ram", "disk"])
def test_a_chat_is_undone_to_the_same_tokens_after_they_went_down(archive: str) -> None:
    chat = told(archive=archive)
    list(chat.switch("/set", archive_limit="2MB"))
    held, seen = chat.ledger.held_positions.tolist(), chat.seen
    list(chat.ask("And what is green? " * 12))
    list(chat.switch("/set", archive_limit=str(LIMIT)))
    bits = chat.engine.store.archive.bits(np.array(held))
    assert bits.any()
    assert chat.engine.store.has(np.array(held))
    chat.undo()
    assert chat.ledger.held_positions.tolist() == held
    assert chat.seen == seen
    now = chat.tokens(held)
    assert [f"{n} bits" in row.flags for n, row in zip(bits, now, strict=True)] == list(bits > 0)
    list(chat.ask("And now?"))
    assert sum(size for _, size in counted(chat).values()) <= LIMIT


def test_a_chat_knows_what_came_from_fewer_bits_also_while_and_after_the_archive_is_off(
    tmp_path: Path,
) -> None:
    chat = told()
    list(chat.switch("/budget", budget=220))
    store, held = chat.engine.store, chat.ledger.held_positions.copy()
    bits = store.archive.bits(held)
    assert set(bits.tolist()) == {0, 8, 4}
    list(chat.switch("/set", archive="off"))
    saving = Autosave(chat, folder=tmp_path)
    saving.save()
    saving.close()
    again, _ = resumed(tmp_path, saving.id)
    assert again.profile.archive == "off"
    for one in (chat, again):
        assert one.engine.store.archive.bits(held).tolist() == bits.tolist()
        gone = np.flatnonzero(one.ledger.column("state") == State.NOT_STORED)
        assert not one.engine.store.archive.bits(gone).any()
    list(chat.ask("And?"))
    list(chat.switch("/set", archive="ram"))
    rest, rows = chat.ledger.held_positions.copy(), store.copy_key_values()
    stays = rest[np.isin(rest, held)]
    assert store.archive.bits(stays).tolist() == bits[np.isin(held, rest)].tolist()
    list(chat.switch("/budget", budget=64))
    came = np.isin(rest, store.archived()) & (store.archive.bits(rest) > 0)
    assert came.sum() > 64
    assert rows is not None
    for tensor, before in zip(numbers_of(chat, rest[came]), rows.tensors, strict=True):
        assert torch.equal(tensor, before[:, torch.from_numpy(came)])


def test_a_limit_that_holds_no_token_is_said_to(own_home: Path) -> None:
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, recall="off", max_new_tokens=16)
    chat.say("My name is Anna.")
    assert "holds no token" not in chat.do("/set archive_limit 64KiB")
    told = chat.do("/set archive_limit 200")
    assert re.search(r"archive_limit 200 holds no token: one takes [\d,]+ bytes; of", told)
    chat.say(*["I live in Rome.", "Tell me a joke.", "What is a tree?", "I like cats."] * 2)
    states = {rank.state for rank in chat.session.why("turn 0")}
    assert "rereadable" in states, "only its text is kept"
    assert "archived" not in states
