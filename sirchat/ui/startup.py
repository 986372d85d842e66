"""A chat begins: the prompt is there at once, while a thread loads the model.

Until the session is open, this module reads the first line, and imports nothing heavy. Then it
hands over to `repl.py`, even in the middle of a line.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from sirchat.chat.model_defaults import follows_model
from sirchat.config.profile import Profile
from sirchat.ui.attaching import complete_path, path_begun
from sirchat.ui.line_input import LineInput, line_input
from sirchat.ui.prompt import Line, Prompt
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line

if TYPE_CHECKING:
    from sirchat.chat.events import Event
    from sirchat.chat.session import Session
    from sirchat.saved.store import SessionStore
    from sirchat.ui.repl import Chat

_LEAVING = ("/exit", "/quit", "/bye")
"""Commands that need no session."""


def chat(
    open_session: Open,
    profile: Profile,
    screen: Screen,
    *,
    store: SessionStore | None = None,
    debug: bool = False,
    trusted: Collection[str] = (),
) -> None:
    """Load the model of a profile, and chat until the user leaves.

    The chat is saved if its settings say so; `store` is the file it was resumed from, if any.
    `trusted` are the `module:Class` policies that profiles and saved chats may name.

    A new chat on a terminal shows its prompt at once. Elsewhere, and before a saved chat, whose
    last turns come first, the loading is shown. Raises what goes wrong in loading. An error in a
    turn is shown, and the chat goes on; with `debug`, unexpected errors are raised.
    """
    with line_input(screen) as entry:
        first = _FirstPrompt(open_session, profile, screen, entry, store, debug, trusted)
        try:
            first.run(at_once=store is None and screen.terminal is not None)
        finally:
            first.close()
        first.say_where()


class _FirstPrompt:
    """From the start of a chat until its session is open."""

    def __init__(
        self,
        open_session: Open,
        profile: Profile,
        screen: Screen,
        entry: LineInput,
        store: SessionStore | None,
        debug: bool,
        trusted: Collection[str],
    ) -> None:
        self._open = open_session
        self._profile = profile
        self._screen = screen
        self._entry = entry
        self._rest = store, debug, trusted
        self._chat: Chat | None = None  # once the session is open

    def run(self, *, at_once: bool) -> None:
        """Chat until the user leaves; `at_once`: show the prompt while the model loads."""
        if not at_once:
            from sirchat.ui.progress import loading_bar

            with loading_bar(self._screen, self._profile.model) as report:
                session = self._open(report)
            self._begin(session, session.start()).run()
            return
        opening = SessionLoader(self._open, self._entry.prompt.redraw)
        try:
            line = self._read(opening)
        except KeyboardInterrupt:
            if self._chat is None:
                raise
            self._screen.note("Ctrl-D or /exit leaves")
            self._chat.run()
            return
        if line is None or (self._chat is None and line.is_command and line.text in _LEAVING):
            return
        chat = self._chat or self._wait(opening)
        chat.run(line)

    def close(self) -> None:
        """Save the chat, if it has begun."""
        if self._chat is not None:
            self._chat.close()

    def say_where(self) -> None:
        """Say where the chat is kept, once it is closed."""
        if self._chat is not None:
            self._chat.say_where()

    def _read(self, opening: SessionLoader) -> Line | None:
        """The first line; the chat begins above the prompt if it is ready before that."""

        async def hand_over() -> None:
            prompt = self._entry.prompt
            opening.begin()
            try:
                session, events = await asyncio.wrap_future(opening.session)
                if self._chat is None:
                    prompt.print_above(lambda: self._begin(session, events))
            except Exception as error:
                prompt.give_up(error)

        self._entry.prompt.serve(
            _EarlyCompleter(opening, self._entry.prompt), lambda: self._toolbar(opening)
        )
        self._entry.keyboard.keep_typed()
        return self._entry.prompt.read(meanwhile=hand_over)

    def _wait(self, opening: SessionLoader) -> Chat:
        """The chat, once the session is open; Ctrl-C raises KeyboardInterrupt."""
        from sirchat.ui.progress import loading_bar

        with loading_bar(self._screen, self._profile.model) as bar:
            opening.show_on(bar)
            opening.begin()  # where the line was there before the prompt
            session, events = opening.session.result()
        return self._begin(session, events)

    def _begin(self, session: Session, events: Iterable[Event]) -> Chat:
        from sirchat.ui.repl import Chat

        chat = Chat(session, self._screen, self._entry, *self._rest)
        chat.greet(events)
        self._chat = chat
        return chat

    def _toolbar(self, opening: SessionLoader) -> str:
        *_, name = self._profile.model.rstrip("/").rpartition("/")
        parts = [displayable_line(name), displayable_line(self._profile.policy)]
        if not follows_model(self._profile, self._profile.model):
            parts.append(f"budget {self._profile.budget:,}")
        return " · ".join([*parts, displayable_line(opening.step) or "loading"])


class _EarlyCompleter(Completer):
    """Completes names of files at once; commands, once the session is open."""

    def __init__(self, opening: SessionLoader, prompt: Prompt) -> None:
        self._opening, self._prompt = opening, prompt

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        begun = path_begun(document.text_before_cursor)
        return iter(()) if begun is None else complete_path(begun, event)

    async def get_completions_async(
        self, document: Document, event: CompleteEvent
    ) -> AsyncGenerator[Completion, None]:
        if path_begun(document.text_before_cursor) is None:
            with suppress(Exception):  # the prompt says it
                await asyncio.wrap_future(self._opening.session)
        now = self._prompt.completer
        if now is self:
            for completion in self.get_completions(document, event):
                yield completion
        else:
            async for completion in now.get_completions_async(document, event):
                yield completion


if TYPE_CHECKING:  # the thread imports what loads a model
    from sirchat.chat.events import Event
    from sirchat.chat.session import Session
    from sirchat.models.progress import Progress

    Open = Callable[[Progress | None], Session]
    """Loads the model and opens a session, reporting progress."""

THREAD = "opening a session"
"""Name of the thread."""

_SWITCH_SECONDS = 0.0005
"""How long the thread may keep Python's lock while a key waits: the prompt takes it many times for
each key."""

_REPORT_SECONDS = 0.25  # between two calls of `on_step`


class SessionLoader:
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


def preload_torch() -> None:
    """Load torch's largest library, on Linux; `import torch` then finds it loaded.

    An import, and ctypes' own loading, hold the lock for some tenths of a second: no key would be
    echoed. A call of a C function does not. Whatever fails here is left to the import.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    with suppress(ImportError, AttributeError, OSError):
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return
        library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
        load = ctypes.CDLL(None).dlopen
        load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        load(os.fsencode(library), os.RTLD_NOW)
