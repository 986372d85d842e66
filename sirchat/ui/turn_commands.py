"""`/undo`, `/edit` and `/retry`: the last message is taken back, or said in another way."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from sirchat.chat.events import Undone
from sirchat.chat.model_defaults import SAMPLING_PARAMETERS
from sirchat.chat.rereading import own_pins, read_before_last
from sirchat.chat.session import Session
from sirchat.config.values import parse_value
from sirchat.errors import UndoError, UsageError, format_value, nearest
from sirchat.ui.interrupt import Interrupt, left_to_child
from sirchat.ui.progress import loading_bar
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line, shorten


def undo(session: Session, screen: Screen, saved_chat: SavedChat) -> Session | None:
    """Undo the last user turn and everything after it, and print a note.

    Returns None, or a new session: after a resume, or if tokens that the turn evicted are no longer
    archived, a new session reads all earlier turns again, and is saved in the same file. Raises
    UndoError, with nothing changed, if there is no user turn.
    """
    try:
        events = session.undo()
    except UndoError:
        if all(turn.role != "user" for turn in session.turns):
            raise
        return _read_anew(session, screen, saved_chat)
    for event in events:
        if isinstance(event, Undone):
            _report(event.text, session, screen)
    return None


def _read_anew(session: Session, screen: Screen, saved_chat: SavedChat) -> Session:
    said = next(turn.text for turn in reversed(session.turns) if turn.role == "user")
    with loading_bar(screen, session.model.name) as progress:
        before = read_before_last(session, progress)
    with Interrupt():  # Ctrl-C does not stop it halfway
        saved_chat.replace_session(before)
    _report(said, before, screen, f"; {before.seen:,} tokens of earlier turns were read again")
    if pins := own_pins(session):
        screen.note(f"{pins:,} tokens that you had pinned are no longer pinned")
    return before


def _report(text: str, session: Session, screen: Screen, how: str = "") -> None:
    text = shorten(displayable_line(text), 60)
    screen.note(f"undone: {text}{how}; the cache holds {session.resident:,}/{session.budget:,}")


def sampling_settings(words: str) -> dict[str, Any]:
    """Parse sampling settings, such as `--temperature 0.9 --top-p=0.8`.

    Raises UsageError for other settings; whether the values are allowed is not checked.
    """
    found: dict[str, Any] = {}
    parts = iter(words.replace("=", " ").split())
    for flag in parts:
        name, value = flag.removeprefix("--").replace("-", "_"), next(parts, None)
        allowed = ["--" + one.replace("_", "-") for one in SAMPLING_PARAMETERS]
        if name not in SAMPLING_PARAMETERS or not flag.startswith("--"):
            raise UsageError(
                f"/retry: {format_value(flag)} is not allowed; allowed: {', '.join(allowed)}",
                hint=nearest(flag, allowed),
            )
        if value is None:
            raise UsageError(
                f"/retry: {flag} needs a value", hint="for example: /retry --temperature 0.9"
            )
        found[name] = parse_value(name, value)
    return found


def editor() -> list[str]:
    """The command of the user's editor, from VISUAL or EDITOR; empty if neither is set."""
    named = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
    try:
        return shlex.split(named)
    except ValueError:  # an open quote
        return [named]


def edited(command: list[str], text: str) -> str:
    """Open a text in the editor, in a private file; returns the text that the user saved.

    Raises UsageError if the editor can't be started or fails, or if its file is not text.
    """
    number, name = tempfile.mkstemp(prefix="sirchat-", suffix=".md")  # 0600
    path = Path(name)
    try:
        with left_to_child():
            with open(number, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            code = subprocess.run([*command, name], check=False).returncode
            if code:
                raise UsageError(
                    f"the editor {command[0]!r} failed with exit code {code}: "
                    "the message is unchanged"
                )
            return path.read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise UsageError(
            f"the editor {command[0]!r} can't be started: {why}",
            hint="set EDITOR to another editor, or leave it empty to edit at the prompt",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            "the edited file is not UTF-8 text, so the message is unchanged"
        ) from error
    finally:
        path.unlink(missing_ok=True)
