"""A time in words."""

from __future__ import annotations

import pytest

from sirchat.text.duration import duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (59.7, "1 min"), (3_599, "1 h 0 min"), (7_500, "2 h 5 min")],
)
def test_a_time_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
