"""The parts in which a reply is sent: text, tool calls, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from sirchat.chat.events import Delta, Event
from sirchat.chat.session import Session
from sirchat.engine.sampling import TokenFilter
from sirchat.text.tool_calls import CallParser, ToolCall


@dataclass(frozen=True)
class ReplyText:
    text: str  # the next piece of the answer, without calls of tools
    calls: tuple[ToolCall, ...] = ()  # those that end in this part
    thinking: str = ""  # the next piece of the reasoning

    def __add__(self, after: ReplyText) -> ReplyText:
        calls = self.calls + after.calls
        return ReplyText(self.text + after.text, calls, self.thinking + after.thinking)


@dataclass(frozen=True)
class ReplyEnd:
    finish: str  # `stop`, `length` or `tool_calls`, as in OpenAI's API
    usage: dict[str, Any]  # numbers of tokens, as in OpenAI's API
    memory: dict[str, Any]  # the conversation's id, policy and budget, and tokens seen and held
    stopped_by: str = ""  # the stop string that ended the reply, if one did


@dataclass(frozen=True)
class ReplyOptions:
    settings: dict[str, Any] = field(default_factory=dict)  # of sampling, for this reply alone
    stop: Sequence[str] = ()
    calls: CallParser | None = None  # None if the reply must not call tools
    format: Callable[[Session], TokenFilter | None] | None = None
    must_call: bool = False  # a tool; else a model that takes none goes without
    # What is not quite as the request asked, and headers; complete when the reply begins.
    notes: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)


class StopStrings:
    """Ends a text, which comes in pieces, before the first complete stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.held_back = ""  # the end of the text, which may be the beginning of a stop string
        self.complete_stop = ""  # the stop string that is complete

    @property
    def is_found(self) -> bool:
        return bool(self.complete_stop)

    def push(self, text: str) -> str:
        """Add a piece; returns the text that can be sent now, always "" after a stop string."""
        if self.is_found:
            return ""
        self.held_back += text
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self.held_back.find(stop)) >= 0
        ]
        if ends:
            _, start, self.complete_stop = min(ends)
            return self.held_back[:start]
        held = self.held_back
        tails = (n for n in range(len(held)) if any(s.startswith(held[n:]) for s in self._stops))
        end = next(tails, len(held))
        self.held_back = held[end:]
        return held[:end]


class ReplySplitter:
    """Splits a reply into parts: removes stop strings, and takes tool calls out of the text.

    `answer` is the answer so far, without complete `calls`.
    """

    def __init__(self, session: Session, options: ReplyOptions) -> None:
        self._session, self._options = session, options
        self._calls = deepcopy(options.calls)  # each reply has its own
        self.stops = StopStrings(options.stop)
        self.answer = ""
        self.calls: list[ToolCall] = []

    @property
    def has_unsent_text(self) -> bool:
        """Whether the model has written more than was sent."""
        calls = self._calls
        return (calls is not None and calls.is_cut) or (bool(self.calls) and self.stops.is_found)

    @property
    def has_ended(self) -> bool:
        """Whether the reply ended by a stop string, or by the only call that it may have."""
        calls = self._calls
        return self.stops.is_found or (calls is not None and calls.has_ended)

    def push(self, event: Event) -> ReplyText | None:
        """Add an event; if it is generated text, returns the next part, if there is one."""
        return self._add_text(event) if isinstance(event, Delta) and event.text else None

    def _add_text(self, delta: Delta) -> ReplyText | None:
        if delta.part == "thinking":
            return ReplyText("", thinking=delta.text)
        calls = self._calls
        if delta.part == "call" and calls is not None and calls.hold_back(delta.text):
            return None
        return self._add(*((delta.text, []) if calls is None else calls.push(delta.text)))

    def end(self, *, is_short: bool) -> ReplyText:
        """The last part, with all text held back; `is_short` means that the reply was cut."""
        calls = self._calls
        if calls is None:
            return ReplyText(self._held_back())
        lead = self._session.template.marks.call_lead
        last = self._add(*calls.finish(lead, is_short=is_short)) or ReplyText("")
        rest = self._held_back()
        self.answer += rest
        return replace(last, text=last.text + rest)

    def _add(self, text: str, new: Sequence[ToolCall]) -> ReplyText | None:
        """Add text and calls, up to a stop string in the text."""
        new = () if self.stops.is_found else tuple(new)
        text = self.stops.push(text)
        self.answer += text
        self.calls += new
        return ReplyText(text, calls=new) if text or new else None

    def _held_back(self) -> str:
        return "" if self.stops.is_found else self.stops.held_back
