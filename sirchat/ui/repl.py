"""The chat loop: reads a line at the prompt, and runs it as a command or sends it to the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from time import monotonic

from sirchat.chat.events import Delta, Event, TurnDone
from sirchat.chat.retry import go_on
from sirchat.chat.session import Interrupted, Session
from sirchat.chat.summary import (
    last_user_message,
    make_summary,
    omitted_facts,
    pin_summary,
    summary_cost,
)
from sirchat.errors import SirchatError, is_output_closed, shows_tracebacks
from sirchat.memory.free_memory import trim_memory
from sirchat.models.devices import describe_threads
from sirchat.saved.store import SessionStore
from sirchat.text.text_file import without_surrogates
from sirchat.tools.config import ToolFlags
from sirchat.ui.attaching import attach_mentions, escape_mentions
from sirchat.ui.commands import (
    Action,
    Commands,
    Continue,
    Edit,
    Greet,
    Leave,
    Summarize,
)
from sirchat.ui.completion import SlashCompleter
from sirchat.ui.editor import edit_in_editor, editor_command
from sirchat.ui.interrupt import InterruptFlag
from sirchat.ui.live import LiveView
from sirchat.ui.panel import draw_prompt_panel
from sirchat.ui.saved_chat import SavedChat, show_resumed_chat
from sirchat.ui.screen import Screen
from sirchat.ui.status import toolbar_text
from sirchat.ui.text import displayable_line
from sirchat.ui.tool_use import ToolUse
from sirchat.ui.turn_commands import Retry, edit, make_undoable, retry
from sirchat.ui.typed_input import Keyboard, TerminalInput
from sirchat.ui.typed_line import InputLine, as_typed

_MIN_WINDOW_ROWS = 24  # for the panel above the prompt
_MAX_READ_SENTENCES = 4  # that the model reads for that panel
_REVIEW_QUESTION = "takes {:,} tokens, evicts {:,}: k or Enter keeps it, e edits, d drops: "


class Chat:
    """A chat at the prompt, which ends when the user leaves.

    `store` is the file from which the chat was resumed. Unexpected errors are printed, and
    with `--debug` raised.
    """

    def __init__(
        self,
        session: Session,
        screen: Screen,
        terminal_input: TerminalInput,
        store: SessionStore | None,
        tools: ToolFlags | None = None,
    ) -> None:
        self._screen = screen
        self._ctrl_c = terminal_input.ctrl_c
        self._keyboard = terminal_input.keyboard
        self._history = terminal_input.history
        self._prompt = terminal_input.prompt
        self.saved_chat = SavedChat(session, screen, store)
        self.tools = ToolUse(
            tools or ToolFlags(),
            screen,
            self._ask_for_key,
            lambda: self._session.profile.tool_timeout,
            self._keyboard.escape_pressed,
        )
        self._switch_to(session)
        self._prompt.set_completer(SlashCompleter(lambda: self._session))
        self._prompt.set_toolbar(lambda: toolbar_text(self._session, screen.width))
        self._prompt.set_header(self._draw_header)

    def run(self, line: InputLine | None = None) -> None:
        """Handle `line`, if given, and then each line that is read, until the user leaves."""
        while True:
            self._follow_saved_chat()
            try:
                with self._ctrl_c.interruptible():
                    if line is None:
                        self._keyboard.pass_keys_to_prompt()
                        self._history.is_persistent = self._session.profile.save
                        self._prompt.set_editing_mode(self._session.profile.editing)
                        line = self._prompt.read()
                    is_open = line is not None and self._handle_line(line)
                if not is_open:
                    return
                with InterruptFlag():  # ends only at the third Ctrl-C
                    self.saved_chat.save()
            except KeyboardInterrupt:
                self._screen.note("Ctrl-D or /exit leaves")
            line = None

    def greet(self, events: Iterable[Event]) -> None:
        """Show the events of the session's start, its model, and the last turns, if any."""
        with LiveView(self._session, self._screen) as view:
            for event in events:
                view.show(event)
        profile = self._session.profile
        device = self._session.model.device
        threads = describe_threads(device, was_free=profile.threads == 0)
        self._screen.remark(
            f"{self._session.model.name}, policy {profile.policy}, "
            f"budget {self._session.budget:,}{', ' if threads else ''}{threads}: "
            "/help, Esc stops a reply, Ctrl-D leaves"
        )
        if self._session.seen and not self._screen.is_quiet:
            show_resumed_chat(self._session, self._screen)

    def begin_tools(self) -> None:
        """Turn on the tools that flags allow; Esc or Ctrl-C stops a server's start."""
        try:
            with self._ctrl_c.interruptible():
                self.tools.begin()
        except KeyboardInterrupt:
            self._screen.note("stopped")
        self._keyboard.pass_keys_to_prompt()
        self._prompt.take_passed_keys()

    def _draw_header(self) -> str:
        """The panel above the prompt; "" if it is not wanted, or if nothing was said yet."""
        session, screen = self._session, self._screen
        mode, window_rows = session.profile.panel, screen.console.size.height
        is_wanted = mode == "prompt" or (mode == "auto" and window_rows >= _MIN_WINDOW_ROWS)
        if not is_wanted or screen.is_plain or not session.seen:
            return ""
        try:
            facts = session.facts(max_reads=_MAX_READ_SENTENCES)
            snapshot = session.snapshot(strongest=0)
            with screen.console.capture() as captured:
                rows = max(1, window_rows // 12)  # it takes less than half of the window
                screen.show(draw_prompt_panel(snapshot, facts, screen.theme, screen.width, rows))
        except Exception as error:
            if shows_tracebacks():
                raise
            return displayable_line(f"no panel: {type(error).__name__}: {error}")
        return captured.get()

    def _follow_saved_chat(self) -> None:
        """Go on with the session of the saved chat, which a command may have replaced."""
        if (session := self.saved_chat.session) is not self._session:
            self._switch_to(session)
            trim_memory()  # of the former one

    def _switch_to(self, session: Session) -> None:
        self._session, session.toolbox = session, self.tools
        screen, saved_chat = self._screen, self.saved_chat
        self._commands = Commands(session, screen, self._history, saved_chat)
        self._screen.use_theme(session.profile.theme)

    def _handle_line(self, line: InputLine) -> bool:
        """Run the line as a command, or send it; print errors. Returns False if the user leaves."""
        try:
            if line.is_command:
                return self._perform(self._commands.run(line.text))
            # From here on Ctrl-C stops the reply, and the message stays.
            with InterruptFlag() as interrupt:
                text = self._attach_files(line.text)
                is_stopped = line.is_stopped or interrupt()
                self._run_turn(lambda interrupted: self._session.ask(text, interrupted), is_stopped)
        except SirchatError as error:
            self._screen.error(str(error))
        except KeyboardInterrupt:
            self._screen.note("stopped")
        except Exception as error:
            if shows_tracebacks() or is_output_closed(error):
                raise
            self._screen.error(f"{type(error).__name__}: {error}")
        return True

    def _perform(self, action: Action | None) -> bool:
        """Do what a command asks for; returns False if the user leaves."""
        match action:
            case Leave():
                return False
            case Continue():
                self._make_undoable()
                self._run_turn(lambda interrupted: go_on(self._session, interrupted))
            case Retry() as request:
                self._make_undoable()
                self._run_turn(lambda interrupted: retry(self._session, request, interrupted))
            case Edit(text):
                self._edit(text)
            case Summarize():
                self._summarize()
            case Greet():
                self._follow_saved_chat()
                self.greet(self._session.opening_events())
        return True

    def _edit(self, edited: str) -> None:
        """Replace the last message and its reply; if `edited` is "", the user edits the message."""
        text = last_user_message(self._session)
        edited = self._attach_files(edited or self._let_user_edit(escape_mentions(text)))
        if edited.strip() in ("", text.strip()):
            self._screen.note("the message is unchanged; /retry generates another reply")
        else:
            self._make_undoable()
            self._run_turn(lambda interrupted: edit(self._session, edited, interrupted))

    def _make_undoable(self) -> None:
        make_undoable(self._session, self._screen, self.saved_chat)
        self._follow_saved_chat()

    def _let_user_edit(self, text: str) -> str:
        with self._keyboard.lend_terminal():
            edited = edit_in_editor(editor_command(), text)
        self._history.append_string(as_typed(edited))
        return edited

    def _summarize(self) -> None:
        text = ""

        def summarize(_: Interrupted) -> Iterator[Event]:
            nonlocal text
            text = make_summary(self._session, facts := self._session.facts())
            yield Delta(text)
            yield from omitted_facts(facts, text)

        self._run_turn(summarize)
        if text and self._screen.terminal is not None:
            text = self._let_user_review(text)
        if text:
            self._run_turn(lambda interrupted: pin_summary(self._session, text))
        else:
            self._screen.note("no summary is kept; the conversation is unchanged")

    def _let_user_review(self, text: str) -> str:
        """The summary, perhaps edited; "" if the user drops it."""
        question = _REVIEW_QUESTION.format(*summary_cost(self._session, text))
        while True:
            try:
                key = self._ask_for_key(question, "k\red\x1b")
            except KeyboardInterrupt:
                return ""
            if key != "e":
                return text if key in "k\r" else ""
            if edited := self._let_user_edit(text).strip():
                return edited

    def _ask_for_key(self, question: str, keys: Collection[str]) -> str:
        """The key that the user presses; keys before the question, except Esc, go to the prompt."""
        if self._keyboard.wait_for_silence():
            return "\x1b"
        return self._prompt.ask_for_key(question, keys)

    def _attach_files(self, typed: str) -> str:
        """The message that a typed text sends, with files in place of their names."""
        text = attach_mentions(typed, self._screen.note, self.tools.resource)
        if text != typed:
            message = without_surrogates(text).strip()
            # /edit may bring the same message again, with names that it escapes.
            self._history.typed_by_message.setdefault(message, typed.strip())
        return text

    def _run_turn(
        self, run: Callable[[Interrupted], Iterator[Event]], is_stopped: bool = False
    ) -> None:
        """Show the events that `run` yields, until the user stops it."""
        self.tools.is_stopped, start = False, monotonic()
        self._keyboard.set_bracketed_paste(True)
        try:
            with InterruptFlag() as interrupt, LiveView(self._session, self._screen) as view:
                must_stop = make_stop_check(interrupt, self._keyboard, is_stopped)
                for event in run(lambda: must_stop() or self.tools.is_stopped):
                    view.show(event)
                    if isinstance(event, TurnDone) and event.role == "tool":
                        self.saved_chat.save()
        finally:
            self._keyboard.set_bracketed_paste(False)
        if 0 < self._session.profile.bell <= monotonic() - start:
            self._screen.ring()


def make_stop_check(
    interrupt: InterruptFlag, keyboard: Keyboard, is_stopped: bool
) -> Callable[[], bool]:
    """Make a function that says whether Esc or Ctrl-C was pressed, or `is_stopped` is true."""

    def must_stop() -> bool:
        nonlocal is_stopped
        is_stopped = is_stopped or keyboard.escape_pressed() or interrupt()
        return is_stopped

    return must_stop
