"""SIGTERM and SIGHUP end a command in order: files are closed, archives removed."""

import signal
import sys
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
