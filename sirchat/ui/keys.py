"""Turns a terminal's input into key presses, at the prompt and between two prompts.

Beyond prompt_toolkit's parser, it drops what no key sends, such as a terminal's answers, and waits
for the rest of a sequence before it takes Esc as pressed alone.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

from prompt_toolkit.input import Input, create_input
from prompt_toolkit.input.ansi_escape_sequences import ANSI_SEQUENCES
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyPress

from sirchat.text.text_file import without_surrogates

# If no byte follows an Esc byte within this time, the user pressed Esc; arrows send more bytes.
ESCAPE_SECONDS = 0.05

_PASTE, _PASTE_END, _CTRL_C = "\x1b[200~", "\x1b[201~", "\x03"
# CSI; or OSC, DCS, APC and PM, by which a terminal answers programs.
_SEQUENCE = re.compile(
    r"\x1b\[(?:\[[A-E]|(?!\[)[0-?]*[ -/]*[@-~])|\x1b[]P_^][^\x00-\x1f]*(?:\x07|\x1b\\)"
)
# Shift-Enter and Ctrl-Enter, by CSI u and modifyOtherKeys.
_NEW_LINES = ("\x1b[13;2u", "\x1b[13;5u", "\x1b[27;2;13~", "\x1b[27;5;13~")
# The beginning of one, at the end of what came so far.
_PARTIAL_SEQUENCE = re.compile(r"\x1b(?:\[(?:\[|[0-?]*[ -/]*)|[]P_^][^\x00-\x1f]*\x1b?)?\Z")
_POSITION_REPORT = re.compile(r"\x1b\[(?:\d+;\d+R|<?[\d;]*[mM])")  # where cursor or mouse are


class KeyParser(Vt100Parser):
    """Calls `feed_key_callback` for each key press in a terminal's input."""

    def __init__(self, feed_key_callback: Callable[[KeyPress], None]) -> None:
        super().__init__(feed_key_callback)
        self._last_feed = 0.0  # time of the last data, in seconds
        self.partial = ""  # the end of the data so far: Esc alone, or the beginning of a sequence

    def feed(self, data: str) -> None:
        if not data:  # nothing could be read
            return
        self._last_feed = time.monotonic()
        if self._in_bracketed_paste:  # Ctrl-C alone ends a paste whose end is lost
            super().feed(_PASTE_END if data == _CTRL_C else without_surrogates(data))
            return
        data, self.partial = self.partial + without_surrogates(data), ""
        typed, paste, pasted = data.partition(_PASTE)
        typed = _SEQUENCE.sub(_key_sequence, typed)
        if not paste and (partial := _PARTIAL_SEQUENCE.search(typed)):
            typed, self.partial = typed[: partial.start()], partial[0]
        super().feed(typed + paste)
        if pasted:
            self.feed(pasted)

    def flush(self) -> None:
        """Take a partial sequence as Esc, and what follows, if no more came in time."""
        if time.monotonic() - self._last_feed >= 0.8 * ESCAPE_SECONDS:
            super().feed(self.partial)
            self.partial = ""
            super().flush()


def _key_sequence(match: re.Match[str]) -> str:
    """The sequence that prompt_toolkit knows for a whole one; "" if no key sends it."""
    sequence = match[0]
    if sequence in _NEW_LINES:
        return "\n"
    is_known = sequence in ANSI_SEQUENCES or _POSITION_REPORT.fullmatch(sequence)
    return sequence if is_known else ""


if sys.platform != "win32":
    from prompt_toolkit.input.vt100 import Vt100Input

    class TerminalKeys(Vt100Input):
        def __init__(self, stdin: TextIO) -> None:
            super().__init__(stdin)
            self.parser = KeyParser(lambda press: self._buffer.append(press))
            self.vt100_parser = self.parser


def terminal_keys() -> Input:
    keys = create_input()
    if sys.platform != "win32" and isinstance(keys, Vt100Input):
        return TerminalKeys(keys.stdin)
    return keys
