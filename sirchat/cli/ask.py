"""Asking one question from the shell."""

import sys
from typing import TYPE_CHECKING, Any

from sirchat.cli.chat import open_saved, saved_settings
from sirchat.cli.launch import profile_of
from sirchat.errors import UsageError
from sirchat.text.transcript import MOST_BYTES

if TYPE_CHECKING:
    from sirchat.saved.store import SessionStore


def ask_once(
    question: str, flags: dict[str, Any], *, resume: str | None, json: bool, trust: bool
) -> None:
    """Ask, print the reply alone on standard output, and end.

    What comes from a pipe or a file stands before the question, or is the question. A saved chat
    (`resume`) is asked in its own memory, and saved with the reply.
    """
    text = _message(question)
    later: dict[str, Any] = {}
    store: SessionStore | None = None
    if resume is None:
        profile = profile_of(flags)
    else:
        profile, store, later = saved_settings(resume, flags, at_once=False)
    from sirchat.ui.loading import loading_bar
    from sirchat.ui.one_reply import print_reply
    from sirchat.ui.saved_chat import SavedChat
    from sirchat.ui.screen import Screen

    screen = Screen(theme=profile.theme)
    with loading_bar(screen, profile.model) as report:
        session = open_saved(profile, trust, report, store, later)
    if store is None:
        print_reply(session, text, screen, as_json=json)
        return
    saved_chat = SavedChat(session, screen, store)
    try:
        print_reply(session, text, screen, as_json=json)
    finally:
        saved_chat.close()


def _message(question: str) -> str:
    """The question, after what standard input holds."""
    given = ""
    if not sys.stdin.isatty():
        try:
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise UsageError(f"standard input has more than {MOST_BYTES:,} bytes")
            given = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UsageError("standard input is not UTF-8", hint="ask takes text") from None
    parts = [part for part in (given.strip("\n"), question) if part.strip()]
    if not parts:
        raise UsageError("there is no question", hint='sirchat ask "What is a KV cache?"')
    return "\n\n".join(parts)
