"""A reply that calls tools: call, result, next reply, until a reply has no calls.

A result is a turn with the role `tool`. The policy treats its tokens as all others.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from sirchat.chat.conversation import Conversation
from sirchat.chat.events import Called, Delta, Event, Notice, Returned, TurnDone
from sirchat.chat.state import GeneratedReply, TurnStats
from sirchat.chat.turn import Interrupted, never
from sirchat.engine.sampling import TokenFilter
from sirchat.text.other_templates import PromptedTools, ToolTemplate
from sirchat.text.template import TurnIds
from sirchat.text.text_file import without_surrogates
from sirchat.text.tool_calls import CallParser, ToolCall, append_calls, calls_from_key, calls_key

MAX_CALLS = 64  # for one message
_ARGUMENTS = '"arguments"'
STOPPED = "the user stopped this"
_EMPTY = "(empty)"  # what is read of a result without text
_HEAD_PARTS = 8  # a large result's beginning may take one of so many parts of the policy's tokens


@dataclass(frozen=True)
class ChatTool:
    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments
    # Gets the arguments, and a function that says whether to stop; the model reads its errors.
    run: Callable[[dict[str, Any], Interrupted], str] = field(compare=False)
    origin: tuple[str, str] = ("", "")  # its server, and its name there
    server_text: str = ""  # what the server says of all its tools

    @classmethod
    def of(cls, function: Callable[..., object]) -> ChatTool:
        """A tool of a function, with its name, docstring and annotated parameters."""
        adapter: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]
        text = inspect.getdoc(function) or ""
        return cls(
            function.__name__,
            text,
            adapter.json_schema(),
            lambda given, _: str(adapter.validate_python(ArgsKwargs((), given))),
        )

    @property
    def as_json_object(self) -> dict[str, Any]:
        """The tool as a JSON object in the shape of OpenAI's API, for chat templates."""
        fields = {"description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {"name": self.name, **fields}}


class Toolbox:
    """The tools that a model may call.

    `decide` gets each call before it is done. It returns the call, perhaps with other arguments, or
    why the call is refused, which the model reads.
    """

    def __init__(
        self,
        tools: Iterable[ChatTool | Callable[..., object]] = (),
        decide: Callable[[ToolCall], ToolCall | str] = lambda call: call,
    ) -> None:
        each = [tool if isinstance(tool, ChatTool) else ChatTool.of(tool) for tool in tools]
        self.tools = {tool.name: tool for tool in each}
        self.decide = decide
        self.is_template_note_shown = False

    @property
    def tools_json(self) -> str:
        """The tools as JSON, as the model reads them; "" if there are none."""
        told, said = list[dict[str, Any]](), {""}
        for tool in self.tools.values():  # which are turned on and off meanwhile
            server_text = "" if tool.server_text in said else f"\n\n{tool.server_text}"
            told.append(replace(tool, description=tool.description + server_text).as_json_object)
            said.add(tool.server_text)
        return without_surrogates(json.dumps(told, ensure_ascii=False)) if told else ""


def tools_prompt_size(chat: Conversation, told: str) -> int:
    """Tokens of the system prompt with the tools `told`; SirchatError if it can't be pinned."""
    size = len(chat.template_with(told).system_turn(chat.profile.system or "").ids)
    if chat.profile.pin_system:
        chat.engine.choice.check_pins(size - len(chat.state.system.positions))
    return size


def reply_format(
    chat: Conversation,
    box: Toolbox,
    begun: GeneratedReply | None = None,
    *,
    is_same_round: bool = False,
) -> Generator[Event, None, TokenFilter | None]:
    """The ids that the setting `json_schema` allows in a reply, which may have `begun`.

    Yields notes on the schema, whose file is not read again in the same round. Raises SettingError
    if the schema can't be kept.
    """
    # With a template that takes no tools, the model calls them only where a call was begun for it.
    is_open = type(chat.template) is ToolTemplate
    tools = [(tool.name, tool.parameters) for tool in box.tools.values() if is_open]
    ids = begun.ids if begun else ()
    notes = list[str]()
    file = chat.profile.json_schema
    allowed = chat.formats.from_file(chat, notes, file, tools, ids, is_same_round=is_same_round)
    yield from map(Notice, notes)
    return allowed


def answer(
    chat: Conversation,
    box: Toolbox,
    question: str,
    interrupted: Interrupted,
    reply: GeneratedReply | None = None,
    allowed: TokenFilter | None = None,
    begun: TurnStats | None = None,
) -> Iterator[Event]:
    """Answer the `question`, with calls of the tools in `box`, if any.

    `reply` and `allowed` are those of `Session.ask`, for the first reply, which may have `begun`.
    """
    if not box.tools:
        return chat.begin_reply(interrupted, reply, allowed, begun=begun).events()
    return _answer_with_tools(chat, box, question, interrupted, reply, allowed, begun)


def _answer_with_tools(
    chat: Conversation,
    box: Toolbox,
    question: str,
    interrupted: Interrupted,
    reply: GeneratedReply | None,
    allowed: TokenFilter | None,
    begun: TurnStats | None,
) -> Iterator[Event]:
    """Answer, do the calls of the reply, read their results, reply again, and so on."""
    left = MAX_CALLS
    if not box.is_template_note_shown and (note := _tool_template(chat).note):
        yield Notice(note)
    box.is_template_note_shown = True
    parser = first = _call_parser(chat, box)
    stops = interrupted
    if begun or (beginning := _call_beginning(chat)):
        stops = lambda: interrupted() or first.has_ended  # noqa: E731
    if not begun and beginning:
        reply, allowed = GeneratedReply(beginning, None), None
    while True:
        extractor = _CallExtractor(chat, parser)
        opened = chat.begin_reply(stops, reply, allowed, begun=begun)
        for piece in opened.said:
            extractor.push(Delta(*piece))
        for event in opened.events():
            yield from extractor.push(event)
        calls = extractor.calls
        if left <= 0 and calls:
            yield Notice(f"the model goes on calling tools; {MAX_CALLS} calls for a message are")
        if not calls or left <= 0 or interrupted():
            return
        asking = len(chat.state.turns) - 1
        for number, call in enumerate(calls, 1):
            left -= 1
            text = yield from _run_call(asking, box, call, interrupted, left)
            following = "tool" if number < len(calls) else None
            yield from read_result(chat, call, text, question, interrupted, next_role=following)
        reply = begun = None
        allowed = yield from reply_format(chat, box, is_same_round=True)
        parser = _call_parser(chat, box)
        stops = interrupted


def read_result(
    chat: Conversation,
    call: ToolCall,
    text: str,
    question: str,
    interrupted: Interrupted = never,
    *,
    next_role: str | None = None,
) -> Iterator[Event]:
    """Read a tool's result as a turn, and recall the tokens that fit the `question`.

    The beginning of a text larger than the free budget is pinned for the reply. `next_role` is the
    role of the next message if that message is given, not generated.
    """
    template, engine = _tool_template(chat), chat.engine
    text = without_surrogates(text) if text.strip() else _EMPTY
    sought = template.user_turn(question)
    ids = template.followed_by(template.tool_results_turn([call.result(text)]), next_role)
    turn = yield from chat.begin_message("tool", ids)
    chat.turns[-1].text = text  # also if reading fails
    division = engine.choice.divide_budget()
    start = engine.ledger.seen
    head = 0  # the number of pinned ids
    if engine.resident + len(ids.ids) > division.hard_bound and division.max_pins:
        room = min(division.evictable // _HEAD_PARTS, division.max_pins - division.pins)
        head = max(0, min(room, ids.content[1]))
    after = template.closing if ids.header is None else []
    with engine.evictor.ending_recall_on_error():
        try:
            yield from turn.read_result(
                ids, interrupted, chat.recall, sought, head=head, after=after
            )
        finally:
            read = range(start, min(start + head, engine.ledger.seen))
            chat.state.result_pins = [*chat.state.result_pins, *read]
        yield turn.finish(text)


def calls_in(chat: Conversation, text: str) -> tuple[list[ToolCall], TurnIds | None]:
    """The calls in a reply's text, and the ids of such a turn, which are None without calls."""
    parser = CallParser((), chat.state.tool_turns)
    said = parser.push(text)[0] + parser.finish()[0]
    if not parser.calls:
        return [], None
    said, calls = calls_from_key(calls_key(said, parser.calls))
    return parser.calls, _tool_template(chat).tool_calls_turn(said, calls, chat.state.reply_header)


def _call_beginning(chat: Conversation) -> tuple[int, ...]:
    """The likeliest ids with which a reply begins a call; () if it begins without one."""
    # For a chat template without tools: a small model hardly ever begins a call by itself.
    template = chat.template
    if not isinstance(template, PromptedTools):
        return ()
    texts = template.call_beginnings()
    names = [text[: text.index(_ARGUMENTS) + len(_ARGUMENTS)] for text in texts]
    scores = [sum(one.log_probabilities) for one in chat.score_continuations(names)]
    best = scores.index(max(scores))
    return tuple(template.as_text(texts[best])) if best else ()


def _tool_template(chat: Conversation) -> ToolTemplate:
    if not isinstance(chat.template, ToolTemplate):
        chat.template = chat.template_with("")
    assert isinstance(chat.template, ToolTemplate)
    return chat.template


def _call_parser(chat: Conversation, box: Toolbox) -> CallParser:
    """The parser of the calls in the next reply; with a begun call, of the first call alone."""
    number = chat.state.tool_turns
    if not isinstance(chat.template, PromptedTools):
        names = {name: tool.parameters for name, tool in box.tools.items()}
        return CallParser(names, number)
    # Such models invent more and more arguments.
    known = {name: tool.parameters.get("properties", ()) for name, tool in box.tools.items()}
    return CallParser(box.tools, number, single_call=True, known_arguments=known)


class _CallExtractor:
    """Takes the calls out of a reply's text; `calls` has them once the reply is complete."""

    def __init__(self, chat: Conversation, parser: CallParser) -> None:
        self._chat, self._parser = chat, parser
        self._said = ""  # the text without calls, so far
        self.calls: list[ToolCall] = []

    def push(self, event: Event) -> list[Event]:
        """The events to yield in place of the reply's next event."""
        parser, turns = self._parser, self._chat.state.turns
        if isinstance(event, Delta) and event.part != "thinking":
            is_held = event.part == "call" and parser.hold_back(event.text)
            text = "" if is_held else parser.push(event.text)[0]
            self._said += text
            return [replace(event, text=text)]
        if not isinstance(event, TurnDone):
            return [event]
        if event.finish != "interrupt" or parser.has_ended:
            self.calls = parser.calls
        is_short = event.finish not in ("stop", "control")
        rest, _ = parser.finish(self._chat.template.marks.call_lead, is_short=is_short)
        said = self._said + rest
        if parser.calls:
            turns[-1].text = append_calls(said.strip(), [call.message() for call in parser.calls])
        return [Delta(rest, end=len(said)), replace(event, text=turns[-1].text)]


def _run_call(
    turn: int, box: Toolbox, call: ToolCall, interrupted: Interrupted, left: int
) -> Generator[Event, None, str]:
    """Do a call of a turn's, unless it is refused; returns the text for the model.

    `left` is how many more the message may have.
    """
    decided = call
    is_error = True
    start = time.perf_counter()
    try:
        if interrupted():
            raise InterruptedError(STOPPED)
        if left < 0:
            raise PermissionError("this call is one too many")
        if call.name not in box.tools:
            raise LookupError(f"there is no tool {call.name}; there are: {', '.join(box.tools)}")
        if isinstance(choice := box.decide(call), str):
            raise PermissionError(choice)
        decided = choice
        given = json.loads(decided.arguments)
        yield Called(turn, call.id, call.name, given)
        start = time.perf_counter()
        text = box.tools[call.name].run(given, interrupted)
        is_error = False
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        text = f"error: {'; '.join(problems)}"
    except Exception as error:  # whatever a tool raises
        text = f"error: {str(error) or type(error).__name__}"
    if decided.arguments != call.arguments:
        text = f"The user changed the arguments to {decided.arguments}.\n{text}"
    if left <= 0:
        text += f"\nThat was the last of {MAX_CALLS} calls; answer without tools."
    yield Returned(call.id, call.name, text, is_error, time.perf_counter() - start)
    return text
