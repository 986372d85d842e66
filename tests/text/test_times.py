"""Words of time in a message, and the turns that they mean."""

import time
from datetime import datetime

import pytest

from sirchat.text.times import local_time, time_ago, time_range

NOW = datetime(2026, 11, 26, 15, 30).timestamp()  # a Thursday


def span(text: str) -> tuple[str, str] | None:
    found = time_range(text, NOW)
    if found is None:
        return None
    start, end = (datetime.fromtimestamp(at) for at in (found.start, found.end))
    return f"{start:%d.%m. %H}", f"{end:%d.%m. %H}"


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("What did I tell you yesterday?", "25.11. 00", "26.11. 00"),
        ("What did we eat the day before yesterday?", "24.11. 00", "25.11. 00"),
        ("today", "26.11. 00", "27.11. 00"),
        ("Which book did I name this morning?", "26.11. 00", "26.11. 12"),
        ("last night", "25.11. 18", "26.11. 05"),
        ("last week", "16.11. 00", "23.11. 00"),
        ("what I said on Monday", "23.11. 00", "24.11. 00"),
        ("on Thursday", "19.11. 00", "20.11. 00"),  # not today
        ("three days ago", "23.11. 00", "24.11. 00"),
        ("2 weeks ago", "12.11. 00", "19.11. 00"),
    ],
)
def test_words_of_time_mean_a_span(text: str, start: str, end: str) -> None:
    assert span(text) == (start, end)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("first", "first"),
        ("last", "last"),
        ("What was the first thing I told you?", "first"),
        ("What did we talk about at the beginning?", "first"),
        ("What did I say last?", "last"),
        *((text, None) for text in ("What is my last name?", "Who came first in the race?")),
        *((text, None) for text in ("Is Mondays a word?", "")),
    ],
)
def test_words_of_order_mean_a_place_in_the_chat(text: str, place: str | None) -> None:
    found = time_range(text, NOW)
    assert (found.place if found else None) == place


@pytest.mark.parametrize("zone", ["UTC", "XYZ-99", "nowhere"])
def test_a_time_is_known_in_any_zone_and_at_any_clock(
    zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert abs(local_time(NOW).timestamp() - NOW) < 1
        assert [local_time(at).year for at in (1e12, -1e12)] == [9999, 1970]
    finally:
        monkeypatch.undo()
        time.tzset()
    beyond = (1e13, 253_402_200_000, -1e13)  # all calendars
    assert [time_range("this month", now) for now in beyond] == [None] * 3


def test_how_long_ago() -> None:
    steps = (5, 90, 3 * 3600, 20 * 3600, 86_400 * 3)
    said = [time_ago(NOW - seconds, NOW) for seconds in steps]
    assert said == ["just now", "1 minute ago", "3 hours ago", "yesterday", "3 days ago"]
    assert time_ago(None, NOW) == ""


def test_turns_of_a_time_are_those_that_began_then() -> None:
    yesterday, today = NOW - 86_400, NOW - 60
    asked = time_range("yesterday", NOW)
    assert asked is not None
    assert asked.turns([None, yesterday, yesterday, today]).tolist() == [False, True, True, False]
    first, last = time_range("first", NOW), time_range("last", NOW)
    assert first is not None
    assert last is not None
    assert first.turns([None] * 20).nonzero()[0].tolist() == [0, 1]
    assert last.turns([None] * 3).tolist() == [False, False, True]
