"""Runs a session without a prompt: replays a transcript, or sends one message, for the shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sirchat.chat.events import Delta, Event, Notice, TurnDone
from sirchat.chat.plain_reply import PlainReply, describe_excess, hold_all
from sirchat.chat.session import Session
from sirchat.errors import TranscriptError
from sirchat.text.transcript import TranscriptTurn
from sirchat.ui.interrupt import Interrupt
from sirchat.ui.screen import Screen
from sirchat.ui.status import describe_turn


@dataclass(frozen=True)
class ReplayOptions:
    """How a transcript is replayed.

    Attributes:
        feed: whether the model reads the transcript's replies; if false, it generates new replies.
        json: whether to print events as JSON.
        name: the name of the transcript's file, for error messages.
    """

    feed: bool = False
    json: bool = False
    name: str = "transcript"


def replay(
    session: Session,
    turns: Iterable[TranscriptTurn],
    screen: Screen,
    options: ReplayOptions,
) -> None:
    """Replay the turns of a transcript in a session, and print what happens.

    If `options.json` is true, events are printed as JSON; if false, the dialogue as text. Ctrl-C
    ends the current turn early, and ends the replay.

    Raises TranscriptError for a turn in the wrong place, and KeyboardInterrupt after Ctrl-C; all
    turns before the error have been printed.
    """
    play(session, turns, screen.json if options.json else _Dialogue(screen, session).show, options)


def play(
    session: Session,
    turns: Iterable[TranscriptTurn],
    show: Callable[[Event], None],
    options: ReplayOptions,
) -> None:
    """Replay the turns of a transcript in a session, and call `show` with each event.

    The events of the session's start and end are included. Raises the same errors as `replay`.
    """
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
    """Yield pairs: a turn, and the turn after it; after the last turn, None.

    If `look_ahead` is false, the second of each pair is None. A turn is then yielded as soon as it
    is complete, even if the next one is still being typed.
    """
    if not look_ahead:
        yield from ((turn, None) for turn in turns)
        return
    previous: TranscriptTurn | None = None
    for turn in turns:
        if previous is not None:
            yield previous, turn
        previous = turn
    if previous is not None:
        yield previous, None


class _Dialogue:
    """Prints the dialogue to stdout, as text that can be replayed, and notes to stderr.

    If the screen is quiet, only replies and notices are printed.
    """

    def __init__(self, screen: Screen, session: Session) -> None:
        self._screen = screen
        self._session = session
        self._is_replying = False

    def show(self, event: Event) -> None:
        if isinstance(event, Delta):
            if not self._is_replying and not self._screen.is_quiet:
                self._screen.stream("ASSISTANT: ")
            self._is_replying = True
            self._screen.stream(event.text)
        elif isinstance(event, TurnDone):
            self._turn(event)
        elif isinstance(event, Notice):
            self._screen.note(event.text)

    def _turn(self, turn: TurnDone) -> None:
        if turn.role == "assistant" and self._is_replying:
            self._screen.line()
            self._is_replying = False
        elif not self._screen.is_quiet:
            self._screen.line(f"{turn.role.upper()}: {turn.text}")
        if excess := describe_excess(turn, self._session, "--budget"):
            self._screen.note(excess)
        recalled = self._session.recalled_turns if turn.role == "user" else ()
        self._screen.remark(describe_turn(turn, self._session.budget, recalled))


def print_reply(
    session: Session, text: str, screen: Screen, *, as_json: bool, holds_all: bool = False
) -> None:
    """Send the message `text`, and print the reply while it is generated; all events if `as_json`.

    `holds_all` raises the budget to hold all of the message. KeyboardInterrupt after Ctrl-C, which
    ends the reply.
    """
    if holds_all:
        hold_all(session, text)
    reply = PlainReply(session)

    def show(event: Event) -> None:
        if as_json:
            screen.json(event)
            return
        said, notes = reply.push(event)
        screen.stream(said)
        if isinstance(event, TurnDone) and event.role == "assistant":
            screen.line()
        for note in notes:
            screen.note(note)

    for event in session.start():
        show(event)
    with Interrupt() as interrupted:
        try:
            for event in session.ask(text, interrupted):
                show(event)
        finally:
            show(session.end())
    _stop_if(interrupted)
