"""The keyboard between two prompts, and the history of typed lines."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from filelock import FileLock
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.output.plain_text import PlainTextOutput

from sirchat import paths
from sirchat.ui.interrupt import CtrlCGuard
from sirchat.ui.keys import ESCAPE_SECONDS, terminal_keys
from sirchat.ui.prompt import Prompt
from sirchat.ui.screen import Screen

if sys.platform != "win32":
    import termios

    from sirchat.ui.keys import TerminalKeys

_IGNORED_KEYS = (Keys.CPRResponse, Keys.SIGINT)
_SILENCE_SECONDS = 0.35
_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
_CURSOR_ON = "\x1b[?25h"
_ERASE_BELOW = "\x1b[J"


@dataclass(frozen=True)
class TerminalInput:
    ctrl_c: CtrlCGuard
    keyboard: Keyboard
    history: TypedHistory
    prompt: Prompt


@contextmanager
def open_terminal_input(screen: Screen, *, is_persistent: bool = True) -> Iterator[TerminalInput]:
    """Context manager: the terminal echoes no keys; `is_persistent` saves typed lines."""
    keys = terminal_keys()
    with CtrlCGuard() as ctrl_c, Keyboard(keys, screen.terminal) as keyboard:
        history = open_history(screen.note, is_persistent=is_persistent)
        output = create_prompt_output(screen)
        prompt = Prompt(keys, output, history=history, has_colours=lambda: screen.has_colours)
        yield TerminalInput(ctrl_c, keyboard, history, prompt)


def create_prompt_output(screen: Screen) -> Output:
    """The terminal, as a prompt writes to it: plain text if the terminal is dumb."""
    if screen.is_dumb:
        return PlainTextOutput(sys.stdout)
    return create_output(always_prefer_tty=True)


def open_history(warn: Callable[[str], None], *, is_persistent: bool = True) -> TypedHistory:
    """The history of typed lines in its file; in memory, after a `warn`, if that is not writable.

    Unless `is_persistent`, the file is read but not written.
    """
    path = paths.history_file()
    try:
        if is_persistent:
            paths.make_private_dir(path.parent)
            paths.open_private(path, "a").close()
    except OSError as error:
        warn(f"the input history is not kept: {error}")
        return MemoryHistory()
    history = _PrivateFileHistory(str(path))
    history.is_persistent = is_persistent
    return history


class TypedHistory(History):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)  # of the other base class
        self.typed_by_message = dict[str, str]()  # where a file's text is in the message
        self.is_persistent = True  # whether new lines are written to the file

    def lines(self) -> list[str]:
        return list(self.load_history_strings())  # the newest first

    def erase(self, matches: Callable[[str], bool]) -> None:
        """Erase the lines that match; raises OSError if their file can't be written."""
        self._loaded_strings = [line for line in self._loaded_strings if not matches(line)]
        typed = self.typed_by_message.items()
        self.typed_by_message = {message: line for message, line in typed if not matches(line)}


class MemoryHistory(TypedHistory, InMemoryHistory):
    def erase(self, matches: Callable[[str], bool]) -> None:
        self._storage = [line for line in self._storage if not matches(line)]
        super().erase(matches)


class Keyboard:
    """Context manager: the terminal echoes no keys, and Ctrl-C still sends a signal.

    `keys` are shared with the prompt; `out` is the terminal, None if nothing may be written to it.
    """

    def __init__(self, keys: Input, out: Any = None) -> None:
        self._keys = keys
        self._out = out
        self._is_paste_bracketed = False
        self._pressed_keys: list[KeyPress] = []
        self._terminal_mode: list[Any] | None = None  # the terminal's mode; None where it has none
        self._suspend_handler: Any = None  # of Ctrl-Z, before this object was entered

    def __enter__(self) -> Keyboard:
        if sys.platform != "win32":
            self._terminal_mode = termios.tcgetattr(self._keys.fileno())
            self._suspend_handler = signal.signal(signal.SIGTSTP, self._suspend)
            self._disable_echo()
            # In what was typed before, the terminal has turned Enter into a newline.
            self._pressed_keys = [_newline_to_enter(press) for press in self._keys.read_keys()]
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if sys.platform != "win32":
            signal.signal(signal.SIGTSTP, self._suspend_handler)
        self._restore_mode()
        if kind is not None:  # a signal may have come while a prompt was being drawn
            with suppress(OSError):
                self._write(_PASTE_OFF + _CURSOR_ON)

    @contextmanager
    def lend_terminal(self) -> Iterator[None]:
        """Context manager: the terminal has its former mode, for a program such as an editor."""
        self._restore_mode()
        try:
            yield
        finally:
            self._disable_echo()

    def set_bracketed_paste(self, is_on: bool) -> None:
        """Turn bracketed paste on, so that pasted text is one message, or off."""
        self._is_paste_bracketed = is_on
        self._write(_PASTE_ON if is_on else _PASTE_OFF)

    def escape_pressed(self) -> bool:
        """Whether Esc alone or Ctrl-C came since the last call; other keys stay for the prompt."""
        if sys.platform == "win32":
            return False
        presses = self._keys.read_keys()  # an Esc among other keys is of a chord, such as Alt-B
        flushed = [] if presses else self._keys.flush_keys()
        stops = [press for press in presses if press.key == Keys.ControlC]
        if all(press.key == Keys.Escape for press in flushed):  # and not of Alt-P
            stops += flushed
        self._pressed_keys += [press for press in presses + flushed if press not in stops]
        return bool(stops)

    def wait_for_silence(self) -> bool:
        """Wait until no key came for a third of a second; True if Esc came, which ends it at once.

        So a key meant for the next message does not answer a question that comes meanwhile.
        """
        last_key = time.monotonic()
        while time.monotonic() < last_key + _SILENCE_SECONDS:
            count = len(self._pressed_keys)
            if self.escape_pressed():
                return True
            if len(self._pressed_keys) > count:
                last_key = time.monotonic()
            time.sleep(_SILENCE_SECONDS / 20)
        return False

    def pass_keys_to_prompt(self) -> None:
        """Give the keys that came while no prompt was open to the next prompt."""
        if sys.platform != "win32":
            self.escape_pressed()
            if isinstance(self._keys, TerminalKeys) and self._keys.parser.partial:
                time.sleep(ESCAPE_SECONDS)  # the rest of a chord may come, or Esc was pressed
                self.escape_pressed()
        typed = [press for press in self._pressed_keys if press.key not in _IGNORED_KEYS]
        self._pressed_keys = []
        store_typeahead(self._keys, typed)

    def _write(self, sequence: str) -> None:
        if self._out is not None:
            self._out.write(sequence)
            self._out.flush()

    def _write_unbuffered(self, sequence: str) -> None:
        if self._out is not None:  # a signal may have interrupted a `write` of the stream
            os.write(self._out.fileno(), sequence.encode())

    def _disable_echo(self) -> None:
        if sys.platform != "win32" and self._terminal_mode is not None:
            mode = list(self._terminal_mode)
            mode[0] &= ~termios.ICRNL  # Enter gives CR
            mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
            mode[3] |= termios.NOFLSH  # a signal loses neither keys nor output, as half of a frame
            # A signal may come while this object is entered or left: `with` does not see it then.
            atexit.register(self._restore_mode)
            termios.tcsetattr(self._keys.fileno(), termios.TCSANOW, mode)

    def _restore_mode(self) -> None:
        if sys.platform != "win32" and self._terminal_mode is not None:
            with suppress(termios.error):  # the terminal may be closed
                termios.tcsetattr(self._keys.fileno(), termios.TCSANOW, self._terminal_mode)
            atexit.unregister(self._restore_mode)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z: erase the panel, restore the terminal, stop; afterwards, echo no keys."""
        if sys.platform == "win32":  # which has no such key
            return
        self._restore_mode()
        self._write_unbuffered(_PASTE_OFF + _CURSOR_ON + _ERASE_BELOW)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        self._disable_echo()
        if self._is_paste_bracketed:
            self._write_unbuffered(_PASTE_ON)


class _PrivateFileHistory(TypedHistory, FileHistory):
    """A history in a file that only the user can read; failed writes are ignored."""

    def store_string(self, string: str) -> None:
        if not self.is_persistent:
            return
        with suppress(OSError):
            paths.make_private_dir(paths.history_file().parent)
            with _history_lock():
                paths.open_private(paths.history_file(), "a").close()  # it may be deleted
                super().store_string(string)

    def erase(self, matches: Callable[[str], bool]) -> None:
        if paths.history_file().exists():
            with _history_lock():
                kept = [line for line in reversed(self.lines()) if not matches(line)]
                # As `store_string` writes them: each after a comment, with a `+` before each row.
                text = "".join(f"\n#\n+{line.replace(chr(10), f'{chr(10)}+')}\n" for line in kept)
                data = text.encode("utf-8", "replace")
                paths.write_private(paths.history_file(), data, replaces=True)
        super().erase(matches)


def _history_lock() -> FileLock:
    return FileLock(f"{paths.history_file()}.lock", mode=0o600)


def _newline_to_enter(press: KeyPress) -> KeyPress:
    return KeyPress(Keys.ControlM, "\r") if press.key == Keys.ControlJ else press
