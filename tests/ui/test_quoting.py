"""Passages of other saved chats, quoted before a message: on request, or with `recall_from` all."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from chatting import session
from command import run
from session_files import new
from sirchat.chat.session import Session
from sirchat.ui.commands import Commands
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.typed_input import InMemory

ASKED = "At which gate does my flight leave?"


@pytest.fixture
def commands(folder: Path) -> Commands:
    folder.mkdir(parents=True)
    new(folder, "My flight leaves from gate B14.", "Noted.")
    return of(session(max_new_tokens=4))


def of(chat: Session) -> Commands:
    screen = Screen(io.StringIO(), io.StringIO())
    return Commands(chat, screen, InMemory(), SavedChat(chat, screen))


def test_what_was_found_on_request_stands_before_the_next_message_alone(commands: Commands) -> None:
    commands.run("/recall all flight gate")
    message = commands.quoting.with_quotes(ASKED)
    assert message.startswith("From my other chats:\n- ")
    assert message.endswith(f": My flight leaves from gate B14.\n\n{ASKED}")
    assert commands.quoting.with_quotes(ASKED) == ASKED


def test_only_the_setting_all_quotes_unasked(commands: Commands) -> None:
    assert commands.quoting.with_quotes(ASKED) == ASKED
    commands.run("/set recall_from all")
    assert "B14" in commands.quoting.with_quotes(ASKED)
    assert commands.quoting.with_quotes("What is democracy?") == "What is democracy?"


def test_a_private_chat_is_never_found_and_a_quotation_can_be_erased(commands: Commands) -> None:
    chat = session(save=False, max_new_tokens=4)
    list(chat.ask("The gate code is 4711."))
    private = of(chat)
    private._saved_chat.save()
    private.run("/recall all gate")
    list(chat.ask(private.quoting.with_quotes("Is it B14 <|end|>?")))
    assert "gate B14" in chat.turns[-2].text
    assert "4711" not in commands.quoting.with_quotes("The gate code?")
    chat.erase("B14")
    assert not any("B14" in turn.text for turn in chat.turns)


def test_a_server_refuses_to_quote_other_chats() -> None:
    refused = run("serve", "--recall-from", "all", "--port", "0")
    assert refused.returncode == 2
    assert "recall_from can't be 'all' in a server" in refused.stderr
