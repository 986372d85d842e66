"""Generates the reply to one request in its conversation, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from secrets import token_bytes
from typing import Any

from sirchat.chat.events import Choosing, Delta, TurnDone
from sirchat.chat.session import Interrupted, Session
from sirchat.engine.sampling import Allowed
from sirchat.engine.types import ChosenToken
from sirchat.errors import ContextFullError, ModelError, SettingError
from sirchat.server.conversations import History, ServedConversation
from sirchat.server.requests import RequestError
from sirchat.server.tools import CallParser, ToolCall, calls_key, calls_of, results_of
from sirchat.text.other_templates import PlainText, ToolTemplate, calls_as_text
from sirchat.text.text_file import without_surrogates


@dataclass(frozen=True)
class ReplyText:
    """A part of a reply: the next piece of its text.

    Attributes:
        text: the piece of text, without calls of tools.
        tokens: text and log-probability of each token that ends in this part; empty if the request
            does not ask for log-probabilities.
        calls: the calls of tools that end in this part.
    """

    text: str
    tokens: tuple[tuple[str, float], ...] = ()
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ReplyEnd:
    """The last part of a reply: why the reply ended, and token counts.

    Attributes:
        finish: `stop`, `length` or `tool_calls`, as in OpenAI's API.
        usage: numbers of tokens, as in OpenAI's API.
        memory: facts about the conversation, by name: its id, policy and budget, and how many of
            its tokens are in the cache.
    """

    finish: str
    usage: dict[str, Any]
    memory: dict[str, Any]


@dataclass(frozen=True)
class ReplyOptions:
    """The options that say how the reply to a request is generated.

    Attributes:
        settings: sampling settings, for this reply alone.
        memory: memory settings, such as the policy, of the request or else of the server.
        stop: strings that end the reply.
        logprobs: whether to return the log-probability of each token.
        calls: parser that finds calls of tools in the reply; None if the reply must not have calls.
        format: function that makes the reply's format, which says which tokens may come next; None
            if all tokens may.
        own: names of the memory settings that the request itself has. Only these replace settings
            that were changed for the conversation before.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    logprobs: bool = False
    calls: CallParser | None = None
    format: Callable[[Session], Allowed] | None = None
    own: frozenset[str] = frozenset()

    def memory_of(self, conversation: ServedConversation) -> dict[str, Any]:
        """The values of the memory settings, by name, for this reply in `conversation`.

        A value in the request comes first, then a value that was set for this conversation before,
        then the server's value.
        """
        own = self.own | ({"policy_options"} if "policy" in self.own else set())
        set_before = {k: v for k, v in conversation.settings.items() if k not in own}
        return {**self.memory, **set_before}


Step = ReplyText | ReplyEnd | ChosenToken | None
"""What a step of a reply yields: a part of the reply, a token that must be read next, or None."""


def plain_text(prompt: str) -> History:
    """Make the history for a text that the model continues, without a chat template.

    Its keys, which identify the messages of a conversation, are random. So no later request can
    continue the same conversation.
    """
    return History(None, (("text", without_surrogates(prompt)),), (token_bytes(), token_bytes()))


def _is_plain(history: History) -> bool:
    return history.messages[-1][0] == "text"


def generate_reply(
    conversation: ServedConversation, history: History, options: ReplyOptions, gone: Interrupted
) -> Generator[Step]:
    """Read the new messages of `history`, and generate the reply to the last one, in steps.

    Yields what each step yields (see `Step`). The function `gone` says whether the client has left.
    If it has, the reply ends, and its text up to this point is kept; a message that is not
    completely read is undone. Raises the same errors as `Session.ask`.
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
        _set_template(session, history)
        if options.format is not None:
            session.allowed = options.format(session)
        for role, text in history.messages[len(conversation.roles) : -1]:
            read = session.read_user if role in ("user", "tool") else session.read_reply
            for _ in read(_prepared(session, role, text), gone):
                yield None
            conversation.add(role, text)
            if gone():
                conversation.take_back()
                return
        yield from _answer(conversation, history, options, gone, cached)
    except (ContextFullError, SettingError, RequestError):
        # These errors are raised before anything of the message is read.
        conversation.is_exact = True
        raise
    finally:
        session.profile, session.allowed, session.together = usual, None, False


def _set_template(session: Session, history: History) -> None:
    """Set the chat template of `session` to the kind that `history` needs.

    A plain text needs `PlainText`. Tools, calls and results of tools need a `ToolTemplate`. For any
    other history, the session's template stays.
    """
    model, template = session.model, session.template
    if _is_plain(history):
        session.template = PlainText(model.tokenizer)
        return
    if not history.tools and {"tool", "calls"}.isdisjoint(role for role, _ in history.messages):
        return
    if not isinstance(template, ToolTemplate) or template.tools != history.tools:
        with _refused("tools"):
            session.template = ToolTemplate(model.tokenizer, model.anchors, history.tools)


def _prepared(session: Session, role: str, text: str) -> str:
    """Convert the text of a message to the form in which the session stores it.

    For calls and results of tools, this also tells the template which ids to read for the message.
    """
    template = session.template
    if not isinstance(template, ToolTemplate):
        return text
    template.following = None  # left by a turn that was refused before it was read
    if role not in ("tool", "calls"):
        return text
    with _refused("messages"):
        if role == "tool":
            results = results_of(text)
            template.following = template.results(results)
            return "\n".join(one["content"] for one in results)
        said, calls = calls_of(text)
        template.following = template.calls(said, calls)
        return calls_as_text(said, [one["function"] for one in calls])


@contextmanager
def _refused(param: str) -> Iterator[None]:
    """Context manager: raises RequestError if the chat template can't render messages or tools.

    `param` is the field of the request that the error names.
    """
    try:
        yield
    except ModelError as error:
        raise RequestError(str(error), param=param) from None


def _answer(
    conversation: ServedConversation,
    history: History,
    options: ReplyOptions,
    gone: Interrupted,
    cached: int,
) -> Iterator[Step]:
    """Read the last message of `history`, and generate the reply to it, in steps.

    Yields what each step yields (see `Step`). `cached` is the number of tokens that the session had
    read before this request.
    """
    session, pieces = conversation.session, _Pieces(conversation.session, options)
    role, question = history.messages[-1]
    asked = done = None
    text = _prepared(session, role, question)
    for event in session.ask(text, lambda: gone() or pieces.are_ended):
        if isinstance(event, TurnDone):
            asked, done = (event, done) if event.role == "user" else (asked, event)
            if event.role == "user":
                pieces.begin()
        if isinstance(event, Choosing):
            yield event.token
        else:
            yield pieces.push(event.text) if isinstance(event, Delta) else None
    assert asked is not None
    assert done is not None
    yield pieces.end()
    conversation.add("tool" if role == "tool" else "user", question)
    calls = () if options.calls is None or pieces.are_stopped else options.calls.calls
    if calls:
        conversation.add("calls", calls_key(pieces.said, calls))
    else:
        conversation.add("assistant", done.text)
    is_cut = options.calls is not None and options.calls.is_cut
    conversation.is_exact = not _is_plain(history) and not is_cut  # else it is not continued later
    end = _end(conversation, asked, done, cached)
    if asked.finish == "interrupt":  # the question was not read completely
        conversation.take_back()
    yield replace(end, finish="tool_calls") if calls and end.finish == "stop" else end


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


class _Pieces:
    """Cuts the generated text of a reply into parts that can be sent to the client.

    Stop strings are left out, and calls of tools are separated from the text.

    Attributes:
        said: the text of the reply so far, without calls of tools.
    """

    def __init__(self, session: Session, options: ReplyOptions) -> None:
        self._session, self._options = session, options
        self._stops = StopStrings(options.stop)
        self._tokens: _TokenProbabilities | None = None
        self.said = ""

    @property
    def are_stopped(self) -> bool:
        """Whether the reply has ended because a stop string was generated."""
        return self._stops.is_found

    @property
    def are_ended(self) -> bool:
        """Whether the reply has ended, by a stop string or by the only call that it may have."""
        calls = self._options.calls
        return self.are_stopped or (calls is not None and calls.are_complete)

    def begin(self) -> None:
        """Tell this object that the next generated token is the first token of the reply."""
        if self._options.logprobs:
            self._tokens = _TokenProbabilities(self._session)

    def push(self, text: str) -> ReplyText | None:
        """Add newly generated text; returns the next part of the reply.

        Returns None if all text is held back, as it may begin a stop string or a call of a tool.
        """
        text, calls = self._stops.push(text), self._options.calls
        if self._tokens is not None:
            return ReplyText(text, self._tokens.complete(text))
        found: list[ToolCall] = []
        if calls is not None:
            text, found = calls.push(text)
        self.said += text
        return ReplyText(text, calls=tuple(found)) if text or found else None

    def end(self) -> ReplyText:
        """Return the last part: the text and calls that were held back until the reply's end."""
        text, calls = "" if self.are_stopped else self._stops.rest(), self._options.calls
        if calls is None:
            tokens = () if self._tokens is None or self.are_stopped else self._tokens.all()
            return ReplyText(text, tokens)
        (text, found), (rest, more) = calls.push(text), calls.rest()
        self.said += text + rest
        return ReplyText(text + rest, calls=(*found, *more))


class StopStrings:
    """Cuts off a text at the first stop string; the text is added in pieces.

    If the text has several strings of `stops`, it is cut before the string that is complete first.
    The places where the text is divided into pieces make no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._waiting = ""  # it may be the beginning of a stop string
        self.is_found = False

    def push(self, text: str) -> str:
        """Add a piece of text; returns the text that can be sent to the client now.

        The end of the text is held back if it may be the beginning of a stop string. After a stop
        string, the result is always "".
        """
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
        """Whether the last `size` held-back characters are the beginning of a stop string."""
        return any(one.startswith(self._waiting[-size:]) for one in self._stops)

    def rest(self) -> str:
        """The text that is still held back; call this at the end of the reply."""
        return self._waiting


class _TokenProbabilities:
    """Divides a reply's tokens and their log-probabilities among the pieces of the reply's text."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next = session.seen  # position of the next token
        self._waiting: deque[tuple[int, str, float]] = deque()
        self._generated = self._given = 0  # characters

    def complete(self, text: str) -> tuple[tuple[str, float], ...]:
        """Text and log-probability of each token that ends in `text`, the reply's next piece."""
        self._given += len(text)
        self._collect()
        found = []
        while self._waiting and self._waiting[0][0] <= self._given:
            found.append(self._waiting.popleft()[1:])
        return tuple(found)

    def all(self) -> tuple[tuple[str, float], ...]:
        """Text and log-probability of each token that `complete` has not returned yet."""
        return tuple(one[1:] for one in self._waiting)

    def _collect(self) -> None:
        for row in self._session.tokens(range(self._next, self._session.seen)):
            self._generated += len(row.text)
            self._waiting.append((self._generated, row.text, -(row.surprisal or 0.0)))
        self._next = self._session.seen
