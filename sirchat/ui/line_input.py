"""What lines are typed with: the keyboard, the prompt, and the history of what was typed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prompt_toolkit.input import create_input
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.output.plain_text import PlainTextOutput

from sirchat.ui.history import Typed, input_history
from sirchat.ui.keyboard import Keyboard
from sirchat.ui.prompt import Prompt
from sirchat.ui.screen import Screen


@dataclass(frozen=True)
class LineInput:
    """Keyboard, history and prompt of one chat."""

    keyboard: Keyboard
    history: Typed
    prompt: Prompt


@contextmanager
def line_input(screen: Screen) -> Iterator[LineInput]:
    """Take the terminal's keys, as `Keyboard` does, until the end of the context."""
    keys = create_input()
    with Keyboard(keys, screen.terminal) as keyboard:
        history = input_history(screen.note)
        prompt = Prompt(
            keys,
            prompt_output(screen),
            history=history,
            has_colours=lambda: screen.has_colours,
        )
        yield LineInput(keyboard, history, prompt)


def prompt_output(screen: Screen) -> Output:
    """The prompt's output; a dumb terminal gets no escape sequences."""
    if screen.is_dumb:
        return PlainTextOutput(sys.stdout)
    return create_output(always_prefer_tty=True)
