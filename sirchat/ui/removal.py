"""What `sirchat sessions rm` says of a saved chat before it goes, and what stays of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sirchat import paths
from sirchat.errors import SessionError, format_value
from sirchat.saved.session_list import find_session, list_sessions
from sirchat.saved.store import SessionStore
from sirchat.ui.history import Typed, input_history
from sirchat.ui.text import displayable_line


@dataclass(frozen=True)
class Removal:
    """A saved chat that is to be removed.

    Attributes:
        path: its file.
        description: one line that tells which chat it is, for the user to say yes to.
        messages: what the user said in it, as far as it can be read.
        relatives: how many other chats come from the same one by `/branch`.
    """

    path: Path
    description: str
    messages: frozenset[str]
    relatives: int

    def what_stays(self, lines: int) -> list[str]:
        """What is left of the chat elsewhere: so many `lines` in the history, and its branches."""
        stays = []
        if lines:
            one = lines == 1
            stays.append(
                f"{lines:,} typed line{'s' * (not one)} of it stay{'s' * one} in the input "
                f"history, {paths.abbreviated(paths.history_file())} (--history erases them)"
            )
        if self.relatives:
            one = self.relatives == 1
            stays.append(
                f"{self.relatives:,} chat{'s' * (not one)} branched from it, or it from them, "
                f"stay{'s' * one}: sirchat sessions lists them"
            )
        return stays


def removal(folder: Path, ident: str) -> Removal:
    """The chat that `ident` means; raises SessionError if there is none, or `last` is open."""
    listed = list_sessions(folder).sessions
    if ident == "last" and listed and listed[0].in_use:
        raise SessionError(
            f"the last chat, {listed[0].id}, is open in another process",
            hint="close it first, or name another: sirchat sessions lists them",
        )
    path = find_session(folder, ident)
    found = next((one for one in listed if one.path == path), None)
    messages: set[str] = set()
    with suppress(SessionError), SessionStore.open(path) as store:  # it may be damaged
        messages = {turn.text.strip() for turn in store.turns() if turn.role == "user"}
    if found is None:
        return Removal(path, f"{path.stem}, which can't be read", frozenset(messages), 0)
    name = f", called {format_value(found.name)}" if found.name else ""
    begins = f', begins "{found.first}"' if found.first else ""
    description = f"{found.id}{name}: {found.turns:,} messages{begins}"
    relatives = sum(one.family == found.family for one in listed) - 1
    return Removal(path, displayable_line(description), frozenset(messages), relatives)


def typed_lines(messages: frozenset[str]) -> tuple[Typed | None, int]:
    """The input history, if there is one, and how many of its lines are among these messages."""
    if not paths.history_file().is_file():
        return None, 0
    history = input_history(lambda complaint: None)
    return history, sum(line.strip() in messages for line in history.lines())
