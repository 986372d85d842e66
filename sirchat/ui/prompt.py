"""The prompt, at which the user types a line, chooses from a list, or answers by one key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, run_in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import Completer, DummyCompleter
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.enums import EditingMode
from prompt_toolkit.filters import Condition, has_focus, is_searching, vi_mode
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.vi_state import InputMode
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout import (
    Dimension,
    FormattedTextControl,
    HSplit,
    Layout,
    ScrollOffsets,
    Window,
)
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.output import Output
from prompt_toolkit.styles import DynamicStyle, Style
from prompt_toolkit.widgets import RadioList

from sirchat.errors import UsageError
from sirchat.ui.attaching import unfinished_mention
from sirchat.ui.editor import edit_in_editor, editor_command
from sirchat.ui.keys import ESCAPE_SECONDS, ChordEscape, terminal_keys
from sirchat.ui.pasted import FENCE, PastedAtSigns, escape_message
from sirchat.ui.text import displayable

# Takes the index of a list's item and a width in cells; returns the item's lines. Each is a list of
# parts: a style (`dim`, `bold`, `match` or "") and a text.
DrawItem = Callable[[int, int], list[list[tuple[str, str]]]]

_PROMPT = FormattedText([("class:prompt", "> ")])
_EDIT = FormattedText([("class:prompt", "edit> ")])

# What asyncio says if Ctrl-C comes at the moment when a prompt closes.
_CLOSED = "Event loop is closed"

_GREY = "fg:ansibrightblack"
_PLAIN = {
    "bottom-toolbar": "noreverse",
    "prompt": "bold",
    "bold": "bold",
    "match": "bold underline",
}
_PLAIN_STYLE = Style.from_dict(_PLAIN)
_STYLE = Style.from_dict(
    {**_PLAIN, "bottom-toolbar": f"noreverse {_GREY}", "placeholder": _GREY, "dim": _GREY}
)
_MOST = 20  # rows of a list shown at a time


@dataclass(frozen=True)
class InputLine:
    """One input of the user: a command, which begins with a slash, or a message."""

    text: str
    is_command: bool
    is_stopped: bool = False  # Ctrl-C came after Enter, before the prompt had closed
    pasted_at_signs: frozenset[int] = frozenset()  # where `text` has an `@` that was pasted

    @property
    def ends_chat(self) -> bool:
        """Whether this is a command that ends the chat, which needs no session."""
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
        self._signs = PastedAtSigns()
        self._line = -1  # which line of the history is shown
        self._pastes = set[str]()  # what text that was pasted began with, since the chat began
        self._is_pasting = False
        self._entered: str | None = None
        self._is_editing = False
        self._complaint = ""  # shown below the prompt
        self._suggested = ""
        self._has_colours = has_colours
        self._toolbar: Callable[[], str] = str
        self._header: Callable[[], str] = str
        self._printed = 0, Size(0, 0)  # rows of the header above the prompt, and the window's size
        self._prompt: PromptSession[str] = PromptSession(
            self._message,
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
            enable_suspend=True,
            style=DynamicStyle(self._style),
        )
        self._prompt.default_buffer.on_text_changed += self._changed
        # It prints a traceback of a signal that ends the chat while the history is read.
        logging.getLogger("prompt_toolkit.buffer").disabled = True

    def set_completer(self, completer: Completer, toolbar: Callable[[], str]) -> None:
        """Use `completer` from now on, and show the text returned by `toolbar` below the prompt."""
        self._prompt.completer = completer
        self._toolbar = toolbar

    def set_header(self, header: Callable[[], str]) -> None:
        """Show rows of text with colours, which `header` returns, above each prompt until Enter."""
        self._header = header

    def set_editing_mode(self, mode: str) -> None:
        """Let messages be edited by the keys of `emacs` or of `vi`."""
        self._prompt.editing_mode = EditingMode[mode.upper()]

    @property
    def completer(self) -> Completer:
        """The object that completes the user's input at present."""
        return self._prompt.completer or DummyCompleter()

    def read(
        self, suggested: str = "", meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> InputLine | None:
        """Read the next line that is not blank; None at the end of the input.

        Enter alone enters the line `suggested`. `meanwhile` runs in the prompt's event loop. Raises
        KeyboardInterrupt for Ctrl-C at an empty prompt, and the error given to `abort`.
        """

        def begin() -> None:
            self._prepare()
            if meanwhile is not None:
                self._prompt.app.create_background_task(meanwhile())

        while True:
            self._begin(suggested)
            self._show_header()
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
                return replace(line, is_stopped=stopped, pasted_at_signs=signs)

    def edit(self, text: str) -> str:
        """Let the user change the message `text`; return the result, or "" if the user cancels."""
        self._begin()
        self._is_editing = True
        try:
            return self._prompt.prompt(_EDIT, default=text, pre_run=self._prepare)
        except (EOFError, KeyboardInterrupt):
            return self._entered or ""
        finally:
            self._is_editing = False
            self._prompt.message = self._message  # else the prompt session keeps the other one

    def pick(self, count: int, draw: DrawItem, more: str = "") -> int | None:
        """Let the user choose one of `count` items, which `draw` draws, by arrow keys.

        Returns its index, or None after Esc, Ctrl-C or Ctrl-D. `more` is a remark below the list,
        which is removed from the screen at the end. The prompt must not be open.
        """
        output = self._prompt.output

        def item(number: int) -> FormattedText:
            width = output.get_size().columns - 3  # the last column stays free: some terminals wrap
            shown: list[tuple[str, str]] = []
            for line in draw(number, width):
                shown += [("", "\n  " if shown else "")]
                shown += [(f"class:{style}" if style else "", text) for style, text in line]
            return FormattedText(shown)

        items = RadioList(
            [(number, partial(item, number)) for number in range(count)],
            select_on_focus=True,
            open_character="",
            select_character=">",
            close_character="",
            show_cursor=False,
            show_scrollbar=False,
        )
        items.window.height = Dimension(max=_MOST)
        items.window.scroll_offsets = ScrollOffsets(bottom=1)  # an item may have two rows

        def keys() -> str:
            at = f"{items.current_value + 1} of {count}{more}"
            return f"{at}: arrows, Enter opens, Esc leaves"

        below = Window(FormattedTextControl(keys, style="class:dim"), height=1)
        app: Application[int | None] = Application(
            layout=Layout(HSplit([items, below])),
            key_bindings=_picker_bindings(items),
            input=self._prompt.input,
            output=output,
            style=self._style(),
            erase_when_done=True,
        )
        app.ttimeoutlen = app.timeoutlen = ESCAPE_SECONDS
        return app.run(pre_run=_leave_signals_alone)

    def ask_for_key(self, question: str, keys: Collection[str]) -> str:
        """Show `question` until the user presses one of `keys`, and return that key."""
        return ask_for_key(question, keys, self._prompt.output, self._prompt.input)

    def redraw(self) -> None:
        """Ask the prompt to draw itself again soon; any thread may call this."""
        self._prompt.app.invalidate()

    def print_above(self, show: Callable[[], object]) -> None:
        """Call `show`, whose output appears above the open prompt; only in its event loop.

        The terminal stays in the prompt's mode, so that no key is lost or echoed meanwhile.
        """
        renderer = self._prompt.app.renderer
        self._leave_header()
        renderer.erase()
        show()
        renderer.request_absolute_cursor_position()
        self.redraw()

    def abort(self, error: BaseException) -> None:
        """Close the open prompt, so that `read` raises `error`; the history gets the typed text."""
        app, buffer = self._prompt.app, self._prompt.default_buffer
        if app.future is None or app.future.done():
            return
        buffer.append_to_history()
        app.erase_when_done = not buffer.text
        app.exit(exception=error)

    def escape_message(self, text: str) -> str:
        """How a text of the prompt must be typed to mean the same: what was pasted stays text."""
        return escape_message(text) if self._is_literal(text) else text

    def _prepare(self) -> None:
        """Begin in the open prompt: a signal may have ended the last one within a search."""
        _leave_signals_alone()
        self._prompt.layout.focus(self._prompt.default_buffer)
        self._prompt.search_buffer.reset()

    def _begin(self, suggested: str = "") -> None:
        self._pasted = self._entered = None
        self._suggested, self._complaint = suggested, ""
        self._signs.reset()

    def _show_header(self) -> None:
        """Print the header: as a part of the prompt, drawn with each key, it makes typing slow."""
        header, output = self._header(), self._prompt.output
        self._printed = header.count("\n"), output.get_size()
        output.write_raw(header.replace("\n", "\r\n"))
        output.flush()

    def _message(self) -> FormattedText:
        """The prompt; while it closes, the header above it leaves the screen, if all is there."""
        app, (rows, size) = self._prompt.app, self._printed
        if rows and app.is_done:
            self._printed = 0, size
            screen, at = app.renderer.last_rendered_screen, app.renderer._cursor_pos
            height = screen.height if screen is not None else 1  # it was entered beforehand
            if self._prompt.output.get_size() == size and rows + height <= size.rows:
                up, down = f"\x1b[{at.y + rows}A", f"\x1b[{at.y}B" if at.y else ""
                self._prompt.output.write_raw(f"{up}\x1b[{rows}M{down}\x1b[{at.x + 1}G")
        return _PROMPT

    def _leave_header(self) -> None:
        """Other rows come between header and prompt, or it moves: it stays where it is."""
        self._printed = 0, self._printed[1]

    def _style(self) -> Style:
        return _STYLE if self._has_colours() else _PLAIN_STYLE

    def _parsed(self, text: str) -> InputLine:
        if self._is_literal(text):
            return InputLine(text, is_command=False)
        stripped = text.strip()
        if stripped.startswith(FENCE) and stripped.endswith(FENCE) and len(stripped) >= 6:
            inner = stripped.removeprefix(FENCE).removesuffix(FENCE)
            return InputLine(inner.strip("\n"), is_command=False)
        if stripped.startswith("//"):
            return InputLine(stripped[1:], is_command=False)
        return InputLine(stripped, is_command=stripped.startswith("/"))

    def _is_literal(self, text: str) -> bool:
        """Whether `text` begins with pasted text; such a text is a message, never a command."""
        return self._pasted is not None and text.startswith(self._pasted)

    def _changed(self, buffer: Buffer) -> None:
        """Pasted text at the beginning that was edited no longer counts as pasted; its `@` do.

        If it comes back at once, as by undo or from another line, it counts as pasted.
        """
        text = buffer.text
        changed = self._signs.update(text, pasted=self._is_pasting)
        is_back, self._line = (
            changed > 1 or buffer.working_index != self._line,
            buffer.working_index,
        )
        if not self._is_literal(text):
            back = (paste for paste in self._pastes if is_back and text.startswith(paste))
            self._pasted = max(back, key=len, default=None)

    def _is_completed(self) -> bool:
        """Whether completions show while the user types: in commands, and in names after `@`."""
        document = self._prompt.default_buffer.document
        text = document.text
        if unfinished_mention(document.text_before_cursor) is not None:
            return True
        return text.startswith("/") and "\n" not in text and not self._is_literal(text)

    def _placeholder(self) -> FormattedText:
        """The suggested line; empty once the prompt closes, so that the line leaves the screen."""
        is_shown = not self._prompt.app.is_done
        return FormattedText([("class:placeholder", self._suggested if is_shown else "")])

    def _toolbar_text(self) -> str:
        if self._is_literal(self._prompt.default_buffer.text):
            return " pasted text: sent as it is, never run as a command"
        if self._complaint:
            return f" {displayable(self._complaint)}"
        if self._prompt.editing_mode == EditingMode.VI:
            mode = self._prompt.app.vi_state.input_mode
            name = "normal" if mode == InputMode.NAVIGATION else mode.value.removeprefix("vi-")
            return f" {name} · {self._toolbar()}"
        return f" {self._toolbar()}"

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()
        typing = has_focus("DEFAULT_BUFFER") & ~is_searching

        keys.add("enter", filter=typing)(self._enter)
        keys.add("c-c", filter=typing)(self._cancel)
        keys.add(Keys.BracketedPaste, filter=typing)(self._paste)

        @keys.add("escape", "enter", filter=typing & ~vi_mode)  # in vi they leave insert, and send
        @keys.add("c-j", filter=typing)
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("escape", filter=typing & Condition(lambda: self._is_editing))
        def _leave_editing(event: KeyPressEvent) -> None:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

        @keys.add("<sigint>")
        def _signal(event: KeyPressEvent) -> None:
            future = event.app.future
            if future is not None and not future.done():  # else the prompt has just closed
                event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

        @keys.add("c-x", "c-e", filter=typing)
        def _edit(event: KeyPressEvent) -> None:
            self._leave_header()
            event.app.create_background_task(self._open_editor(event.current_buffer))

        @keys.add("c-z", filter=typing)
        def _suspend(event: KeyPressEvent) -> None:
            self._leave_header()
            event.app.suspend_to_background()

        @keys.add("c-l", filter=typing)
        def _clear(event: KeyPressEvent) -> None:
            self._leave_header()
            event.app.renderer.clear()

        @keys.add(Keys.Vt100MouseEvent, eager=True)
        def _no_mouse(event: KeyPressEvent) -> None:
            """Ignore what looks like a mouse event: it is part of a typed escape sequence."""

        return keys

    def _enter(self, event: KeyPressEvent) -> None:
        """Enter the typed text or the suggested line; behind `\\` or in open quotes, a new line."""
        buffer = event.current_buffer
        if not buffer.text and self._suggested:
            buffer.insert_text(self._suggested)
        text = buffer.text
        is_open = text.lstrip().startswith(FENCE) and text.count(FENCE) % 2 == 1
        is_open &= not (text.lstrip().startswith(f"{FENCE}\n") and text.endswith(f"\n{FENCE}"))
        continues = buffer.document.text_before_cursor.endswith("\\") and text[:1] != "/"
        if self._is_literal(text) or not (is_open or continues):
            self._entered = text
            buffer.validate_and_handle()
            return
        if not is_open:
            buffer.delete_before_cursor()
        buffer.insert_text("\n")

    def _cancel(self, event: KeyPressEvent) -> None:
        """Handle Ctrl-C: clear the typed text, which is kept in the history; else, interrupt."""
        buffer = event.current_buffer
        if not buffer.text or self._is_editing:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")
            return
        buffer.append_to_history()
        buffer.reset()
        self._pasted = None
        self._signs.reset()

    def _paste(self, event: KeyPressEvent) -> None:
        buffer, data = event.current_buffer, event.data.replace("\r\n", "\n").replace("\r", "\n")
        begins = not buffer.text.strip() and bool(data)
        if begins:
            buffer.reset()
        self._is_pasting = True
        try:
            buffer.insert_text(data)
        finally:
            self._is_pasting = False
        if begins:  # set last: every change of the text is compared with it
            self._take_as_text(data)

    def _take_as_text(self, text: str) -> None:
        """Let the typed text, which begins with `text`, be a message, whatever it looks like."""
        self._pasted = text
        if len(text) > 1:  # else a command that is recalled might begin with it
            self._pastes.add(text)

    async def _open_editor(self, buffer: Buffer) -> None:
        """Let the user change the text in an editor; what was no command becomes none there."""
        before = buffer.text
        was_typed = not self._is_literal(before) and before.lstrip().startswith(("/", FENCE))
        command = editor_command(is_needed=True)
        try:
            text = await run_in_terminal(lambda: edit_in_editor(command, before))
        except UsageError as error:
            self._complaint = str(error)
            return
        buffer.document = Document(text)
        if was_typed:
            self._pasted = None
        elif text.lstrip().startswith(("/", FENCE)):
            self._take_as_text(text)


def ask_for_key(
    question: str, keys: Collection[str], output: Output, source: Input | None = None
) -> str:
    """Show `question` until the user presses one of `keys`, and return that key.

    A line that begins with another sign, such as a command, is no answer up to its end. Keys are
    read from `source`, or else from the terminal. Raises KeyboardInterrupt for Ctrl-C and Ctrl-D.
    """
    bindings, is_line = KeyBindings(), False

    def shown() -> str:
        return question + "(a line is no answer; Enter ends it)" * is_line

    @bindings.add(Keys.Any)
    @bindings.add("enter")
    def answer(event: KeyPressEvent) -> None:
        nonlocal is_line
        press = event.key_sequence[0]
        key = press.data.lower()
        is_typed = len(key) == 1 and press.key != Keys.BracketedPaste
        is_key = is_typed and key in keys and not isinstance(press, ChordEscape)
        if is_key and not event.app.is_done and (not is_line or press.key == Keys.Escape):
            event.app.exit(result=key)
        is_line = press.key != Keys.Enter if is_line else bool(key) and key.isprintable()

    @bindings.add("c-c")
    @bindings.add("c-d")
    @bindings.add("<sigint>")
    def interrupt(event: KeyPressEvent) -> None:
        if not event.app.is_done:
            event.app.exit(exception=KeyboardInterrupt())

    line: Application[str] = Application(
        layout=Layout(Window(FormattedTextControl(shown), height=1)),
        key_bindings=bindings,
        input=source or terminal_keys(),
        output=output,
        erase_when_done=True,
    )
    line.ttimeoutlen = ESCAPE_SECONDS
    return line.run(pre_run=_leave_signals_alone)


def _leave_signals_alone() -> None:
    """Make the event loop print no traceback of a signal that ends the program."""
    # One within a key ends the generator of keys, so that the next key is a StopIteration; and the
    # cursor's position may come when nobody waits for it any more.
    signs = SystemExit, KeyboardInterrupt, StopIteration, asyncio.InvalidStateError
    loop = asyncio.get_running_loop()
    usual = loop.get_exception_handler() or type(loop).default_exception_handler

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), signs):
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


def _picker_bindings(items: RadioList[int]) -> KeyBindings:
    keys, of_list = KeyBindings(), items.control.key_bindings
    assert of_list is not None
    # Pages and letters of a RadioList move it without its mark: the arrows alone stay.
    items.control.key_bindings = None
    for binding in of_list.bindings:
        if binding.keys in ((Keys.Up,), (Keys.Down,)):
            keys.add(*binding.keys)(binding)

    @keys.add("enter", eager=True)
    def _choose(event: KeyPressEvent) -> None:
        event.app.exit(result=items.current_value)

    @keys.add("escape", eager=True)
    @keys.add("c-c")
    @keys.add("c-d")
    @keys.add("<sigint>")
    def _leave(event: KeyPressEvent) -> None:
        is_chord = any(isinstance(press, ChordEscape) for press in event.key_sequence)
        if not is_chord and not event.app.is_done:
            event.app.exit(result=None)

    return keys
