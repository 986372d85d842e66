"""Generates the reply to one request in its conversation, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from sirchat.chat.editing import KeptTurn, edit
from sirchat.chat.events import Delta, Event, Notice, TurnDone
from sirchat.chat.plain_reply import PlainReply, raise_budget_for
from sirchat.chat.session import Interrupted, Session
from sirchat.chat.state import Reply
from sirchat.chat.tool_loop import template_for
from sirchat.config.profile import Profile
from sirchat.engine.generation import Generation, StepResult
from sirchat.engine.sampling import Allowed
from sirchat.errors import ContextFullError, ModelError, SettingError
from sirchat.memory.ledger import Flag
from sirchat.models.model import LoadedModel
from sirchat.models.shape import free_memory
from sirchat.server.conversation import History, ServedConversation
from sirchat.server.matching import edited
from sirchat.server.requests import RequestError
from sirchat.text.other_templates import NoToolsError, PlainText, PromptedTools, ToolTemplate
from sirchat.text.reply_marks import shared
from sirchat.text.template import TurnIds
from sirchat.text.tool_calls import (
    CallParser,
    ToolCall,
    calls_as_text,
    calls_from_key,
    calls_key,
    results_from_json,
)

# Of the budget: what the tools may take where a text tells of them, unless they are needed.
_MOST_TOLD = 0.5
_LEAST_ROOM = 1.25  # the smallest budget, relative to system prompt and tools that are not pinned
_SHORT = ("length", "loop", "context")  # reasons of an end that cuts a reply


@dataclass(frozen=True)
class ReplyText:
    """A part of a reply.

    Attributes:
        text: the next piece of the answer, without calls of tools.
        tokens: text and log-probability of each token that ends in this part, if asked for.
        calls: the calls of tools that end in this part.
        thinking: the next piece of the reasoning.
    """

    text: str
    tokens: tuple[tuple[str, float], ...] = ()
    calls: tuple[ToolCall, ...] = ()
    thinking: str = ""


@dataclass(frozen=True)
class ReplyEnd:
    """The last part of a reply.

    Attributes:
        finish: `stop`, `length` or `tool_calls`, as in OpenAI's API.
        usage: numbers of tokens, as in OpenAI's API.
        memory: the conversation's id, policy and budget, and how many of its tokens are held.
        stopped_by: the stop string that ended the reply; "" if none did.
    """

    finish: str
    usage: dict[str, Any]
    memory: dict[str, Any]
    stopped_by: str = ""


@dataclass(frozen=True)
class ReplyOptions:
    """How the reply to a request is generated.

    Attributes:
        settings: sampling settings, for this reply alone.
        memory: memory settings, such as the policy, of the request or else of the server.
        stop: strings that end the reply.
        logprobs: whether to return the log-probability of each token.
        calls: finds calls of tools in the reply; None if it must not have calls.
        format: makes the reply's format, which says which tokens may come next.
        own: names of the memory settings that the request itself has. Only these replace settings
            that were changed for the conversation before.
        is_for_ask: whether the reply is one of `sirchat ask`: text and notes as `PlainReply` says.
        holds_all: whether the budget is raised for such a reply to hold all of the message.
        must_call: whether the reply must call a tool; else a model that takes none goes without.
        prefill: the beginning of the reply, which is not sent.
        notes: says what is not quite as the request asked; complete when the reply begins.
        headers: of the response; complete then, too.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    logprobs: bool = False
    calls: CallParser | None = None
    format: Callable[[Session], Allowed | None] | None = None
    own: frozenset[str] = frozenset()
    is_for_ask: bool = False
    holds_all: bool = False
    must_call: bool = False
    prefill: str = ""
    notes: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    def memory_settings_for(self, conversation: ServedConversation) -> dict[str, Any]:
        """The memory settings for this reply: the request's, the conversation's, the server's."""
        own = self.own | ({"policy_options"} if "policy" in self.own else set())
        set_before = {k: v for k, v in conversation.settings.items() if k not in own}
        return {**self.memory, **set_before}


Part = ReplyText | ReplyEnd | None
# A part of the reply; or the reply being generated, whose next `StepResult` is to be sent back.
Parts = Generator[Part | Generation, StepResult | None]


def generate_reply(
    conversation: ServedConversation, history: History, options: ReplyOptions, gone: Interrupted
) -> Parts:
    """Read the new messages of `history`, and generate the reply to the last one, part by part.

    If `gone()`, the client has left: the reply ends, and what was said is kept; a message that is
    not completely read is undone. Raises the same errors as `Session.ask`.
    """
    history = conversation.continued_by or history
    session, whole = conversation.session, conversation.session.seen  # of whole messages
    cached = whole - len(session.ledger.left_out)
    memory = {} if options.is_for_ask else options.memory_settings_for(conversation)
    if memory and memory["budget"] < conversation.least_budget:
        memory["budget"] = conversation.least_budget
    other = {k: v for k, v in memory.items() if getattr(session.profile, k) != v}
    if other:  # raises SettingError, changing nothing
        session.switch("sirchat", **other)
    conversation.is_exact = False
    with session.temporary_reply_settings(options.settings):
        try:
            _set_template(session, history, options)
            options.notes.extend(_of_reasoning(session, options))
            if memory and (conversation.kept or not conversation.roles):
                _raise_budget(conversation, history)
            if memory and conversation.least_budget == session.budget:
                how = "" if session.profile.pin_system else ", which are not pinned"
                note = f"budget is {session.budget}, for the system prompt and tools{how}"
                options.notes.append(note)
            allowed = None if options.format is None else options.format(session)
            if not conversation.roles and session.seen:
                _check_beginning(conversation, history)
                cached = whole = session.seen
            if conversation.kept:
                whole = -1  # a failure within leaves a part of this
                cached = yield from _take_over(conversation, history)
                whole = session.seen
            options.headers["X-Sirchat-Reused"] = str(cached)
            for (role, text), (following, _) in pairwise(
                history.messages[len(conversation.roles) :]
            ):
                for _ in _read(session, gone, role, text, following):
                    yield None
                conversation.add(role, text)
                whole = session.seen
                if gone():
                    conversation.undo_last_question()
                    return
            yield from _answer(conversation, history, options, gone, cached, allowed)
        except (ContextFullError, SettingError, RequestError):
            # Most of these errors are raised before anything of the message is read.
            conversation.is_exact = session.seen == whole
            raise


def prompt_ids(model: LoadedModel, profile: Profile, history: History) -> list[int]:
    """The ids that a new conversation would read to answer `history`."""
    own = profile.model_copy(update={"system": history.system})
    session, ids, said = Session(model, own), list[int](), history.messages
    _set_template(session, history, ReplyOptions())
    template, state = session.template, session.state
    for number, (role, text) in enumerate(said):
        following = said[number + 1][0] if number + 1 < len(said) else None
        text, turn = _prepared(session, role, text)
        if role in ("assistant", "calls"):
            turn = turn or template.assistant(text, state.header)
            ids += turn.ids + (template.closing if turn.closing is None else turn.closing)
            continue
        if not number and turn is None:
            system, turn = template.opening(text, history.system)
            ids += system.ids if system is not None else []
        is_after = number > 0 and said[number - 1][0] in ("user", "tool")
        turn = template.before(turn or template.user(text, after_user=is_after), following)
        state.header = turn.header
        ids += turn.ids
    return ids


def _take_over(conversation: ServedConversation, history: History) -> Generator[None, None, int]:
    """Let the conversation have the messages that it has read already, and read those between.

    Returns how many of its tokens were not read again. If none can stay, it begins anew.
    """
    session = conversation.session
    parts = edited(conversation, history, conversation.kept, partial(_read, session, bool))
    before = sum(len(part.rows) for part in parts if isinstance(part, KeptTurn))
    try:
        if parts:
            for _ in edit(session, parts):
                yield None
    except (SettingError, ContextFullError):  # it may fit without what was pinned or left out
        parts = []
    if not parts:
        session.note_profile(session.profile.model_copy(update={"system": history.system}))
        conversation.begin_anew()
        before = 0
    conversation.kept = {}
    conversation.become(history, len(conversation.turn_numbers))
    return before - len(session.ledger.left_out)


def _raise_budget(conversation: ServedConversation, history: History) -> None:
    """Raise the budget, if need be, so that system prompt and tools, which are pinned, fit.

    It is at most the model's context, and the KV cache takes at most half of the free memory. If
    they would take more than half of that, they are not pinned. RequestError if they don't fit.
    """
    session, (role, text) = conversation.session, history.messages[0]
    room = session.engine.evictor.divide_budget().most_pins
    if room is None or not session.profile.pin_system or role != "user":
        return
    with _refuse_template_errors("messages"):
        prompt = session.template.opening(text, history.system)[0]
    if prompt is None or len(prompt.ids) <= room:
        return
    size, most = len(prompt.ids), session.model.context_length
    if (free := free_memory()) is not None:
        most = min(most, free // 2 // session.model.row_bytes)
    if size * _LEAST_ROOM > most:
        problem = f"system prompt and tools take {size} tokens, which needs a budget of "
        problem += f"{int(size * _LEAST_ROOM)}; here, at most {most} can be had: send fewer tools"
        raise RequestError(problem, param="messages", code="context_length_exceeded")
    conversation.least_budget = min(2 * size, most)
    if 2 * size > most:
        conversation.settings["pin_system"] = False
        session.switch("sirchat", pin_system=False)
    session.switch("sirchat", budget=conversation.least_budget)


def _check_beginning(conversation: ServedConversation, history: History) -> None:
    """Begin anew if the system prompt of another chat is not what this one's template writes."""
    session, (role, text) = conversation.session, history.messages[0]
    prompt = session.template.opening(text, history.system)[0] if role == "user" else None
    ids = session.ledger.column("token_id").tolist()
    if prompt is None or prompt.ids != ids:
        conversation.begin_anew()


def _read(
    session: Session,
    gone: Interrupted,
    role: str,
    text: str,
    following: str | None,
    given: TurnIds | None = None,
) -> Iterator[Event]:
    """Read a message, before one of the role `following`; `given` are its ids, if known."""
    said, own = _prepared(session, role, text)
    given = given or own
    if role not in ("user", "tool"):
        return session.read_reply(said, gone, given)
    take = session.read_question if role == "user" else session.read_user
    return take(said, gone, before=following, given=given)


def _set_template(session: Session, history: History, options: ReplyOptions) -> None:
    """Set the chat template to the kind that plain text, or tools with their calls, need."""
    model, template = session.model, session.template
    if history.messages[-1][0] == "text":
        session.template = PlainText(model.tokenizer)
        return
    has_calls = not {"tool", "calls"}.isdisjoint(role for role, _ in history.messages)
    if not history.tools and not has_calls:
        if isinstance(template, ToolTemplate):  # another request of this chat had tools
            session.template = template_for(model, None, template.ends)
        return
    if not isinstance(template, ToolTemplate) or template.tools != history.tools:
        asked = model.tokenizer, model.anchors, history.tools, template.ends
        with _refuse_template_errors("tools"):
            try:
                tools = ToolTemplate(*asked)
            except NoToolsError as error:
                prompted = PromptedTools(*asked)
                size = sum(len(part.ids) for part in prompted.opening("") if part is not None)
                if size > session.budget * _MOST_TOLD and not (has_calls or options.must_call):
                    options.notes.append(f"tools are left out: {error}, and a text is too long")
                    session.template = template_for(model, None, template.ends)
                    return
                tools = prompted
            session.template = tools


def _of_reasoning(session: Session, options: ReplyOptions) -> Iterator[str]:
    """A note if the reasoning that the request asks for can't be had."""
    wanted, switches = options.settings.get("reasoning", "auto"), session.template.switches
    is_usual = wanted in ("off", "medium") and not switches.has_effort
    if not is_usual and (problem := switches.problem(wanted)):
        yield problem


def _prepared(session: Session, role: str, text: str) -> tuple[str, TurnIds | None]:
    """The text of a message as the session stores it; its ids if these are of calls or results.

    Or if it is the first one, and the system prompt before it was not read with it.
    """
    template = session.template
    if role == "user" and session.seen and all(one.role == "system" for one in session.turns):
        return text, template.opening(text, session.profile.system)[1]
    if not isinstance(template, ToolTemplate) or role not in ("tool", "calls"):
        return text, None
    with _refuse_template_errors("messages"):
        if role == "tool":
            results = results_from_json(text)
            return "\n".join(one["content"] for one in results), template.results(results)
        said, calls = calls_from_key(text)
        given = template.calls(said, calls, session.state.header)
        return calls_as_text(said, [call["function"] for call in calls]), given


@contextmanager
def _refuse_template_errors(param: str) -> Iterator[None]:
    """Context manager: an error of the chat template becomes a RequestError about field `param`."""
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
    allowed: Allowed | None,
) -> Parts:
    """Read the last message, and reply; `cached` tokens had been read before this request."""
    session, pieces, notes = conversation.session, _Pieces(conversation.session, options), []
    role, question = history.messages[-1]
    text, given = _prepared(session, role, question)
    plain = PlainReply(session) if options.is_for_ask else None
    if plain is not None:
        if options.holds_all:
            raise_budget_for(session, text)
        notes = [event.text for event in session.opening_events() if isinstance(event, Notice)]
    reply = _begun_reply(session, options.prefill) if options.prefill else None
    asked = done = None

    def part_of(event: Event) -> ReplyText | None:
        nonlocal notes
        said = event if isinstance(event, Delta) else Delta("")
        if plain is not None:
            text, more = plain.push(event)
            said, notes = Delta(text), notes + more
        return pieces.push(said) if said.text else None

    for event in session.read_question(text, gone, given=given):
        if isinstance(event, TurnDone) and event.role == "user":
            asked = event
        yield part_of(event)
    pieces.begin()
    with session.begin_reply(lambda: gone() or pieces.has_ended, reply, allowed) as opened:
        while not opened.is_over():
            stepped = yield opened.generation
            assert stepped is not None
            yield from filter(None, map(part_of, opened.push(stepped)))
        for event in opened.end():
            done = event if isinstance(event, TurnDone) else done
            yield from filter(None, [part_of(event)])
    assert asked is not None
    assert done is not None
    yield pieces.end(is_short=done.finish in _SHORT)
    conversation.add("tool" if role == "tool" else "user", question)
    calls = pieces.calls
    if calls:
        conversation.add("calls", calls_key(pieces.said, calls))
    else:
        conversation.add("assistant", done.text)
    is_cut = options.calls is not None and options.calls.is_cut
    is_cut |= bool(calls) and pieces.stops.is_found
    conversation.is_exact = not (role == "text" or options.is_for_ask or is_cut)
    end = replace(_end(conversation, asked, done, cached), stopped_by=pieces.stops.found)
    if asked.finish == "interrupt":  # the question was not read completely
        conversation.undo_last_question()
    if options.is_for_ask:
        end.memory["notes"] = notes
    yield replace(end, finish="tool_calls") if calls and end.finish == "stop" else end


def _begun_reply(session: Session, prefill: str) -> Reply:
    if session.template.marks.is_open:
        problem = "can't begin the reply of a model that begins every reply with reasoning"
        raise RequestError(f"a last message of the assistant {problem}", param="messages")
    return Reply(tuple(session.template.as_text(prefill.rstrip())), None)


def _end(served: ServedConversation, asked: TurnDone, done: TurnDone, cached: int) -> ReplyEnd:
    ledger, left_out = served.session.ledger, len(served.session.ledger.left_out)
    thinks = (ledger.column("flags") & np.uint8(Flag.THINKING)) > 0
    thought = int((thinks & (ledger.column("turn") == done.index)).sum())
    usage = {
        "prompt_tokens": asked.seen - left_out,
        "completion_tokens": done.tokens_out,
        "total_tokens": asked.seen - left_out + done.tokens_out,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            # Recall may have restored some that are left out.
            "evicted_tokens": max(0, asked.seen - left_out - asked.resident),
        },
        "completion_tokens_details": {"reasoning_tokens": thought},
    }
    memory = {
        "id": served.id,
        "seen": done.seen,
        "held": done.resident,
        "evicted": done.seen - done.resident,
        "left_out": left_out,
        "recalled": done.recalled,
        "policy": served.session.profile.policy,
        "budget": served.session.budget,
    }
    return ReplyEnd("length" if done.finish in _SHORT else "stop", usage, memory)


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


class _Pieces:
    """Cuts a reply into parts: stop strings are left out, calls of tools are taken out of the text.

    `said` is the answer so far, without the `calls` that are complete.
    """

    def __init__(self, session: Session, options: ReplyOptions) -> None:
        self._session, self._options = session, options
        self.stops = StopStrings(options.stop)
        self._tokens: _TokenProbabilities | None = None
        self._prefill = options.prefill  # as far as it was not generated yet
        self.said = ""
        self.calls: list[ToolCall] = []

    @property
    def has_ended(self) -> bool:
        """Whether the reply has ended, by a stop string or by the only call that it may have."""
        calls = self._options.calls
        return self.stops.is_found or (calls is not None and calls.has_ended)

    def begin(self) -> None:
        """The next generated token is the first one of the reply."""
        if self._options.logprobs:
            self._tokens = _TokenProbabilities(self._session)

    def push(self, said: Delta) -> ReplyText | None:
        """Add generated text; returns the next part, None if all is held back."""
        if said.part == "thinking":
            return ReplyText("", thinking=said.text)
        calls = self._options.calls
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
        calls = self._options.calls
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


class _TokenProbabilities:
    """Divides an answer's tokens and their log-probabilities among the pieces of its text."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next = session.seen  # position of the next token
        self._waiting: deque[tuple[int, str, float]] = deque()
        self._generated = 0  # characters
        self._has_begun = False

    def complete(self, text: str, end: int) -> tuple[tuple[str, float], ...]:
        """Text and log-probability of each token that ends in `text`, the answer's next piece.

        `end` is the index in the whole reply at which it ends; the tokens before it are dropped.
        """
        self._has_begun |= bool(text)
        for row in self._session.tokens(range(self._next, self._session.seen)):
            self._generated += len(row.text)
            self._waiting.append((self._generated, row.text, -(row.surprisal or 0.0)))
        self._next = self._session.seen
        tokens = []
        while self._waiting and self._waiting[0][0] <= end:
            at, said, value = self._waiting.popleft()
            if at > end - len(text):
                tokens.append((said, value))
        return tuple(tokens)

    def rest(self) -> tuple[tuple[str, float], ...]:
        """Text and log-probability of each token that `complete` has not returned yet."""
        return tuple((text, value) for _, text, value in self._waiting if self._has_begun)
