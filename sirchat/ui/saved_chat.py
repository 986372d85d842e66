"""Keeps the current chat on disk: autosave, `/save`, `/load`, `/branch` and `/switch`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from rich.console import Group
from rich.text import Text

from sirchat.chat.rereading import check_rewind, repinned_note, rewind
from sirchat.chat.session import Session
from sirchat.chat.targets import whole_words
from sirchat.config.profile import FIXED_SETTINGS
from sirchat.errors import SessionError, SirchatError, did_you_mean, format_value
from sirchat.paths import sessions_dir
from sirchat.saved.autosave import Autosave
from sirchat.saved.database import SUFFIX
from sirchat.saved.index import saved_text
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import check_model, saved_profile
from sirchat.saved.search import SnippetPart, nothing_found_error, search_sessions
from sirchat.saved.session_list import (
    MAX_LISTED,
    SavedSession,
    branches_of,
    check_name,
    find_session,
    is_prefix_of_id,
    list_sessions,
    names_match,
    open_saved_file,
)
from sirchat.saved.store import SessionStore
from sirchat.ui.lists import SessionLines, draw_sessions
from sirchat.ui.prompt import DrawItem
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line, shorten
from sirchat.ui.theme import ROLE_NAMES

# The name by which `/switch` finds the original chat, of which all branches are copies.
_FIRST = "main"

# Of `FIXED_SETTINGS`, those that are taken from a chat that is loaded.
_OF_THE_SESSION = ("description", "seed")

_TURNS = 4  # of a resumed chat that are shown
_LENGTH = 200  # characters of a turn
_LEAD = 24  # characters of a found message before the first word


class SavedChat:
    """Saves the current chat to disk if the setting `save` is on, and loads other saved chats.

    If writing fails, an error is printed once, and it is tried again after each entered line.

    Args:
        session: the current session.
        screen: where messages go.
        store: the file from which the session was resumed, or None.
        debug: whether to raise errors of saving, instead of printing them.
        trusted: the `module:Class` policies that saved chats may name.
        pick: lets the user pick one of several chats; see `Prompt.pick`. None: the user can't pick.
    """

    def __init__(
        self,
        session: Session,
        screen: Screen,
        store: SessionStore | None = None,
        *,
        debug: bool = False,
        trusted_policies: Collection[str] = (),
        pick: Callable[[int, DrawItem, str], int | None] | None = None,
    ) -> None:
        self._session = session
        self._pick = pick
        self._trusted = trusted_policies
        self._screen = screen
        self._debug = debug
        self._saving = Autosave(session, store)
        self._failure = ""  # why the last try to write failed

    def save(self) -> None:
        """Write the new part of the chat to disk, and what earlier calls could not write."""
        is_known = bool(self._failure)
        if not self._try_to_write() and not is_known:
            self._screen.error(
                f"the chat is not saved now: {self._failure}; it goes on, and is saved as soon as "
                "that works again; /save tries at once"
            )

    def _try_to_write(self) -> bool:
        """Write the new part of the chat, if it is saved; False if a part is still not written."""
        try:
            if self._session.profile.save:
                self._write_new()
        except Exception as error:  # the chat goes on after any error
            if self._debug:
                raise
            self._failure = str(error) or type(error).__name__
        return not self._failure

    def _write_new(self) -> None:
        if self._saving.id:
            self._saving.save()
        else:
            self._saving.create_file()
        if self._failure:
            self._failure = ""
            self._screen.note("the chat is saved again")

    @property
    def outdated_file(self) -> Path | None:
        """The chat's file, if it is out of date because saving has failed; otherwise None."""
        if not self._failure or not self._saving.id:
            return None
        return sessions_dir() / f"{self._saving.id}{SUFFIX}"

    def close(self) -> None:
        """Write what is not saved yet, with the KV cache, and release the chat's file."""
        try:
            if not self._try_to_write():
                self._screen.error(f"the end of this chat is not saved: {self._failure}")
            elif self._session.profile.save:
                self._saving.save_kv()
        except Exception as error:
            if self._debug:
                raise
            self._screen.error(f"saved without keys and values: {error}")
        finally:
            self._saving.close_without_saving()

    def print_resume_command(self) -> None:
        """If the chat is saved, print how to resume it; call this after `close`."""
        is_saved = self._session.profile.save and not self._failure
        if is_saved and self._saving.id and self._screen.is_interactive:
            self._screen.remark(f"to continue this chat: {self._resume_command}")

    def save_as(self, name: str | None) -> None:
        """Save the chat now, with its KV cache, under a new `name`, and from now on each turn.

        Raises SessionError, with nothing changed, if the name is invalid or writing fails.
        """
        if name is not None:
            check_name(sessions_dir(), name, self._saving.id)
        self._begin()
        if name is not None:  # checked again: a file given up meanwhile keeps its name
            self._saving.name = check_name(sessions_dir(), name, self._saving.id)
            self._saving.save()
        self._report_saved()

    def load(self, ident: str) -> Session | None:
        """Switch to a saved chat, by id, name or "last"; None if it is open already.

        Raises SessionError or SettingError, with the current chat unchanged.
        """
        if ident != "last" and find_session(sessions_dir(), ident).stem == self._saving.id:
            self._screen.note(f"session {self._saving.id} is this chat, which is already open")
            return None
        store, skipped = open_saved_file(sessions_dir(), ident, own_id=self._saving.id)
        for error in skipped:
            self._screen.note(f"{error}; loading session {store.name or store.id} instead")
        try:
            session = self._resumed(store)
            saving = Autosave(session, store)
            self._save_before_leaving("nothing is loaded")
        except BaseException:
            store.close()
            raise
        self._saving.close_without_saving()
        self._session, self._saving, self._failure = session, saving, ""
        self._screen.note(f"this chat is session {saving.id}{_name_part(saving)}")
        if not session.profile.save:
            self._screen.note("new messages are not saved, as before; /save starts saving")
        return session

    def branch(self, name: str, back: int) -> None:
        """Go on in a copy of this chat, called `name`, without the last `back` user turns.

        If SessionError or UndoError is raised, the old chat goes on.
        """
        name = check_name(sessions_dir(), name, "")
        is_saved = self._session.profile.save
        if not is_saved or not self._session.turns:
            raise SessionError(
                "a branch needs a saved chat, and this chat is not saved yet",
                hint="send a message first" if is_saved else "/save saves this chat",
            )
        check_rewind(self._session, back)
        self._save_before_leaving("no branch is made")
        old = self._saving
        self._saving = old.branch(name)
        old.close_without_saving()
        handle = _FIRST if old.id == old.family else old.id
        self._screen.note(
            f"this chat is session {self._saving.id}{_name_part(self._saving)}; {old.id} stays "
            "as it is, and "
            f"/switch {format_value(old.name) if old.name else handle} goes back to it"
        )
        if back and rewind(self._session, back):
            self._saving.keep_file_after_reset()
            self._screen.note(f"the chat was read again: {self._session.seen:,} tokens")
            self._screen.note(repinned_note(self._session))

    def switch(self, ident: str) -> Session | None:
        """Switch to a branch, by id, name or "main" (the original); None if it is open already.

        Raises SessionError if this chat has no such branch.
        """
        branches = self._branches()
        for branch in branches:
            is_first = ident == _FIRST and branch.id == self._saving.family
            if is_first or branch.id == ident or names_match(branch.name, ident):
                return self.load(branch.id)
        raise SessionError(
            f"this chat has no branch {format_value(ident)}",
            hint=did_you_mean(ident, [branch.name or branch.id for branch in branches], "/switch ")
            or "/branches lists the branches; /load opens other chats",
        )

    def show_branches(self) -> None:
        """Print a list of this chat and its branches, the copies made by `/branch`."""
        branches = self._branches()
        if len(branches) > 1:
            first = self._saving.family
            named = [replace(b, name=b.name or _FIRST * (b.id == first)) for b in branches]
            chats = SessionLines(named, self._saving.id)
            self._screen.page(draw_sessions(chats, self._screen.width))
            here = next((b.name or b.id for b in named if b.id == self._saving.id), "a new branch")
            self._screen.note(f"you are on {here}; /switch NAME goes on with another")
        else:
            self._screen.note("this chat has no branches; /branch NAME makes one")

    def branches_containing(self, text: str) -> list[str]:
        """The names by which `/switch` finds the other branches of this chat that have the text."""
        pattern, others = whole_words(text), self._branches() if self._saving.id else []
        return [
            _FIRST if chat.id == self._saving.family else chat.name or chat.id
            for chat in others
            if chat.id != self._saving.id and pattern.search(saved_text(chat.path))
        ]

    def _branches(self) -> list[SavedSession]:
        return branches_of(sessions_dir(), self._saving.family)

    def replace_session(self, session: Session) -> None:
        """From now on, save `session`, another session of this conversation, in the same file."""
        self._session = session
        self._saving.replace_session(session)
        self.save()

    def choose_chat(self, words: str) -> str:
        """The id or name of the chat that `/load WORDS` should load; "" if the user picks none.

        Words that are no id or name: the user picks one of the chats in which they were said; no
        words: one of all. Raises SessionError if no chat is found.
        """
        folder = sessions_dir()
        if not words:
            listing = list_sessions(folder, MAX_LISTED)
            for refused in listing.errors:
                self._screen.error(str(refused))
            if not listing.sessions:
                self._screen.note("there are no saved chats")
            older = f" (and {listing.more_count:,} older ones)" if listing.more_count else ""
            return self._picked(listing.sessions, more=older)
        if words == "last" or is_prefix_of_id(folder, words):
            return words
        try:
            result = search_sessions(folder, words)
        except SirchatError as error:  # no word to search for, or no index: it may be a name
            try:
                return find_session(folder, words).stem
            except SessionError:
                raise error from None
        if result.ids_by_name:
            return result.ids_by_name[0] if len(result.ids_by_name) == 1 else words
        if not result.hits:
            raise nothing_found_error(words, result)
        more = f" (and {result.more_count:,} that fit less)" if result.more_count else ""
        lines = {hit.session.id: hit.snippet for hit in result.hits}
        return self._picked([hit.session for hit in result.hits], lines, more)

    def search(self, words: str) -> None:
        """Print the messages of this chat, and the other saved chats, in which all words are."""
        screen, texts = self._screen, list[Text]()
        for role, turn in zip(self._session.state.roles, self._session.turns, strict=True):
            text = " ".join(displayable_line(turn.text).split())
            found = [text.casefold().find(word) for word in words.casefold().split()]
            if found and min(found) >= 0 and role != "template":
                if min(found) > _LEAD:
                    text = f"…{text[text.find(' ', min(found) - _LEAD) + 1 :]}"
                said = shorten(text, max(_LEAD, screen.width - _LEAD))
                line = Text(f"  {ROLE_NAMES[role]}: {said}")
                line.highlight_words(words.split(), "bold underline", case_sensitive=False)
                texts.append(line)
        result = search_sessions(sessions_dir(), words)
        hits = [hit for hit in result.hits if hit.session.id != self._saving.id]
        if not texts and not hits:
            raise SessionError(f"no message and no saved chat has all of {format_value(words)}")
        chats = SessionLines(
            [hit.session for hit in hits], matches={hit.session.id: hit.snippet for hit in hits}
        )
        here = [Text("in this chat:"), *texts] if texts else []
        title = [Text("in saved chats, which /load ID opens:")] if hits else []
        screen.page(Group(*here, *title, draw_sessions(chats, screen.width)))

    def _picked(
        self,
        sessions: Sequence[SavedSession],
        matches: Mapping[str, Sequence[SnippetPart]] = MappingProxyType({}),
        more: str = "",
    ) -> str:
        """Let the user pick one of `sessions`; without a terminal, print them, and return ""."""
        if not sessions:
            return ""
        chats = SessionLines(sessions, self._saving.id, matches)
        if self._pick is None or self._screen.terminal is None:
            self._screen.page(draw_sessions(chats, self._screen.width))
            self._screen.note(f"/load ID opens one of them{more}")
            return ""
        number = self._pick(len(sessions), chats.lines, more)
        if number is None:
            self._screen.note("nothing is loaded; this chat goes on")
        return "" if number is None else sessions[number].id

    def drop_revealing_name(self, text: str, *, is_whole_turn: bool) -> bool:
        """Remove the chat's name if it contains `text`, which is erased; return whether it did.

        If `text` is all of a turn, a name that is a part of it is removed, too.
        """
        dropped = self._saving.drop_revealing_name(text, is_whole_turn=is_whole_turn)
        if dropped:
            self._screen.note(
                "the chat's name contained the erased text and was removed; "
                "/save NAME gives a new one"
            )
        return dropped

    def _begin(self) -> None:
        """Switch the setting `save` on, and write all of the chat, to a new file if need be."""
        session, before = self._session, self._session.profile
        session.note_profile(before.model_copy(update={"save": True}))  # `--resume` saves it, too
        try:
            self._write()
        except Exception as error:
            session.note_profile(before)
            raise SessionError(f"the chat can't be saved: {error}") from error

    def _write(self) -> None:
        try:
            self._write_new()
        except Exception:
            if not self._saving.id:
                raise
            old, new = self._saving, Autosave(self._session)
            new.create_file()
            old.close_without_saving()
            self._saving = new
            self._screen.note(f"cannot write {old.id}; continuing in a new file")
            self._write_new()

    @property
    def _handle(self) -> str:
        """What the user types to find this chat: its name or, if it has none, its id."""
        return format_value(self._saving.name) if self._saving.name else self._saving.id

    @property
    def _resume_command(self) -> str:
        """What a shell runs to go on with this chat; `=`, as a name may be that of a command."""
        return f"sirchat --resume={shlex.quote(self._saving.name or self._saving.id)}"

    def _report_saved(self) -> None:
        """Save the KV cache, and print how to find the chat."""
        saving, kept = self._saving, False
        if not saving.id:
            self._screen.note("the chat is still empty; it will be saved after the first reply")
            return
        try:
            kept = saving.save_kv()
        except SessionError as error:
            self._screen.error(str(error))
        self._screen.note(
            f"saved as {saving.id}{_name_part(saving)}, {'with' if kept else 'without'} keys and "
            f"values; to continue it: /load {self._handle}, or {self._resume_command}"
        )

    def _resumed(self, store: SessionStore) -> Session:
        """The session saved in `store`, with its settings, most of `FIXED_SETTINGS` as now."""
        if store.state_record() is None:
            raise SessionError(f"session {store.id} holds no message yet")
        model, current = self._session.model, self._session.profile
        check_model(store, model)  # first: the settings may be invalid for another model
        kept = {
            name: getattr(current, name) for name in FIXED_SETTINGS if name not in _OF_THE_SESSION
        }
        trusted_policies = (*self._trusted, current.policy)
        session = Session(model, saved_profile(store, trusted_policies).model_copy(update=kept))
        resume_session(session, store)
        return session

    def _save_before_leaving(self, otherwise: str) -> None:
        """If the setting `save` is on, save the chat, because another one is opened next.

        If that fails, raises SessionError, whose text begins with `otherwise`.
        """
        if not self._session.profile.save:
            return
        try:
            self._write()
            self._saving.save_kv()
        except Exception as error:
            raise SessionError(
                f"{otherwise}, because the current chat can't be saved: {error}",
                hint="/reset discards the current chat",
            ) from error


def show_resumed_chat(session: Session, screen: Screen) -> None:
    """Print a resumed chat's last turns, and its tokens."""
    for role, turn in [*zip(session.state.roles, session.turns, strict=True)][-_TURNS:]:
        if turn.text.strip():
            text = shorten(displayable_line(turn.text), _LENGTH)
            screen.note(f"{ROLE_NAMES.get(role, role)}: {text}")
    screen.note(
        f"the chat goes on after {len(session.turns):,} messages: {session.seen:,} tokens read, "
        f"{session.resident:,} held"
    )
    screen.note(repinned_note(session))


def _name_part(saving: Autosave) -> str:
    return f", called {format_value(saving.name)}" if saving.name else ""
