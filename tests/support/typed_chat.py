"""A chat at its prompt without a process: keys come by a pipe, and an emulator has the screen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import Any, Self, cast
from unittest.mock import patch

from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output.vt100 import Vt100_Output

from chatting import session
from fake_terminal import FakeTerminal
from sirchat.models.model import LoadedModel
from sirchat.ui.interrupt import CtrlCGuard
from sirchat.ui.prompt import Prompt
from sirchat.ui.repl import Chat
from sirchat.ui.screen import Screen
from sirchat.ui.typed_input import Keyboard, TerminalInput, open_history
from terminal import everything_on

CTRL_D = "\x04"


class _NoKeys(Keyboard):
    """Between two prompts nothing is typed: all keys wait for the next one."""

    def pass_keys_to_prompt(self) -> None: ...

    def escape_pressed(self) -> bool:
        return False

    def wait_for_silence(self) -> bool:
        return False

    @contextmanager
    def lend_terminal(self) -> Iterator[None]:
        yield


class _Output(Vt100_Output):
    """Knows the rows below the cursor without a question to the terminal, and so has a toolbar."""

    def get_rows_below_cursor_position(self) -> int:
        screen = cast(FakeTerminal, self.stdout).screen
        return int(screen.lines - screen.cursor.y)


class TypedChat:
    """A context manager. The fixture `terminal` gives the window; settings are as of `session`."""

    def __init__(
        self, terminal: FakeTerminal, model: LoadedModel | None = None, **settings: Any
    ) -> None:
        self.terminal, self._model, self._settings = terminal, model, settings
        self._open = ExitStack()

    def __enter__(self) -> Self:
        keys = self._open.enter_context(create_pipe_input())
        self._open.enter_context(patch.dict(os.environ, SIRCHAT_DEBUG="1"))  # raises errors
        terminal, self.pipe = self.terminal, keys
        self.session = session(self._model, **{"panel": "off", **self._settings})
        self.screen = Screen(terminal, terminal)
        self.history = open_history(self.screen.note, is_persistent=self.session.profile.save)

        def size() -> Size:
            return Size(*reversed(terminal.size()))

        output = _Output(terminal, size, term="xterm-256color", enable_cpr=False)
        prompt = Prompt(
            keys, output, history=self.history, has_colours=lambda: self.screen.has_colours
        )
        entry = TerminalInput(CtrlCGuard(), _NoKeys(keys), self.history, prompt)
        self.chat = Chat(self.session, self.screen, entry, None)
        return self

    def __exit__(self, *error: object) -> None:
        self.chat.saved_chat.close()
        self._open.close()

    def press(self, *keys: str) -> str:
        """Press keys at the prompt, then Ctrl-D; returns all that is shown meanwhile."""
        self.terminal.clear()
        self.pipe.send_text("".join(keys) + CTRL_D)
        self.chat.run()
        return everything_on(self.terminal.screen)

    def ask(self, line: str) -> str:
        """Enter a line; returns what is shown below it, up to the next prompt."""
        rows = self.press(line, "\r").split("\n")
        echo = next(at for at, row in enumerate(rows) if row.startswith("> "))
        return "\n".join(takewhile(lambda row: row != ">", rows[echo + 1 :])).rstrip()

    def said(self, turn: int = -2) -> str:
        """The text of a turn; by default of the last message."""
        return self.session.turns[turn].text
