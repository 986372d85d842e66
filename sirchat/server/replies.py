"""Generates the reply to one request in its conversation, one step at a time, in its format."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from sirchat.chat.editing import KeptTurn, edit
from sirchat.chat.events import Delta, Event, TurnDone
from sirchat.chat.formats import MAX_CALLS_PER_REPLY, ModelFormats
from sirchat.chat.session import Session
from sirchat.chat.turn import Interrupted, never
from sirchat.engine.engine import Generation, StepResult
from sirchat.engine.sampling import TokenFilter
from sirchat.errors import ContextFullError, ModelError, SettingError
from sirchat.memory.ledger import Flag
from sirchat.server.conversation import Continuation, History, ServedConversation, edited
from sirchat.server.fields import RequestError
from sirchat.server.requests import ChatRequest, NamedTool
from sirchat.text.other_templates import PromptedTools, ToolTemplate
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
_MAX_TOOLS_SHARE = 0.5
_MIN_BUDGET_RATIO = 1.25  # to the size of system prompt and tools that are not pinned
_CUT_REASONS = ("length", "loop", "context")  # reasons of an end that cuts a reply


@dataclass(frozen=True)
class ReplyText:
    text: str  # the next piece of the answer, without calls of tools
    calls: tuple[ToolCall, ...] = ()  # those that end in this part
    thinking: str = ""  # the next piece of the reasoning
    conversation: str = ""  # its id, if the part was sent

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
        self._held = ""  # the end of the text, which may be the beginning of a stop string
        self.complete_stop = ""  # the stop string that is complete

    @property
    def is_found(self) -> bool:
        return bool(self.complete_stop)

    def push(self, text: str) -> str:
        """Add a piece; returns the text that can be sent now, always "" after a stop string."""
        if self.is_found:
            return ""
        held, self._held = self._held + text, ""
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := held.find(stop)) >= 0
        ]
        if ends:
            _, start, self.complete_stop = min(ends)
            return held[:start]
        tails = (n for n in range(len(held)) if any(s.startswith(held[n:]) for s in self._stops))
        end = next(tails, len(held))
        self._held = held[end:]
        return held[:end]

    def finish(self) -> str:
        """The rest of the text, which is no stop string as nothing follows."""
        return self._held


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
        if not isinstance(event, Delta) or not event.text:
            return None
        if event.part == "thinking":
            return ReplyText("", thinking=event.text)
        if self._calls is None:
            return self._add(event.text, [])
        if event.part == "call" and self._calls.hold_back(event.text):
            return None
        return self._add(*self._calls.push(event.text))

    def end(self, *, is_short: bool) -> ReplyText:
        """The last part, with all text held back; `is_short` means that the reply was cut."""
        last = None
        if self._calls is not None:
            lead = self._session.template.marks.call_lead
            last = self._add(*self._calls.finish(lead, is_short=is_short))
        rest = self.stops.finish()
        self.answer += rest
        return (last or ReplyText("")) + ReplyText(rest)

    def _add(self, text: str, new: Sequence[ToolCall]) -> ReplyText | None:
        """Add text and calls, up to a stop string in the text."""
        new = () if self.stops.is_found else tuple(new)
        text = self.stops.push(text)
        self.answer += text
        self.calls += new
        return ReplyText(text, calls=new) if text or new else None


# A part of the reply; or a generation, whose next `StepResult` is to be sent back; or None, after a
# chunk of a message.
Step = ReplyText | Generation | None
Steps = Generator[Step, StepResult | None, ReplyEnd | None]  # returns None if the client has left


class ReplyGenerator:
    """Answers one request in its conversation.

    When `is_cancelled()` becomes true, the client has left: the reply ends and its text is kept; a
    message that is not completely read is undone.
    """

    def __init__(
        self,
        continuation: Continuation,
        options: ReplyOptions,
        is_cancelled: Interrupted,
    ) -> None:
        self._conversation, self._history = continuation.conversation, continuation.history
        self._reused, self._is_retry = continuation.reused, continuation.is_retry
        self._session = self._conversation.session
        self._options, self._is_cancelled = options, is_cancelled
        self._complete_tokens = self._session.seen  # number of tokens of whole messages

    def steps(self) -> Steps:
        """Read the new messages, and generate the reply to the last one, step by step.

        Raises the same errors as `Session.ask`.
        """
        conversation, session, options = self._conversation, self._session, self._options
        conversation.is_exact = False
        with session.temporary_reply_settings(options.settings):
            try:
                _set_template(session, self._history, options)
                options.notes.extend(_reasoning_notes(session, options))
                if self._reused or not conversation.roles:
                    _raise_budget(conversation, self._history)
                if conversation.least_budget == session.budget:
                    pinning = "" if session.profile.pin_system else ", which are not pinned"
                    note = f"budget is {session.budget}, for the system prompt and tools{pinning}"
                    options.notes.append(note)
                allowed = None if options.format is None else options.format(session)
                if not conversation.roles and session.seen:
                    _check_beginning(conversation, self._history)
                is_retry = self._is_retry and conversation.undo_reply()
                cached = yield from self._go_back(is_retry=is_retry)
                options.headers["X-Sirchat-Reused"] = str(cached)
                if (yield from self._read_all_but_last()):
                    return (yield from self._reply(cached, allowed, is_retry=is_retry))
                return None
            except Exception:  # whatever a model or a policy raises
                conversation.is_exact = self._undo_incomplete()
                raise

    def _undo_incomplete(self) -> bool:
        """Undo a message that was read in part; returns whether only whole ones are left."""
        conversation, session = self._conversation, self._session
        with suppress(Exception):  # what failed may fail again
            # Of some, nothing was read yet.
            points = session.history.messages
            if points and points[-1].checkpoint.seen == self._complete_tokens:
                session.undo()
        is_whole = session.seen == self._complete_tokens
        return is_whole and len(conversation.turn_numbers) == len(conversation.roles)

    def _go_back(self, *, is_retry: bool) -> Generator[None, None, int]:
        """Keep only messages that the request has; returns how many tokens are not read again."""
        # New messages between them are read; if no message can stay, the conversation begins anew.
        conversation, session, history = self._conversation, self._session, self._history
        is_edit = bool(self._reused)
        if not (is_edit or is_retry or conversation.undo_to(len(history.messages) - 1)):
            self._begin_anew()
        self._complete_tokens = cached = session.seen
        if is_edit:
            self._complete_tokens = -1  # a failure within leaves a part of this
            read = partial(_read_message, session, never)
            parts = edited(conversation, history, self._reused, read)
            conversation.prompt_mark = b""  # meanwhile, no other may copy the system prompt
            cached = sum(len(part.rows) for part in parts if isinstance(part, KeptTurn))
            try:
                if parts:
                    yield from (None for _ in edit(session, parts))
            except (SettingError, ContextFullError):  # it may fit without what was pinned or left
                parts = []
            if parts:
                conversation.set_messages(history, len(conversation.turn_numbers))
            else:
                self._begin_anew()
                cached = 0
            self._complete_tokens = session.seen
        return cached - len(session.ledger.left_out)

    def _begin_anew(self) -> None:
        conversation, session = self._conversation, self._session
        profile = session.profile.model_copy(update={"system": self._history.system})
        session.note_profile(profile)
        conversation.reset()
        conversation.set_messages(self._history, 0)

    def _read_all_but_last(self) -> Generator[None, None, bool]:
        """Read the messages before the last one; returns False once the client has left."""
        conversation, session = self._conversation, self._session
        is_cancelled = self._is_cancelled
        unread = self._history.messages[len(conversation.roles) :]
        for (role, text), (next_role, _) in pairwise(unread):
            yield from (None for _ in _read_message(session, is_cancelled, role, text, next_role))
            conversation.add(role, text)
            self._complete_tokens = session.seen
            if is_cancelled():
                conversation.undo_last_question()
                return False
        return True

    def _reply(self, cached: int, allowed: TokenFilter | None, *, is_retry: bool) -> Steps:
        """Read the last message, unless it `is_retry`, and reply; `cached`: tokens read before."""
        conversation, session = self._conversation, self._session
        role, question = self._history.messages[-1]
        text, ids = _stored_text_and_ids(session, role, question)
        splitter = ReplySplitter(session, self._options)
        is_read = True
        if not is_retry:
            for event in session.read_question(text, self._is_cancelled, given=ids):
                if isinstance(event, TurnDone) and event.role == "user":
                    is_read = event.finish != "interrupt"
                yield splitter.push(event)
            conversation.reasoning = session.profile.reasoning
        start = session.seen, session.resident
        asked = [] if is_retry else [("tool" if role == "tool" else "user", question)]
        try:
            done = yield from self._generate(splitter, allowed)
        except Exception:  # whatever a model raises; what it has said by then stays
            if session.turns[-1].role == "assistant":
                for message in (*asked, ("assistant", session.turns[-1].text)):
                    conversation.add(*message)
                self._complete_tokens = session.seen
            raise
        yield splitter.end(is_short=done.finish in _CUT_REASONS)
        for message in asked:
            conversation.add(*message)
        if splitter.calls:
            conversation.add("calls", calls_key(splitter.answer, splitter.calls))
        else:
            conversation.add("assistant", done.text)
        conversation.is_exact = not splitter.has_unsent_text
        end = _reply_end(conversation, splitter, start, done, cached)
        if not is_read:
            conversation.undo_last_question()
        return end

    def _generate(
        self, splitter: ReplySplitter, allowed: TokenFilter | None
    ) -> Generator[Step, StepResult | None, TurnDone]:
        def stops() -> bool:
            return self._is_cancelled() or splitter.has_ended

        done = None
        with self._session.begin_reply(stops, allowed=allowed, is_undoable=True) as reply:
            while not reply.is_over():
                result = yield reply.generation
                assert result is not None
                yield from filter(None, map(splitter.push, reply.push(result)))
            for event in reply.end():
                done = event if isinstance(event, TurnDone) else done
                if (part := splitter.push(event)) is not None:
                    yield part
        assert done is not None
        return done


def _raise_budget(conversation: ServedConversation, history: History) -> None:
    """Raise the budget so that system prompt and tools fit; raises RequestError if impossible."""
    # Prompt and tools are pinned, unless they take more than half of what the budget can be: the
    # model's context, in at most half of the free memory.
    session, (role, text) = conversation.session, history.messages[0]
    max_pins = session.engine.choice.divide_budget().max_pins
    if max_pins is None or not session.profile.pin_system or role != "user":
        return
    with _refuse_template_errors("messages"):
        prompt = session.template.opening(text, history.system)[0]
    if prompt is None or len(prompt.ids) <= max_pins:
        return
    size, max_budget = len(prompt.ids), session.model.affordable_rows()
    if size * _MIN_BUDGET_RATIO > max_budget:
        needed = int(size * _MIN_BUDGET_RATIO)
        problem = f"system prompt and tools take {size} tokens, which needs a budget of {needed}; "
        problem += f"here, at most {max_budget} can be had: send fewer tools"
        raise RequestError(problem, param="messages", code="context_length_exceeded")
    conversation.least_budget = min(2 * size, max_budget)
    if 2 * size > max_budget:
        conversation.settings["pin_system"] = False
        session.switch("sirchat", pin_system=False)
    session.switch("sirchat", budget=conversation.least_budget)


def _check_beginning(conversation: ServedConversation, history: History) -> None:
    """Begin anew if the chat's system prompt is not as this request's template writes it."""
    session, (role, text) = conversation.session, history.messages[0]
    prompt = session.template.opening(text, history.system)[0] if role == "user" else None
    ids = session.ledger.column("token_id").tolist()
    if prompt is None or prompt.ids != ids:
        conversation.reset()


def _read_message(
    session: Session,
    is_cancelled: Interrupted,
    role: str,
    text: str,
    next_role: str | None,
    ids: TurnIds | None = None,
) -> Iterator[Event]:
    """Read a message, before one of the role `next_role`; `ids` are its token ids, if known."""
    stored_text, stored_ids = _stored_text_and_ids(session, role, text)
    ids = ids or stored_ids
    if role not in ("user", "tool"):
        return session.read_reply(stored_text, is_cancelled, ids)
    read = session.read_question if role == "user" else session.read_user
    return read(stored_text, is_cancelled, next_role=next_role, given=ids)


def _set_template(session: Session, history: History, options: ReplyOptions) -> None:
    """Set the chat template that the request's tools and their calls need."""
    has_calls = not {"tool", "calls"}.isdisjoint(role for role, _ in history.messages)
    with _refuse_template_errors("tools"):
        template = session.template_with(history.tools if history.tools or has_calls else None)
        is_new = template is not session.template
        if is_new and isinstance(template, PromptedTools):
            size = sum(len(part.ids) for part in template.opening("") if part is not None)
            if size > session.budget * _MAX_TOOLS_SHARE and not (has_calls or options.must_call):
                reason = "the model's chat template takes no tools, and a text is too long"
                options.notes.append(f"tools are left out: {reason}")
                template = session.template_with(None)
        elif is_new and isinstance(template, ToolTemplate) and history.tools and template.note:
            options.notes.append(template.note)
    session.template = template


def _reasoning_notes(session: Session, options: ReplyOptions) -> list[str]:
    """A note if the model can't reason as much or as little as the request asks."""
    reasoning, switches = options.settings.get("reasoning", "auto"), session.template.switches
    if reasoning in ("off", "medium") and not switches.has_effort:
        return []
    problem = switches.problem(reasoning)
    return [problem] if problem else []


def _stored_text_and_ids(session: Session, role: str, text: str) -> tuple[str, TurnIds | None]:
    """A message's text as the session stores it; and its ids, or None for ordinary messages."""
    template = session.template
    if role == "user" and session.seen and all(turn.role == "system" for turn in session.turns):
        return text, template.opening(text, session.profile.system)[1]
    if not isinstance(template, ToolTemplate) or role not in ("tool", "calls"):
        return text, None
    with _refuse_template_errors("messages"):
        if role == "tool":
            results = results_from_json(text)
            contents = "\n".join(result["content"] for result in results)
            return contents, template.tool_results_turn(results)
        answer, calls = calls_from_key(text)
        ids = template.tool_calls_turn(answer, calls, session.state.reply_header)
        return calls_as_text(answer, [call["function"] for call in calls]), ids


@contextmanager
def _refuse_template_errors(param: str) -> Iterator[None]:
    """Context manager: an error of the chat template becomes a RequestError about `param`."""
    try:
        yield
    except ModelError as error:
        raise RequestError(str(error), param=param) from None


def reply_format(
    formats: ModelFormats, request: ChatRequest, notes: list[str], session: Session
) -> TokenFilter | None:
    """The format of the reply to a request, if any: JSON, calls, or strict calls.

    Parts of a schema that are not enforced are added to `notes`. Raises RequestError if the model
    or a schema can't be used, or if the chat template does not write calls as JSON.
    """
    required = request.required_tools
    schema = None if required else request.response_format.reply_schema
    may_be_strict = request.tool_choice == "auto" and isinstance(session.template, ToolTemplate)
    tools = required or [tool.function for tool in request.tools if may_be_strict]
    is_free_reply = not required and schema is None
    if is_free_reply and not any(tool.strict for tool in tools):
        return None
    param = "tool_choice" if required else "tools" if is_free_reply else "response_format"
    tool_schemas = [(t.name, t.parameters if t.strict or not is_free_reply else {}) for t in tools]
    is_single = isinstance(request.tool_choice, NamedTool) or not request.parallel_tool_calls
    # A small model would go on with calls of all other tools.
    is_single |= bool(required) and "parallel_tool_calls" not in request.model_fields_set
    max_calls = 1 if is_single else MAX_CALLS_PER_REPLY
    try:
        if is_free_reply:
            return formats.strict(session, param, notes, tool_schemas)
        return formats.json_or_calls(session, param, notes, schema, tool_schemas, max_calls)
    except SettingError as error:
        raise RequestError(str(error), param=param) from None


def _reply_end(
    conversation: ServedConversation,
    splitter: ReplySplitter,
    start: tuple[int, int],
    done: TurnDone,
    cached: int,
) -> ReplyEnd:
    """`start`: tokens seen, and held, when the reply began; `cached` ones were not read again."""
    seen, held = start
    ledger, left_out = conversation.session.ledger, len(conversation.session.ledger.left_out)
    is_thinking = (ledger.column("flags") & np.uint8(Flag.THINKING)) > 0
    reasoning_tokens = int((is_thinking & (ledger.column("turn") == done.index)).sum())
    usage = {
        "prompt_tokens": seen - left_out,
        "completion_tokens": done.tokens_out,
        "total_tokens": seen - left_out + done.tokens_out,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            # Recall may have restored some that are left out.
            "evicted_tokens": max(0, seen - left_out - held),
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
    memory = {
        "id": conversation.id,
        "seen": done.seen,
        "held": done.resident,
        "evicted": done.seen - done.resident,
        "left_out": left_out,
        "recalled": done.recalled,
        "policy": conversation.session.profile.policy,
        "budget": conversation.session.budget,
    }
    finish = "length" if done.finish in _CUT_REASONS else "tool_calls" if splitter.calls else "stop"
    return ReplyEnd(finish, usage, memory, splitter.stops.complete_stop)
