"""`/recall yesterday`: what the user said then is shown, restored and pinned."""

from __future__ import annotations

import io
import time

import pytest

from chatting import session
from sirchat.chat.session import Session
from sirchat.errors import UsageError
from sirchat.ui.commands import Commands
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.typed_input import InMemory

DAY = 86_400


def chat_of_days(*said: tuple[int, str]) -> tuple[Session, Commands, io.StringIO]:
    """A chat with messages of so many days ago."""
    chat, notes = (
        session(policy="sink", budget=96, max_new_tokens=4, pin_system=False),
        io.StringIO(),
    )
    for days, text in said:
        list(chat.ask(text))
        chat.turns[-2].time = chat.turns[-1].time = int(time.time()) - days * DAY
    screen = Screen(io.StringIO(), notes)
    return chat, Commands(chat, screen, InMemory(), SavedChat(chat, screen)), notes


def pinned(chat: Session) -> str:
    return "".join(row.text for row in chat.tokens(chat.ledger.pinned_positions.tolist()))


def test_what_was_said_at_a_time_is_restored_and_pinned() -> None:
    talk = [(0, "Tell me a joke, please, and another one, and a third one.")] * 4
    chat, commands, notes = chat_of_days((3, "My name is Anna."), (1, "I live in Rome."), *talk)
    commands.run("/recall yesterday")
    assert pinned(chat) == "I live in Rome."
    assert "yesterday: I live in Rome." in notes.getvalue()
    commands.run("/recall 3 days ago")
    assert pinned(chat) == "My name is Anna.I live in Rome."
    with pytest.raises(UsageError, match="you said nothing at this time: last month"):
        commands.run("/recall last month")


def test_first_and_last_mean_places_and_words_stay_words() -> None:
    chat, commands, _ = chat_of_days((0, "My name is Anna."), (0, "I met her yesterday."))
    commands.run("/recall first")
    assert pinned(chat) == "My name is Anna."
    commands.run('/recall "yesterday"')
    assert "yesterday" in pinned(chat)
