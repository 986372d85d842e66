"""Times as people are told them."""

from __future__ import annotations

from datetime import UTC, datetime

_MAX_TIME = 253_402_300_799  # in seconds: the end of the year 9999


def local_time(seconds: float) -> datetime:
    """A UNIX time by this machine's clock; in UTC if its zone is invalid; 9999 at the latest."""
    try:
        return datetime.fromtimestamp(seconds).astimezone()
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(max(0, min(seconds, _MAX_TIME)), UTC)


def time_ago(time: float | None, now: float) -> str:
    """How long before `now` a `time` was, such as `2 days ago`; "" if unknown."""
    if time is None:
        return ""
    days = (local_time(now).date() - local_time(time).date()).days
    seconds = max(0, int(now - time))
    if days > 0 and seconds >= 6 * 3600:
        return "yesterday" if days == 1 else f"{days:,} days ago"
    for size, unit in ((3600, "hour"), (60, "minute")):
        if (count := seconds // size) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
