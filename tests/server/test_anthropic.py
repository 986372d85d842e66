"""Anthropic's messages: what its clients send is read, and what they get is in its shape."""

from __future__ import annotations

import asyncio
import json
import threading
from operator import attrgetter
from typing import Any

import httpx2
import pytest

from serving import URL, Served, served, server_of_module, system, user
from sirchat.server.anthropic import chat_fields
from sirchat.server.fields import make_request
from sirchat.server.requests import ChatRequest
from template_shapes import WEATHER, script, tool_tiny

PATH = "/v1/messages"
FUNCTION: Any = WEATHER["function"]
TOOL = {
    "name": "weather",
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
ASKED = [user("How is the weather in Oslo?")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {
    "type": "tool_result",
    "tool_use_id": "toolu_1",
    "is_error": False,
    "content": [
        {"type": "text", "text": "It rains.", "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    ],
}
CALLED: list[Any] = [
    *ASKED,
    {"role": "assistant", "content": [USE]},
    {"role": "user", "content": [RESULT]},
]


NO_INPUT = {name: value for name, value in USE.items() if name != "input"}


server = server_of_module(tool_tiny, policy="full", max_new_tokens=90)


def body(messages: list[Any] = ASKED, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 90, "temperature": 0, "messages": messages, **fields}


def as_chat(fields: dict[str, Any]) -> ChatRequest:
    return make_request(ChatRequest, chat_fields(fields))


def events(server: Served, **fields: Any) -> list[tuple[str, Any]]:
    """Name and JSON of each event of a stream."""
    response = server.client.post(PATH, json=body(stream=True, **fields))
    assert response.headers["content-type"].startswith("text/event-stream")
    told = [each for each in response.text.split("\n\n")[:-1] if not each.startswith(":")]
    pairs = [each.removeprefix("event: ").split("\ndata: ") for each in told]
    return [(name, json.loads(data)) for name, data in pairs]


def test_what_claude_code_sends_is_read_in_order() -> None:
    """Blocks, reasoning, results with images beside text, tools that only Anthropic has."""
    request = as_chat(
        body(
            [
                user("Look."),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Oslo.", "signature": "x"},
                        {"type": "text", "text": "I look."},
                        USE,
                    ],
                },
                {"role": "user", "content": [RESULT, {"type": "text", "text": "And?"}]},
            ],
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "e"}}],
            tools=[
                TOOL | {"defer_loading": True, "input_examples": [{"a": 1}]},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            ],
            metadata={"user_id": "u"},
            thinking={"type": "disabled"},
        )
    )
    assert request.system == "Be brief."
    assert [tool.function.name for tool in request.tools] == ["weather"]
    said = request.turns
    assert [role for role, _ in said] == ["user", "calls", "tool", "user"]
    assert "It rains." in said[2][1]
    assert "an image" in said[2][1]
    assert said[3] == ("user", "And?")
    (note,) = request.ignored_fields_notes()
    assert '"tools.web_search_20250305"' in note


def test_a_reply_is_that_of_a_chat_completion(server: Served) -> None:
    wanted = server.ask([system("Be kind."), *ASKED], max_tokens=9, temperature=0)
    got = server.send(PATH, **body(system="Be kind.", max_tokens=9))
    assert got["content"] == [{"type": "text", "text": wanted["choices"][0]["message"]["content"]}]
    assert (got["type"], got["role"], got["stop_reason"]) == ("message", "assistant", "max_tokens")
    usage, other = got["usage"], wanted["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == other["prompt_tokens"]
    assert usage["output_tokens"] == other["completion_tokens"]


def test_a_stream_has_the_blocks_of_the_whole_reply(server: Served) -> None:
    whole = server.send(PATH, **body())
    told = events(server)
    names = [name for name, _ in told]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(name == data["type"] for name, data in told)
    text = "".join(data["delta"]["text"] for name, data in told if name == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert told[-2][1]["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert told[-2][1]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_stop_sequence_is_named(server: Served) -> None:
    whole = server.send(PATH, **body())["content"][0]["text"]
    stop = whole[4:7]
    got = server.send(PATH, **body(stop_sequences=["never said", stop]))
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", stop)
    assert got["content"][0]["text"] == whole[: whole.index(stop)]


def test_calls_are_blocks_whose_input_is_an_object(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [f"I look.\n{CALL}", f"I look.\n{CALL}", "It rains."])
    got = server.send(PATH, **body(tools=[TOOL]))
    assert got["stop_reason"] == "tool_use"
    assert [each["type"] for each in got["content"]] == ["text", "tool_use"]
    call = got["content"][1]
    assert (call["name"], call["input"]) == ("weather", {"city": "Oslo"})
    told = events(server, tools=[TOOL])
    begun = [data for name, data in told if name == "content_block_start"]
    assert [each["index"] for each in begun] == [0, 1]
    assert begun[1]["content_block"]["input"] == {}
    written = "".join(d["delta"].get("partial_json", "") for n, d in told if "delta" in d)
    assert json.loads(written) == {"city": "Oslo"}
    stops = [data["index"] for name, data in told if name == "content_block_stop"]
    assert stops == [0, 1]
    answered = [*ASKED, {"role": "assistant", "content": got["content"]}]
    result = {"role": "user", "content": [RESULT | {"tool_use_id": call["id"]}]}
    after = server.send(PATH, **body([*answered, result], tools=[TOOL]))
    assert after["usage"]["cache_read_input_tokens"] > got["usage"]["input_tokens"]


def test_the_tokens_of_a_request_are_counted_without_a_reply(server: Served) -> None:
    fields = {"model": "tiny", "system": "Be kind.", "tools": [TOOL], "messages": CALLED}
    counted = server.send(f"{PATH}/count_tokens", **fields)["input_tokens"]
    read = server.send(PATH, **body(CALLED, system="Be kind.", tools=[TOOL]))["usage"]
    assert counted == pytest.approx(sum(read[name] for name in read if "input" in name), rel=0.5)
    longer = [*CALLED, user("It is late. " * 500)]
    more = server.send(f"{PATH}/count_tokens", **fields | {"messages": longer})["input_tokens"]
    assert more - counted == len(tool_tiny().tokenizer.encode(longer[-1]["content"]))


def test_while_tokens_are_counted_other_requests_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, tokenizer, sizes = threading.Event(), tool_tiny().tokenizer, list[int]()

    def encode(text: str, **how: Any) -> list[int]:
        sizes.append(len(text))
        assert answered.wait(10)
        return [1]

    async def both(app: Any) -> None:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url=URL) as client:
            fields = {"model": "tiny", "messages": [user("word " * 200_000)]}
            counting = asyncio.create_task(client.post(f"{PATH}/count_tokens", json=fields))
            while not sizes:
                await asyncio.sleep(0.01)
            assert (await client.get("/health")).status_code == 200
            answered.set()
            assert (await counting).json()["input_tokens"] == len(sizes)

    with served(tool_tiny()) as server:
        monkeypatch.setattr(tokenizer, "encode", encode)
        asyncio.run(both(server.server.app))
    assert max(sizes) < 100_000  # while one text is read, no other thread runs


HIGH = {"output_config": {"effort": "high"}}
BY_SCHEMA: Any = {"type": "json_schema", "schema": {"enum": ["a"]}}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"output_format": BY_SCHEMA}, {"response_format.reply_schema": {"enum": ["a"]}}),
        (
            {"output_config": {"format": BY_SCHEMA}},
            {"response_format.reply_schema": {"enum": ["a"]}},
        ),
        (
            {"tool_choice": {"type": "any"}},
            {"tool_choice": "required", "parallel_tool_calls": True},
        ),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none", "parallel_tool_calls": True}),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        # An effort is one of the answer, unless the model may reason.
        (HIGH, {"reasoning_effort": None}),
        (HIGH | {"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        (HIGH | {"thinking": {"type": "adaptive"}}, {"reasoning_effort": "high"}),
        (
            HIGH | {"thinking": {"type": "enabled", "budget_tokens": 9}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_fields_are_those_of_chats(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    asked = as_chat(body(tools=[TOOL]) | fields)
    assert {name: attrgetter(name)(asked) for name in wanted} == wanted


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "other"}, 404, "not_found_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"top_k": "many"}, 400, "invalid_request_error"),
        (
            {"messages": [*ASKED, {"role": "assistant", "content": [NO_INPUT]}, CALLED[-1]]},
            400,
            None,
        ),
        ({"tools": ["weather"]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, None),
    ],
)
def test_errors_have_the_shape_of_anthropics(
    server: Served, path: str, fields: Any, status: int, kind: str | None
) -> None:
    response = server.client.post(path, json=body() | fields)
    assert response.status_code == status
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == (kind or "invalid_request_error")
