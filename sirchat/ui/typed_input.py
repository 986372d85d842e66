"""What the user types: the keyboard between two prompts, and the history of typed lines."""

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
from sirchat.ui.keys import ESCAPE_SECONDS, ChordEscape, terminal_keys
from sirchat.ui.prompt import Prompt
from sirchat.ui.screen import Screen

if sys.platform != "win32":
    import termios

    from sirchat.ui.keys import TerminalKeys

_DROPPED = (Keys.CPRResponse, Keys.SIGINT)
_SILENCE = 0.35  # seconds
_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
_CURSOR_ON = "\x1b[?25h"
_ERASE_BELOW = "\x1b[J"


@dataclass(frozen=True)
class TerminalInput:
    """What reads the lines of one chat, and what Ctrl-C does between two of them."""

    ctrl_c: CtrlCGuard
    keyboard: Keyboard
    history: TypedHistory
    prompt: Prompt


@contextmanager
def open_terminal_input(screen: Screen, *, is_persistent: bool = True) -> Iterator[TerminalInput]:
    """Context manager: yields what reads lines; inside, the terminal echoes no keys.

    `is_persistent`: whether typed lines are kept on disk.
    """
    keys = terminal_keys()
    with CtrlCGuard() as ctrl_c, Keyboard(keys, screen.terminal) as keyboard:
        ask_background(keys, screen)
        screen.before_pager = keyboard.wait_for_background
        history, output = (
            open_history(screen.note, is_persistent=is_persistent),
            create_prompt_output(screen),
        )
        prompt = Prompt(keys, output, history=history, has_colours=lambda: screen.has_colours)
        history.escape_message = prompt.escape_message
        yield TerminalInput(ctrl_c, keyboard, history, prompt)


def ask_background(keys: Input, screen: Screen) -> None:
    """Ask the terminal whether it is light, if no variable tells; inside a `Keyboard`."""
    is_told = os.environ.get("COLORFGBG") or screen.console.no_color or not screen.has_auto_theme
    # Old consoles of Linux print the question.
    if is_told or screen.terminal is None or os.environ.get("TERM") == "linux":
        return
    if sys.platform != "win32" and isinstance(keys, TerminalKeys):
        keys.ask_background(screen.terminal, screen.use_background)


def create_prompt_output(screen: Screen) -> Output:
    """The object by which a prompt writes to the terminal; plain text to a dumb one."""
    if screen.is_dumb:
        return PlainTextOutput(sys.stdout)
    return create_output(always_prefer_tty=True)


def open_history(complain: Callable[[str], None], *, is_persistent: bool = True) -> TypedHistory:
    """The history of typed lines: a file or, with a call of `complain`, in memory if that fails.

    Unless `is_persistent`, the file is read but not written.
    """
    path = paths.history_file()
    try:
        if is_persistent:
            paths.make_private_dir(path.parent)
            paths.open_private(path, "a").close()
    except OSError as error:
        complain(f"the input history is not kept: {error}")
        return InMemoryTypedHistory()
    history = _Private(str(path))
    history.is_persistent = is_persistent
    return history


class TypedHistory(History):
    """The history of the lines typed at the prompt, in this chat and in earlier ones."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)  # those of the other base class
        self.new_lines: set[str] = set()  # since the program began
        self.typed_by_message: dict[
            str, str
        ] = {}  # by the message that was sent with a file's text in it
        self.is_persistent = True  # whether new lines are written to the file
        self.escape_message: Callable[[str], str] = str  # how a line must be typed to mean the same

    def append_string(self, string: str) -> None:
        typed = self.escape_message(string)
        self.new_lines.add(typed.strip())
        super().append_string(typed)

    def lines(self) -> list[str]:
        """All lines of the history, the newest first."""
        return list(self.load_history_strings())

    def erase(self, matches: Callable[[str], bool]) -> None:
        """Erase the lines that match. Raises OSError if their file can't be written."""
        self._loaded_strings = [line for line in self._loaded_strings if not matches(line)]
        self.new_lines = {line for line in self.new_lines if not matches(line)}
        self.typed_by_message = {
            sent: line for sent, line in self.typed_by_message.items() if not matches(line)
        }


class InMemoryTypedHistory(TypedHistory, InMemoryHistory):
    """A history of typed lines that is lost when the chat ends."""

    def erase(self, matches: Callable[[str], bool]) -> None:
        self._storage = [line for line in self._storage if not matches(line)]
        super().erase(matches)


class Keyboard:
    """Context manager that switches the terminal's echo off; Ctrl-C still sends a signal.

    Args:
        keys: the source of keys, shared with the prompt.
        out: the terminal to which `set_bracketed_paste` writes; None: nothing is written.
    """

    def __init__(self, keys: Input, out: Any = None) -> None:
        self._keys = keys
        self._out = out
        self._marks_pastes = False
        self._typed: list[KeyPress] = []
        self._before: list[Any] | None = None  # the terminal's mode; None where it has none
        self._suspended: Any = None  # the handler of Ctrl-Z before

    def __enter__(self) -> Keyboard:
        if sys.platform != "win32":
            self._before = termios.tcgetattr(self._keys.fileno())
            self._suspended = signal.signal(signal.SIGTSTP, self._suspend)
            self._quiet()
            # In what was typed before, the terminal has turned Enter into a newline.
            self._typed = [_as_enter(press) for press in self._keys.read_keys()]
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if sys.platform != "win32":
            signal.signal(signal.SIGTSTP, self._suspended)
        self.wait_for_background()
        self._restore()
        if kind is not None:  # a signal may have come while a prompt was being drawn
            with suppress(OSError):
                self._write(_PASTE_OFF + _CURSOR_ON)

    @contextmanager
    def lend_terminal(self) -> Iterator[None]:
        """Context manager: inside, the terminal is in its usual mode, for example for an editor."""
        self.wait_for_background()
        self._restore()
        try:
            yield
        finally:
            self._quiet()

    def wait_for_background(self) -> None:
        """Wait a moment for an answer of the terminal, which another program would take as keys.

        Where none comes, nobody waits again.
        """
        keys = self._keys
        if sys.platform != "win32" and isinstance(keys, TerminalKeys) and keys.is_answer_pending:
            self._quiet()  # a prompt that is left shows what comes
            end = time.monotonic() + _SILENCE
            with suppress(ValueError):  # Ctrl-Z came while keys were read
                while keys.is_answer_pending and time.monotonic() < end:
                    self._typed += keys.read_keys()
                    time.sleep(_SILENCE / 20)
            keys.is_answer_pending = False

    def set_bracketed_paste(self, on: bool) -> None:
        """Switch bracketed paste on or off; while it is on, pasted text stays one message."""
        self._marks_pastes = on
        self._write(_PASTE_ON if on else _PASTE_OFF)

    def escape_pressed(self) -> bool:
        """Whether Esc alone, or Ctrl-C, is among the keys since the last call.

        `pass_keys_to_prompt` still gets all others.
        """
        if sys.platform == "win32":
            return False
        presses = self._keys.read_keys() or self._keys.flush_keys()
        self._typed += [press for press in presses if not _stops(press)]
        return any(map(_stops, presses))

    def wait_for_silence(self) -> bool:
        """Keep keys for the next prompt until none came for a third of a second; True after Esc.

        So a key that is meant for the next message does not answer a question that comes meanwhile.
        """
        since = time.monotonic()
        while time.monotonic() < since + _SILENCE:
            count = len(self._typed)
            if self.escape_pressed():
                return True
            if len(self._typed) > count:
                since = time.monotonic()
            time.sleep(_SILENCE / 20)
        return False

    def pass_keys_to_prompt(self) -> None:
        """Pass the keys that were typed while no prompt was open to the next prompt."""
        if sys.platform != "win32":
            self.escape_pressed()
            if isinstance(self._keys, TerminalKeys) and self._keys.is_incomplete:
                time.sleep(ESCAPE_SECONDS)  # the rest of a chord may come, or Esc was pressed
                self.escape_pressed()
        typed = [press for press in self._typed if press.key not in _DROPPED]
        self._typed = []
        store_typeahead(self._keys, typed)

    def _write(self, sequence: str) -> None:
        if self._out is not None:
            self._out.write(sequence)
            self._out.flush()

    def _write_now(self, sequence: str) -> None:
        """Write directly: a signal may have interrupted a `write` of the stream."""
        if self._out is not None:
            os.write(self._out.fileno(), sequence.encode())

    def _quiet(self) -> None:
        if sys.platform != "win32" and self._before is not None:
            mode = list(self._before)
            mode[0] &= ~termios.ICRNL  # Enter gives CR
            mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
            mode[3] |= termios.NOFLSH  # a signal loses neither keys nor output, as half of a frame
            # A signal may come while this object is entered or left: `with` does not see it then.
            atexit.register(self._restore)
            termios.tcsetattr(self._keys.fileno(), termios.TCSANOW, mode)

    def _restore(self) -> None:
        if sys.platform != "win32" and self._before is not None:
            with suppress(termios.error):  # the terminal may be closed
                termios.tcsetattr(self._keys.fileno(), termios.TCSANOW, self._before)
            atexit.unregister(self._restore)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z: erase the panel, restore the terminal, stop, and be quiet afterwards."""
        if sys.platform == "win32":  # which has no such key
            return
        self.wait_for_background()
        self._restore()
        self._write_now(_PASTE_OFF + _CURSOR_ON + _ERASE_BELOW)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        self._quiet()
        if self._marks_pastes:
            self._write_now(_PASTE_ON)


class _Private(TypedHistory, FileHistory):
    """A history in a file that only the user can read; a line that can't be added is ignored."""

    def store_string(self, string: str) -> None:
        if not self.is_persistent:
            return
        with suppress(OSError):
            paths.make_private_dir(paths.history_file().parent)
            with _lock():
                paths.open_private(paths.history_file(), "a").close()  # it may be gone
                super().store_string(string)

    def erase(self, matches: Callable[[str], bool]) -> None:
        if paths.history_file().exists():
            with _lock():
                self._rewrite([line for line in self.lines() if not matches(line)])
        super().erase(matches)

    def _rewrite(self, lines: list[str]) -> None:
        new = paths.history_file().with_name("history.new")
        path, self.filename = self.filename, f"{os.fsdecode(self.filename)}.new"
        try:
            new.unlink(missing_ok=True)  # or a link
            paths.open_private(new, "x").close()
            for entry in reversed(lines):
                FileHistory.store_string(self, entry)
            os.replace(self.filename, path)
        finally:
            self.filename = path
            new.unlink(missing_ok=True)


def _lock() -> FileLock:
    """What one chat holds while it changes the file of the history."""
    return FileLock(f"{paths.history_file()}.lock", mode=0o600)


def _stops(press: KeyPress) -> bool:
    """Whether this key stops a reply; as a newer form of Ctrl-C, it is no signal."""
    is_escape = press.key == Keys.Escape and not isinstance(press, ChordEscape)
    return is_escape or press.key == Keys.ControlC


def _as_enter(press: KeyPress) -> KeyPress:
    return KeyPress(Keys.ControlM, "\r") if press.key == Keys.ControlJ else press
