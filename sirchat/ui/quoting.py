"""Quotes passages of other saved chats in messages, as `/recall all` and `recall_from` ask."""

from __future__ import annotations

from sirchat.chat.session import Session
from sirchat.errors import SessionError
from sirchat.saved.across import Passage, quote
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.text import shorten


class Quoting:
    """Finds passages of other chats, shows them, and puts them before the user's next message."""

    def __init__(self, session: Session, screen: Screen, saved_chat: SavedChat) -> None:
        self._session, self._screen, self._saved_chat = session, screen, saved_chat
        self._next = list[Passage]()  # those that `/recall all` found

    def search(self, words: str) -> None:
        """Find the passages that fit `words`, which the next message will quote, and show them."""
        self._next = self._saved_chat.passages_elsewhere(words)
        if self._next:
            self._show(self._next)
            self._screen.note("your next message quotes this, so that the model reads it")
        else:
            self._screen.note(f"no other saved chat has {shorten(words, 60)}")

    def with_quotes(self, text: str) -> str:
        """The message `text`, after the passages that it must quote."""
        found, self._next = self._next, []
        if not found and self._session.profile.recall_from == "all":
            try:
                found = self._saved_chat.passages_elsewhere(text)
            except SessionError as error:  # the message is sent all the same
                self._screen.error(str(error))
            self._show(found)
        return quote(found, text) if found else text

    def _show(self, found: list[Passage]) -> None:
        for passage in found:
            self._screen.note(f"from another chat {passage}")
