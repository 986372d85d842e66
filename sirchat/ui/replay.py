"""Runs a session without a prompt: replays a transcript, or sends one message, for the shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sirchat.chat.events import Delta, Event, Notice, TurnDone
from sirchat.chat.session import Interrupted, Session
from sirchat.chat.turn import FinalAnswer
from sirchat.errors import TranscriptError
from sirchat.text.transcript import TranscriptTurn
from sirchat.ui.attaching import describe_excess
from sirchat.ui.interrupt import Interrupt
from sirchat.ui.screen import Screen
from sirchat.ui.status_line import describe_turn


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


def print_reply(session: Session, text: str, screen: Screen, *, as_json: bool) -> None:
    """Send the message `text`, and print the reply while it is generated.

    If `as_json` is true, all events are printed as JSON instead. If not, the reply's reasoning is
    printed only if the setting `thinking` is "show"; if it is "fold", a note says that the
    reasoning was left out. Raises KeyboardInterrupt after Ctrl-C, which ends the reply.
    """
    with Interrupt() as interrupted:
        for _ in reply_steps(session, text, screen, interrupted, as_json=as_json):
            pass
    _stop_if(interrupted)


def reply_steps(
    session: Session, text: str, screen: Screen, interrupted: Interrupted, *, as_json: bool
) -> Iterator[None]:
    """Do what `print_reply` does in steps: yield None after each event has been printed.

    When `interrupted` returns true, the reply ends.
    """
    show = screen.json if as_json else _Reply(session, screen).show
    for event in session.start():
        show(event)
    try:
        for event in session.ask(text, interrupted):
            show(event)
            yield
    finally:
        show(session.end())


class _Reply:
    def __init__(self, session: Session, screen: Screen) -> None:
        self._screen, self._session = screen, session
        self._folds = session.profile.thinking == "fold"
        self._answer: FinalAnswer | None = None  # None: all of the reply is printed
        if session.profile.thinking != "show":
            self._answer = FinalAnswer(is_open=session.template.opens_reasoning)

    def show(self, event: Event) -> None:
        match event:
            case Delta():
                answer = self._answer
                self._screen.stream(answer.push(event.text) if answer else event.text)
            case TurnDone(role="user"):
                if excess := describe_excess(event, self._session, "--budget"):
                    self._screen.note(excess)
            case TurnDone(role="assistant"):
                if self._answer:
                    self._screen.stream(self._answer.end())
                self._screen.line()
                if self._answer and self._answer.has_thought and self._folds:
                    self._screen.note("the reasoning was left out; --thinking show prints it")
                if event.finish == "length":
                    self._screen.note(
                        "the reply was cut at the length limit; --max-new-tokens raises the limit"
                    )
            case Notice():
                self._screen.note(event.text)
