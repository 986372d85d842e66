"""Finds the time, or the place in a chat, that a text asks for by a word such as `yesterday`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import inf

import numpy as np
from numpy.typing import NDArray

_SHARE = 10  # the beginning of a chat is a tenth of its turns, and so is its end
_DAY = timedelta(days=1)
_NUMBERS = ("a", "one", "two", "three", "four", "five", "six", "seven")  # "a" is 1, too

_MAX_TIME = 253_402_300_799  # in seconds: the end of the year 9999

_Span = tuple[datetime, datetime]


@dataclass(frozen=True)
class TimeRange:
    """Turns that a text asks for: those that began from `start` until before `end`, UNIX seconds.

    A `place` of `first` or `last` means the start or the end of the chat instead.
    """

    words: str  # the words of the text that say so
    start: float = -inf
    end: float = inf
    place: str = ""

    def turns(self, times: Sequence[float | None]) -> NDArray[np.bool_]:
        """A mask [n] of turns in this range, by the time when each began, if known."""
        if self.place:
            size, number = -(-len(times) // _SHARE), np.arange(len(times))
            return number < size if self.place == "first" else number >= len(times) - size
        known = np.array([np.nan if time is None else time for time in times], np.float64)
        return (known >= self.start) & (known < self.end)


def time_range(text: str, now: float) -> TimeRange | None:
    """The time that `text` asks for at the UNIX time `now`; None if it names none."""
    for pattern, span in _SPANS:
        if match := pattern.search(text):
            with suppress(ValueError, OverflowError, OSError):  # no calendar has the clock's day
                today = datetime.fromtimestamp(now)
                start, end = span(today.replace(hour=0, minute=0, second=0, microsecond=0), match)
                return TimeRange(match[0], start.timestamp(), end.timestamp())
    for pattern, place in _PLACES:
        if match := pattern.search(text):
            return TimeRange(match[0], place=place)
    return None


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


def _days(first: int, last: int = 0, hours: tuple[int, int] = (0, 24)) -> Callable[..., _Span]:
    """From the day `first` to the day `last`, counted from today, between these hours."""

    def span(today: datetime, match: re.Match[str]) -> _Span:
        start, end = today + first * _DAY, today + (last or first) * _DAY
        return start + timedelta(hours=hours[0]), end + timedelta(hours=hours[1])

    return span


def _weekday(today: datetime, match: re.Match[str]) -> _Span:
    back = (today.weekday() - _WEEKDAYS.index(match["day"].casefold()) - 1) % 7 + 1
    return today - back * _DAY, today - (back - 1) * _DAY


def _ago(today: datetime, match: re.Match[str]) -> _Span:
    word = match["count"].casefold()
    count = max(1, _NUMBERS.index(word)) if word in _NUMBERS else min(int(word), 10_000)
    size = 7 if match["unit"].casefold().startswith("week") else 1
    return today - count * size * _DAY, today - (count * size - size) * _DAY


def _weeks(back: int) -> Callable[..., _Span]:
    def span(today: datetime, match: re.Match[str]) -> _Span:
        monday = today - (today.weekday() + 7 * back) * _DAY
        return monday, monday + 7 * _DAY

    return span


_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_COUNT = rf"(?P<count>\d+|{'|'.join(_NUMBERS)})"
_SPEECH_VERBS = r"say|said|tell|told|ask|asked|mention|mentioned|write|wrote|written|talk|talked"

# What is searched for in a text, and the time that it means. Another language is more lines; of
# several that fit, the first counts.
_SPANS: list[tuple[re.Pattern[str], Callable[..., _Span]]] = [
    (re.compile(rf"\b(?:{words})\b", re.IGNORECASE), span)
    for words, span in (
        ("the day before yesterday", _days(-2)),
        ("yesterday morning", _days(-1, hours=(0, 12))),
        ("yesterday (?:evening|night)|last night", _days(-1, hours=(18, 29))),
        ("yesterday", _days(-1)),
        ("this morning", _days(0, hours=(0, 12))),
        ("this afternoon", _days(0, hours=(12, 18))),
        ("this evening|tonight", _days(0, hours=(18, 24))),
        ("earlier today|today", _days(0)),
        (rf"{_COUNT} (?P<unit>days?|weeks?) ago", _ago),
        ("last week", _weeks(1)),
        ("this week", _weeks(0)),
        (rf"(?:on|last) (?P<day>{'|'.join(_WEEKDAYS)})", _weekday),
    )
]
_PLACES = [
    (re.compile(rf"^\W*{place}\W*$|{words}", re.IGNORECASE), place)
    for place, words in (
        (
            "first",
            r"\b(?:at|in) the (?:very )?(?:beginning|start)\b|\bfirst (?:thing|message|question)\b|"
            rf"\b(?:{_SPEECH_VERBS})\b[^.!]*\bfirst\b|\bfirst (?:{_SPEECH_VERBS})\b",
        ),
        (
            "last",
            r"\blast (?:thing|message|question)\b|\bmost recently\b|"
            rf"\b(?:{_SPEECH_VERBS})\b[^.!]*\blast\W*$|\blast (?:{_SPEECH_VERBS})\b",
        ),
    )
]
