"""SIGTERM and SIGHUP end a command in order: files are closed, archives removed; leaving early."""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

_ENDING = ("SIGTERM", "SIGHUP")


def end_in_order() -> None:
    """From now on, the signals that ask a program to end raise SystemExit, with 128 + number.

    One that is ignored, as SIGHUP under `nohup`, stays ignored.
    """
    for name in _ENDING:
        number = getattr(signal, name, None)  # Windows lacks some
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # the next one ends it at once
    sys.exit(128 + number)


def leave_opening(leaving: SystemExit) -> None:
    """End at once if a thread still loads a model: Python can't stop it in order."""
    opening = sys.modules.get("sirchat.ui.opening")  # not imported, so not running
    if opening is None or all(one.name != opening.THREAD for one in threading.enumerate()):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(leaving.code if isinstance(leaving.code, int) else 0)
