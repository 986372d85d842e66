"""Answers one request in its conversation, a step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sirchat.chat.events import Delta, TurnDone
from sirchat.chat.session import Interrupted, Session
from sirchat.errors import ContextFullError, SettingError
from sirchat.server.conversations import History, ServedConversation


@dataclass(frozen=True)
class ReplyText:
    """A piece of the reply: `text`, and its tokens that are complete, if they were asked for.

    For each token, there are its text and its log-probability.
    """

    text: str
    tokens: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class ReplyEnd:
    """How a reply ended.

    `finish` is `stop` or `length`. `usage` counts tokens, as OpenAI does; `memory` says how many
    tokens of the conversation are in the cache, and its id.
    """

    finish: str
    usage: dict[str, Any]
    memory: dict[str, Any]


@dataclass(frozen=True)
class ReplyOptions:
    """How to answer.

    `settings` are those of sampling, for this reply alone; to those in `memory`, such as the
    policy, the session is switched first, if it has others. Those that were set for the
    conversation take precedence, but not over `own`: what the request itself names.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    logprobs: bool = False
    own: frozenset[str] = frozenset()

    def memory_of(self, conversation: ServedConversation) -> dict[str, Any]:
        """The settings of memory that hold for this reply in `conversation`."""
        own = self.own | ({"policy_options"} if "policy" in self.own else set())
        set_before = {k: v for k, v in conversation.settings.items() if k not in own}
        return {**self.memory, **set_before}


def generate_reply(
    conversation: ServedConversation, history: History, options: ReplyOptions, gone: Interrupted
) -> Generator[ReplyText | ReplyEnd | None]:
    """Read what is new in `history`, and answer it; yields None after a step without text.

    When `gone` returns true, the reply ends, and what was said is kept; a message that was being
    read is taken back. Raises like `Session.ask`.
    """
    session, cached = conversation.session, conversation.session.seen
    wanted = options.memory_of(conversation)
    other = {k: v for k, v in wanted.items() if getattr(session.profile, k) != v}
    if other:  # raises SettingError, changing nothing
        session.switch("sirchat", **other)
    usual = session.profile
    session.profile = usual.model_copy(update=options.settings)
    conversation.is_exact = False
    try:
        for role, text in history.messages[len(conversation.roles) : -1]:
            read = session.read_user if role == "user" else session.read_reply
            for _ in read(text, gone):
                yield None
            conversation.add(role, text)
            if gone():
                conversation.take_back()
                return
        yield from _answer(conversation, history.messages[-1][1], options, gone, cached)
    except (ContextFullError, SettingError):  # raised before anything of the message is read
        conversation.is_exact = True
        raise
    finally:
        session.profile = usual


def _answer(
    conversation: ServedConversation,
    question: str,
    options: ReplyOptions,
    gone: Interrupted,
    cached: int,
) -> Iterator[ReplyText | ReplyEnd | None]:
    """Read the last message, and generate the reply; `cached` tokens were read before."""
    session, stops = conversation.session, StopStrings(options.stop)
    asked = done = None
    tokens: _TokenProbabilities | None = None
    for event in session.ask(question, lambda: gone() or stops.is_found):
        text = stops.push(event.text) if isinstance(event, Delta) else ""
        if isinstance(event, TurnDone):
            asked, done = (event, done) if event.role == "user" else (asked, event)
            if event.role == "user" and options.logprobs:
                tokens = _TokenProbabilities(session)
        elif isinstance(event, Delta) and tokens is not None:
            yield ReplyText(text, tokens.complete(text))
            continue
        yield ReplyText(text) if text else None
    assert asked is not None
    assert done is not None
    if not stops.is_found:
        rest = stops.rest()
        yield ReplyText(rest, tokens.all() if tokens is not None else ())
    conversation.add("user", question)
    conversation.add("assistant", done.text)
    conversation.is_exact = True
    end = _end(conversation, asked, done, cached)
    if asked.finish == "interrupt":  # the question was not read completely
        conversation.take_back()
    yield end


def _end(served: ServedConversation, asked: TurnDone, done: TurnDone, cached: int) -> ReplyEnd:
    usage = {
        "prompt_tokens": asked.seen,
        "completion_tokens": done.tokens_out,
        "total_tokens": asked.seen + done.tokens_out,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    session = served.session
    memory = {
        "id": served.id,
        "seen": done.seen,
        "held": done.resident,
        "evicted": done.seen - done.resident,
        "recalled": done.recalled,
        "policy": session.profile.policy,
        "budget": session.budget,
    }
    return ReplyEnd("length" if done.finish in ("length", "context") else "stop", usage, memory)


class StopStrings:
    """Ends a text before the first of the strings `stops` that is complete in it.

    The text comes in pieces; how it is divided makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._waiting = ""  # it may be the beginning of a stop string
        self.is_found = False

    def push(self, text: str) -> str:
        """Add a piece; returns the text that can't be a part of a stop string."""
        if self.is_found:
            return ""
        self._waiting += text
        found = [(at + len(one), at) for one in self._stops if (at := self._waiting.find(one)) >= 0]
        if found:
            self.is_found = True
            return self._waiting[: min(found)[1]]
        longest = min(len(self._waiting), max(map(len, self._stops), default=1) - 1)
        size = next((n for n in range(longest, 0, -1) if self._begins(n)), 0)
        ready = self._waiting[: len(self._waiting) - size]
        self._waiting = self._waiting[len(ready) :]
        return ready

    def _begins(self, size: int) -> bool:
        """Whether a stop string begins with the last `size` characters."""
        return any(one.startswith(self._waiting[-size:]) for one in self._stops)

    def rest(self) -> str:
        """The text that was held back, at the end of the reply."""
        return self._waiting


class _TokenProbabilities:
    """The log-probabilities of the tokens of a reply, given out with the text that they make."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next = session.seen  # position of the next token
        self._waiting: deque[tuple[int, str, float]] = deque()
        self._generated = self._given = 0  # characters

    def complete(self, text: str) -> tuple[tuple[str, float], ...]:
        """The tokens that end in `text`, the next piece of the reply."""
        self._given += len(text)
        self._collect()
        found = []
        while self._waiting and self._waiting[0][0] <= self._given:
            found.append(self._waiting.popleft()[1:])
        return tuple(found)

    def all(self) -> tuple[tuple[str, float], ...]:
        """The tokens not given out yet."""
        return tuple(one[1:] for one in self._waiting)

    def _collect(self) -> None:
        for row in self._session.tokens(range(self._next, self._session.seen)):
            self._generated += len(row.text)
            self._waiting.append((self._generated, row.text, -(row.surprisal or 0.0)))
        self._next = self._session.seen
