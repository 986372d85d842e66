"""Progress of long work: lines in a log file, a bar in a terminal, times in words."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from sirchat.lab.progress import duration, with_progress


def lines_of(times: list[float], total: int, known: int = 0, *, terminal: bool = False) -> str:
    """What is written while units finish at these times, in seconds."""
    file, now = io.StringIO(), 0.0

    def units() -> Iterator[float]:
        nonlocal now
        for second in times:
            now = second
            yield second

    console = Console(file=file, force_terminal=terminal, width=60)
    passed = with_progress(units(), total, known, "facts", console=console, clock=lambda: now)
    assert list(passed) == times
    return file.getvalue()


def test_a_log_file_gets_a_line_at_the_start_every_half_minute_and_at_the_end() -> None:
    times = [float(second) for second in range(10, 101, 10)]
    assert lines_of(times, 10).splitlines() == [
        "facts: 0 of 10",
        "facts: 3 of 10, 1 min left",
        "facts: 6 of 10, 40 s left",
        "facts: 9 of 10, 10 s left",
        "facts: 10 of 10",
    ]


def test_units_known_from_before_count_but_tell_nothing_of_the_time_left() -> None:
    assert lines_of([60.0, 120.0], 80, known=78).splitlines() == [
        "facts: 78 of 80",
        "facts: 79 of 80, 1 min left",
        "facts: 80 of 80",
    ]
    assert lines_of([], 80, known=80).splitlines() == ["facts: 80 of 80"]


def test_a_terminal_gets_a_bar() -> None:
    drawn = lines_of([31.0, 62.0], 2, terminal=True)
    assert "\x1b" in drawn
    assert "1/2" in drawn or "2/2" in drawn


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (59.7, "1 min"), (3_599, "1 h 0 min"), (7_500, "2 h 5 min")],
)
def test_a_time_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
