"""A message that sets a rule for later replies is pinned, and says how to let go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatting import babbler, session
from saved_chats import Chat
from sirchat.chat.events import Event, Notice
from sirchat.chat.rereading import read_whole
from sirchat.chat.retry import retry_under
from sirchat.chat.session import Session
from sirchat.models.load import load_model
from sirchat.saved.resume import resume_session
from sirchat.saved.session_list import find_session
from sirchat.saved.store import SessionStore
from statement_telling import OTHERS, RULE, telling

LINE = f'pinned your instruction "{RULE}": /unpin "{RULE}" lets go'


def chat_of(**settings: Any) -> Session:
    given: dict[str, Any] = {"policy": "sink", "budget": 128, "max_new_tokens": 8} | settings
    return session(telling(), **given)


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


def ask(chat: Session, text: str) -> list[str]:
    return notes(list(chat.ask(text)))


def pinned(chat: Session) -> str:
    rows = chat.tokens(chat.ledger.pinned_positions.tolist())
    return "".join(row.text for row in rows).strip()


def test_the_rule_alone_is_pinned_and_stays_while_the_chat_goes_on() -> None:
    chat = chat_of()
    assert ask(chat, f"Hello.\n{RULE}\nTell me a joke.") == [LINE]
    for text in OTHERS:
        assert not ask(chat, text)
    assert pinned(chat) == RULE
    assert RULE in "".join(row.text for row in chat.snapshot().rows)


def test_without_the_setting_it_is_evicted() -> None:
    chat = chat_of(pin_instructions=False)
    assert not ask(chat, RULE)
    for text in OTHERS * 2:
        ask(chat, text)
    assert not pinned(chat)
    assert RULE not in "".join(row.text for row in chat.snapshot().rows)


def test_undo_and_unpin_let_go() -> None:
    chat = chat_of()
    ask(chat, "Hello.")
    before = [row.position for row in chat.snapshot().rows]
    ask(chat, RULE)
    chat.undo()
    assert not pinned(chat)
    assert [row.position for row in chat.snapshot().rows] == before
    ask(chat, RULE)
    chat.pin(f'"{RULE}"', pinned=False)
    assert not pinned(chat)


def test_a_message_that_is_answered_again_stays_unpinned_unless_it_is_pinned_again() -> None:
    chat = chat_of()
    ask(chat, "Hello.")
    ask(chat, RULE)
    for _ in range(2):
        chat.pin("turn 2", pinned=False)
        list(chat.retry())
        list(retry_under(chat, {"temperature": 0.5}, lambda _: "warmer"))
        assert not pinned(chat)
        chat.pin("turn 2")
        list(chat.retry())
        assert RULE in pinned(chat)
    chat.pin("turn 2", pinned=False)
    assert LINE in ask(chat, RULE)
    chat.pin(f'"{RULE}"', pinned=False)
    chat.undo()
    assert LINE in ask(chat, RULE)  # it was unpinned in what was undone


def test_of_a_rule_that_is_erased_nothing_stays() -> None:
    chat = chat_of()
    ask(chat, f"Hello.\n{RULE}")
    ask(chat, "Call me Priya from now on.")
    chat.pin("turn 0", pinned=False)
    chat.pin("turn 2", pinned=False)
    chat.erase("sentence")
    assert chat.state.unpinned == {(0, "Hello."), (2, "Call me Priya from now on.")}


def test_a_chat_without_an_encoder_and_a_policy_without_pins_pin_nothing() -> None:
    plain = session(babbler(), max_new_tokens=4)
    assert not ask(plain, RULE)
    assert not pinned(plain)
    window = chat_of(policy="window")
    assert not ask(window, RULE)
    assert not pinned(window)


def test_where_pins_have_no_room_it_says_so_and_pins_nothing() -> None:
    chat = chat_of(budget=40)
    ask(chat, "Hello.")
    chat.pin("turn 0")
    size = len(chat.ledger.pinned_positions)
    while size < 14:
        ask(chat, "Hello.")
        chat.pin("last")
        size = len(chat.ledger.pinned_positions)
    before = pinned(chat)
    (said,) = ask(chat, RULE)
    assert said.startswith(f'your instruction "{RULE}" is not pinned: ')
    assert pinned(chat) == before


@pytest.mark.parametrize("rebuild", [False, True])
def test_a_resumed_chat_keeps_what_is_pinned_and_pins_nothing_again(
    folder: Path, rebuild: bool
) -> None:
    chat = Chat(telling(), policy="sink", budget=128)
    chat.say(RULE, "Hello.", "Call me Priya from now on.", *OTHERS)
    chat.do(f'/unpin "{RULE}"')
    chat.saved_chat.close()
    again = session(telling(), policy="sink", budget=128)
    with SessionStore.open(find_session(folder, "last")) as store:
        resume_session(again, store, rebuild=rebuild)
    assert pinned(again) == pinned(chat.session) == "Call me Priya from now on."


@pytest.mark.parametrize("rebuild", [False, True])
def test_a_rule_that_was_unpinned_stays_so_when_it_is_answered_again_in_a_resumed_chat(
    folder: Path, rebuild: bool
) -> None:
    chat = Chat(telling(), policy="sink", budget=128)
    chat.say("Hello.", RULE)
    chat.do(f'/unpin "{RULE}"')
    chat.saved_chat.close()
    again = session(telling(), policy="sink", budget=128)
    with SessionStore.open(find_session(folder, "last")) as store:
        resume_session(again, store, rebuild=rebuild)
        again = again if again.undo_points else read_whole(again)
    assert not notes(list(again.retry()))
    assert not pinned(again)


def test_a_long_text_has_no_rules_for_the_model() -> None:
    chat = chat_of(budget=600)
    assert not ask(chat, " ".join([RULE, *OTHERS * 3]))


@pytest.mark.real
def test_a_real_model_keeps_the_rule() -> None:
    chat = session(load_model("smollm2"), policy="salience", budget=128, max_new_tokens=24)
    assert ask(chat, RULE) == [LINE]
    for text in ("What is a fox?", "Tell me about the sea.", "Write a long story about a fox."):
        assert not ask(chat, text)
    assert RULE in "".join(row.text for row in chat.snapshot().rows)
