"""Keeps the current chat on disk: autosave, `/save`, `/load` and `/branch`."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Group
from rich.text import Text

from sirchat.chat.events import Event, Notice
from sirchat.chat.rereading import check_rewind, repinned_note, rewind
from sirchat.chat.session import Session
from sirchat.chat.targets import whole_words
from sirchat.config.profile import FIXED_SETTINGS
from sirchat.errors import (
    SessionError,
    format_value,
    shows_tracebacks,
)
from sirchat.paths import sessions_dir
from sirchat.saved.autosave import Autosave
from sirchat.saved.database import SUFFIX
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import check_model, saved_profile
from sirchat.saved.search import (
    saved_text,
    search_sessions,
)
from sirchat.saved.session_list import (
    SavedSession,
    branches_of,
    check_name,
    find_session,
    list_sessions,
    reveals_text,
)
from sirchat.saved.store import SessionStore
from sirchat.ui.interrupt import InterruptFlag
from sirchat.ui.lists import MORE_HITS, draw_sessions
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line, shorten
from sirchat.ui.theme import ROLE_NAMES

# Of `FIXED_SETTINGS`, those that `/load` takes from the saved chat.
_LOADED_FIXED_SETTINGS = ("description", "seed")

_SHOWN_TURNS, _SHOWN_TURN_CHARS = 4, 200  # of a resumed chat
_CHARS_BEFORE_MATCH = 24  # shown of a found message


class SavedChat:
    """Saves the current chat if the setting `save` is on, and loads other saved chats.

    `store` is the file from which the session was resumed. Errors of saving are printed;
    `--debug` raises them.
    """

    def __init__(self, session: Session, screen: Screen, store: SessionStore | None = None) -> None:
        self.session = session
        self._screen = screen
        self._autosave = Autosave(session, store)
        self._last_error = ""  # "" if the last try to write succeeded

    def save(self) -> None:
        """Write the unsaved part of the chat to disk; prints the first of several errors."""
        is_reported = bool(self._last_error)
        if not self._try_to_write() and not is_reported:
            self._screen.error(
                f"the chat is not saved now: {self._last_error}; it goes on, and is saved as soon "
                "as that works again; /save tries at once"
            )

    def _try_to_write(self) -> bool:
        """If the setting is on, write the unsaved part of the chat; returns False on failure."""
        try:
            if self.session.profile.save:
                self._write_new()
        except Exception as error:  # the chat goes on after any error
            if shows_tracebacks():
                raise
            self._last_error = str(error) or type(error).__name__
        return not self._last_error

    def _write_new(self) -> None:
        self._autosave.save()
        if self._last_error:
            self._last_error = ""
            self._screen.note("the chat is saved again")

    @property
    def outdated_file(self) -> Path | None:
        """The chat's file if it is out of date because saving failed; else None."""
        if not self._last_error or not self._autosave.id:
            return None
        return sessions_dir() / f"{self._autosave.id}{SUFFIX}"

    def close(self) -> None:
        """Write the unsaved part of the chat and the KV cache, and release the chat's file."""
        try:
            if not self._try_to_write():
                self._screen.error(f"the end of this chat is not saved: {self._last_error}")
            elif self.session.profile.save:
                self._autosave.save_kv()
        except Exception as error:
            if shows_tracebacks():
                raise
            self._screen.error(f"saved without keys and values: {error}")
        finally:
            self._autosave.close_without_saving()

    def print_resume_command(self) -> None:
        is_saved = self.session.profile.save and not self._last_error
        if is_saved and self._autosave.id and self._screen.is_interactive:
            self._screen.remark(f"to continue this chat: {self._resume_command}")

    def save_as(self, name: str | None) -> None:
        """Save the chat with its KV cache now, under `name` if given, and from now on each turn.

        Raises SessionError, with nothing changed, if the name is invalid or writing fails.
        """
        if name is not None:
            check_name(sessions_dir(), name, self._autosave.id)
        self._start_saving()
        if name is not None:  # checked again: a file abandoned meanwhile keeps its name
            self._autosave.name = check_name(sessions_dir(), name, self._autosave.id)
            self._autosave.save()
        self._report_saved()

    def load(self, name_or_id: str) -> bool:
        """Continue a saved chat, by id, name or "last"; False if it is the current one.

        Raises SessionError or SettingError, with the current chat unchanged.
        """
        current = self._autosave.id
        path = find_session(sessions_dir(), name_or_id, own_id=current)
        if path.stem == current:
            self._screen.note(f"session {current} is this chat, which is already open")
            return False
        store = SessionStore.open(path)
        try:
            session = self._resume(store)
            autosave = Autosave(session, store)
            self._save_before_leaving("nothing is loaded")
        except BaseException:
            store.close()
            raise
        with InterruptFlag():  # Ctrl-C does not stop it halfway
            self._autosave.close_without_saving()
            self.session, self._autosave, self._last_error = session, autosave, ""
        self._screen.note(f"this chat is session {autosave.id}{_name_part(autosave)}")
        if not session.profile.save:
            self._screen.note("new messages are not saved, as before; /save starts saving")
        return True

    def branch(self, name: str, num_turns: int) -> None:
        """Continue in a copy of this chat, called `name`, without the last `num_turns` user turns.

        Raises SessionError or UndoError, with the current chat unchanged.
        """
        name = check_name(sessions_dir(), name, "")
        is_saved = self.session.profile.save
        if not is_saved or not self.session.turns:
            raise SessionError(
                "a branch needs a saved chat, and this chat is not saved yet",
                hint="send a message first" if is_saved else "/save saves this chat",
            )
        check_rewind(self.session, num_turns)
        self._save_before_leaving("no branch is made")
        session, old, events = self.session, self._autosave, list[Event]()
        if num_turns > len(session.history.messages):  # it is read again: Ctrl-C may stop that
            session, _ = rewind(session, num_turns)
        with InterruptFlag():  # but nothing from here on
            self._autosave = old.branch(name)
            old.close_without_saving()
            if session is self.session:
                session, events = rewind(session, num_turns)
            if is_other := session is not self.session:
                self.replace_session(session)
        old_name = format_value(old.name) if old.name else old.id
        self._screen.note(
            f"this chat is session {self._autosave.id}{_name_part(self._autosave)}; {old.id} stays "
            f"as it is, and /load {old_name} goes back to it"
        )
        for event in events:
            if isinstance(event, Notice):
                self._screen.note(event.text)
        if is_other:
            self._screen.note(f"the chat was read again: {session.seen:,} tokens")
            self._screen.note(repinned_note(session))

    def show_branches(self) -> None:
        """Print a list of this chat and its branches, the copies made by `/branch`."""
        branches, current = self._branches(), self._autosave.id
        if len(branches) > 1:
            self._screen.page(draw_sessions(branches, self._screen.width, open_id=current))
            self._screen.note("/load ID or /load NAME goes on with another")
        else:
            self._screen.note("this chat has no branches; /branch NAME makes one")

    def branches_containing(self, text: str) -> list[str]:
        """The names or ids of other branches that contain the words `text`."""
        pattern, others = whole_words(text), self._branches() if self._autosave.id else []
        return [
            chat.name or chat.id
            for chat in others
            if chat.id != self._autosave.id and pattern.search(saved_text(chat.path))
        ]

    def _branches(self) -> list[SavedSession]:
        return branches_of(sessions_dir(), self._autosave.family)

    def replace_session(self, session: Session) -> None:
        """Continue with another session of the same chat, saved in the same file."""
        self.session = session
        self._autosave.replace_session(session)
        self.save()

    def list_chats(self) -> None:
        """Print a list of all saved chats."""
        listing = list_sessions(sessions_dir())
        for refused in listing.errors:
            self._screen.error(str(refused))
        if not listing.sessions:
            self._screen.note("there are no saved chats")
            return
        chats = draw_sessions(listing.sessions, self._screen.width, open_id=self._autosave.id)
        self._screen.page(chats)
        self._screen.note("/load ID opens one of them, and Tab completes ids and names")

    def search(self, words: str) -> None:
        """Print each message of this chat, and the other saved chats, that have all words."""
        messages = self._find_messages(words)
        hits, more = search_sessions(sessions_dir(), words, except_id=self._autosave.id)
        if not messages and not hits:
            raise SessionError(f"no message and no saved chat has all of {format_value(words)}")
        if messages:
            messages.insert(0, Text("in this chat:"))
        if hits:
            messages.append(Text("in saved chats, which /load ID opens:"))
        matches = {hit.session.id: hit.snippet for hit in hits}
        chats = draw_sessions([hit.session for hit in hits], self._screen.width, matches)
        self._screen.page(Group(*messages, chats))
        if more:
            self._screen.note(MORE_HITS.format(more))

    def _find_messages(self, words: str) -> list[Text]:
        lines, max_chars = list[Text](), max(24, self._screen.width - 24)  # a role stands before
        for role, turn in zip(self.session.state.roles, self.session.turns, strict=True):
            text = " ".join(displayable_line(turn.text).split())
            indices = [text.casefold().find(word) for word in words.casefold().split()]
            start = min(indices, default=-1)
            if start < 0 or role == "template":
                continue
            if start > _CHARS_BEFORE_MATCH:
                text = f"…{text[text.find(' ', start - _CHARS_BEFORE_MATCH) + 1 :]}"
            line = Text(f"  {ROLE_NAMES[role]}: {shorten(text, max_chars)}")
            line.highlight_words(words.split(), "bold underline", case_sensitive=False)
            lines.append(line)
        return lines

    def drop_revealing_name(self, text: str, *, is_whole_turn: bool) -> bool:
        """Remove the chat's name if it contains the erased `text`; return whether it did.

        If `text` is a whole turn, a name that is a part of `text` is removed, too.
        """
        is_removed = reveals_text(self._autosave.name, text, is_whole_turn=is_whole_turn)
        if is_removed:
            self._autosave.name = ""
            self._screen.note(
                "the chat's name contained the erased text and was removed; "
                "/save NAME gives a new one"
            )
        return is_removed

    def _start_saving(self) -> None:
        """Turn the setting `save` on, and write the whole chat, to a new file if necessary."""
        session, former_profile = self.session, self.session.profile
        # So that `--resume` saves it, too.
        session.note_profile(former_profile.model_copy(update={"save": True}))
        try:
            self._write_or_move()
        except Exception as error:
            session.note_profile(former_profile)
            raise SessionError(f"the chat can't be saved: {error}") from error

    def _write_or_move(self) -> None:
        """Write the unsaved part of the chat; if that fails, write all of it to a new file."""
        try:
            self._write_new()
        except Exception:
            if not self._autosave.id:
                raise
            old, new = self._autosave, Autosave(self.session)
            new.save()
            old.close_without_saving()
            self._autosave = new
            self._screen.note(f"cannot write {old.id}; continuing in a new file")
            self._write_new()

    @property
    def _resume_command(self) -> str:
        # `=`, as the name of a chat may be that of a command.
        return f"sirchat --resume={shlex.quote(self._autosave.name or self._autosave.id)}"

    def _report_saved(self) -> None:
        autosave, has_kv = self._autosave, False
        if not autosave.id:
            self._screen.note("the chat is still empty; it will be saved after the first reply")
            return
        try:
            has_kv = autosave.save_kv()
        except SessionError as error:
            self._screen.error(str(error))
        name_or_id = format_value(autosave.name) if autosave.name else autosave.id
        self._screen.note(
            f"saved as {autosave.id}{_name_part(autosave)}, {'with' if has_kv else 'without'} keys "
            f"and values; to continue it: /load {name_or_id}, or {self._resume_command}"
        )

    def _resume(self, store: SessionStore) -> Session:
        """The session saved in `store`; most `FIXED_SETTINGS` stay those of the current chat."""
        if store.state_record() is None:
            raise SessionError(f"session {store.id} holds no message yet")
        model, current = self.session.model, self.session.profile
        check_model(store, model)  # first: the settings may be invalid for another model
        kept_names = [name for name in FIXED_SETTINGS if name not in _LOADED_FIXED_SETTINGS]
        profile = saved_profile(store)
        kept = {name: getattr(current, name) for name in kept_names}
        session = Session(model, profile.model_copy(update=kept))
        resume_session(session, store)
        return session

    def _save_before_leaving(self, consequence: str) -> None:
        """Save the chat if the setting is on; raises SessionError that names the `consequence`."""
        if not self.session.profile.save:
            return
        try:
            self._write_or_move()
            self._autosave.save_kv()
        except Exception as error:
            raise SessionError(
                f"{consequence}, because the current chat can't be saved: {error}",
                hint="/reset discards the current chat",
            ) from error


def show_resumed_chat(session: Session, screen: Screen) -> None:
    """Print a resumed chat's last turns, and how many tokens it has."""
    for role, turn in [*zip(session.state.roles, session.turns, strict=True)][-_SHOWN_TURNS:]:
        if turn.text.strip():
            text = shorten(displayable_line(turn.text), _SHOWN_TURN_CHARS)
            screen.note(f"{ROLE_NAMES.get(role, role)}: {text}")
    screen.note(
        f"the chat goes on after {len(session.turns):,} messages: {session.seen:,} tokens read, "
        f"{session.resident:,} held"
    )
    screen.note(repinned_note(session))


def _name_part(autosave: Autosave) -> str:
    return f", called {format_value(autosave.name)}" if autosave.name else ""
