"""Runs a session without a prompt, for the shell: replays a transcript, or sends one message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, pairwise

from sirchat.chat.events import Delta, Event, Notice, Reading, Returned, Switched, TurnDone
from sirchat.chat.plain_reply import (
    PlainReply,
    TaggedText,
    calls_tools,
    describe_excess,
    raise_budget_for,
)
from sirchat.chat.session import Session
from sirchat.chat.tool_loop import calls_in, read_result
from sirchat.config.values import format_setting
from sirchat.errors import TranscriptError
from sirchat.models.progress import Progress
from sirchat.text.tool_calls import ToolCall, call_id
from sirchat.text.transcript import SettingsSwitch, TranscriptItem, TranscriptTurn
from sirchat.ui.interrupt import InterruptFlag
from sirchat.ui.screen import Screen
from sirchat.ui.status import describe_recalled, describe_turn, loading_bar
from sirchat.ui.switching import describe_change, describe_switch
from sirchat.ui.tool_use import describe_result


@dataclass(frozen=True)
class ReplayOptions:
    feed: bool = False  # the model reads the transcript's replies, and generates none
    json: bool = False  # events are printed as JSON
    name: str = "transcript"  # of its file, for error messages


def replay(
    session: Session, turns: Iterable[TranscriptItem], screen: Screen, options: ReplayOptions
) -> None:
    """Replay a transcript, and print events or the dialogue.

    Raises TranscriptError for a turn in the wrong place, and KeyboardInterrupt after Ctrl-C.
    """
    show = screen.json if options.json else _Dialogue(screen, session).show
    for event in session.opening_events():
        show(event)
    try:
        for event in _replay_events(session, turns, options):
            show(event)
    finally:
        show(session.closing_event())


def print_reply(
    session: Session,
    text: str,
    screen: Screen,
    *,
    as_json: bool,
    holds_all: bool = False,
    source: int = 0,
) -> None:
    """Send the message `text`, and print the reply while it is generated; all events if `as_json`.

    `holds_all` raises the budget to hold the whole message; `source` is as in `PlainReply`, which
    chooses the quote below the reply. Ctrl-C ends the reply and raises KeyboardInterrupt.
    """
    if holds_all:
        raise_budget_for(session, text)
    with _Answer(session, text, screen, source) as answer, InterruptFlag() as interrupted:
        show = screen.json if as_json else answer.show
        for event in session.opening_events():
            show(event)
        try:
            for event in session.ask(text, interrupted):
                show(event)
        finally:
            show(session.closing_event())
    if interrupted():
        raise KeyboardInterrupt


class _Answer(ExitStack):
    """Context manager that prints one reply, with a bar while the message before it is read."""

    def __init__(self, session: Session, text: str, screen: Screen, source: int) -> None:
        super().__init__()
        self._session, self._screen = session, screen
        self._reply = PlainReply(session, text, source)
        self._report: Progress | None = None  # moves the bar
        self._has_printed = False

    def show(self, event: Event) -> None:
        if isinstance(event, Reading):
            if self._report is None and event.done < event.total:
                self._report = self.enter_context(loading_bar(self._screen, "text"))
            if self._report is not None:
                self._report(f"reading {event.total:,} tokens", event.done, event.total)
            return
        self.close()  # the bar
        self._report = None
        printed, notes = self._reply.push(event)
        self._screen.stream(printed)
        self._has_printed = self._has_printed or bool(printed)
        if isinstance(event, TurnDone) and event.role == "assistant":
            if self._has_printed or not calls_tools(event, self._session):
                self._screen.line()
            self._screen.quote(self._reply.quote)
            self._has_printed = False
        if isinstance(event, Returned):
            self._screen.note(describe_result(event))
        for note in notes:
            self._screen.note(note)


def _replay_events(
    session: Session, turns: Iterable[TranscriptItem], options: ReplayOptions
) -> Iterator[Event]:
    previous, calls = "", list[ToolCall]()
    # A turn is replayed as soon as it is complete, even if the next one is still being typed.
    pairs = pairwise(chain(turns, (None,))) if options.feed else ((turn, None) for turn in turns)
    for item, next_item in pairs:
        assert item is not None  # only the last of all is
        next_role = next_item.role if isinstance(next_item, TranscriptTurn) else None
        with InterruptFlag() as interrupted:
            if isinstance(item, SettingsSwitch):
                yield from _replay_switch(session, item, options, interrupted)
            elif item.role == "system":
                yield from _replay_system(session, item, options.name)
            elif item.role == "user" and next_role == "assistant":
                yield from session.read_question(item.content, interrupted, next_role=next_role)
            elif item.role == "user":
                yield from session.ask(item.content, interrupted)
            elif item.role == "tool" and options.feed:
                call = calls.pop(0) if calls else ToolCall(call_id(item.line), "tool", "{}")
                asked = session.undoable_message
                yield from read_result(
                    session, call, item.content, asked, interrupted, next_role=next_role
                )
            elif options.feed:
                if previous not in ("user", "tool"):
                    where = f"{options.name}, line {item.line}"
                    raise TranscriptError(f"{where}: an assistant turn must follow a user turn")
                calls, given = calls_in(session, item.content)
                yield from session.read_reply(item.content, interrupted, given)
        if interrupted():
            raise KeyboardInterrupt
        previous = "" if isinstance(item, SettingsSwitch) else item.role


def _replay_system(session: Session, turn: TranscriptTurn, name: str) -> Iterator[Event]:
    if session.seen:
        yield Notice(f"{name}, line {turn.line}: a system turn after the first turn is left out")
    else:
        yield from session.switch(f"{name}, line {turn.line}", system=turn.content)


def _replay_switch(
    session: Session, switch: SettingsSwitch, options: ReplayOptions, interrupted: InterruptFlag
) -> Iterator[Event]:
    source, settings = f"{options.name}, line {switch.line}", switch.settings
    events = session.switch(source, interrupted, **settings)
    yield from events
    values = {name: format_setting(value) for name, value in settings.items()}
    same = ", ".join(f"{name} is already {value}" for name, value in values.items())
    if not options.json and (change := describe_switch(events, session, same)):
        yield Notice(change)


class _Dialogue:
    """Prints a dialogue that can be replayed to stdout, and notes to stderr.

    If the screen is quiet, only replies and notices are printed.
    """

    def __init__(self, screen: Screen, session: Session) -> None:
        self._screen = screen
        self._session = session
        self._is_replying = False
        self._text = TaggedText()

    def show(self, event: Event) -> None:
        if isinstance(event, Delta):
            if not self._is_replying and not self._screen.is_quiet:
                self._screen.stream("ASSISTANT: ")
            self._is_replying = True
            self._screen.stream(self._text.push(event))
        elif isinstance(event, TurnDone):
            self._show_turn(event)
        elif isinstance(event, Switched):
            self._screen.note(describe_change(event))
        elif isinstance(event, Notice):
            self._screen.note(event.text)
        elif isinstance(event, Returned):
            self._screen.note(describe_result(event))

    def _show_turn(self, turn: TurnDone) -> None:
        if turn.role == "assistant" and self._is_replying:
            self._screen.line(self._text.end())
            self._is_replying = False
        elif not self._screen.is_quiet:
            self._screen.line(f"{turn.role.upper()}: {turn.text}")
        self._screen.note(describe_excess(turn, self._session, "--budget"))
        recall = self._session.recall
        recalled = describe_recalled(recall, turn.seen) if turn.role == "user" else ""
        self._screen.remark(describe_turn(turn, self._session.budget, recalled))
