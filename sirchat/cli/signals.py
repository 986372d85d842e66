"""Handles closed standard streams, and ends the program cleanly after a signal."""

import os
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from types import FrameType
from typing import Any

from sirchat.errors import shows_tracebacks

_EXIT_SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT")  # SIGQUIT is Ctrl-\
_GRACE_SECONDS = 1.0  # from a signal to the check whether the program is ending


def prepare_streams() -> str:
    """Replace closed standard streams, and print `?` for characters that the locale lacks.

    Returns an error text if standard output is closed, else "".
    """
    closed = sys.stdout is None
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, _open_null_device(number, mode))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    return "standard output is closed" if closed else ""


def install_exit_handlers() -> None:
    """Let terminating signals raise SystemExit(128 + number), unless they are ignored.

    Ctrl-Z shows the cursor, which a progress bar may have hidden.
    """
    exit_handler = _ExitHandler()
    sys.unraisablehook = exit_handler.send_ignored_again
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    for name in _EXIT_SIGNALS:
        number = getattr(signal, name, None)  # Windows lacks some signals
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, exit_handler)
    if hasattr(signal, "SIGTSTP") and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, _suspend)


def restore_terminal() -> None:
    """The last step of a command: show the cursor, and let signals end the program at once."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "rich.live" in sys.modules:
        _show_cursor()
    with suppress(ValueError):
        signal.signal(signal.SIGINT, _exit_at_once)
        for name in _EXIT_SIGNALS:
            if isinstance(signal.getsignal(getattr(signal, name, 0)), _ExitHandler):
                signal.signal(getattr(signal, name), _exit_at_once)


def exit_while_loading(exit_request: SystemExit) -> None:
    """End the process at once if a thread still loads a model, because Python can't stop it.

    Python would end such a thread at its next return from C++, which then aborts the process.
    """
    loading = sys.modules.get("sirchat.models.new_thread")  # not imported, so no thread of it runs
    names = [thread.name for thread in threading.enumerate()]
    if loading is not None and loading.LOADER_THREAD in names:
        restore_terminal()
        _exit(exit_request.code if isinstance(exit_request.code, int) else 0)


class _ExitHandler:
    """Signal handler: the first signal raises SystemExit, a later one ends the program at once.

    Signals within a second of the first are ignored: a closing terminal sends several.
    """

    def __init__(self) -> None:
        self._first_signal: float | None = None  # time in seconds; None: no signal has come
        self._exit_step: Any = None  # the step of an event loop that raises SystemExit

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._first_signal is not None:
            if time.monotonic() > self._first_signal + _GRACE_SECONDS:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._first_signal = time.monotonic()
        watch = threading.Timer(_GRACE_SECONDS, self._send_swallowed_again, (number,))
        watch.daemon = True
        with suppress(RuntimeError):  # no thread can be started: Python is ending
            watch.start()
        asyncio = sys.modules.get("asyncio")
        loop = asyncio and asyncio._get_running_loop()
        if self._exit_step is not None:  # the loop did not come to it
            self._exit_step.cancel()
        elif loop:
            # Raised at any other place, it could lose a task's next step, and the loop would wait
            # for this task for ever.
            self._exit_step = loop.call_soon_threadsafe(sys.exit, 128 + number)
            return
        sys.exit(128 + number)

    def _send_swallowed_again(self, number: int) -> None:
        """Send the signal again if a library caught the SystemExit and the program goes on."""
        if not isinstance(signal.getsignal(number), _ExitHandler):  # `restore_terminal` ran
            return
        handled = sys._current_exceptions().get(threading.main_thread().ident or 0)
        error = handled[1] if isinstance(handled, tuple) else handled  # a tuple until Python 3.11
        while error is not None:  # an error raised later has the SystemExit as its context
            if isinstance(error, SystemExit):
                return
            error = error.__context__
        self._first_signal = None
        os.kill(os.getpid(), number)

    def send_ignored_again(self, ignored: "sys.UnraisableHookArgs") -> None:
        """Send a signal again whose exception Python ignored, as in `__del__`."""
        code = getattr(ignored.exc_value, "code", None)
        if _is_exit_code(code):
            number = int(code)  # type: ignore[arg-type]
            self._first_signal = None
        elif isinstance(ignored.exc_value, KeyboardInterrupt):
            number = 128 + signal.SIGINT
        else:  # an error of a library that was interrupted; it would print a traceback
            if shows_tracebacks():
                sys.__unraisablehook__(ignored)
            return
        threading.Timer(0.02, os.kill, (os.getpid(), number - 128)).start()


def _show_cursor() -> None:
    for stream in (sys.stderr, sys.stdout):
        if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            with suppress(OSError):
                stream.write("\x1b[?25h")
                stream.flush()
            return


def _suspend(number: int, frame: FrameType | None) -> None:
    if "rich.live" in sys.modules and os.isatty(2):  # whose bar has replaced `sys.stderr`
        os.write(2, b"\x1b[?25h")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.signal(number, _suspend)


def _is_exit_code(code: object) -> bool:
    return code in {128 + getattr(signal, name, 0) for name in _EXIT_SIGNALS} - {128}


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    _exit(128 + number)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _open_null_device(number: int, mode: str) -> Any:
    """Open the null device as descriptor `number`, so that no later file gets this number."""
    opened = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    return open(number, mode, encoding="utf-8", closefd=False)
