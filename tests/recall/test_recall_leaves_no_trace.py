"""A chat that recalled is, once the recalled rows have left, as a chat that never did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatting import babbler, session
from session_files import columns
from sirchat.chat.session import Session
from sirchat.errors import SirchatError
from sirchat.memory.ledger import Flag

RETRIEVERS = ["words", "meaning"]
TEXTS = [
    "Our zebra is called Quixbert.",
    "What a rainy day it is.",
    "I moved to Lisbon by train.",
    "What is our zebra called?",
    "Tell me a joke about the train.",
]

turns = st.sampled_from(TEXTS).map(lambda text: ("say", text))
settings_set = [{"budget": 64}, {"budget": 128}, {"policy": "reservoir"}, {"policy": "sink"}]
others = st.sampled_from(
    [
        *(("pin", "zebra"), ("pin", "Lisbon"), ("unpin", "zebra"), ("erase", "Lisbon")),
        *(("undo", None), ("retry", None), ("resume", None)),
        *(("set", updates) for updates in [*settings_set, {"sinks": 1}]),
    ]
)
recalls = st.sampled_from([*RETRIEVERS, "off"])


def act(chat: Session, what: str, value: Any) -> Session:
    """Do one thing; what can't be done changes nothing. Replies are given, not generated."""
    try:
        match what:
            case "say":
                list(chat.read_user(value))
                list(chat.read_reply("Fine, thank you."))
            case "undo":
                chat.undo()
            case "retry":
                text = chat.last_said
                chat.undo(keep_pins=True)
                act(chat, "say", text)
            case "pin" | "unpin":
                chat.pin(value, what == "pin")
            case "erase":
                chat.erase(value)
            case "set":
                chat.switch("/set", **value)
            case "resume":
                other = Session(chat.model, chat.profile)
                other.load(chat.save(), chat.state, chat.engine.store.copy_key_values())
                return other
    except SirchatError:
        pass
    return chat


def state(chat: Session) -> dict[str, Any]:
    """What is held, archived, pinned and said; not surprisals, which depend on what was held."""
    rows = chat.save().rows
    ledger = {name: rows[name].tolist() for name in ("token_id", "turn", "round", "role", "state")}
    flags = (rows["flags"] & ~np.uint8(Flag.RECALLED)).tolist()
    turns = [(one.role, one.text) for one in chat.turns]
    return {**ledger, "flags": flags, "held": chat.save().held.tolist(), "turns": turns}


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    done=st.lists(st.tuples(st.one_of(turns, turns, others), recalls), min_size=4, max_size=12),
    policy=st.sampled_from(["sink", "reservoir", "interval"]),
)
def test_a_chat_that_recalled_ends_as_one_that_never_did(
    done: list[tuple[tuple[str, Any], str]], policy: str
) -> None:
    chats = [session(babbler(), policy=policy, budget=96, recent=8, archive="ram") for _ in "ab"]
    for text in TEXTS[:3] * 2:
        chats = [act(one, "say", text) for one in chats]
    for (what, value), recall in done:
        chats[0].switch("/recall", recall=recall)
        chats = [act(one, what, value) for one in chats]
        assert chats[0].resident <= chats[0].budget
    for one in chats:
        one.switch("/recall", recall="off")
        one.switch("/set", budget=120)  # both choose anew, from everything
        one.switch("/set", budget=80)
    assert state(chats[0]) == state(chats[1])


@settings(max_examples=8, deadline=None)
@given(retriever=st.sampled_from(RETRIEVERS), text=st.sampled_from(TEXTS))
def test_an_undone_turn_leaves_keys_and_values_as_they_were(retriever: str, text: str) -> None:
    chat = session(babbler(), policy="sink", budget=96, recall=retriever, max_new_tokens=40)
    for one in TEXTS * 2:
        act(chat, "say", one)
    before, rows = chat.save(), chat.engine.store.copy_key_values()
    list(chat.ask(text))
    assert chat.recall.scores
    chat.undo()
    after, again = chat.save(), chat.engine.store.copy_key_values()
    assert columns(after.rows) == columns(before.rows)
    assert after.held.tolist() == before.held.tolist()
    assert rows is not None
    assert again is not None
    assert all(map(torch.equal, rows.tensors, again.tensors))
