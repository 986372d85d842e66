"""`sirchat tutorial`: a chat whose lines are suggested and explained; their effects are checked.

The replies and the commands are real. The tutorial describes an effect only if it was observed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from sirchat.chat.session import Interrupted, Session
from sirchat.errors import SirchatError, UsageError
from sirchat.paths import read_yaml
from sirchat.ui.commands import Action, Commands, Leave
from sirchat.ui.completion import SlashCompleter
from sirchat.ui.interrupt import InterruptFlag
from sirchat.ui.keys import terminal_keys
from sirchat.ui.live import LiveView
from sirchat.ui.panel import draw_compact_panel
from sirchat.ui.prompt import Prompt
from sirchat.ui.repl import make_stop_check
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.status import loading_bar
from sirchat.ui.typed_input import (
    Keyboard,
    MemoryHistory,
    create_prompt_output,
)
from sirchat.ui.typed_line import InputLine

# At the tutorial's start: the budget is so small that two messages fill it.
TUTORIAL_SETTINGS: Final[dict[str, Any]] = {
    "policy": "sink",
    "budget": 48,
    "temperature": 0.0,
    "panel": "off",
}

# Commands allowed in the tutorial: they change or show the chat's memory, and write no file.
ALLOWED_COMMANDS: Final = {
    *("policy", "budget", "decay", "sinks", "recent", "recall", "set", "system"),
    *("show", "panel", "tokens", "stats", "evicted", "why", "pin", "unpin"),
    *("help", "?", "undo", "reset", "clear", "exit", "quit", "bye"),
}


@dataclass(frozen=True)
class ExpectedEffect:
    """Whether `word` must be in the reply, or in the text of the held tokens; None: unchecked."""

    word: str
    in_reply: bool | None = None
    in_memory: bool | None = None


@dataclass(frozen=True)
class TutorialStep:
    before: str  # shown first
    line: str  # what Enter sends
    after: str = ""  # shown after `line` was run, if all effects were observed
    effects: tuple[ExpectedEffect, ...] = ()
    shows_panel: bool = False  # `after` explains the compact panel


_SCRIPT = read_yaml(__file__, "tutorial")

STEPS: Final = tuple(
    TutorialStep(**{**step, "effects": tuple(ExpectedEffect(**e) for e in step.get("effects", ()))})
    for step in _SCRIPT["steps"]
)
FURTHER_COMMANDS: Final[dict[str, str]] = _SCRIPT["more"]  # commands, listed at the end

_TOOLBAR = "Enter sends this line, or type your own; q leaves"
_MAX_COLUMNS = 92  # of explanations; longer lines are hard to read

if TYPE_CHECKING:
    from sirchat.ui.startup import OpenSession

# Takes the suggested line; returns the line that the user enters, or None if the user leaves.
ReadLine = Callable[[str], InputLine | None]

# Takes the flag for Ctrl-C; returns a function that says whether to stop the reply.
MakeStopCheck = Callable[[InterruptFlag], Interrupted]


def run_tutorial(open_session: OpenSession, screen: Screen, *, waits: bool) -> bool:
    """Load the model and run all steps; return False if an effect was not observed.

    If `waits`, each step waits for Enter, at a terminal. Raises KeyboardInterrupt for Ctrl-C.
    """
    keys = terminal_keys() if waits else None
    with Keyboard(keys, screen.terminal) if keys else nullcontext() as keyboard:
        with loading_bar(screen, "tiny") as report:
            session = open_session(report)
        if keys is None or keyboard is None:
            return _Tutorial(session, screen, _echo(screen), lambda interrupt: interrupt).run()
        keyboard.pass_keys_to_prompt()  # the terminal may have told its background meanwhile
        output, history = create_prompt_output(screen), MemoryHistory()
        prompt = Prompt(keys, output, history=history, has_colours=lambda: screen.has_colours)
        prompt.set_completer(SlashCompleter(lambda: session))
        prompt.set_toolbar(lambda: _TOOLBAR)

        def read(suggested: str) -> InputLine | None:
            keyboard.pass_keys_to_prompt()
            return prompt.read(suggested)

        return _Tutorial(
            session, screen, read, lambda interrupt: make_stop_check(interrupt, keyboard, False)
        ).run()


def _echo(screen: Screen) -> ReadLine:
    """Instead of a user: print the suggested line, and return it."""

    def read(suggested: str) -> InputLine:
        screen.line(f"> {suggested}")
        return InputLine(suggested, is_command=suggested.startswith("/"))

    return read


class _Tutorial:
    def __init__(
        self, session: Session, screen: Screen, read_line: ReadLine, make_check: MakeStopCheck
    ) -> None:
        self._session, self._screen = session, screen
        self._read_line, self._make_check = read_line, make_check
        self._commands = Commands(session, screen, MemoryHistory(), SavedChat(session, screen))
        self._has_other_lines = False

    def run(self) -> bool:
        """Run the steps; returns False if an effect was not observed by the end."""
        self._explain(_SCRIPT["welcome"])
        failed_steps = 0
        try:
            for number, step in enumerate(STEPS, 1):
                self._print_title(f"{number} of {len(STEPS)}")
                self._explain(step.before)
                if not self._run_step(step):
                    self._print_ways_on()
                    return True
                failed_steps += not self._check_effects(step)
        except KeyboardInterrupt:
            self._print_ways_on()
            raise
        self._end(failed_steps)
        return not failed_steps

    def _print_ways_on(self) -> None:
        self._screen.remark(
            "sirchat tutorial starts the tutorial again; sirchat alone opens a chat"
        )

    def _run_step(self, step: TutorialStep) -> bool:
        """Run lines that the user types, up to `step.line`; returns False if the user leaves."""
        while True:
            line = self._read_line(step.line)
            if line is None or line.text.strip().lower() == "q":
                return False
            if isinstance(self._send(line), Leave):
                return False
            if line.text.strip() == step.line:
                return True
            self._has_other_lines = True

    def _send(self, line: InputLine) -> Action | None:
        try:
            if line.is_stopped:
                raise KeyboardInterrupt
            if line.is_command:
                return self._run(line.text)
            with InterruptFlag() as interrupt, LiveView(self._session, self._screen) as view:
                for event in self._session.ask(line.text, self._make_check(interrupt)):
                    view.show(event)
            if interrupt():
                raise KeyboardInterrupt
        except SirchatError as error:
            self._screen.error(str(error))
        return None

    def _run(self, text: str) -> Action | None:
        name = [*text[1:].split(None, 1), ""][0].removeprefix("/")  # as Commands reads it
        if name in Commands.names() and name not in ALLOWED_COMMANDS:
            raise UsageError(
                f"/{name} does not work in the tutorial", hint="sirchat alone opens a chat"
            )
        return self._commands.run(text)

    def _check_effects(self, step: TutorialStep) -> bool:
        """Explain the effects of `step`; if some are missing, name these, and return False."""
        if step.shows_panel and self._screen.is_plain:  # replies are then shown without the panel
            snapshot = self._session.snapshot(strongest=self._screen.width)
            self._screen.show(draw_compact_panel(snapshot, self._screen.theme, self._screen.width))
        faults = [fault for effect in step.effects if (fault := self._describe_fault(effect))]
        if faults:
            why = "Your own lines may be why." if self._has_other_lines else "Please report it."
            self._explain(f"This did not go as it should: {', '.join(faults)}. {why}")
        elif step.after:
            self._explain(step.after)
        return not faults

    def _describe_fault(self, effect: ExpectedEffect) -> str:
        """Say how the outcome differs from `effect`; "" if it does not differ."""
        reply = next((t.text for t in reversed(self._session.turns) if t.role == "assistant"), "")
        for place, text, wanted in (
            ("reply", reply, effect.in_reply),
            ("memory", _held_text(self._session), effect.in_memory),
        ):
            if wanted is not None and (effect.word in text) != wanted:
                return f"{effect.word} is {'not ' if wanted else ''}in the {place}"
        return ""

    def _end(self, failed_steps: int) -> None:
        self._print_title("the end")
        if failed_steps:
            self._explain(f"{failed_steps} of the steps did not go as they should.")
        else:
            self._explain("Evicted, held, and restored.")
        width = max(map(len, FURTHER_COMMANDS))
        rows = [f"{name:<{width}}  {does}" for name, does in FURTHER_COMMANDS.items()]
        self._explain("\n".join([_SCRIPT["goodbye"], *rows]))

    def _print_title(self, title: str) -> None:
        self._screen.show(Text(f"\n── {title} ──", self._screen.theme.empty))

    def _explain(self, text: str) -> None:
        screen = self._screen
        width = min(screen.width - 3, _MAX_COLUMNS)
        for row in Text(text).wrap(screen.console, width):
            row.rstrip()
            screen.show(Text.assemble(("│ ", screen.theme.empty), row))


def _held_text(session: Session) -> str:
    """The text of all tokens in the cache, with a mark wherever tokens are missing."""
    parts, last_position = [], -1
    for row in session.snapshot().rows:
        parts.append(row.text if row.position == last_position + 1 else f"⋯{row.text}")
        last_position = row.position
    return "".join(parts)
