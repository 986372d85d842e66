"""A progress bar of one row."""

from __future__ import annotations

from rich.text import Text

from sirchat.ui.theme import Theme

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def draw_bar(name: str, done: int, total: int, theme: Theme, width: int) -> Text:
    """One row: `reading ████▌      512 of 4,096 tokens`."""
    head, tail = f"{name} ", f" {done:,} of {total:,} tokens"
    room = max(4, min(40, width - 1 - len(head) - len(tail)))
    eighths = 8 * room * min(done, total) // max(1, total)
    bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
    text = Text(no_wrap=True, overflow="crop")
    text.append(head, theme.quiet)
    text.append(bar.ljust(room), theme.gauge)
    text.append(tail, theme.quiet)
    return text
