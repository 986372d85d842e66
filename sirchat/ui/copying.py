"""`/copy`: a reply, or its last block of code, to the clipboard."""

from __future__ import annotations

import os

from sirchat.chat.session import Session
from sirchat.errors import UsageError, format_value
from sirchat.text.fences import last_fenced
from sirchat.ui.clipboard import copy_with_tool, osc52
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable

_FLAG = "--osc52"


def copy_reply(session: Session, screen: Screen, rest: str) -> None:
    """Copy what `/copy REST` means, and say how much it was.

    Control characters are left out, as on the screen: pasted elsewhere they could do harm.

    Raises UsageError where nothing is copied.
    """
    words = rest.split()
    target = " ".join(word for word in words if word != _FLAG)
    text = displayable(_text_of(session, target)).strip("\n")
    if not text.strip():
        raise UsageError("nothing is copied: the reply is empty")
    count = f"{len(text):,} character{'s' * (len(text) != 1)}"
    if _FLAG not in words:
        tool = copy_with_tool(text, os.environ)
        screen.note(f"copied {count} ({tool})")
        return
    terminal = screen.terminal
    if terminal is None:
        raise UsageError("nothing is copied: OSC 52 needs a terminal for standard output")
    terminal.write(osc52(text))
    terminal.flush()
    screen.note(f"sent {count} to the terminal for its clipboard; it does not say if it took them")


def _text_of(session: Session, target: str) -> str:
    """The text that is meant: the last reply, that of N turns ago, or the last one's code."""
    replies = [turn.text for turn in session.turns if turn.role == "assistant"]
    if not replies:
        raise UsageError("nothing is copied: there is no reply yet")
    if target == "code":
        block = last_fenced(replies[-1])
        if block is None:
            raise UsageError("nothing is copied: the last reply has no block of code")
        return block
    if target and not target.isdecimal():
        raise UsageError(
            f"/copy: {format_value(target)} is not allowed; allowed: code, a number of turns ago, "
            f"{_FLAG}"
        )
    ago = int(target or 0)
    if ago >= len(replies):
        raise UsageError(
            f"nothing is copied: no reply is {ago:,} turns ago; allowed: 0, the last, "
            f"to {len(replies) - 1:,}"
        )
    return replies[-1 - ago]
