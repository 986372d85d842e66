"""The parts in which a reply is sent: text, calls of tools, log-probabilities, and its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from sirchat.chat.events import Delta, Event
from sirchat.chat.plain_reply import PlainReply
from sirchat.chat.session import Session
from sirchat.engine.sampling import Allowed
from sirchat.server.conversation import ServedConversation
from sirchat.text.reply_marks import shared
from sirchat.text.tool_calls import CallParser, ToolCall


@dataclass(frozen=True)
class TokenChance:
    """A token's text and log-probability, and the likeliest tokens in its place, with theirs."""

    text: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class ReplyText:
    """A part of a reply.

    Attributes:
        text: the next piece of the answer, without calls of tools.
        tokens: each token that ends in this part, if asked for.
        calls: the calls of tools that end in this part.
        thinking: the next piece of the reasoning.
        choice: which of several replies to the same message this is a part of.
        finish: as in `ReplyEnd`, in the last part of each such reply but the last one; else "".
    """

    text: str
    tokens: tuple[TokenChance, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    thinking: str = ""
    choice: int = 0
    finish: str = ""


@dataclass(frozen=True)
class ReplyEnd:
    """The last part of a reply.

    Attributes:
        finish: `stop`, `length` or `tool_calls`, as in OpenAI's API.
        usage: numbers of tokens, as in OpenAI's API.
        memory: the conversation's id, policy and budget, and how many of its tokens are held.
        stopped_by: the stop string that ended the reply; "" if none did.
        choice: which of several replies to the same message has ended.
    """

    finish: str
    usage: dict[str, Any]
    memory: dict[str, Any]
    stopped_by: str = ""
    choice: int = 0


@dataclass(frozen=True)
class ReplyOptions:
    """How the reply to a request is generated.

    Attributes:
        settings: sampling settings, for this reply alone.
        memory: memory settings, such as the policy, of the request or else of the server.
        stop: strings that end the reply.
        alternatives: of how many likeliest tokens the log-probabilities are told, beside that of
            each token; None for none at all.
        calls: finds calls of tools in the reply; None if it must not have calls.
        format: makes the reply's format, which says which tokens may come next.
        own: names of the memory settings that the request itself has. Only these replace settings
            that were changed for the conversation before.
        is_for_ask: whether the reply is one of `sirchat ask`: text and notes as `PlainReply` says.
        holds_all: whether the budget is raised for such a reply to hold all of the message.
        source: how many characters of that message are a text that it asks about.
        must_call: whether the reply must call a tool; else a model that takes none goes without.
        prefill: the beginning of the reply, which is not sent.
        notes: says what is not quite as the request asked; complete when the reply begins.
        headers: of the response; complete then, too.
        count: how many replies to the message are generated, each with other random numbers.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    alternatives: int | None = None
    calls: CallParser | None = None
    format: Callable[[Session], Allowed | None] | None = None
    own: frozenset[str] = frozenset()
    is_for_ask: bool = False
    holds_all: bool = False
    source: int = 0
    must_call: bool = False
    prefill: str = ""
    notes: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    count: int = 1

    def memory_settings_for(self, conversation: ServedConversation) -> dict[str, Any]:
        """The memory settings for this reply: the request's, the conversation's, the server's."""
        own = self.own | ({"policy_options"} if "policy" in self.own else set())
        set_before = {k: v for k, v in conversation.settings.items() if k not in own}
        return {**self.memory, **set_before}


class StopStrings:
    """Cuts off a text, which comes in pieces, before the stop string that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.waiting = ""  # the end of the text, which may be the beginning of a stop string
        self.found = ""  # the stop string that is complete

    @property
    def is_found(self) -> bool:
        """Whether a stop string is complete."""
        return bool(self.found)

    def push(self, text: str) -> str:
        """Add a piece; returns what can be sent now. After a stop string, that is always ""."""
        if self.is_found:
            return ""
        self.waiting += text
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self.waiting.find(stop)) >= 0
        ]
        if ends:
            _, start, self.found = min(ends)
            return self.waiting[:start]
        longest = min(len(self.waiting), max(map(len, self._stops), default=1) - 1)
        ready = len(self.waiting) - longest
        while ready < len(self.waiting) and not any(
            stop.startswith(self.waiting[ready:]) for stop in self._stops
        ):
            ready += 1
        sent, self.waiting = self.waiting[:ready], self.waiting[ready:]
        return sent


class Pieces:
    """Cuts a reply into parts: stop strings are left out, calls of tools are taken out of the text.

    `said` is the answer so far, without the `calls` that are complete.
    """

    def __init__(
        self, session: Session, options: ReplyOptions, plain: PlainReply | None = None
    ) -> None:
        self._session, self._options, self._plain = session, options, plain
        self._calls = deepcopy(options.calls)  # each reply has its own
        self.stops = StopStrings(options.stop)
        told = options.alternatives
        self._tokens = None if told is None else _TokenChances(session, told)
        self._prefill = options.prefill  # as far as it was not generated yet
        self.said = ""
        self.calls: list[ToolCall] = []
        self.notes = list[str]()  # of `sirchat ask`

    @property
    def is_cut(self) -> bool:
        """Whether the model has said more than is sent."""
        calls = self._calls
        return (calls is not None and calls.is_cut) or (bool(self.calls) and self.stops.is_found)

    @property
    def has_ended(self) -> bool:
        """Whether the reply has ended, by a stop string or by the only call that it may have."""
        calls = self._calls
        return self.stops.is_found or (calls is not None and calls.has_ended)

    def note_logits(self) -> None:
        """Note which tokens are the likeliest next ones, if that is to be told."""
        if self._tokens is not None:
            self._tokens.note_logits()

    def push(self, event: Event) -> ReplyText | None:
        """Add generated text, if that is the event; returns the next part, if there is one."""
        said = event if isinstance(event, Delta) else Delta("")
        if self._plain is not None:
            text, more = self._plain.push(event)
            said, self.notes = Delta(text), self.notes + more
        return self._add_text(said) if said.text else None

    def _add_text(self, said: Delta) -> ReplyText | None:
        if said.part == "thinking":
            return ReplyText("", thinking=said.text)
        calls = self._calls
        if said.part == "call" and calls is not None and calls.holds(said.text):
            return None
        if self._tokens is not None:
            waiting = len(self.stops.waiting) + len(said.text)
            text = self.stops.push(said.text)
            return ReplyText(text, self._tokens.complete(text, said.end - waiting + len(text)))
        size = shared(self._prefill, said.text)
        text, self._prefill = said.text[size:], self._prefill[size:] if not said.text[size:] else ""
        return self._add(*((text, []) if calls is None else calls.push(text)))

    def end(self, *, is_short: bool) -> ReplyText:
        """The last part: what was held back until the reply's end; `is_short`: it was cut there."""
        calls = self._calls
        if calls is None:
            tokens = () if self._tokens is None or self.stops.is_found else self._tokens.rest()
            return ReplyText(self._rest(), tokens)
        lead = self._session.template.marks.call_lead
        last = self._add(*calls.rest(lead, is_short=is_short)) or ReplyText("")
        rest = self._rest()
        self.said += rest
        return replace(last, text=last.text + rest)

    def _add(self, text: str, new: Sequence[ToolCall]) -> ReplyText | None:
        """Add text and calls, up to a stop string in the text."""
        new = () if self.stops.is_found else tuple(new)
        text = self.stops.push(text)
        self.said += text
        self.calls += new
        return ReplyText(text, calls=new) if text or new else None

    def _rest(self) -> str:
        return "" if self.stops.is_found else self.stops.waiting


class _TokenChances:
    """Divides an answer's tokens and their log-probabilities among the pieces of its text."""

    def __init__(self, session: Session, alternatives: int) -> None:
        self._session, self._alternatives = session, alternatives
        self._next = -1  # position of the next token, if the reply has begun
        self._likeliest = dict[int, tuple[tuple[str, float], ...]]()  # by position
        self._waiting: deque[tuple[int, TokenChance]] = deque()
        self._generated = 0  # characters
        self._has_begun = False

    def note_logits(self) -> None:
        """Note the likeliest next tokens, from the model's logits."""
        session, logits = self._session, self._session.engine.logits
        self._next = session.seen if self._next < 0 else self._next
        if self._alternatives and logits is not None:
            best = logits.float().log_softmax(-1).topk(self._alternatives)
            texts = (session.model.tokenizer.decode([one]) for one in best.indices.tolist())
            values = best.values.tolist()
            self._likeliest[session.seen] = tuple(zip(texts, values, strict=True))

    def complete(self, text: str, end: int) -> tuple[TokenChance, ...]:
        """Each token that ends in `text`, the answer's next piece.

        `end` is the index in the whole reply at which it ends; the tokens before it are dropped.
        """
        self._has_begun |= bool(text)
        for row in self._session.tokens(range(self._next, self._session.seen)):
            self._generated += len(row.text)
            likeliest = self._likeliest.pop(row.position, ())
            chance = TokenChance(row.text, -(row.surprisal or 0.0), likeliest)
            self._waiting.append((self._generated, chance))
        self._next = self._session.seen
        tokens = []
        while self._waiting and self._waiting[0][0] <= end:
            at, chance = self._waiting.popleft()
            if at > end - len(text):
                tokens.append(chance)
        return tuple(tokens)

    def rest(self) -> tuple[TokenChance, ...]:
        """Each token that `complete` has not returned yet."""
        return tuple(chance for _, chance in self._waiting if self._has_begun)
