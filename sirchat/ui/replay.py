"""Replay a transcript: the user's turns are answered, or the transcript's own replies are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sirchat.chat.events import Delta, Event, Notice, TurnDone
from sirchat.chat.session import Session
from sirchat.errors import TranscriptError
from sirchat.text.transcript import TranscriptTurn
from sirchat.ui.interrupt import Interrupt
from sirchat.ui.screen import Screen
from sirchat.ui.summary import describe_turn


@dataclass(frozen=True)
class ReplayOptions:
    """`feed` reads the transcript's replies; `json` prints records; `name` is for messages."""

    feed: bool = False
    json: bool = False
    name: str = "transcript"


def replay(
    session: Session,
    turns: Iterable[TranscriptTurn],
    screen: Screen,
    options: ReplayOptions,
) -> None:
    """Run the turns through the session and print what happens.

    Ctrl-C during a turn ends it early, well-formed; between turns, or after it, it ends the replay.

    Raises TranscriptError for a turn out of place, KeyboardInterrupt when stopped in between; what
    was said until then has been printed.
    """
    show = screen.json if options.json else _Dialogue(screen, session).show
    for event in session.start():
        show(event)
    try:
        for event in _events(session, turns, options):
            show(event)
    finally:
        show(session.end())


def _events(
    session: Session, turns: Iterable[TranscriptTurn], options: ReplayOptions
) -> Iterator[Event]:
    previous = ""
    for turn, following in _with_next(turns, look_ahead=options.feed):
        if turn.role == "system":
            yield from _system(session, turn, options.name)
        elif turn.role == "user":
            fed = following is not None and following.role == "assistant"
            with Interrupt() as interrupted:
                ask = session.read_user if fed else session.ask
                yield from ask(turn.content, interrupted)
            _stop_if(interrupted)
        elif options.feed:
            if previous != "user":
                raise TranscriptError(
                    f"{options.name}, line {turn.line}: an assistant turn must follow a user turn"
                )
            with Interrupt() as interrupted:
                yield from session.read_reply(turn.content, interrupted)
            _stop_if(interrupted)
        previous = turn.role


def _stop_if(interrupted: Interrupt) -> None:
    if interrupted():
        raise KeyboardInterrupt


def _system(session: Session, turn: TranscriptTurn, name: str) -> Iterator[Event]:
    if session.seen:
        yield Notice(f"{name}, line {turn.line}: a system turn after the first turn is left out")
    else:
        yield from session.switch(f"{name}, line {turn.line}", system=turn.content)


def _with_next(
    turns: Iterable[TranscriptTurn], *, look_ahead: bool
) -> Iterator[tuple[TranscriptTurn, TranscriptTurn | None]]:
    """Each turn with the one after it; without look-ahead at once, for input that is typed."""
    if not look_ahead:
        yield from ((turn, None) for turn in turns)
        return
    held: TranscriptTurn | None = None
    for turn in turns:
        if held is not None:
            yield held, turn
        held = turn
    if held is not None:
        yield held, None


class _Dialogue:
    """Prints the dialogue to stdout, as text that can be replayed, and status to stderr."""

    def __init__(self, screen: Screen, session: Session) -> None:
        self._screen = screen
        self._session = session
        self._speaking = False

    def show(self, event: Event) -> None:
        if isinstance(event, Delta):
            if not self._speaking:
                self._screen.stream("ASSISTANT: ")
            self._speaking = True
            self._screen.stream(event.text)
        elif isinstance(event, TurnDone):
            self._turn(event)
        elif isinstance(event, Notice):
            self._screen.note(event.text)

    def _turn(self, turn: TurnDone) -> None:
        if turn.role == "assistant" and self._speaking:
            self._screen.line()
            self._speaking = False
        else:
            self._screen.line(f"{turn.role.upper()}: {turn.text}")
        self._screen.note(describe_turn(turn, self._session.budget))
