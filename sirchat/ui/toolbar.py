"""The line below the prompt: the model, the policy, and how full the cache is."""

from __future__ import annotations

from sirchat.chat.session import Session
from sirchat.config.values import short
from sirchat.ui.text import displayable_line


def toolbar(session: Session) -> str:
    """Model, policy, held tokens and budget, decay, and the speed of the last reply."""
    profile = session.profile
    *_, name = session.model.name.rstrip("/").rpartition("/")
    parts = [
        displayable_line(name),
        displayable_line(profile.policy),
        f"{session.resident:,}/{session.budget:,} held",
        f"decay {short(profile.decay)}",
    ]
    if session.speed:
        parts.append(f"{session.speed:,.0f} tok/s")
    return " · ".join(parts)
