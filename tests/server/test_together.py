"""Replies that are generated at the same time share their forward passes, and nothing else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from chatting import babbler
from serving import Served, served, waiting
from sirchat.chat.session import Session
from sirchat.engine.reader import Reader
from sirchat.engine.sampling import TokenFilter
from sirchat.models.native_step import NativeStep
from sirchat.server import reply_thread
from sirchat.server.conversation import History
from sirchat.server.fields import RequestError
from sirchat.server.pool import BusyError
from sirchat.server.replies import ReplyEnd, ReplyText
from sirchat.server.reply_thread import SentPart, WaitingReply

TEXTS = ("Anna", "My name is Tom. I live in Rome, and I play the violin.", "Hello, you.", "4711")
LENGTHS = (5, 30, 12, 21)  # tokens of the replies
Question = tuple[str, int, dict[str, Any]]  # a message, most tokens of the reply, options
ASKED: list[Question] = [(text, most, {}) for text, most in zip(TEXTS, LENGTHS, strict=True)]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each shared forward pass has read."""
    found, usual = list[int](), NativeStep.read_together

    def recorded(step: NativeStep, tokens: Sequence[Any]) -> Any:
        found.append(len(tokens))
        return usual(step, tokens)

    monkeypatch.setattr(NativeStep, "read_together", recorded)
    return found


def replies(server: Served, asked: Sequence[Question], leave: int = -1) -> list[Any]:
    """The end, text and surprisals of each reply, if all begin at the same time.

    The client number `leave` leaves after some tokens.
    """
    thread, begin = server.server.replies, threading.Event()
    parts = SimpleQueue[tuple[int, SentPart]]()

    def send(number: int, part: SentPart) -> None:
        parts.put((number, part))

    thread.call(begin.wait)
    submitted = [
        waiting(text, partial(send, number), most, **more)
        for number, (text, most, more) in enumerate(asked)
    ]
    for one in submitted:
        thread.submit(one)
    begin.set()
    found: list[list[str]] = [[] for _ in asked]
    ends: dict[int, SentPart] = {}
    while len(ends) < len(asked):
        number, part = parts.get(timeout=20)
        if isinstance(part, ReplyText):
            found[number].append(part.text)
            if number == leave and len(found[number]) > 2:
                thread.cancel(submitted[number])
        else:
            ends[number] = part
    return [
        (ends[number], "".join(said), surprisals(server, ends[number]))
        for number, said in enumerate(found)
    ]


def surprisals(server: Served, end: SentPart) -> list[float]:
    """Those of all tokens in the conversation of a reply, if it has ended well."""
    if not isinstance(end, ReplyEnd):
        return []
    find = partial(server.server.conversations.find, end.memory["id"])
    ledger = server.server.replies.call(find).result().session.ledger
    numbers: list[float] = ledger.column("surprisal").tolist()
    return numbers


def read(end: Any) -> dict[str, Any]:
    """The numbers of tokens, whether or not the message had been read before."""
    return {name: count for name, count in end.usage.items() if "details" not in name}


def same(found: Any, alone: Any) -> None:
    """The reply is the same, its surprisals up to rounding; and so is the memory."""
    (end, text, numbers), (other_end, other_text, others) = found, alone
    assert text == other_text
    assert numbers == pytest.approx(others, rel=1e-4, abs=1e-5, nan_ok=True)
    assert (end.finish, read(end)) == (other_end.finish, read(other_end))
    assert {**end.memory, "id": ""} == {**other_end.memory, "id": ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "are_shared"),
    [
        ({"budget": 256}, True),
        ({"policy": "salience", "budget": 32}, True),  # evicts during the replies
        ({"policy": "sink", "budget": 32, "positions": "stream", "lookup": True}, True),
        ({"policy": "h2o", "budget": 32}, False),  # records attention
    ],
)
def test_each_reply_is_the_one_that_it_would_be_alone(
    settings: dict[str, Any], are_shared: bool, passes: list[int]
) -> None:
    with served(babbler(), **settings) as server:
        alone = [replies(server, [question])[0] for question in ASKED]
        assert not passes, "a reply alone is generated as in a chat"
    with served(babbler(), **settings) as server:
        for found, wanted in zip(replies(server, ASKED), alone, strict=True):
            same(found, wanted)
    assert not are_shared or (passes[0], passes[-1]) == (4, 2)
    assert len(passes) <= (sorted(LENGTHS)[-2] if are_shared else 0)


def test_if_the_shared_pass_fails_each_reply_reads_its_own_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(babbler(), budget=256) as server:
        alone = [replies(server, [question])[0] for question in ASKED]

        def fail(*arguments: object) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(NativeStep, "read_together", fail)
    with served(babbler(), budget=256) as server:
        for found, wanted in zip(replies(server, ASKED), alone, strict=True):
            same(found, wanted)


def test_a_reply_that_fails_or_has_no_client_any_more_leaves_the_others_alone(
    passes: list[int],
) -> None:
    def failing(session: Session) -> TokenFilter:
        def allowed(picked: Sequence[int]) -> Tensor:
            if len(picked) > 3:
                raise RuntimeError
            return anything(picked)

        return allowed

    with served(babbler(), budget=256) as server:
        alone = [replies(server, [question])[0] for question in ASKED]
    with served(babbler(), budget=256) as server:
        found = replies(server, [*ASKED, ("Fail.", 30, {"format": failing})], leave=1)
        assert isinstance(found[4][0], RequestError)
        for number in (0, 2, 3):
            same(found[number], alone[number])
        end, text, _ = found[1]
        assert isinstance(end, ReplyEnd)
        assert 0 < len(text) < len(alone[1][1])
        assert alone[1][1].startswith(text)
        assert max(passes) == 5
        same(replies(server, [ASKED[3]])[0], alone[3])


def test_long_messages_hold_up_a_reply_by_one_chunk_for_each_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, usual = list[int](), Reader.read

    def recorded(reader: Reader, chunk: Any, *rest: Any) -> list[float]:
        read.append(len(chunk.ids))
        return usual(reader, chunk, *rest)

    monkeypatch.setattr(Reader, "read", recorded)
    monkeypatch.setattr(reply_thread, "_MAX_READ_TOKENS", 8)
    with served(babbler(), budget=64) as server:
        long: list[Question] = [(f"{word} " * 100, 1, {}) for word in ("long", "wide", "high")]
        replies(server, [("Hi.", 200, {}), *long])
    begun = read.index(1)  # its first token
    chunks = [at for at, count in enumerate(read) if count > 8 and at > begun]
    assert len(chunks) > 15
    assert all(read[at + 1] == 1 for at in chunks)


def test_a_conversation_that_left_memory_is_freed_though_its_request_is_still_known() -> None:
    known, sessions = list[WaitingReply](), list[weakref.ref[Session]]()

    def note(session: Session) -> TokenFilter:
        sessions.append(weakref.ref(session))
        return anything

    with served(babbler(), conversations=1, budget=64) as server:
        for text in ("Hello.", "Bye."):
            ends = SimpleQueue[SentPart]()
            known.append(waiting(text, ends.put, 2, format=note))
            server.server.replies.submit(known[-1])
            while not isinstance(ends.get(timeout=20), ReplyEnd):
                pass
        server.server.replies.call(lambda: None).result(timeout=20)
        assert [reference() is None for reference in sessions] == [True, False]


def anything(picked: Sequence[int]) -> Tensor:
    """A format that allows every token."""
    return torch.ones(babbler().vocab_size, dtype=torch.bool)


def test_who_leaves_while_a_call_runs_stops_no_other() -> None:
    with served(babbler(), budget=64) as server:
        thread, begun, go_on = server.server.replies, threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            go_on.wait(20)

        left = thread.call(work)
        begun.wait(20)
        left.cancel()
        go_on.set()
        assert thread.call(lambda: 5).result(timeout=20) == 5


def test_what_is_busy_is_tried_again_when_it_is_free_although_a_call_runs_meanwhile() -> None:
    tried = list[int]()

    def busy() -> int:
        tried.append(1)
        if len(tried) == 1:
            raise BusyError
        return 5

    with served(babbler(), budget=64) as server:
        thread = server.server.replies
        begin = threading.Event()
        thread.call(begin.wait)
        waits = thread.call(busy)
        thread.call(thread.wake)  # another thread frees it while a call runs
        begin.set()
        assert waits.result(timeout=20) == 5


def test_a_reply_that_waits_is_tried_again_before_one_that_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(babbler(), budget=64) as server:
        thread, take, tried = server.server.replies, server.server.conversations.take, list[str]()
        is_free, waits, ends = threading.Event(), threading.Event(), SimpleQueue[SentPart]()

        def busy(history: History) -> Any:
            tried.append(history.messages[-1][1])
            if not is_free.is_set():
                waits.set()
                raise BusyError
            return take(history)

        monkeypatch.setattr(server.server.conversations, "take", busy)

        def submit(text: str) -> None:
            thread.submit(waiting(text, ends.put, 2))

        submit("first")
        assert waits.wait(20)
        is_free.set()  # by another thread, which has not yet said so
        submit("second")
        while len(tried) < 2 or "second" not in tried:
            ends.get(timeout=20)
        assert tried == ["first", "first", "second"]
