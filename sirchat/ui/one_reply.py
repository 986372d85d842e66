"""One question and its reply, for the shell: nothing else goes to standard output."""

from __future__ import annotations

from sirchat.chat.events import Delta, Event, Notice, TurnDone
from sirchat.chat.session import Session
from sirchat.text.transcript import TranscriptTurn
from sirchat.ui.replay import ReplayOptions, play
from sirchat.ui.screen import Screen


def print_reply(session: Session, text: str, screen: Screen, *, as_json: bool) -> None:
    """Ask `text` and print the reply while it is generated; or, `as_json`, the events.

    Raises KeyboardInterrupt after Ctrl-C, which ends the reply.
    """
    show = screen.json if as_json else _Reply(screen).show
    play(session, [TranscriptTurn("user", text, 1)], show, ReplayOptions())


class _Reply:
    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def show(self, event: Event) -> None:
        match event:
            case Delta():
                self._screen.stream(event.text)
            case TurnDone(role="assistant"):
                self._screen.line()
                if event.finish == "length":
                    self._screen.note("cut at the length limit; --max-new-tokens raises it")
            case Notice():
                self._screen.note(event.text)
