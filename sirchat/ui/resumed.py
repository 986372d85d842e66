"""What a saved chat shows when it goes on: its last lines, and settings one might not expect."""

from __future__ import annotations

from sirchat.chat.model_defaults import DRAWING, with_model_defaults
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.config.values import as_typed
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line, shorten

_TURNS = 4
_LENGTH = 200  # characters of a turn
_ANSWERS = (*DRAWING, "max_new_tokens")
"""Settings that change replies and are not in the first line."""


def greet_again(session: Session, screen: Screen) -> None:
    """Show the last turns, how much is held, and how replies are drawn, if not as usual."""
    for turn in session.turns[-_TURNS:]:
        if turn.text.strip():
            text = shorten(displayable_line(turn.text), _LENGTH)
            screen.note(f"{turn.role.upper()}: {text}")
    screen.note(
        f"goes on after {len(session.turns)} turns: {session.seen:,} tokens seen, "
        f"{session.resident:,} held"
    )
    usual = with_model_defaults(Profile(), session.model)
    changed = [
        f"{name} {as_typed(getattr(session.profile, name))}"
        for name in _ANSWERS
        if getattr(session.profile, name) != getattr(usual, name)
    ]
    if changed:
        screen.note(f"as it was set: {', '.join(changed)}")
