"""The prompt, at which the user types a line, or answers by one key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from itertools import groupby
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, run_in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import Completer, DummyCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import EditingMode
from prompt_toolkit.filters import Condition, has_focus, is_done, is_searching, vi_mode
from prompt_toolkit.formatted_text import (
    ANSI,
    FormattedText,
    StyleAndTextTuples,
    to_formatted_text,
)
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import get_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.vi_state import InputMode
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout import (
    ConditionalContainer,
    FormattedTextControl,
    HSplit,
    Layout,
    Window,
)
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.output import Output
from prompt_toolkit.styles import DynamicStyle, Style

from sirchat.errors import UsageError
from sirchat.ui.attaching import escape_mentions, unfinished_mention
from sirchat.ui.editor import edit_in_editor, editor_command
from sirchat.ui.keys import ESCAPE_SECONDS
from sirchat.ui.text import displayable
from sirchat.ui.typed_line import FENCE, InputLine, as_typed, parse_line

_PROMPT_TEXT = FormattedText([("class:sign", "> ")])

_LOOP_CLOSED = "Event loop is closed"  # asyncio's error if Ctrl-C comes while a prompt closes

_GREY = "fg:ansibrightblack"
_COLOURLESS = {"bottom-toolbar": "noreverse", "sign": "bold"}
_COLOURLESS_STYLE = Style.from_dict(_COLOURLESS)
_STYLE = Style.from_dict(
    {**_COLOURLESS, "bottom-toolbar": f"noreverse {_GREY}", "placeholder": _GREY}
)


class Prompt:
    """Reads the user's input from `keys`, which others may read between two prompts.

    `has_colours` is called at each redraw.
    """

    def __init__(
        self,
        keys: Input,
        output: Output,
        *,
        history: History,
        has_colours: Callable[[], bool] = lambda: True,
    ) -> None:
        self._entered: str | None = None  # the text at the last Enter
        self._editor_error = ""
        self._suggestion = ""
        self._has_colours = has_colours
        self._draw_toolbar: Callable[[], str] = str
        self._draw_header: Callable[[], str] = str
        self._header: StyleAndTextTuples = []  # the rows above the prompt
        self._prompt: PromptSession[str] = PromptSession(
            _PROMPT_TEXT,
            input=keys,
            output=output,
            multiline=True,
            prompt_continuation="  ",
            completer=DummyCompleter(),
            complete_while_typing=Condition(self._completes_while_typing),
            bottom_toolbar=self._toolbar_text,
            placeholder=self._placeholder,
            history=history,
            key_bindings=self._bindings(),
            input_processors=[_ControlCharFilter()],
            enable_suspend=True,
            style=DynamicStyle(self._style),
        )
        header = Window(FormattedTextControl(lambda: self._header), dont_extend_height=True)
        shows_header = Condition(lambda: bool(self._header)) & ~is_done
        layout = self._prompt.layout
        layout.container = HSplit([ConditionalContainer(header, shows_header), layout.container])
        # It would print a traceback if a signal ended the chat while the history is read.
        logging.getLogger("prompt_toolkit.buffer").disabled = True

    def set_completer(self, completer: Completer) -> None:
        self._prompt.completer = completer

    def set_toolbar(self, draw_toolbar: Callable[[], str]) -> None:
        """From now on, show below the prompt the text that `draw_toolbar` returns."""
        self._draw_toolbar = draw_toolbar

    def set_header(self, draw_header: Callable[[], str]) -> None:
        """Show the rows of `draw_header`, with escape sequences, above each prompt until Enter."""
        self._draw_header = draw_header

    def set_editing_mode(self, mode: str) -> None:
        """Set whose keys edit the text: those of `emacs` or `vi`."""
        self._prompt.editing_mode = EditingMode[mode.upper()]

    def read(
        self,
        suggestion: str = "",
        background: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> InputLine | None:
        """Read the next line that is not blank, or that Enter takes from `suggestion`; None at EOF.

        `background` runs in the prompt's event loop. Raises KeyboardInterrupt for Ctrl-C at an
        empty prompt, and the error given to `abort`.
        """

        def begin() -> None:
            self._prepare()
            if background is not None:
                self._prompt.app.create_background_task(background())

        while True:
            self._reset(suggestion)
            self._header = _from_ansi(self._draw_header().rstrip("\n"))
            is_stopped = False
            try:
                text = self._prompt.prompt(pre_run=begin)
            except EOFError:
                return None
            except (KeyboardInterrupt, RuntimeError) as error:
                if isinstance(error, RuntimeError) and str(error) != _LOOP_CLOSED:
                    raise
                if self._entered is None:
                    raise KeyboardInterrupt from None
                text, is_stopped = self._entered, True  # the prompt was about to close
            line = parse_line(text)
            if line.text.strip():
                return replace(line, is_stopped=is_stopped)

    def ask_for_key(self, question: str, keys: Collection[str]) -> str:
        """Show `question` until the user presses one of `keys`, and return that key.

        A line that begins with another character, such as a command, is ignored up to Enter. Raises
        KeyboardInterrupt for Ctrl-C and Ctrl-D.
        """
        bindings, is_in_line = KeyBindings(), False

        def question_text() -> str:
            return question + "(a line is no answer; Enter ends it)" * is_in_line

        @bindings.add(Keys.Any)
        @bindings.add("enter")
        def answer(event: KeyPressEvent) -> None:
            nonlocal is_in_line
            press = event.key_sequence[0]
            key = press.data.lower()
            is_typed = len(key) == 1 and press.key != Keys.BracketedPaste
            is_answer = is_typed and key in keys and (not is_in_line or press.key == Keys.Escape)
            if is_answer and not event.app.is_done:
                event.app.exit(result=key)
            begins_line = bool(key) and key.isprintable()
            is_in_line = press.key != Keys.Enter and (is_in_line or begins_line)

        @bindings.add("c-c")
        @bindings.add("c-d")
        @bindings.add("<sigint>")
        def interrupt(event: KeyPressEvent) -> None:
            if not event.app.is_done:
                event.app.exit(exception=KeyboardInterrupt())

        app: Application[str] = Application(
            layout=Layout(Window(FormattedTextControl(question_text), height=1)),
            key_bindings=bindings,
            input=self._prompt.input,
            output=self._prompt.output,
            erase_when_done=True,
        )
        app.ttimeoutlen = ESCAPE_SECONDS
        return app.run(pre_run=_silence_signal_tracebacks)

    def redraw(self) -> None:
        """Draw the prompt again soon; any thread may call this."""
        self._prompt.app.invalidate()

    def take_passed_keys(self) -> None:
        """Take the keys that came while an open prompt had to wait; only in its event loop."""
        app = self._prompt.app
        if app.is_running:
            app.key_processor.feed_multiple(get_typeahead(app.input))
            app.key_processor.process_keys()

    def print_above(self, show: Callable[[], object]) -> None:
        """Call `show`, whose output appears above the open prompt; only in its event loop."""
        # Unlike prompt_toolkit's own way, this leaves the terminal's mode, so no key is lost.
        renderer = self._prompt.app.renderer
        renderer.erase()
        show()
        renderer.request_absolute_cursor_position()
        self.redraw()

    def abort(self, error: BaseException) -> None:
        """Close the prompt, so that `read` raises `error`; the typed text goes into the history."""
        app, buffer = self._prompt.app, self._prompt.default_buffer
        if app.future is None or app.future.done():
            return
        buffer.append_to_history()
        app.erase_when_done = not buffer.text
        app.exit(exception=error)

    def _prepare(self) -> None:
        _silence_signal_tracebacks()
        # A signal may have ended the last prompt within a search.
        self._prompt.layout.focus(self._prompt.default_buffer)
        self._prompt.search_buffer.reset()

    def _reset(self, suggestion: str = "") -> None:
        self._entered, self._header = None, []
        self._suggestion, self._editor_error = suggestion, ""

    def _style(self) -> Style:
        return _STYLE if self._has_colours() else _COLOURLESS_STYLE

    def _completes_while_typing(self) -> bool:
        document = self._prompt.default_buffer.document
        text = document.text
        if unfinished_mention(document.text_before_cursor) is not None:
            return True
        return text.startswith("/") and "\n" not in text

    def _placeholder(self) -> FormattedText:
        is_closing = self._prompt.app.is_done  # then the suggestion leaves the screen
        return FormattedText([("class:placeholder", "" if is_closing else self._suggestion)])

    def _toolbar_text(self) -> str:
        if self._editor_error:
            return f" {displayable(self._editor_error)}"
        if self._prompt.editing_mode == EditingMode.VI:
            mode = self._prompt.app.vi_state.input_mode
            name = "normal" if mode == InputMode.NAVIGATION else mode.value.removeprefix("vi-")
            return f" {name} · {self._draw_toolbar()}"
        return f" {self._draw_toolbar()}"

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()
        typing = has_focus("DEFAULT_BUFFER") & ~is_searching

        keys.add("enter", filter=typing)(self._on_enter)
        keys.add("c-c", filter=typing)(self._on_ctrl_c)
        keys.add(Keys.BracketedPaste, filter=typing)(self._on_paste)

        @keys.add("escape", "enter", filter=typing & ~vi_mode)  # in vi they leave insert, and send
        @keys.add("c-j", filter=typing)
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("<sigint>")
        def _signal(event: KeyPressEvent) -> None:
            future = event.app.future
            if future is not None and not future.done():  # else the prompt has just closed
                event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

        @keys.add("c-x", "c-e", filter=typing)
        def _edit(event: KeyPressEvent) -> None:
            event.app.create_background_task(self._open_editor(event.current_buffer))

        @keys.add(Keys.Vt100MouseEvent, eager=True)
        def _no_mouse(event: KeyPressEvent) -> None:
            """Ignore it: the mouse is never asked for, so it is a typed escape sequence."""

        return keys

    def _on_enter(self, event: KeyPressEvent) -> None:
        """Enter the text or the suggestion; a new line after a backslash and in an open block."""
        buffer = event.current_buffer
        if not buffer.text and self._suggestion:
            buffer.insert_text(self._suggestion)
        text = buffer.text
        ends_in_backslash = buffer.document.text_before_cursor.endswith("\\")
        if _is_open_block(text):
            buffer.insert_text("\n")
        elif ends_in_backslash and not text.lstrip().startswith(("/", FENCE)):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            self._entered = text
            buffer.validate_and_handle()

    def _on_ctrl_c(self, event: KeyPressEvent) -> None:
        """Move the typed text into the history; interrupt if it is empty."""
        buffer = event.current_buffer
        if not buffer.text:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")
            return
        buffer.append_to_history()
        buffer.reset()

    def _on_paste(self, event: KeyPressEvent) -> None:
        """Insert pasted text as it must be typed: it is no command, and names no file."""
        buffer, data = event.current_buffer, event.data.replace("\r\n", "\n").replace("\r", "\n")
        before, after = buffer.document.text_before_cursor, buffer.document.text_after_cursor
        is_first, is_command = not before.strip(), parse_line(buffer.text).is_command
        if is_command and "/" in before:
            buffer.insert_text(data)
            return
        data = escape_mentions(data, after=before[-1:])
        whole = data + after if is_first else before + data + after
        if not data.strip() or not (is_first or parse_line(whole).is_command):
            buffer.insert_text(data)
            return
        typed = as_typed(whole)
        end = len(after) + typed.startswith(FENCE) * len(f"\n{FENCE}")
        buffer.document = Document(typed, len(typed) - end)  # within the block, if it is one

    async def _open_editor(self, buffer: Buffer) -> None:
        """Let the user change the text in an editor; a message never becomes a command there."""
        before = buffer.text
        shows_marks = before.lstrip().startswith(("/", FENCE))
        command = editor_command()
        try:
            text = await run_in_terminal(lambda: edit_in_editor(command, before))
        except UsageError as error:
            self._editor_error = str(error)
            return
        buffer.document = Document(text if shows_marks else as_typed(text))


def _from_ansi(text: str) -> StyleAndTextTuples:
    """Styled runs of a text with escape sequences: each is drawn faster than single characters."""
    styled = to_formatted_text(ANSI(text))
    runs = groupby(styled, key=lambda part: part[0])
    return [(style, "".join(part[1] for part in run)) for style, run in runs]


def _is_open_block(text: str) -> bool:
    """Whether the text begins with quotes that open a block of lines, and does not close it."""
    start = text.lstrip()
    is_closed = start.startswith(f"{FENCE}\n") and text.endswith(f"\n{FENCE}")
    return start.startswith(FENCE) and text.count(FENCE) % 2 == 1 and not is_closed


def _silence_signal_tracebacks() -> None:
    """Make the event loop print no traceback of a signal that ends the program."""
    # A signal within a key ends the generator of keys, so that the next key is a StopIteration; and
    # the cursor's position may come when nobody waits for it any more.
    silenced = SystemExit, KeyboardInterrupt, StopIteration, asyncio.InvalidStateError
    loop = asyncio.get_running_loop()
    former = loop.get_exception_handler() or type(loop).default_exception_handler

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), silenced):
            former(loop, context)

    loop.set_exception_handler(handle)


class _ControlCharFilter(Processor):
    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        shown: list[tuple[str, str]] = []
        for style, text, *_ in transformation_input.fragments:
            if displayable(text) != text:
                text = "".join(char if displayable(char) else "·" for char in text)
            shown.append((style, text))
        return Transformation(shown)  # type: ignore[arg-type]
