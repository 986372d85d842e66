"""`sirchat tutorial`: a chat whose lines are suggested and explained; their effects are checked.

The replies and the commands are real. The tutorial describes an effect only if it was observed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prompt_toolkit.input import create_input
from rich.text import Text

from sirchat.chat.session import Interrupted, Session
from sirchat.errors import SirchatError, UsageError
from sirchat.ui.commands import Action, Commands, Leave
from sirchat.ui.completion import SlashCompleter
from sirchat.ui.interrupt import Interrupt
from sirchat.ui.live import LiveView
from sirchat.ui.panel import draw_compact_panel
from sirchat.ui.prompt import Line, Prompt
from sirchat.ui.repl import stop_signal
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.status import loading_bar
from sirchat.ui.typed_input import InMemory, Keyboard, prompt_output

SETTINGS: Final[dict[str, Any]] = {
    "policy": "sink",
    "budget": 48,
    "temperature": 0.0,
    "panel": "off",
}
"""The settings at the tutorial's start: the budget is so small that two messages fill it."""

COMMANDS: Final = {
    *("policy", "budget", "decay", "sinks", "recent", "recall", "set", "system"),
    *("show", "panel", "tokens", "stats", "evicted", "why", "pin", "unpin"),
    *("help", "?", "undo", "reset", "clear", "exit", "quit", "bye"),
}
"""Commands allowed in the tutorial: they change or show the chat's memory, and write no file."""


@dataclass(frozen=True)
class Effect:
    """Where `word` must be, or must not be, after a step of the tutorial.

    `in_reply` is about the model's reply, `in_memory` about the text of the tokens in the cache.
    True: the word must be there; False: it must not be there; None: this is not checked.
    """

    word: str
    in_reply: bool | None = None
    in_memory: bool | None = None


@dataclass(frozen=True)
class TutorialStep:
    """One step of the tutorial.

    Attributes:
        before: text that is shown first.
        line: the message or command that Enter sends.
        after: text that is shown after `line` was run, if all effects were observed.
        effects: what must be true after `line` was run.
        shows_panel: whether the text `after` explains the compact panel, which is then shown.
    """

    before: str
    line: str
    after: str = ""
    effects: tuple[Effect, ...] = ()
    shows_panel: bool = False


WELCOME: Final = (
    "In three minutes you see what a chat holds, what it evicts, and how to restore that. "
    "You talk with tiny, a toy model that comes with sirchat and works offline. It really writes "
    "every reply. Nothing is saved.\n"
    "Enter sends the line that is shown. You may type something of your own instead; the line is "
    "then offered again. q or Ctrl-D leaves."
)

STEPS: Final = (
    TutorialStep(
        "A model reads text as tokens: words, or pieces of words. It knows only the tokens that "
        "it holds in memory. Here these are at most 48: the budget. Tell it something.",
        "My name is Anna.",
        "The line below the reply counts tokens: how many were read, how many were written, how "
        "fast, and how many of the 48 places in memory are taken.",
    ),
    TutorialStep("One more fact.", "My cat is called Luna."),
    TutorialStep(
        "Now some small talk, until the memory is full.",
        "Tell me a joke.",
        'Old tokens were "evicted": the line counts them, and names some of your words among them.',
        (Effect("Anna", in_memory=False),),
    ),
    TutorialStep(
        "A policy decides which tokens are evicted. The policy in use is called sink: it keeps the "
        "first four tokens of all (they help the model to write well) and the newest. The next "
        "command shows the memory below each reply; this view is the panel.",
        "/panel turn",
    ),
    TutorialStep(
        "Does the model still know you?",
        "What is my name?",
        "It can't know: the name is no longer in its memory. The lines above are the panel. The "
        'bar shows how full the memory is. After "turns" is a mark for each message: a full block '
        "if all tokens of the message are held, a dot if none are. After "
        '"evicted next" are the words that will be evicted, after "evicted" those that just were. '
        "The last lines are the text that the model still sees, as much as fits: ⋯ and a number "
        "stand for that many evicted tokens; you: and model: say who speaks.",
        (Effect("Anna", in_reply=False, in_memory=False),),
        shows_panel=True,
    ),
    TutorialStep(
        "Another policy, entropy, keeps the tokens that surprised the model most. Small talk is "
        "easy to guess; a name is not. Evicted tokens are in an archive, so a new policy "
        "chooses from everything that was ever read.",
        "/policy entropy",
        '"restored" counts tokens that returned from the archive. The name is one of them.',
        (Effect("Anna", in_memory=True),),
    ),
    TutorialStep(
        "More small talk. Now the policy entropy must evict something, too.",
        "What is the capital of Italy?",
        "The cat's name was evicted, too, but not Anna, which had surprised the model more.",
        (Effect("Anna", in_memory=True), Effect("Luna", in_memory=False)),
    ),
    TutorialStep(
        "The same question as before.",
        "What is my name?",
        "It knows, in the same 48 places. The panel now says how much surprise a token needs to "
        "stay. Surprise is measured in nats: 0 for what was certain, more for what was not "
        "expected. The first lines of the text are what is left of the first messages.",
        (Effect("Anna", in_reply=True),),
        shows_panel=True,
    ),
    TutorialStep(
        "And the cat?",
        "What is my cat called?",
        "A budget of 48 is small: below the answer about Italy, Luna was already named as evicted.",
        (Effect("Luna", in_reply=False, in_memory=False),),
    ),
    TutorialStep(
        "What was evicted can be listed, the most surprising words of each message first.",
        "/evicted",
        "Luna is in the list: evicted, and still in the archive.",
        (Effect("Luna", in_memory=False),),
    ),
    TutorialStep(
        "You can restore a word yourself, with the words beside it.",
        '/recall "Luna"',
        "These words are held again, and pinned: every policy except window keeps them. Other "
        "tokens were evicted to make room, as the memory was full.",
        (Effect("Luna", in_memory=True),),
    ),
    TutorialStep(
        "And ask again.",
        "What is my cat called?",
        "It knows the cat's name again. To make room, Anna was evicted: the text in the panel has "
        "Luna, but no longer Anna. With 48 places, pinned tokens leave little room for others. "
        "(With /recall on, sirchat itself restores what fits each message.)",
        (Effect("Luna", in_reply=True), Effect("Anna", in_memory=False)),
        shows_panel=True,
    ),
)

GOODBYE: Final = (
    "sirchat alone opens a chat, with 1,024 places and the policy salience, which keeps whole "
    "words that were surprising. Some commands in a chat:"
)

MORE: Final = {
    "/evicted": "lists the evicted words",
    '/recall "words"': "restores these words",
    "/branch NAME": "goes on in a copy of the chat",
    "/edit": "changes your last message, and goes on from there",
    "@FILE": "in a message, sends the text of a file",
    "/model NAME": "goes on with another model; sirchat models lists them",
    "/help": "lists all commands",
}
"""Commands, and what they do; listed at the end of the tutorial."""


if TYPE_CHECKING:
    from sirchat.ui.startup import Open

_TOOLBAR = "Enter sends this line, or type your own; q leaves"
_MOST_COLUMNS = 92  # of explanations; longer lines are hard to read

Read = Callable[[str], Line | None]
"""Takes the suggested line; returns the line that the user enters, or None if the user leaves."""

Stops = Callable[[Interrupt], Interrupted]
"""Takes the flag for Ctrl-C; returns a function that says whether to stop the reply."""


def run_tutorial(open_session: Open, screen: Screen, *, waits: bool) -> bool:
    """Load the model and run all steps of the tutorial; return False if an effect was not observed.

    If `waits` is true, each step waits until the user presses Enter, which needs a terminal. Raises
    KeyboardInterrupt for Ctrl-C.
    """
    if not waits:
        with loading_bar(screen, "tiny") as report:
            session = open_session(report)
        return _Tutorial(session, screen, _echo(screen), lambda interrupt: interrupt).run()
    keys = create_input()
    with Keyboard(keys, screen.terminal) as keyboard:
        with loading_bar(screen, "tiny") as report:
            session = open_session(report)
        output = prompt_output(screen)
        prompt = Prompt(keys, output, history=InMemory(), has_colours=lambda: screen.has_colours)
        prompt.serve(SlashCompleter(lambda: session), lambda: _TOOLBAR)

        def read(suggested: str) -> Line | None:
            keyboard.keep_typed()
            return prompt.read(suggested)

        def stops(interrupt: Interrupt) -> Interrupted:
            return stop_signal(interrupt, keyboard, False)

        return _Tutorial(session, screen, read, stops).run()


def _echo(screen: Screen) -> Read:
    """A function of type `Read` without a user: it prints the suggested line, and returns it."""

    def read(suggested: str) -> Line:
        screen.line(f"> {suggested}")
        return Line(suggested, is_command=suggested.startswith("/"))

    return read


class _Tutorial:
    """One run of the tutorial, from its first step to its last."""

    def __init__(self, session: Session, screen: Screen, read: Read, stops: Stops) -> None:
        self._session, self._screen = session, screen
        self._read, self._stops = read, stops
        self._commands = Commands(session, screen, InMemory(), SavedChat(session, screen))
        self._has_own_lines = False

    def run(self) -> bool:
        """Run the tutorial's steps until the end, or until the user leaves.

        Returns False if the end is reached and an effect was not observed.
        """
        self._explain(WELCOME)
        missing = 0
        try:
            for number, step in enumerate(STEPS, 1):
                self._head(f"{number} of {len(STEPS)}")
                self._explain(step.before)
                if not self._take(step):
                    self._say_how_to_go_on()
                    return True
                missing += not self._conclude(step)
        except KeyboardInterrupt:
            self._say_how_to_go_on()
            raise
        self._end(missing)
        return not missing

    def _say_how_to_go_on(self) -> None:
        self._screen.remark(
            "sirchat tutorial starts the tutorial again; sirchat alone opens a chat"
        )

    def _take(self, step: TutorialStep) -> bool:
        """Run the lines that the user types, up to `step.line`; return False if the user leaves."""
        while True:
            line = self._read(step.line)
            if line is None or line.text.strip().lower() == "q":
                return False
            if isinstance(self._send(line), Leave):
                return False
            if line.text.strip() == step.line:
                return True
            self._has_own_lines = True

    def _send(self, line: Line) -> Action | None:
        """Run a command or a turn; return the action that a command asks for, or None."""
        try:
            if line.is_stopped:
                raise KeyboardInterrupt
            if line.is_command:
                return self._run(line.text)
            with Interrupt() as interrupt, LiveView(self._session, self._screen) as view:
                for event in self._session.ask(line.text, self._stops(interrupt)):
                    view.show(event)
            if interrupt():
                raise KeyboardInterrupt
        except SirchatError as error:
            self._screen.error(str(error))
        return None

    def _run(self, text: str) -> Action | None:
        name = [*text[1:].split(None, 1), ""][0].removeprefix("/")  # as Commands reads it
        if name in Commands.names() and name not in COMMANDS:
            raise UsageError(
                f"/{name} does not work in the tutorial", hint="sirchat alone opens a chat"
            )
        return self._commands.run(text)

    def _conclude(self, step: TutorialStep) -> bool:
        """Explain the effects of `step`; if some did not happen, name these, and return False."""
        if step.shows_panel and self._screen.is_plain:  # replies are then shown without the panel
            snapshot = self._session.snapshot(strongest=self._screen.width)
            self._screen.show(draw_compact_panel(snapshot, self._screen.theme, self._screen.width))
        wrong = [fault for effect in step.effects if (fault := self._fault(effect))]
        if wrong:
            why = "Your own lines may be why." if self._has_own_lines else "Please report it."
            self._explain(f"This did not go as it should: {', '.join(wrong)}. {why}")
        elif step.after:
            self._explain(step.after)
        return not wrong

    def _fault(self, effect: Effect) -> str:
        """Say in words how the outcome differs from `effect`; "" if it does not differ."""
        reply = next((t.text for t in reversed(self._session.turns) if t.role == "assistant"), "")
        for place, text, wanted in (
            ("reply", reply, effect.in_reply),
            ("memory", _held_text(self._session), effect.in_memory),
        ):
            if wanted is not None and (effect.word in text) != wanted:
                return f"{effect.word} is {'not ' if wanted else ''}in the {place}"
        return ""

    def _end(self, missing: int) -> None:
        self._head("the end")
        if missing:
            self._explain(f"{missing} of the steps did not go as they should.")
        else:
            self._explain("Evicted, held, and restored.")
        width = max(map(len, MORE))
        rows = [f"{name:<{width}}  {does}" for name, does in MORE.items()]
        self._explain("\n".join([GOODBYE, *rows]))

    def _head(self, title: str) -> None:
        self._screen.show(Text(f"\n── {title} ──", self._screen.theme.rest))

    def _explain(self, text: str) -> None:
        """Print an explanation, with a bar at the left of each line."""
        screen = self._screen
        width = min(screen.width - 3, _MOST_COLUMNS)
        for row in Text(text).wrap(screen.console, width):
            row.rstrip()
            screen.show(Text.assemble(("│ ", screen.theme.rest), row))


def _held_text(session: Session) -> str:
    """The text of all tokens in the cache, with a mark wherever tokens are missing."""
    parts, before = [], -1
    for row in session.snapshot().rows:
        parts.append(row.text if row.position == before + 1 else f"⋯{row.text}")
        before = row.position
    return "".join(parts)
