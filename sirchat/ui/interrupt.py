"""Handles Ctrl-C in a chat: during imports, in another program and during a reply."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

# What may take long, and changes nothing that lasts: a forward pass, scores.
_INTERRUPTIBLE = ("sirchat.models.", "sirchat.memory.policies.")
# Methods of `Session` that change tokens and text, which must fit together
CHANGES = ("undo", "restore", "pin", "erase", "switch", "reset")
# What undoes tokens, which are gone before a policy chooses anew, or brings them back
_RETRY = "sirchat.chat.retry"
_UNDOING = {("sirchat.chat.session", "return_to"), (_RETRY, "trial"), (_RETRY, "answer_as_before")}
# What makes a new session, which is dropped if Ctrl-C stops it
_READING = {("sirchat.chat.rereading", "read_again"), ("sirchat.saved.resume", "resume_session")}


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """Context manager for imports: Ctrl-C ends them, even if one swallows KeyboardInterrupt."""
    default_handler, is_pressed = signal.default_int_handler, False
    is_main = threading.current_thread() is threading.main_thread()
    if signal.getsignal(signal.SIGINT) is not default_handler or not is_main:
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default_handler)
        if is_pressed:
            raise KeyboardInterrupt from None


@contextmanager
def leave_ctrl_c_to_child() -> Iterator[None]:
    """Context manager: only a child process (pager, editor) handles Ctrl-C."""
    former = signal.signal(signal.SIGINT, lambda *_: None)  # SIG_IGN would be inherited
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Context manager for drawing: the first signal of each kind is handled at the end.

    A second one is handled at once, because a terminal may take no output.
    """
    # An exception in the midst of a `write` loses the rest of the text, of a sequence, too.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")  # Windows lacks some
    numbers = {getattr(signal, name, signal.SIGINT) for name in names}
    handlers = {number: signal.getsignal(number) for number in numbers}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    deferred = list[int]()

    def defer(number: int, frame: FrameType | None) -> None:
        deferred.append(number)
        signal.signal(number, handlers[signal.Signals(number)])

    try:
        for number in handlers:
            signal.signal(number, defer)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for signal_number in deferred:
            signal.raise_signal(signal_number)


class _CtrlCHandler:
    def __enter__(self) -> Self:
        self._former_handler = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._former_handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class CtrlCGuard(_CtrlCHandler):
    """Context manager for a whole chat: Ctrl-C does nothing except in `interruptible`.

    So a surplus Ctrl-C never ends the chat, even between two prompts, nor any change of it halfway.
    """

    _is_interruptible = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context manager: the first Ctrl-C inside raises KeyboardInterrupt, except in a change."""
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_interruptible and not _is_changing_chat(frame):
            self._is_interruptible = False
            raise KeyboardInterrupt


class InterruptFlag(_CtrlCHandler):
    """Context manager; calling it returns whether Ctrl-C was pressed inside.

    The engine calls it between two forward passes. The third Ctrl-C raises KeyboardInterrupt, or
    the first one after it that does not come while tokens are moved or noted.
    """

    _count = 0

    def __call__(self) -> bool:
        return self._count > 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= 3 and not _is_changing_chat(frame):  # the next check may take too long
            raise KeyboardInterrupt


def _is_changing_chat(frame: FrameType | None) -> bool:
    """Whether a change of a chat is at work, which must not end halfway, but not a model."""
    is_change = is_waiting = False
    while frame is not None:
        name, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        if (name, function) in _UNDOING | _READING:
            return (name, function) in _UNDOING
        is_waiting |= not is_change and f"{name}.".startswith(_INTERRUPTIBLE)
        is_change |= name == "sirchat.chat.session" and function in CHANGES
        is_change |= f"{name}.".startswith(("sirchat.engine.", "sirchat.memory."))
        frame = frame.f_back
    return is_change and not is_waiting
