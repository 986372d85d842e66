"""Progress of a training: lines in a log file, a bar in a terminal."""

from __future__ import annotations

import io
import re

from rich.console import Console

from sirchat.lab.progress import shown_progress


def shown(steps: dict[float, int], total: int, *, terminal: bool = False) -> str:
    """What is written while steps end at these times, in seconds."""
    file, times = io.StringIO(), iter(steps)
    console = Console(file=file, force_terminal=terminal, width=80)
    with shown_progress(console, "first step", lambda: next(times)) as show:
        for step in steps.values():
            show(step, total, f"steps, loss {step}.5")
    return file.getvalue()


def test_a_log_file_gets_the_first_step_a_line_each_half_minute_and_the_last() -> None:
    steps = {100.0 + 10 * step: step for step in range(1, 11)}
    assert shown(steps, 10).splitlines() == [
        "1 of 10 steps, loss 1.5",
        "4 of 10 steps, loss 4.5, 1 min left",
        "7 of 10 steps, loss 7.5, 30 s left",
        "10 of 10 steps, loss 10.5",
    ]


def test_steps_before_a_resume_tell_nothing_of_the_time_left() -> None:
    assert shown({0.0: 1000, 60.0: 1001}, 1003).splitlines() == [
        "1,000 of 1,003 steps, loss 1000.5",
        "1,001 of 1,003 steps, loss 1001.5, 2 min left",
    ]


def test_a_terminal_gets_a_bar() -> None:
    drawn = shown({31.0: 1, 62.0: 2}, 2, terminal=True)
    assert "\x1b" in drawn
    assert "2/2 steps, loss 2.5" in re.sub(r"\x1b\[[\d;]*m", "", drawn)
