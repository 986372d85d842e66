"""Handles Ctrl-C while modules are imported, while another program runs, and during a reply."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """Context manager for imports: Ctrl-C ends them with KeyboardInterrupt.

    If an imported module catches this KeyboardInterrupt, it is raised again at the end.
    """
    usual, pressed = signal.default_int_handler, False
    in_main = threading.current_thread() is threading.main_thread()
    if signal.getsignal(signal.SIGINT) is not usual or not in_main:
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if pressed:  # even if the first one was swallowed
            raise KeyboardInterrupt from None


@contextmanager
def left_to_child() -> Iterator[None]:
    """Context manager: this program ignores Ctrl-C; only its child (pager, editor) handles it."""
    before = signal.signal(signal.SIGINT, lambda *_: None)  # SIG_IGN would be inherited
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Interrupt:
    """Context manager: Ctrl-C sets a flag, and does not raise KeyboardInterrupt.

    The engine, which runs the model, checks the flag between two tokens; a forward pass is never
    interrupted. Calling the object returns whether the flag is set. The third Ctrl-C raises
    KeyboardInterrupt, because the next check may take too long.
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
