"""Ctrl-C while the model is loaded, and while it speaks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


@contextmanager
def insistent() -> Iterator[None]:
    """Let Ctrl-C end imports for sure: what cleans up behind each of them may swallow it."""
    usual, came = signal.default_int_handler, False
    in_main = threading.current_thread() is threading.main_thread()
    if signal.getsignal(signal.SIGINT) is not usual or not in_main:
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:  # whatever became of it on its way
            raise KeyboardInterrupt from None


class Interrupt:
    """As a context, turns Ctrl-C into a flag, for the engine to look at between tokens.

    Called, says whether it is set. So a forward pass is never cut in the middle. A third Ctrl-C
    raises KeyboardInterrupt, for a model that takes too long to look.
    """

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> bool:
        return self._count > 0

    def __enter__(self) -> Interrupt:
        self._count = 0
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= 3:
            raise KeyboardInterrupt
