"""`/recall WORDS`: shown and restored for the next message, never pinned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chatting import tiny
from saved_chats import Chat
from sirchat.chat.session import Session
from sirchat.errors import SirchatError
from sirchat.memory.ledger import Flag, Role, State
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.session_list import find_session
from sirchat.saved.store import SessionStore
from sirchat.ui.status import describe_recalled
from sirchat.ui.switching import Switching


def chat_of(*said: str) -> Chat:
    chat = Chat(tiny(), policy="sink", max_new_tokens=4, pin_system=False, save=False, decay=1.0)
    chat.say(*said)
    return chat


def held(chat: Chat) -> str:
    """The text that is held, by the ledger; nothing of it is pinned."""
    ledger = chat.session.ledger
    assert not (ledger.column("flags") & Flag.PINNED).any()
    at = np.flatnonzero(ledger.column("state") == State.HELD)
    return "".join(row.text for row in chat.session.tokens(at.tolist()))


@pytest.mark.parametrize("recall", ["off", "words"])
def test_words_are_restored_as_they_were_told_not_as_the_model_repeated_them(recall: str) -> None:
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, save=False, max_new_tokens=24)
    chat.say("My cat is called Luna.", *["Tell me a joke."] * 3)
    assert "Luna" in chat.session.turns[1].text
    assert "Luna" not in held(chat)
    chat.session.switch("/recall", recall=recall)
    before = chat.session.ledger.held_positions.tolist()
    shown = " ".join(chat.do('/recall "Luna"').split())
    assert held(chat).count("Luna") == 1
    now = chat.session.ledger.held_positions.tolist()
    came, aside = (len(set(one) - set(other)) for one, other in ((now, before), (before, now)))
    assert f"“My cat is called Luna.” 6 tokens, {came} of them were evicted; " in shown
    assert (f"; {aside} stepped aside until it is answered; " in shown) == (aside > 0)
    for _ in "ab":  # another reply is given from the same memory
        chat.say("What is my cat called?")
        assert "Luna" in chat.session.turns[-1].text
        line = describe_recalled(chat.session.recall, chat.session.seen)
        assert line.startswith(f"recalled {came} tokens")
        assert "Luna" in chat.do("/recall")
        chat.session.undo()
    chat.say("Hello!", "Tell me a joke.")
    assert "Luna" not in held(chat)


@pytest.mark.parametrize("way", ["undo", "resume", "both"])
def test_what_was_restored_for_the_next_message_is_still_so_after(way: str, folder: Path) -> None:
    """It is no longer after the reply to that message."""
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, max_new_tokens=24)
    chat.say("My cat is called Luna.", *["Tell me a joke."] * 4)
    assert "“My cat is called Luna.”" in chat.do('/recall "Luna"')
    if way != "resume":
        chat.do("/undo")
    session = chat.session
    chat.saved_chat.close()
    if way != "undo":
        store = SessionStore.open(find_session(folder, "last"))
        session = Session(tiny(), saved_profile(store))
        resume_session(session, store)
        store.close()
    list(session.ask("What is my cat called?"))
    assert "Luna" in session.turns[-1].text
    assert "Luna" in "".join(row.text for row in session.tokens(list(session.recall.scores)))
    list(session.ask("Hello!"))
    assert not session.recall.scores


def test_what_was_restored_from_an_undone_message_is_forgotten() -> None:
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, save=False, max_new_tokens=24)
    chat.say(*["Tell me a joke."] * 2, "My cat is called Luna.", *["Tell me a joke."] * 4)
    chat.do('/recall "Luna"')
    for _ in range(5):
        chat.do("/undo")
    assert not chat.session.state.restored_by_user
    chat.say("Tell me a joke.", "My cat is called Tom.")


def test_of_what_was_restored_the_rest_of_a_sentence_with_erased_words_is_not_recalled() -> None:
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, max_new_tokens=8)
    chat.say("My cat is called Luna. I live in Rome.", *["Tell me a joke."] * 3)
    chat.do('/recall "Luna"')
    chat.do('/erase --yes "Luna"')
    chat.say("Hello!")
    assert "is called" not in chat.do("/recall")
    assert "I live in Rome." in chat.do("/recall")


def test_the_words_around_what_is_restored_are_of_no_sentence_with_erased_words() -> None:
    chat = Chat(tiny(), budget=64, recent=0, max_new_tokens=16, policy="window")
    chat.say("My favourite colour is Rex. I live in Lisbon.")
    chat.do('/erase --yes "Rex"')
    told = chat.do('/recall "Lisbon"')
    assert "Lisbon" in told
    assert "favourite" not in told


def test_where_nothing_can_be_restored_a_line_says_why() -> None:
    chat = chat_of("My name is Anna.", "I live in Rome.", "Hello!")
    ledger = chat.session.ledger
    is_said = (ledger.column("turn") == 2) & (ledger.column("role") == Role.USER)
    chat.session.erase("turn 2")
    with pytest.raises(SirchatError, match="nothing is restored: it is no longer archived"):
        Switching(chat.session, chat.screen).restore(np.flatnonzero(is_said))


def test_a_message_for_which_nothing_is_restored_does_not_look_for_what_could_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = Chat(tiny(), policy="sink", budget=64, save=False, max_new_tokens=4)
    chat.say(*["Tell me a joke."] * 4)
    monkeypatch.setattr("sirchat.memory.key_value_store.KeyValueStore.recallable", None)
    chat.say("Hello!")
