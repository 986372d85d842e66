"""A session is opened by a thread, so that the prompt is there meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from sirchat.models.preload import preload_torch

if TYPE_CHECKING:  # the thread imports what loads a model
    from sirchat.chat.events import Event
    from sirchat.chat.session import Session
    from sirchat.models.bars import Progress

    Open = Callable[[Progress | None], Session]
    """Loads the model and opens a session, reporting progress."""

THREAD = "opening a session"
"""Name of the thread."""

_SWITCH_SECONDS = 0.0005
"""How long the thread may keep Python's lock while a key waits: the prompt takes it many times for
each key."""

_REPORT_SECONDS = 0.25  # between two calls of `on_step`


class Opening:
    """Opens a session in a thread that ends with the program.

    Attributes:
        session: becomes the session and the events of its start, or the error.
        step: what is being done, such as `Loading weights 3/30`; empty before that is known.
    """

    def __init__(self, open_session: Open, on_step: Callable[[], None]) -> None:
        self.session: Future[tuple[Session, list[Event]]] = Future()
        self.session.set_running_or_notify_cancel()  # now nobody who waits can cancel it
        self.step = ""
        self._open = open_session
        self._on_step = on_step
        self._reported = 0.0
        self._has_begun = False
        self._bar: Progress | None = None

    def begin(self) -> None:
        """Start the thread. Not before the prompt is drawn: libraries that load hold it up."""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=self._run, name=THREAD, daemon=True).start()

    def show_on(self, bar: Progress | None) -> None:
        """Report to a bar, too, from now on."""
        self._bar = bar

    def _run(self) -> None:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            preload_torch()
            session = self._open(self._report)
            started = list(session.start())
        except BaseException as error:
            self.session.set_exception(error)
        else:
            self.session.set_result((session, started))
        finally:
            sys.setswitchinterval(usual)

    def _report(self, step: str, done: int, total: int | None) -> None:
        self.step = f"{step} {done:,}/{total:,}" if total else step
        if self._bar is not None:
            self._bar(step, done, total)
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            self._on_step()
