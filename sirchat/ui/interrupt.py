"""What Ctrl-C does in a chat, during imports, in another program and during a reply.

While the screen is drawn, every signal waits.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """Context manager for imports: Ctrl-C ends them, even if one swallows KeyboardInterrupt."""
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
        if pressed:
            raise KeyboardInterrupt from None


@contextmanager
def leave_ctrl_c_to_child() -> Iterator[None]:
    """Context manager: this program ignores Ctrl-C; only its child (pager, editor) handles it."""
    before = signal.signal(signal.SIGINT, lambda *_: None)  # SIG_IGN would be inherited
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Context manager for drawing: a signal that raises an exception here does so only at the end.

    The next one does so at once, because a terminal may take no output.
    """
    # An exception in the midst of a `write` loses the rest of the text, of a sequence, too.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    numbers = [getattr(signal, name, signal.SIGINT) for name in names]
    handlers = {number: signal.getsignal(number) for number in numbers}
    usual = {number: handler for number, handler in handlers.items() if callable(handler)}
    held = list[int]()

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)
        signal.signal(number, usual[signal.Signals(number)])

    try:
        for number in usual:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


class CtrlCGuard:
    """Context manager for a whole chat: Ctrl-C does nothing, but where `interruptible` lets it.

    So no Ctrl-C more than was meant ends the chat, wherever between two prompts it comes.
    """

    def __init__(self) -> None:
        self._raises = False

    def __enter__(self) -> CtrlCGuard:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context manager: inside, the first Ctrl-C raises KeyboardInterrupt, and no other."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt


class InterruptFlag:
    """Context manager: Ctrl-C sets a flag, which a call of the object returns.

    The third Ctrl-C raises KeyboardInterrupt.

    The engine checks the flag between two tokens; a forward pass is never interrupted.
    """

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> bool:
        return self._count > 0

    def __enter__(self) -> InterruptFlag:
        self._count = 0
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= 3:  # the next check may take too long
            raise KeyboardInterrupt
