"""Evicted tokens whose keys and values are lost are read again from their ids, where needed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chatting import babbler, notices, session
from held_rows import contents, same
from sirchat.chat.events import Recalled
from sirchat.chat.session import Session
from sirchat.errors import UndoError
from sirchat.memory.ledger import Flag, State
from sirchat.models.model import LoadedModel

SAID = ("My name is Anna.", "I keep a pelican at home.", "The tree is green.", "blue " * 40)
SMALL: dict[str, Any] = {"budget": 64, "policy": "sink", "max_new_tokens": 8, "recent": 8}
BEFORE = 16  # tokens before a passage that are read with it


def told(model: LoadedModel | None = None, **settings: Any) -> Session:
    """A chat under a small budget that has evicted the pelican."""
    chat = session(model or babbler(), **{**SMALL, **settings})
    for text in SAID:
        list(chat.ask(text))
    return chat


def reopened(chat: Session) -> Session:
    """The chat as it is after a crash: of evicted tokens, ids alone are saved."""
    again = Session(chat.model, chat.profile)
    again.load(chat.engine.save(), deepcopy(chat.state), None)
    return again


def lost_of(chat: Session) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.flatnonzero(chat.ledger.column("state") == State.NOT_STORED)


def keys_and_values(model: LoadedModel, ids: list[int], last: int) -> list[Tensor]:
    """By transformers alone: those of the last of these ids, which have the positions from 0 on."""
    cache = model.module(torch.tensor([ids]), use_cache=True).past_key_values
    return [one[0, :, -last:] for layer in cache.layers for one in (layer.keys, layer.values)]


def test_a_passage_is_read_after_the_sinks_and_what_stood_before_it() -> None:
    chat = reopened(told())
    ids, sinks = chat.ledger.column("token_id").tolist(), chat.profile.sinks
    passage = lost_of(chat)[BEFORE + sinks :][:6]
    assert (np.diff(passage) == 1).all()
    chat.engine.evictor.reread(passage)
    rows = chat.engine.store.archive.fetch(passage)
    start, end = int(passage[0]), int(passage[-1]) + 1
    read = [*ids[:sinks], *ids[start - BEFORE : end]]
    assert rows.written_at.tolist() == list(range(len(read) - 6, len(read)))
    expected = keys_and_values(chat.model, read, 6)
    for tensor, other in zip(rows.tensors, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-5)
    assert set(chat.ledger.column("state")[passage]) == {State.ARCHIVED}


def test_what_was_erased_is_never_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = reopened(told())
    chat.erase("Anna")
    erased = np.flatnonzero(chat.ledger.column("flags") & Flag.ERASED)
    seen: list[int] = []
    usual = LoadedModel.read

    def read(self: LoadedModel, ids: list[int], *arguments: Any, **options: Any) -> Any:
        seen.extend(ids)
        return usual(self, ids, *arguments, **options)

    monkeypatch.setattr(LoadedModel, "read", read)
    last = lost_of(chat)[-1]
    chat.engine.evictor.reread(np.arange(chat.seen))
    assert len(erased)
    assert lost_of(chat).tolist() == erased.tolist()
    rest = np.setdiff1d(np.arange(last + 1), erased)
    assert seen == chat.ledger.column("token_id")[rest].tolist()


@pytest.mark.parametrize("why", ["not saved", "archive full"])
def test_a_lost_passage_can_be_pinned_and_the_chat_says_once_that_it_is_read_again(
    why: str,
) -> None:
    chat = reopened(told()) if why == "not saved" else told(archive_limit="40KiB")
    assert len(lost_of(chat)) > 40
    assert {rank.state for rank in chat.why("pelican")} == {"rereadable"}
    ranks = chat.ledger.column("surprisal").copy()
    events = chat.restore("pelican", around=4)
    assert len(notices(events)) == 1
    assert "read again from the text" in notices(events)[0]
    assert {rank.state for rank in chat.why("pelican")} == {"held"}
    assert not notices(chat.pin("Anna"))
    assert (chat.ledger.column("surprisal") == ranks)[1:].all()


@pytest.mark.parametrize("why", ["not saved", "archive full"])
def test_recall_finds_what_is_lost_and_the_chat_says_once_that_it_is_read_again(why: str) -> None:
    is_full = why == "archive full"
    limit = "4KiB" if is_full else "1GiB"
    chat = told(budget=96, recall="words", archive_limit=limit)
    list(chat.ask("blue " * 60))
    chat = chat if is_full else reopened(chat)
    assert {rank.state for rank in chat.why("pelican")} == {"rereadable"}
    events = list(chat.read_user("Is it a pelican?"))
    (came,) = [event for event in events if isinstance(event, Recalled)]
    assert "pelican" in "".join(row.text for row in chat.tokens(came.positions))
    assert len(notices(events)) == 1
    assert "read again from the text" in notices(events)[0]
    list(chat.read_reply("Yes."))
    assert not notices(list(chat.read_user("Who is Anna?")))


def test_undo_takes_back_what_was_read_again() -> None:
    chat, never = (reopened(told()) for _ in range(2))
    list(chat.ask("Hello."))
    chat.restore("pelican", around=4)
    list(chat.ask("What do I keep?"))
    for _ in range(2):
        chat.undo()
    assert same(contents(chat.engine), contents(never.engine))
    assert lost_of(chat).tolist() == lost_of(never).tolist()
    assert not chat.engine.store.archive.has(lost_of(chat)).any()


def test_a_message_before_which_a_token_was_held_that_is_lost_is_not_undone_with_another_key() -> (
    None
):
    chat = told(archive_limit="40KiB")
    point = chat.history.messages[-1].checkpoint
    lost = np.intersect1d(lost_of(chat), point.placement.held)
    assert len(lost)
    chat.engine.evictor.reread(lost)
    with pytest.raises(UndoError, match="no longer archived"):
        chat.undo()


def test_without_an_archive_nothing_is_read_again() -> None:
    chat = told(archive="off")
    chat.engine.evictor.reread(np.arange(chat.seen))
    assert {rank.state for rank in chat.why("pelican")} == {"not_stored"}
