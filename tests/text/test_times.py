"""Times as people are told them."""

import time
from datetime import datetime

import pytest

from sirchat.text.times import local_time, time_ago

NOW = datetime(2026, 11, 26, 15, 30).timestamp()  # a Thursday


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


def test_how_long_ago() -> None:
    steps = (5, 90, 3 * 3600, 20 * 3600, 86_400 * 3)
    said = [time_ago(NOW - seconds, NOW) for seconds in steps]
    assert said == ["just now", "1 minute ago", "3 hours ago", "yesterday", "3 days ago"]
    assert time_ago(None, NOW) == ""
