"""Ollama's API for replies: requests become chat requests; replies are one or more JSON objects."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from typing import Any

from sirchat.server.fields import Fields, RequestError, checked, take_objects, take_options
from sirchat.server.parts import ReplyEnd, ReplyText
from sirchat.server.requests import SamplingFields, schema_format
from sirchat.server.streaming import ReplySerializer
from sirchat.text.tool_calls import call_id

_SAMPLING_OPTIONS = SamplingFields.model_fields.keys() - {"model"}
NAMES = {  # what fields of a chat request are called here
    **{name: f"options.{name}" for name in _SAMPLING_OPTIONS},
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
    "response_format": "format",
}


def chat_fields(body: Fields) -> Fields:
    """A request to `/api/chat` in the form of chat completions; RequestError if impossible."""
    fields = dict(body)
    if fields.get("stream") is None:
        fields["stream"] = True
    fields |= take_options(fields, "options", {*_SAMPLING_OPTIONS, "num_predict"})
    fields["max_tokens"] = fields.pop("num_predict", None)
    fields["messages"] = list(_chat_messages(take_objects(fields, "messages")))
    think = fields.pop("think", None)
    is_switch = isinstance(think, bool)
    fields["reasoning_effort"] = ("on" if think else "none") if is_switch else think
    json_format = fields.pop("format", None)
    if json_format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif json_format not in (None, ""):
        fields["response_format"] = schema_format(json_format)
    return fields


def _chat_messages(messages: Sequence[Fields]) -> Iterator[Fields]:
    """Yield the messages of a chat request; each call and each result gets an id."""
    ids, unanswered = map(call_id, count()), list[tuple[Any, Any]]()  # of calls: name and id
    for number, message in enumerate(messages):
        calls = list[Fields]()
        for call in take_objects(message, "tool_calls"):
            given = checked(call.get("function"), Fields(), f"messages.{number}.tool_calls")
            ident = call.get("id") or next(ids)
            arguments = {} if given.get("arguments") is None else given["arguments"]
            calls.append({"id": ident, "function": {**given, "arguments": arguments}})
            unanswered.append((given.get("name"), ident))
        fields = {**message, "content": message.get("content") or "", "tool_calls": calls}
        if message.get("role") == "tool":
            name = message.get("tool_name")
            candidates = [pair for pair in unanswered if name in (None, pair[0])]
            unanswered = [pair for pair in unanswered if pair not in candidates[:1]]
            first_id = next((ident for _, ident in candidates), "none")
            fields |= {"tool_call_id": message.get("tool_call_id") or first_id, "name": name}
        yield fields


class OllamaSerializer(ReplySerializer):
    """The JSON of one reply in Ollama's format: one object, or one object per line."""

    media = "application/x-ndjson"

    def __init__(self, model: str) -> None:
        self._model = model
        self._began_at = time.monotonic_ns()

    def loaded_body(self) -> dict[str, Any]:
        """The response to a request without messages, which only loads the model."""
        return self._reply_body(ReplyText("")) | {"done": True, "done_reason": "load"}

    def response_body(self, reply: ReplyText, end: ReplyEnd) -> dict[str, Any]:
        return self._reply_body(reply) | self._end_fields(end)

    def first_events(self) -> Iterable[str]:
        return ()

    def part_events(self, part: ReplyText) -> Iterable[str]:
        return (_line(self._reply_body(part)),) if part != ReplyText("") else ()

    def last_events(self, end: ReplyEnd) -> Iterable[str]:
        return (_line(self._reply_body(ReplyText("")) | self._end_fields(end)),)

    def error_events(self, error: RequestError) -> Iterable[str]:
        return (_line(error.body_for("/api/")),)

    def _reply_body(self, part: ReplyText) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.text}
        if part.thinking:
            message["thinking"] = part.thinking
        if part.calls:
            functions = ({"name": c.name, "arguments": json.loads(c.arguments)} for c in part.calls)
            message["tool_calls"] = [{"function": function} for function in functions]
        now = datetime.now(UTC).isoformat()
        return {"model": self._model, "created_at": now, "message": message, "done": False}

    def _end_fields(self, end: ReplyEnd) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": "length" if end.finish == "length" else "stop",
            "total_duration": time.monotonic_ns() - self._began_at,
            "prompt_eval_count": end.usage["prompt_tokens"],
            "eval_count": end.usage["completion_tokens"],
            "sirchat": end.memory,
        }


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"
