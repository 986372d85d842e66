"""Keys of a terminal: what it sends becomes key presses, at the prompt and between two prompts.

An Esc that is pressed alone differs from the one with which chords such as Alt-Enter begin, keys in
the newer forms (CSI u, modifyOtherKeys) are the same as in the old one, and a paste ends in time.
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

# A paste, or a sequence, after which nothing comes for so long has lost its end.
INCOMPLETE_SECONDS = 1.0

_PASTE, _PASTE_END = "\x1b[200~", "\x1b[201~"
_CTRL_C = "\x03"
_LONGEST_KEY = 8  # characters; a key sends no more
# OSC, DCS, APC and PM, by which a terminal answers programs; and how answers begin that have not
# ended yet, unlike what is typed after Esc.
_STRING = r"\x1b[]P_^][^\x00-\x1f]*(?:\x07|\x1b\\)"
_ANSWER = r"\x1b(?:\]\d+;|P[\d>!$+]|_G)[^\x00-\x1f]*\x1b?"
_SEQUENCE = re.compile(rf"\x1b\[(?:\[[A-E]|[0-?]*[ -/]*[@-~])|{_STRING}")
_BEGUN = re.compile(rf"\x1b(?:O|\[\[?|\[[0-?]+[ -/]*|\]\d*|P|_)?\Z|{_ANSWER}\Z")
# Keys in the newer forms (CSI u, modifyOtherKeys), as they are sent without being asked for.
_NEWER = {
    **dict.fromkeys(("\x1b[13;2u", "\x1b[13;5u", "\x1b[27;2;13~", "\x1b[27;5;13~"), "\n"),
    **dict.fromkeys(("\x1b[13;3u", "\x1b[27;3;13~"), "\x1b\r"),
    "\x1b[9;2u": "\x1b[Z",
    "\x1b[99;5u": _CTRL_C,
}
_ASK_BACKGROUND = "\x1b]11;?\x1b\\"
_BACKGROUND = re.compile(r"\x1b]11;rgba?:([\da-fA-F]+)/([\da-fA-F]+)/([\da-fA-F]+)")
_KNOWN = {*ANSI_SEQUENCES, *_NEWER.values()}
_REPORT = re.compile(r"\x1b\[(?:\d+;\d+R|<?[\d;]*[mM])")  # where cursor or mouse are


class ChordEscape(KeyPress):
    """The Esc with which a chord begins, such as Alt-B; any other Esc was pressed alone."""


class KeyParser(Vt100Parser):
    """Turns what a terminal sends into key presses, for each of which it calls its argument."""

    def __init__(self, feed_key_callback: Callable[[KeyPress], None]) -> None:
        super().__init__(feed_key_callback)
        self._last = 0.0  # time of the last data, in seconds
        self._begun = ""  # the beginning of a sequence, at the end of the data so far
        self._paste: str | None = None  # the text of a paste whose end has not come
        self._was_cut = False  # a paste was ended before its end came
        self._is_flushing = False
        # Gets whether the background is light.
        self.on_background: Callable[[bool], object] = lambda is_light: None

    @property
    def is_incomplete(self) -> bool:
        """Whether a paste or a sequence has begun and not ended."""
        return self._paste is not None or bool(self._begun)

    def feed(self, data: str) -> None:
        """Take the next data; none (""): end what has waited for its end too long."""
        if not data:
            if self.is_incomplete and time.monotonic() - self._last >= INCOMPLETE_SECONDS:
                self._give_up()
            return
        self._last = time.monotonic()
        data = without_surrogates(data)
        if self._was_cut and (len(data) > _LONGEST_KEY or _PASTE_END in data):
            self._paste = ""  # the rest came late, and is no more typed than its beginning
        self._was_cut = False
        if self._paste is None:
            self._feed_typed(self._begun + data)
        elif data == _CTRL_C:  # a key alone, not part of the text
            self._give_up()
        else:
            self._feed_pasted(data)

    def flush(self) -> None:
        """End a key sequence that has begun, as Esc, Alt-[ or Alt-O, if no more came in time."""
        if time.monotonic() - self._last < 0.8 * ESCAPE_SECONDS:
            return
        self._is_flushing = True
        super().flush()
        if self._begun == "\x1b":
            self._call_handler(Keys.Escape, self._begun)
        self._is_flushing = False
        if len(self._begun) == 2:
            self._call_handler(Keys.Escape, "\x1b")
            self._call_handler(self._begun[1], self._begun[1])
        if len(self._begun) < 3:
            self._begun = ""

    def _call_handler(self, key: str | Keys | tuple[Keys, ...], insert_text: str) -> None:
        if key == Keys.Escape and not self._is_flushing:
            self.feed_key_callback(ChordEscape(Keys.Escape, insert_text))
        else:
            super()._call_handler(key, insert_text)

    def _feed_typed(self, data: str) -> None:
        self._begun = ""
        while match := _SEQUENCE.search(data):
            super().feed(data[: match.start()])
            data = data[match.end() :]
            if match[0] == _PASTE:
                self._paste = ""
                self._feed_pasted(data)
                return
            self._feed_sequence(match[0])
        if begun := _BEGUN.search(data):
            data, self._begun = data[: begun.start()], begun[0]
        super().feed(data)

    def _feed_sequence(self, sequence: str) -> None:
        """Take one whole sequence; one that no key of ours sends is left out."""
        sequence = _NEWER.get(sequence, sequence)
        if sequence == "\x1b[27u":
            self.feed_key_callback(KeyPress(Keys.Escape, "\x1b"))
            return
        if match := _BACKGROUND.match(sequence):
            # Shares of red, green and blue, each with as many digits as the terminal likes.
            red, green, blue = (int(share, 16) / (16 ** len(share) - 1) for share in match.groups())
            self.on_background(0.3 * red + 0.6 * green + 0.1 * blue > 0.5)
            return
        if sequence not in _KNOWN and not _REPORT.fullmatch(sequence):
            return
        super().feed(sequence)

    def _feed_pasted(self, data: str) -> None:
        begun = self._paste or ""
        text = begun + data
        end = text.find(_PASTE_END, max(0, len(begun) - len(_PASTE_END)))
        self._paste = text if end < 0 else None
        if end >= 0:
            self.feed_key_callback(KeyPress(Keys.BracketedPaste, text[:end]))
            self._feed_typed(text[end + len(_PASTE_END) :])

    def _give_up(self) -> None:
        """End a paste without its end, and forget the beginning of a sequence."""
        text, self._paste, self._begun = self._paste, None, ""
        if text is not None:
            self._was_cut = True
            self.feed_key_callback(KeyPress(Keys.BracketedPaste, text))


if sys.platform != "win32":
    from prompt_toolkit.input.vt100 import Vt100Input

    class TerminalKeys(Vt100Input):
        """The keys of a terminal; in an event loop, it ends itself what waits for its end."""

        def __init__(self, stdin: TextIO) -> None:
            super().__init__(stdin)
            self._parser = KeyParser(lambda press: self._buffer.append(press))
            self.vt100_parser = self._parser
            self.is_answer_pending = False  # for its background, and an answer may come yet
            self._ready: Callable[[], None] = lambda: None
            self._timer: asyncio.TimerHandle | None = None

        @property
        def is_incomplete(self) -> bool:
            """Whether a paste or a sequence has begun and not ended."""
            return self._parser.is_incomplete

        def ask_background(self, out: TextIO, on_answer: Callable[[bool], object]) -> None:
            """Ask the terminal `out` whether it is light; nobody waits for an answer, if any."""

            def take(is_light: bool) -> None:
                self.is_answer_pending = False
                on_answer(is_light)

            self._parser.on_background, self.is_answer_pending = take, True
            out.write(_ASK_BACKGROUND)
            out.flush()

        def attach(self, input_ready_callback: Callable[[], None]) -> AbstractContextManager[None]:
            self._ready = input_ready_callback
            self._look_again()
            return super().attach(input_ready_callback)

        def read_keys(self) -> list[KeyPress]:
            keys = super().read_keys()
            self._look_again()
            return keys

        def _look_again(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self.is_incomplete:
                with suppress(RuntimeError):  # no event loop: someone else calls `read_keys`
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(INCOMPLETE_SECONDS, self._ready)


def terminal_keys() -> Input:
    """The keyboard of the terminal, which is standard input."""
    keys = create_input()
    if sys.platform != "win32" and isinstance(keys, Vt100Input):
        return TerminalKeys(keys.stdin)
    return keys
