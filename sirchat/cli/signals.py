"""SIGTERM and SIGHUP end a command in order: files are closed, archives removed; leaving early."""

import os
import signal
import sys
import threading
import warnings
from contextlib import suppress
from types import FrameType

_ENDING = ("SIGTERM", "SIGHUP")


def end_in_order() -> None:
    """From now on, the signals that ask a program to end raise SystemExit, with 128 + number.

    One that is ignored, as SIGHUP under `nohup`, stays ignored.
    """
    sys.unraisablehook = _send_again
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    for name in _ENDING:
        number = getattr(signal, name, None)  # Windows lacks some
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)


def leave_terminal() -> None:
    """Show the cursor, which a progress bar may have hidden and a signal kept it from showing.

    However a command ends, this is the last that it does: from here on Ctrl-C ends the process at
    once, and not in a traceback.
    """
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "rich.live" in sys.modules:
        _show_cursor()
    with suppress(ValueError):
        signal.signal(signal.SIGINT, _leave_at_once)


def _show_cursor() -> None:
    for stream in (sys.stderr, sys.stdout):
        if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            with suppress(OSError):
                stream.write("\x1b[?25h")
                stream.flush()
            return


def _is_ending(code: object) -> bool:
    """Whether an exit code says that a signal asked the program to end."""
    return code in {128 + getattr(signal, name, 0) for name in _ENDING} - {128}


def _send_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Send a signal once more that came where Python ignores exceptions, such as in a __del__."""
    code = getattr(ignored.exc_value, "code", None)
    if _is_ending(code):
        number = int(code)  # type: ignore[arg-type]
        signal.signal(number - 128, _leave)
    elif isinstance(ignored.exc_value, KeyboardInterrupt):
        number = 128 + signal.SIGINT
    else:  # of a library that a signal interrupted; it would be a traceback
        if "--debug" in sys.argv:
            sys.__unraisablehook__(ignored)
        return
    threading.Timer(0.02, os.kill, (os.getpid(), number - 128)).start()


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # the next one ends it at once
    sys.exit(128 + number)


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(128 + number)


def leave_opening(leaving: SystemExit) -> None:
    """End at once if a thread still loads a model: Python can't stop it in order."""
    opening = sys.modules.get("sirchat.ui.opening")  # not imported, so not running
    if opening is None or all(one.name != opening.THREAD for one in threading.enumerate()):
        return
    leave_terminal()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(leaving.code if isinstance(leaving.code, int) else 0)
