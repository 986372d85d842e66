"""One question and its reply, for the shell: nothing else goes to standard output."""

from __future__ import annotations

from sirchat.chat.events import Delta, Event, Notice, TurnDone
from sirchat.chat.session import Session
from sirchat.chat.thinking import FinalAnswer
from sirchat.text.transcript import TranscriptTurn
from sirchat.ui.replay import ReplayOptions, play
from sirchat.ui.screen import Screen


def print_reply(session: Session, text: str, screen: Screen, *, as_json: bool) -> None:
    """Ask `text` and print the reply while it is generated; or, `as_json`, the events.

    Unless `thinking` is `show`, the reply's reasoning is left out, and with `fold` a note says so.
    Raises KeyboardInterrupt after Ctrl-C, which ends the reply.
    """
    show = screen.json if as_json else _Reply(session, screen).show
    play(session, [TranscriptTurn("user", text, 1)], show, ReplayOptions())


class _Reply:
    def __init__(self, session: Session, screen: Screen) -> None:
        self._screen = screen
        self._folds = session.profile.thinking == "fold"
        self._answer: FinalAnswer | None = None  # None: all of the reply is printed
        if session.profile.thinking != "show":
            self._answer = FinalAnswer(is_open=session.template.opens_reasoning)

    def show(self, event: Event) -> None:
        match event:
            case Delta():
                answer = self._answer
                self._screen.stream(answer.push(event.text) if answer else event.text)
            case TurnDone(role="assistant"):
                if self._answer:
                    self._screen.stream(self._answer.end())
                self._screen.line()
                if self._answer and self._answer.has_thought and self._folds:
                    self._screen.note("the reasoning was left out; --thinking show prints it")
                if event.finish == "length":
                    self._screen.note("cut at the length limit; --max-new-tokens raises it")
            case Notice():
                self._screen.note(event.text)
