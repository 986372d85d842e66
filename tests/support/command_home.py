"""A home folder that commands run in, and what must be in it once they have ended."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from chatting import tiny
from forked_command import ForkedCommand
from sirchat.chat.session import Session
from sirchat.memory.archive import remove_stale_folders
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.session_list import list_sessions
from sirchat.saved.store import SavedTurn, SessionStore

SECONDS = 5.0  # most processor time from a signal to the end

_WRONG_CLOCK = """
import itertools, runpy, time
right, errors = time.time, itertools.cycle({})
time.time = lambda: right() + next(errors)
runpy.run_module("sirchat", run_name="__main__", alter_sys=True)
"""
_CONTROL = re.compile(rb"\x1b\[\?(25|1049|2004)([hl])")


class Wrong(AssertionError):
    """What happened to a command or its files, and should not have."""


class CommandHome:
    """A folder of commands' files, and the environment in which they run, with these variables."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder, self.sessions = folder, folder / "data" / "sessions"
        for name in ("tmp", "cwd"):
            (folder / name).mkdir(parents=True)
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("SIRCHAT_")} | {
            "SIRCHAT_HOME": str(folder), "TMPDIR": str(folder / "tmp"), "TERM": "xterm-256color",
            "SIRCHAT_MODEL": "tiny", "PAGER": "cat", "SIRCHAT_COMPILE": "off", **variables,
        }  # fmt: skip

    def run(self, *arguments: str, in_terminal: bool, ahead: Sequence[int] = ()) -> ForkedCommand:
        """A command; at each look, its clock is `ahead` by the next of these seconds."""
        program = ("-c", _WRONG_CLOCK.format(list(ahead))) if ahead else ("-m", "sirchat")
        environ, folder = self.environ, self.folder / "cwd"
        return ForkedCommand(
            *program, *arguments, environ=environ, folder=folder, in_terminal=in_terminal
        )

    def turns(self, *, is_killed: bool) -> list[SavedTurn]:
        """Check that every chat opens and goes on, and nothing lies about; returns their turns."""
        listing, turns = list_sessions(self.sessions), list[SavedTurn]()
        if listing.errors:
            raise Wrong(f"refused: {listing.errors}")
        for entry in listing.sessions:
            with SessionStore.open(entry.path) as store:
                turns += store.turns()
                if store.state_record() is not None:
                    resume_session(Session(tiny(), saved_profile(store)), store)
        archives = self.folder / "data" / "archives"
        if is_killed:
            remove_stale_folders(archives)
            left = list(archives.glob("*/*"))
        else:
            left = [*archives.glob("*"), *(self.folder / "tmp").iterdir()]
            left += [*self.sessions.glob("*-journal"), *self.sessions.glob("*.new")]
        if left:
            raise Wrong(f"left behind: {left}")
        return turns


def check_end(command: ForkedCommand, number: signal.Signals, codes: set[int]) -> None:
    """It ends in time with one of these codes, or by SIGKILL, and the terminal is as before."""
    code = command.ended(SECONDS)
    shown = command.shown + command.errors
    if number == signal.SIGINT and b"_begin" in shown and b"/sirchat/cli/" not in shown:
        return  # it came before the program began
    if code is None:
        raise Wrong(f"does not end: {shown[-1500:]!r}")
    if code not in ({0, 1, -number} if number == signal.SIGKILL else codes):
        raise Wrong(f"exit code {code}: {shown[-1500:]!r}")
    for word in (b"Traceback", b"Exception", b"Error:", b"core dumped"):
        if (at := shown.find(word)) >= 0:
            raise Wrong(shown[max(0, at - 2500) : at + 500].decode(errors="replace"))
    if left := command.left_processes():
        raise Wrong(f"processes {left} are left")
    if number == signal.SIGKILL:
        return
    last, usual = dict(_CONTROL.findall(command.shown)), {b"25": b"h", b"1049": b"l", b"2004": b"l"}
    if usual | last != usual:
        raise Wrong(f"the terminal is left in modes {last}: {command.shown[-600:]!r}")
    if not command.has_modes_of_before:
        raise Wrong("the terminal's attributes are others than before")
