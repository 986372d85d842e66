"""Chats that are saved and loaded by the slash commands, without a terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from chatting import babbler, session
from sirchat.chat.session import Session
from sirchat.errors import SirchatError
from sirchat.models.model import LoadedModel
from sirchat.paths import sessions_dir
from sirchat.saved.autosave import Autosave
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.session_list import find_session, list_sessions
from sirchat.saved.store import SessionStore
from sirchat.ui.commands import Commands
from sirchat.ui.completion import SlashCompleter
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.typed_input import MemoryHistory

SMALL: dict[str, Any] = {"budget": 96, "recent": 16, "max_new_tokens": 8, "decay": 0.9}
SAYINGS = [f"{n} some words and {n * n} more of them" for n in range(5)]


class Chat:
    """A chat with its slash commands; each line ends with an autosave, as at the prompt."""

    def __init__(self, model: LoadedModel | None = None, **settings: Any) -> None:
        self.session = session(model or babbler(), **{**SMALL, **settings})
        self.out = io.StringIO()
        self.screen = Screen(self.out, self.out)
        self.saved_chat = SavedChat(self.session, self.screen)
        self.history = MemoryHistory()
        self.commands = self._new_commands()

    def say(self, *texts: str) -> None:
        for text in texts:
            list(self.session.ask(text))
            self.saved_chat.save()

    def do(self, line: str) -> str:
        """Run a command; returns what it shows."""
        before = len(self.out.getvalue())
        self.commands.run(line)
        if self.saved_chat.session is not self.session:
            self.session = self.saved_chat.session
            self.commands = self._new_commands()
        self.saved_chat.save()
        return self.out.getvalue()[before:]

    def _new_commands(self) -> Commands:
        return Commands(self.session, self.screen, self.history, self.saved_chat)

    def crash(self) -> None:
        self.saved_chat._autosave.close_without_saving()

    @property
    def texts(self) -> list[str]:
        return [turn.text for turn in self.session.turns if turn.role == "user"]


def saved(folder: Path, name: str = "", **settings: Any) -> str:
    """Save and leave a chat in which the user said `SAYINGS[:2]`; returns its id."""
    chat = Chat(**settings)
    chat.say(*SAYINGS[:2])
    chat.do(f"/save {name}".strip())
    chat.saved_chat.close()
    return list_sessions(folder).sessions[0].id


def resumed(folder: Path, ident: str, *, rebuild: bool = False) -> tuple[Session, bool]:
    """A session as `--resume` restores it, and whether its keys and values were saved."""
    with SessionStore.open(find_session(folder, ident)) as store:
        head = store.state_record()
        assert head is not None
        again = Session(babbler(), saved_profile(store))
        resume_session(again, store, rebuild=rebuild)
        return again, store.kv.load(head.fields["kv"]) is not None


def saved_and_resumed(chat: Session, again: Session) -> Session:
    """A chat that is saved and closed goes on in another session, which is returned."""
    saving = Autosave(chat)
    saving.save()
    saving.close()
    with SessionStore.open(find_session(sessions_dir(), "last")) as store:
        resume_session(again, store)
    return again


def refusal(chat: Chat, line: str) -> str:
    with pytest.raises(SirchatError) as caught:
        chat.do(line)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def completions(text: str) -> list[str]:
    completer = SlashCompleter(lambda: session(babbler()))
    return [one.text for one in completer.get_completions(Document(text), CompleteEvent())]
