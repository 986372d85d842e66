"""A time in words, for progress and reports."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time in words: `40 s`, `3 min`, `2 h 5 min`."""
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
