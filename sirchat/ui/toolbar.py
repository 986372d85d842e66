"""The line below the prompt: the model, the policy, and how full the cache is."""

from __future__ import annotations

from sirchat.chat.session import Session
from sirchat.config.values import short
from sirchat.ui.text import displayable_line

_CELLS, _WIDE = 8, 80


def toolbar(session: Session, width: int) -> str:
    """Model, policy, held tokens and budget, decay, and the speed of the last reply.

    `width`: of the window, in columns; a narrow one has no room for the gauge.
    """
    profile = session.profile
    *_, name = session.model.name.rstrip("/").rpartition("/")
    gauge = f"{_gauge(session.resident / session.budget)} " if width >= _WIDE else ""
    parts = [
        displayable_line(name),
        displayable_line(profile.policy),
        gauge + f"{session.resident:,}/{session.budget:,} held",
        f"decay {short(profile.decay)}",
    ]
    if session.speed:
        parts.append(f"{session.speed:,.0f} tok/s")
    return " · ".join(parts)


def _gauge(share: float) -> str:
    """How full the cache is, in a few cells."""
    full = round(_CELLS * min(share, 1.0))
    return "━" * full + "─" * (_CELLS - full)
