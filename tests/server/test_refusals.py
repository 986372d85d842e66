"""What a request asks for and can't have is refused in each shape, not ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serving import Served, refusal, served, user
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
    response = server.client.post(path, json=BASE[path] | fields)
    if path == OLLAMA:  # its clients show this text
        assert response.status_code == status
        (said,) = response.json().values()
        assert response.json() == {"error": str(said)}
        return str(said)
    error = refusal(response, status)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    return f"{error['param']}: {error['message']}"


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
        (CHAT, {"tools": [WEATHER], "tool_choice": named("days")}, "tool_choice names no tool"),
        (CHAT, {"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        (
            CHAT,
            {"tools": [strange(b={"type": "nosuch"})], "tool_choice": "required"},
            "tool_choice has a schema that can't be used",
        ),
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
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "response_format"),
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


def test_providers_of_the_ai_sdk_get_the_object_that_they_read(server: Served) -> None:
    """Whose `User-Agent` names it: real Ollama's errors, which are texts, they don't show."""
    for path, status in (("/api/nosuch", 404), (OLLAMA, 400)):
        response = server.client.post(
            path, json={}, headers={"User-Agent": "ai/6.0.326 ai-sdk/provider-utils/4.0.66"}
        )
        assert refusal(response, status)["message"]
        assert isinstance(server.client.post(path, json={}).json()["error"], str)


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
