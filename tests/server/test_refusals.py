"""What a request asks for and can't have is refused in each shape, not ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serving import Served, assistant, refusal, served, system, user
from template_shapes import WEATHER, tool_tiny

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
OLLAMA = "/api/chat"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [user("Hello.")]},
    TEXT: {"prompt": "Hello."},
    RESPONSES: {"input": "Hello."},
    OLLAMA: {"model": "tiny", "messages": [user("Hello.")]},
}
FUNCTION = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def returned(ident: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": ident, "content": "Snow."}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def strange(**parameters: Any) -> dict[str, Any]:
    """A tool with these parameters."""
    properties = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": "a", "parameters": properties}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tool_tiny(), policy="full", max_new_tokens=4) as one:
        yield one


def refused(server: Served, path: str, fields: dict[str, Any], status: int = 400) -> str:
    """The field and the message of the error."""
    error = refusal(server.client.post(path, json=BASE[path] | fields), status)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    return f"{error['param']}: {error['message']}"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *((CHAT, "n", value) for value in (2, "1")),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "tools", [{"type": "function", "function": {"name": "no blanks"}}]),
        (CHAT, "logit_bias", {"5": 100}),
        (CHAT, "frequency_penalty", 0.5),
        (CHAT, "top_logprobs", 3),
        (CHAT, "store", True),
        (CHAT, "reasoning_effort", "high"),
        *((CHAT, "temperature", value) for value in ("hot", -1)),
        (CHAT, "top_p", 0),
        (CHAT, "seed", -1),
        (CHAT, "max_tokens", 0),
        (CHAT, "max_completion_tokens", True),
        *((CHAT, "stop", value) for value in (["a", "b", "c", "d", "e"], "")),
        (CHAT, "stream_options", {"other": 1}),
        (CHAT, "messages", []),
        (CHAT, "messages", [{"role": "tool", "content": "x"}]),
        (CHAT, "messages", [{"role": "user"}]),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        (CHAT, "messages", [user("a"), assistant("b")]),
        (CHAT, "messages", [assistant("b"), user("a")]),
        (CHAT, "messages", [user("a"), system("b"), user("c")]),
        (CHAT, "messages", [user("a")] * 10_001),
        (CHAT, "messages", [user("a") | {"name": "Anna"}]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "tool_choice", named("weather")),
        (CHAT, "response_format", {"type": "xml"}),
        (CHAT, "response_format", {"type": "json_schema"}),
        (CHAT, "response_format", {"type": "json_object", "json_schema": {"name": "a"}}),
        (CHAT, "response_format", form("object")),
        (CHAT, "response_format", form({"type": "nosuch"})),
        (CHAT, "response_format", form({"$ref": "http://127.0.0.1/schema"})),
        (CHAT, "response_format", form({"$ref": "file:///etc/passwd"})),
        (CHAT, "response_format", form({"type": "string", "pattern": "("})),
        (CHAT, "response_format", form({"not": {"type": "string"}})),
        (CHAT, "response_format", form({"type": "integer", "minimum": 10**400})),
        *((TEXT, "prompt", value) for value in ("", ["a", "b"], [1, 2])),
        (TEXT, "suffix", "x"),
        (TEXT, "echo", True),
        (TEXT, "logprobs", 3),
        (TEXT, "n", 2),
        (TEXT, "messages", [user("a")]),
        (RESPONSES, "input", []),
        (RESPONSES, "input", [{"type": "item_reference", "id": "a"}]),
        (RESPONSES, "background", True),
        (RESPONSES, "reasoning", {"effort": "high"}),
        *((RESPONSES, "tools", [tool]) for tool in ({"type": "x"}, WEATHER)),
        (RESPONSES, "max_output_tokens", 0),
        (RESPONSES, "seed", 3),
        (OLLAMA, "think", True),
        (OLLAMA, "format", "xml"),
        (OLLAMA, "options", {"num_predict": -2}),
        (OLLAMA, "options", {"mirostat": 1}),
        (OLLAMA, "messages", [user("a") | {"images": ["x"]}]),
    ],
)
def test_a_field_that_would_be_ignored_is_refused_by_its_name(
    server: Served, path: str, field: str, value: Any
) -> None:
    assert field in refused(server, path, {field: value})


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"sirchat": {"policy": "nosuch"}}, 'sirchat: policy can\'t be "nosuch"'),
        (CHAT, {"sirchat": {"policy": "os:system"}}, "can't name a policy of your own"),
        (CHAT, {"sirchat": {"policy": "sink", "budget": 3}}, "budget"),
        (CHAT, {"sirchat": {"policy": "sink", "budget": 10**6}}, "above the context length of"),
        (CHAT, {"sirchat": {"policy": "sink", "decay": 2.0}}, "decay"),
        (CHAT, {"sirchat": {"model": "other"}}, "sirchat.model is not supported"),
        *(
            (CHAT, {"sirchat_ask": {"settings": settings}, **more}, words)
            for settings, more, words in (
                ({}, {"messages": [user("a"), user("b")]}, "takes one message alone"),
                ({}, {"temperature": 1.0}, "takes one message alone"),
                ({"nosuch": 1}, {}, "are not those of this version of sirchat"),
                ({"policy": "os:system"}, {}, "can't name a policy of your own"),
                ({"budget": 10**6}, {}, "above the context length of"),
            )
        ),
        (CHAT, {"tools": [WEATHER], "logprobs": True}, "logprobs can't be had with tools"),
        (
            CHAT,
            {"tools": [WEATHER], "response_format": {"type": "json_object"}},
            "response_format can't be had with tools",
        ),
        (CHAT, {"tools": [WEATHER], "tool_choice": named("days")}, "tool_choice names no tool"),
        (CHAT, {"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        (
            CHAT,
            {"tools": [strange(b={"type": "nosuch"})], "tool_choice": "required"},
            "tool_choice has a schema that can't be used",
        ),
        (CHAT, {"tools": [WEATHER | {"function": {"name": "a", "strict": True}}]}, "strict"),
        (CHAT, {"messages": [user("a"), CALLING]}, "the last message"),
        (CHAT, {"messages": [user("a"), CALLING, user("b")]}, "what the tool returned"),
        (CHAT, {"messages": [user("a"), CALLING, returned("b")]}, "no such call"),
        (CHAT, {"messages": [user("a"), returned("a")]}, "no such call"),
        (
            CHAT,
            {"messages": [user("a"), CALLING, {"role": "tool", "content": "b"}]},
            "tool_call_id",
        ),
        (CHAT, {"messages": [user("a") | {"tool_calls": [CALL]}]}, "only the assistant"),
        (RESPONSES, {"input": [assistant("a")]}, "follows no user message"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "response_format"),
        (RESPONSES, {"tools": [FUNCTION | {"strict": True}]}, "strict"),
        (
            RESPONSES,
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "other"}},
            "tool_choice",
        ),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
            "no such call",
        ),
        (OLLAMA, {"format": {"type": "nosuch"}}, "response_format has a schema"),
        (OLLAMA, {"options": {"stop": ["a", "b", "c", "d", "e"]}}, "stop"),
        (OLLAMA, {"options": {"num_ctx": 10**6}, "sirchat": {"policy": "sink"}}, "context length"),
        (OLLAMA, {"options": {"num_ctx": 100}, "sirchat": {"budget": 200}}, "num_ctx"),
    ],
)
def test_what_can_t_be_had_is_refused_and_said(
    server: Served, path: str, fields: dict[str, Any], words: str
) -> None:
    assert words in refused(server, path, fields)


def test_another_model_is_refused(server: Served) -> None:
    assert "llama3" in refused(server, OLLAMA, {"model": "llama3"}, 404)
    assert 'there is no model "gpt-4o"' in refused(server, CHAT, {"model": "gpt-4o"}, 404)


def test_parameters_that_are_nested_too_deeply_are_refused(server: Served) -> None:
    deep = '{"a":' * 500 + "1" + "}" * 500
    function = json.dumps(WEATHER).replace('{"type": "string"}', deep)
    body = f'{{"messages": {json.dumps(BASE[CHAT]["messages"])}, "tools": [{function}]}}'
    error = refusal(server.client.post(CHAT, content=body))
    assert "nested too deeply" in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 100_000, b"1" * 9999])
def test_a_body_that_is_no_json_object_is_refused(server: Served, body: bytes) -> None:
    assert "body is not" in refusal(server.client.post(CHAT, content=body))["message"]


def test_a_body_that_is_too_large_is_refused_whether_its_size_is_known_or_not(
    server: Served,
) -> None:
    large = b" " * (17 * 2**20)
    for content in (large, iter([large])):
        assert "16 MiB" in refusal(server.client.post(CHAT, content=content), 413)["message"]


def test_other_addresses_and_methods_are_errors_of_the_same_shape(server: Served) -> None:
    refusal(server.client.get("/v1/nothing"), 404)
    refusal(server.client.get(CHAT), 405)
