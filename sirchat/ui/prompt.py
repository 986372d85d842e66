"""The prompt, at which the user types a command or a message of one line or several.

The prompt has a history, completion, an editor, and a toolbar (a line with the chat's state).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import Completer, DummyCompleter
from prompt_toolkit.filters import Condition, has_focus, is_searching
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.output import Output
from prompt_toolkit.styles import DynamicStyle, Style

from sirchat.ui.attaching import open_mention
from sirchat.ui.picker import Picker
from sirchat.ui.text import displayable

_FENCE = '"""'

_PROMPT = FormattedText([("class:prompt", "> ")])
_EDIT = FormattedText([("class:prompt", "edit> ")])

_CLOSED = "Event loop is closed"
"""Text of the error that asyncio raises if Ctrl-C comes at the moment when a prompt closes."""

_STYLE = Style.from_dict(
    {
        "bottom-toolbar": "noreverse fg:ansibrightblack",
        "prompt": "bold",
        "placeholder": "fg:ansibrightblack",
    }
)
_PLAIN_STYLE = Style.from_dict({"bottom-toolbar": "noreverse", "prompt": "bold"})


@dataclass(frozen=True)
class Line:
    """One input of the user: a command, which begins with a slash, or a message.

    `is_stopped` says that Ctrl-C came after Enter, before the prompt had closed. `pasted_signs` has
    the indices in `text` of all `@` that were pasted, not typed.
    """

    text: str
    is_command: bool
    is_stopped: bool = False
    pasted_signs: frozenset[int] = frozenset()

    @property
    def ends_chat(self) -> bool:
        """Whether this line is a command that ends the chat; this command needs no session."""
        return self.is_command and self.text in ("/exit", "/quit", "/bye")


class Prompt:
    """Reads the user's input from the keyboard.

    Args:
        keys: the source of keys; other code may read from it between two prompts.
        output: the terminal.
        history: the lines that were typed earlier.
        has_colours: returns whether colours may be used; called at every redraw.
    """

    def __init__(
        self,
        keys: Input,
        output: Output,
        *,
        history: History,
        has_colours: Callable[[], bool] = lambda: True,
    ) -> None:
        self._pasted: str | None = None
        self._signs = PastedSigns()
        self._is_pasting = False
        self._entered: str | None = None
        self._is_editing = False
        self._suggested = ""
        self._has_colours = has_colours
        self._toolbar: Callable[[], str] = str
        self._prompt: PromptSession[str] = PromptSession(
            _PROMPT,
            input=keys,
            output=output,
            multiline=True,
            prompt_continuation="  ",
            completer=DummyCompleter(),
            complete_while_typing=Condition(self._is_completed),
            bottom_toolbar=self._toolbar_text,
            placeholder=self._placeholder,
            history=history,
            key_bindings=self._bindings(),
            input_processors=[_Filtered()],
            tempfile_suffix=".txt",
            enable_suspend=True,
            style=DynamicStyle(lambda: _STYLE if has_colours() else _PLAIN_STYLE),
        )
        self._prompt.default_buffer.on_text_changed += self._changed

    def serve(self, completer: Completer, toolbar: Callable[[], str]) -> None:
        """Use `completer` from now on, and show the text returned by `toolbar` below the prompt."""
        self._prompt.completer = completer
        self._toolbar = toolbar

    def picker(self) -> Picker:
        """A picker for the same terminal, by which the user chooses from a list.

        The picker must not run while the prompt reads a line.
        """
        return Picker(self._prompt.input, self._prompt.output, self._has_colours)

    @property
    def completer(self) -> Completer:
        """The object that completes the user's input at present."""
        return self._prompt.completer or DummyCompleter()

    def read(
        self,
        suggested: str = "",
        meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> Line | None:
        """Read the next line that is not blank; return None at the end of the input.

        The line `suggested` is shown until the user types something; Enter alone enters this line.
        `meanwhile` runs in the prompt's event loop until a line is entered. Raises
        KeyboardInterrupt for Ctrl-C at an empty prompt. If `give_up` is called, raises the error
        that `give_up` was given.
        """

        def begin() -> None:
            _leave_signals_alone()
            if meanwhile is not None:
                self._prompt.app.create_background_task(meanwhile())

        self._suggested = suggested
        while True:
            self._pasted = self._entered = None
            self._signs.begin()
            stopped = False
            try:
                text = self._prompt.prompt(pre_run=begin)
            except EOFError:
                return None
            except (KeyboardInterrupt, RuntimeError) as error:
                if isinstance(error, RuntimeError) and str(error) != _CLOSED:
                    raise
                if self._entered is None:
                    raise KeyboardInterrupt from None
                text, stopped = self._entered, True  # the prompt was about to close
            line = self._parsed(text)
            if line.text.strip():
                start = text.find(line.text)
                signs = frozenset(index - start for index in self._signs.indices)
                return replace(line, is_stopped=stopped, pasted_signs=signs)

    def edit(self, text: str) -> str:
        """Let the user change the message `text`; return the result, or "" if the user cancels."""
        self._pasted = self._entered = None
        self._suggested = ""
        self._signs.begin()
        self._is_editing = True
        try:
            return self._prompt.prompt(_EDIT, default=text, pre_run=_leave_signals_alone)
        except (EOFError, KeyboardInterrupt):
            return self._entered or ""
        finally:
            self._is_editing = False
            self._prompt.message = _PROMPT  # else the prompt session keeps the other one

    def redraw(self) -> None:
        """Ask the prompt to draw itself again soon; any thread may call this."""
        self._prompt.app.invalidate()

    def print_above(self, show: Callable[[], object]) -> None:
        """Call `show`, whose output appears above the open prompt.

        This method must be called in the prompt's event loop. The terminal stays in the prompt's
        mode, so that no key is lost or echoed while `show` runs.
        """
        renderer = self._prompt.app.renderer
        renderer.erase()
        show()
        renderer.request_absolute_cursor_position()
        self.redraw()

    def give_up(self, error: BaseException) -> None:
        """Close the open prompt, so that `read` raises `error`.

        Text that the user has typed stays on the screen and is added to the history.
        """
        app, buffer = self._prompt.app, self._prompt.default_buffer
        if app.future is None or app.future.done():
            return
        buffer.append_to_history()
        app.erase_when_done = not buffer.text
        app.exit(exception=error)

    def _parsed(self, text: str) -> Line:
        if self._is_literal(text):
            return Line(text, is_command=False)
        stripped = text.strip()
        if stripped.startswith(_FENCE) and stripped.endswith(_FENCE) and len(stripped) >= 6:
            inner = stripped.removeprefix(_FENCE).removesuffix(_FENCE)
            return Line(inner.strip("\n"), is_command=False)
        if stripped.startswith("//"):
            return Line(stripped[1:], is_command=False)
        return Line(stripped, is_command=stripped.startswith("/"))

    def _is_literal(self, text: str) -> bool:
        """Whether `text` begins with pasted text; such a text is a message, never a command."""
        return self._pasted is not None and text.startswith(self._pasted)

    def _changed(self, buffer: Buffer) -> None:
        """Keep track of pasted text; this is called after each change of the typed text.

        If the user has edited the pasted text at the beginning of the line, it no longer counts as
        pasted. But each pasted `@` still counts as pasted.
        """
        self._signs.changed(buffer.text, pasted=self._is_pasting)
        if not self._is_literal(buffer.text):
            self._pasted = None

    def _is_completed(self) -> bool:
        """Whether completions show while the user types: in commands, and in names after `@`."""
        document = self._prompt.default_buffer.document
        text = document.text
        if open_mention(document.text_before_cursor) is not None:
            return True
        return text.startswith("/") and "\n" not in text and not self._is_literal(text)

    def _placeholder(self) -> FormattedText:
        """The suggested line; empty once the prompt closes, so that the line leaves the screen."""
        is_shown = not self._prompt.app.is_done
        return FormattedText([("class:placeholder", self._suggested if is_shown else "")])

    def _toolbar_text(self) -> str:
        if self._is_literal(self._prompt.default_buffer.text):
            return " pasted text: sent as it is, never run as a command"
        return f" {self._toolbar()}"

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()
        typing = has_focus("DEFAULT_BUFFER") & ~is_searching

        @keys.add("enter", filter=typing)
        def _enter(event: KeyPressEvent) -> None:
            self._enter(event.current_buffer)

        @keys.add("escape", "enter", filter=typing)
        @keys.add("c-j", filter=typing)
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c", filter=typing)
        def _cancel(event: KeyPressEvent) -> None:
            self._cancel(event)

        @keys.add("<sigint>")
        def _signal(event: KeyPressEvent) -> None:
            future = event.app.future
            if future is not None and not future.done():  # else the prompt has just closed
                event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

        @keys.add("c-x", "c-e", filter=typing)
        def _edit(event: KeyPressEvent) -> None:
            event.current_buffer.open_in_editor()  # the prompt then has the edited text

        @keys.add(Keys.Vt100MouseEvent, eager=True)
        def _no_mouse(event: KeyPressEvent) -> None:
            """Ignore what looks like a mouse event: it is part of a typed escape sequence."""

        @keys.add(Keys.BracketedPaste, filter=typing)
        def _paste(event: KeyPressEvent) -> None:
            self._paste(event.current_buffer, event.data)

        return keys

    def _enter(self, buffer: Buffer) -> None:
        """Handle Enter: submit the typed text or, if there is none, the suggested line.

        If the cursor stands behind a backslash, or if triple quotes are open, insert a line break
        instead.
        """
        if not buffer.text and self._suggested:
            buffer.insert_text(self._suggested)
        text = buffer.text
        is_open = text.lstrip().startswith(_FENCE) and text.count(_FENCE) % 2 == 1
        continues = buffer.document.text_before_cursor.endswith("\\") and text[:1] != "/"
        if self._is_literal(text) or not (is_open or continues):
            self._entered = text
            buffer.validate_and_handle()
            return
        if not is_open:
            buffer.delete_before_cursor()
        buffer.insert_text("\n")

    def _cancel(self, event: KeyPressEvent) -> None:
        """Handle Ctrl-C: clear the typed text, which is kept in the history.

        If there is no typed text, raise KeyboardInterrupt. While `edit` runs, always raise
        KeyboardInterrupt, so that the message is not changed.
        """
        buffer = event.current_buffer
        if not buffer.text or self._is_editing:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")
            return
        buffer.append_to_history()
        buffer.reset()
        self._pasted = None
        self._signs.begin()

    def _paste(self, buffer: Buffer, data: str) -> None:
        data = data.replace("\r\n", "\n").replace("\r", "\n")
        begins = not buffer.text.strip() and bool(data)
        if begins:
            buffer.reset()
        self._is_pasting = True
        try:
            buffer.insert_text(data)
        finally:
            self._is_pasting = False
        if begins:  # set last: every change of the text is compared with it
            self._pasted = data


def _leave_signals_alone() -> None:
    """Make the event loop print no traceback when a signal ends the program while a task runs."""
    loop = asyncio.get_running_loop()
    usual = loop.get_exception_handler() or type(loop).default_exception_handler

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), SystemExit | KeyboardInterrupt):
            usual(loop, context)

    loop.set_exception_handler(handle)


class _Filtered(Processor):
    """Shows a dot in place of each control character in the typed text; the text is unchanged."""

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        shown: list[tuple[str, str]] = []
        for style, text, *_ in transformation_input.fragments:
            if displayable(text) != text:
                text = "".join(char if displayable(char) else "·" for char in text)
            shown.append((style, text))
        return Transformation(shown)  # type: ignore[arg-type]


_WORD = re.compile(r"@\S+")


class PastedSigns:
    """Knows which `@` signs of the typed text were pasted; call `changed` after each change.

    A pasted word that is inserted again whole (from history, by undo or yank) counts as pasted.
    """

    def __init__(self) -> None:
        self._words = set[str]()
        self.begin()

    def begin(self) -> None:
        """Start again with an empty text; words that were pasted earlier are still known."""
        self._text = ""
        self._signs = frozenset[int]()

    @property
    def indices(self) -> frozenset[int]:
        """The indices in the text of all `@` signs that were pasted."""
        return self._signs

    def changed(self, text: str, *, pasted: bool = False) -> None:
        """Take the text after a change; `pasted`: whether the new part was pasted, not typed."""
        old = self._text
        start = _common_length(old, text)
        tail = _common_length(old[start:][::-1], text[start:][::-1])
        end, shift, new = len(old) - tail, len(text) - len(old), text[start : len(text) - tail]
        stay = {index for index in self._signs if index < start}
        stay |= {index + shift for index in self._signs if index >= end}
        if pasted:
            self._words |= set(_WORD.findall(new))
            stay |= {index for index, char in enumerate(new, start) if char == "@"}
        elif len(new) > 1:  # more than a key types
            found = (one for one in _WORD.finditer(new) if self._was_pasted(one[0]))
            stay |= {start + one.start() for one in found}
        self._text, self._signs = text, frozenset(stay)

    def _was_pasted(self, word: str) -> bool:
        """Whether a pasted word equals `word`, begins with it, or is its beginning."""
        return any(word.startswith(one) or one.startswith(word) for one in self._words)


def _common_length(left: str, right: str) -> int:
    """Number of equal characters at the beginning of two texts; found by bisection."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
