"""Turns a terminal's input into key presses, at the prompt and between two prompts.

Beyond prompt_toolkit's parser, it tells Esc alone from the Esc of a chord such as Alt-Enter, knows
keys sent as CSI u or by modifyOtherKeys, and ends a paste whose end mark is lost.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import TextIO

from prompt_toolkit.input import Input, create_input
from prompt_toolkit.input.ansi_escape_sequences import ANSI_SEQUENCES
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

from sirchat.text.text_file import without_surrogates

# If no byte follows an Esc byte within this time, the user pressed Esc; arrows send more bytes.
ESCAPE_SECONDS = 0.05

# If nothing follows the beginning of a paste or a sequence within this time, its end is lost.
INCOMPLETE_SECONDS = 1.0

_PASTE, _PASTE_END = "\x1b[200~", "\x1b[201~"
_CTRL_C = "\x03"
_MAX_KEY_CHARS = 8  # that one key sends
# OSC, DCS, APC and PM, by which a terminal answers programs; and the beginning of such an answer,
# unlike what is typed after Esc.
_CONTROL_STRING = r"\x1b[]P_^][^\x00-\x1f]*(?:\x07|\x1b\\)"
_PARTIAL_ANSWER = r"\x1b(?:\]\d+;|P[\d>!$+]|_G)[^\x00-\x1f]*\x1b?"
_SEQUENCE = re.compile(rf"\x1b\[(?:\[[A-E]|[0-?]*[ -/]*[@-~])|{_CONTROL_STRING}")
_PARTIAL_SEQUENCE = re.compile(rf"\x1b(?:O|\[\[?|\[[0-?]+[ -/]*|\]\d*|P|_)?\Z|{_PARTIAL_ANSWER}\Z")
# What some terminals send by CSI u and modifyOtherKeys, and what others send for these keys.
_CLASSIC_SEQUENCES = {
    **dict.fromkeys(("\x1b[13;2u", "\x1b[13;5u", "\x1b[27;2;13~", "\x1b[27;5;13~"), "\n"),
    **dict.fromkeys(("\x1b[13;3u", "\x1b[27;3;13~"), "\x1b\r"),
    "\x1b[9;2u": "\x1b[Z",
    "\x1b[99;5u": _CTRL_C,
}
_ASK_BACKGROUND = "\x1b]11;?\x1b\\"
_BACKGROUND = re.compile(r"\x1b]11;rgba?:([\da-fA-F]+)/([\da-fA-F]+)/([\da-fA-F]+)")
_KEY_SEQUENCES = {*ANSI_SEQUENCES, *_CLASSIC_SEQUENCES.values()}
_POSITION_REPORT = re.compile(r"\x1b\[(?:\d+;\d+R|<?[\d;]*[mM])")  # where cursor or mouse are


class ChordEscape(KeyPress):
    """The Esc of a chord such as Alt-B; any other Esc was pressed alone."""


class KeyParser(Vt100Parser):
    """Calls `feed_key_callback` for each key press in a terminal's input."""

    def __init__(self, feed_key_callback: Callable[[KeyPress], None]) -> None:
        super().__init__(feed_key_callback)
        self._last_feed = 0.0  # time of the last data, in seconds
        self._partial_sequence = ""  # at the end of the data so far
        self._partial_paste: str | None = None
        self._is_paste_truncated = False  # a paste was ended before its end came
        self._is_flushing = False
        self.on_background: Callable[[bool], object] = lambda is_light: None

    @property
    def is_waiting(self) -> bool:
        """Whether a paste or an escape sequence has begun and not ended."""
        return self._partial_paste is not None or bool(self._partial_sequence)

    def feed(self, data: str) -> None:
        """Take the next data; "" ends input that has waited too long for its end."""
        if not data:
            if self.is_waiting and time.monotonic() - self._last_feed >= INCOMPLETE_SECONDS:
                self._end_partial_input()
            return
        self._last_feed = time.monotonic()
        data = without_surrogates(data)
        if self._is_paste_truncated and (len(data) > _MAX_KEY_CHARS or _PASTE_END in data):
            self._partial_paste = ""  # the rest of the paste comes late
        self._is_paste_truncated = False
        if self._partial_paste is None:
            self._feed_typed(self._partial_sequence + data)
        elif data == _CTRL_C:  # a key alone, not part of the text
            self._end_partial_input()
        else:
            self._feed_pasted(data)

    def flush(self) -> None:
        """Take a partial sequence as Esc, Alt-[ or Alt-O, if no more came in time."""
        if time.monotonic() - self._last_feed < 0.8 * ESCAPE_SECONDS:
            return
        self._is_flushing = True
        super().flush()
        if self._partial_sequence == "\x1b":
            self._call_handler(Keys.Escape, self._partial_sequence)
        self._is_flushing = False
        if len(self._partial_sequence) == 2:
            self._call_handler(Keys.Escape, "\x1b")
            self._call_handler(self._partial_sequence[1], self._partial_sequence[1])
        if len(self._partial_sequence) < 3:
            self._partial_sequence = ""

    def _call_handler(self, key: str | Keys | tuple[Keys, ...], insert_text: str) -> None:
        if key == Keys.Escape and not self._is_flushing:
            self.feed_key_callback(ChordEscape(Keys.Escape, insert_text))
        else:
            super()._call_handler(key, insert_text)

    def _feed_typed(self, data: str) -> None:
        self._partial_sequence = ""
        while match := _SEQUENCE.search(data):
            super().feed(data[: match.start()])
            data = data[match.end() :]
            if match[0] == _PASTE:
                self._partial_paste = ""
                self._feed_pasted(data)
                return
            self._feed_sequence(match[0])
        if partial := _PARTIAL_SEQUENCE.search(data):
            data, self._partial_sequence = data[: partial.start()], partial[0]
        super().feed(data)

    def _feed_sequence(self, sequence: str) -> None:
        """Take one whole escape sequence; ignore it if no key sends it."""
        sequence = _CLASSIC_SEQUENCES.get(sequence, sequence)
        if sequence == "\x1b[27u":
            self.feed_key_callback(KeyPress(Keys.Escape, "\x1b"))
            return
        if match := _BACKGROUND.match(sequence):
            # Shares of red, green and blue, each with as many digits as the terminal likes.
            red, green, blue = (int(share, 16) / (16 ** len(share) - 1) for share in match.groups())
            self.on_background(0.3 * red + 0.6 * green + 0.1 * blue > 0.5)
            return
        if sequence not in _KEY_SEQUENCES and not _POSITION_REPORT.fullmatch(sequence):
            return
        super().feed(sequence)

    def _feed_pasted(self, data: str) -> None:
        former = self._partial_paste or ""
        text = former + data
        end = text.find(_PASTE_END, max(0, len(former) - len(_PASTE_END)))
        self._partial_paste = text if end < 0 else None
        if end >= 0:
            self.feed_key_callback(KeyPress(Keys.BracketedPaste, text[:end]))
            self._feed_typed(text[end + len(_PASTE_END) :])

    def _end_partial_input(self) -> None:
        """Take a partial paste as a whole one, and drop a partial sequence."""
        text, self._partial_paste, self._partial_sequence = self._partial_paste, None, ""
        if text is not None:
            self._is_paste_truncated = True
            self.feed_key_callback(KeyPress(Keys.BracketedPaste, text))


if sys.platform != "win32":
    from prompt_toolkit.input.vt100 import Vt100Input

    class TerminalKeys(Vt100Input):
        """The keys of a terminal; in an event loop, a paste whose end mark is lost is ended."""

        def __init__(self, stdin: TextIO) -> None:
            super().__init__(stdin)
            self._parser = KeyParser(lambda press: self._buffer.append(press))
            self.vt100_parser = self._parser
            self.is_answer_pending = False  # the terminal was asked for its background
            self._on_ready: Callable[[], None] = lambda: None
            self._timeout: asyncio.TimerHandle | None = None

        @property
        def is_waiting(self) -> bool:
            return self._parser.is_waiting

        def ask_background(self, out: TextIO, on_answer: Callable[[bool], object]) -> None:
            """Ask for the terminal's background; `on_answer` is told if it is light, once known."""

            def take_answer(is_light: bool) -> None:
                self.is_answer_pending = False
                on_answer(is_light)

            self._parser.on_background, self.is_answer_pending = take_answer, True
            out.write(_ASK_BACKGROUND)
            out.flush()

        def attach(self, input_ready_callback: Callable[[], None]) -> AbstractContextManager[None]:
            self._on_ready = input_ready_callback
            self._schedule_timeout()
            return super().attach(input_ready_callback)

        def read_keys(self) -> list[KeyPress]:
            keys = super().read_keys()
            self._schedule_timeout()
            return keys

        def _schedule_timeout(self) -> None:
            if self._timeout is not None:
                self._timeout.cancel()
                self._timeout = None
            if self.is_waiting:
                with suppress(RuntimeError):  # without an event loop, others call `read_keys`
                    loop = asyncio.get_running_loop()
                    self._timeout = loop.call_later(INCOMPLETE_SECONDS, self._on_ready)


def terminal_keys() -> Input:
    keys = create_input()
    if sys.platform != "win32" and isinstance(keys, Vt100Input):
        return TerminalKeys(keys.stdin)
    return keys
