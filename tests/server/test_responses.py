"""OpenAI's responses: whole and as events, with tools, and as Codex asks for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serving import Served, assistant, cached, refusal, served, server_of_module, system, told, user
from sirchat.server.fields import make_request
from sirchat.server.requests import ChatRequest
from sirchat.server.responses import chat_fields
from template_shapes import WEATHER, script, tool_quick

RESPONSES = "/v1/responses"
ANNA, NAME = "My name is Anna.", "What is my name?"


server = server_of_module(policy="full", max_new_tokens=12)


@pytest.fixture(scope="module")
def with_tools() -> Iterator[Served]:
    with served(tool_quick(), policy="full", max_new_tokens=160) as one:
        yield one


def blocks_of(stream: str) -> list[str]:
    """The events of a stream; a response that waits, as on a busy machine, also sends comments."""
    return [block for block in stream.split("\n\n") if not block.startswith(":")]


def streamed(server: Served, **body: Any) -> list[Any]:
    """The events of a response, whose names and numbers are checked."""
    lines = server.client.post(RESPONSES, json=body | {"stream": True}).text
    events = []
    for number, block in enumerate(blocks_of(lines.removesuffix("\n\n"))):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events


def test_a_response_continues_a_chat_and_reads_only_what_is_new(server: Served) -> None:
    first = server.send(RESPONSES, input=ANNA, instructions="Be kind.", model="tiny")
    (said,) = first["output"]
    text = told([system("Be kind."), user(ANNA)], max_new_tokens=12)
    assert (first["object"], first["status"], first["error"]) == ("response", "completed", None)
    assert (said["role"], said["content"][0]["text"]) == ("assistant", text)
    items = [user(ANNA), *first["output"], user(NAME)]
    second = server.send(RESPONSES, input=items, instructions="Be kind.")
    longer = [system("Be kind."), user(ANNA), assistant(text), user(NAME)]
    assert second["output"][0]["content"][0]["text"] == told(longer, max_new_tokens=12)
    assert cached(second) == first["sirchat"]["seen"]
    cut = server.send(RESPONSES, input=ANNA, max_output_tokens=2)
    assert cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_response_comes_in_events_that_build_it_up(server: Served) -> None:
    events = streamed(server, input=ANNA)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(event.get("delta", "") for event in events)
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == text == told([user(ANNA)], max_new_tokens=12)


def test_a_response_is_not_kept_but_its_conversation_may_have_a_name(server: Served) -> None:
    first = server.send(RESPONSES, input=ANNA, conversation="Anna")
    assert first["store"] is False
    second = server.send(RESPONSES, input=NAME, conversation="Anna")
    assert cached(second) == first["sirchat"]["seen"]
    refused: list[dict[str, Any]] = [{"previous_response_id": first["id"]}]
    refused += [{"input": [{"type": "item_reference", "id": first["output"][0]["id"]}]}]
    for fields in refused:
        error = refusal(server.client.post(RESPONSES, json={"input": NAME} | fields))
        assert error["param"] in fields
        assert "name the conversation" in error["message"]


def test_a_response_may_name_its_format(server: Served) -> None:
    schema = {"type": "object", "maxProperties": 0}
    form = {"type": "json_schema", "name": "empty", "schema": schema, "strict": True}
    response = server.send(RESPONSES, input=ANNA, text={"format": form})
    assert response["output"][0]["content"][0]["text"] == "{}"
    assert response["text"]["format"] == form


ASKED = "How is the weather in Oslo?"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]


def returned(call: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "Snow."}


def test_a_response_calls_a_tool_and_the_next_one_reads_only_what_it_returned(
    with_tools: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [f"Let me look.\n{CALL}\n{CALL}", "It is cold."])
    first = with_tools.send(RESPONSES, input=ASKED, tools=[TOOL])
    text, call, other = first["output"]
    assert text["content"][0]["text"] == "Let me look."
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    results = [returned(call), returned(other)]
    items = [user(ASKED), *first["output"], *results]
    second = with_tools.send(RESPONSES, input=items, tools=[TOOL])
    assert cached(second) == first["sirchat"]["seen"]
    (said,) = second["output"]
    assert said["content"][0]["text"] == "It is cold."


def test_a_call_comes_in_events_that_build_it_up(
    with_tools: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [CALL, f"Well.\n{CALL}"])
    for texts in ([], ["Well."]):
        events = streamed(with_tools, input=ASKED, tools=[TOOL])
        output: list[Any] = []
        for one in events:
            match one["type"].removeprefix("response."):
                case "output_item.added":
                    assert one["output_index"] == len(output)
                    output.append(one["item"])
                case "output_text.delta" | "function_call_arguments.delta":
                    item = output[one["output_index"]]
                    assert item["id"] == one["item_id"]
                    item["built"] = item.get("built", "") + one["delta"]
                case "output_item.done":
                    output[one["output_index"]] |= one["item"]
        built = [item.pop("built") for item in output]
        final = events[-1]["response"]
        assert (events[-1]["type"], final["status"]) == ("response.completed", "completed")
        assert final["output"] == output
        assert built == [*texts, output[-1]["arguments"]]


def test_codex_gets_calls_of_namespaces_and_of_tools_that_take_a_text(
    with_tools: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two namespaces may have a function of one name; what only OpenAI runs is left out."""
    patch = {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "a: b"}}
    spaces = [{"type": "namespace", "name": name, "tools": [TOOL]} for name in ("home", "away")]
    spaces += [{"type": "namespace", "name": "empty"}, {"type": "namespace"}]
    tools = [*spaces, patch, {"type": "web_search", "external_web_access": True}]
    city = '{"city": "Oslo"}'
    script(
        monkeypatch,
        [
            f'<tool_call>\n{{"name": "away.weather", "arguments": {city}}}\n</tool_call>',
            '<tool_call>\n{"name": "patch", "arguments": {"input": "a \\"b\\""}}\n</tool_call>',
            "Done.",
        ],
    )
    rules = [{"type": "input_text", "text": text} for text in ("Rules.", "More rules.")]
    asked = [{"type": "message", "role": "developer", "content": rules}, user(ASKED)]
    unset = dict.fromkeys(("reasoning", "service_tier"))
    more: dict[str, Any] = {
        "instructions": "Write code.",
        "text": {"verbosity": "medium"},
        "store": False,
    }
    more |= {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "a"}
    body = {"model": "tiny", "input": asked, "tools": tools, **unset, **more}
    response = with_tools.client.post(RESPONSES, json=body)
    assert '"tools.web_search"' in response.headers["X-Sirchat-Note"]
    (call,) = response.json()["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("away", "weather", city)
    thought: Any = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    history = [*asked, thought, call, returned(call)]
    events = streamed(with_tools, **body | {"input": history})
    (use,) = events[-1]["response"]["output"]
    assert (use["type"], use["name"], use["input"]) == ("custom_tool_call", "patch", 'a "b"')
    named = {"type": "function", "namespace": "away", "name": "weather"}
    choosing = {"input": ASKED, "tools": tools, "tool_choice": named}
    built = make_request(ChatRequest, chat_fields(choosing))
    assert [one.name for one in built.required_tools] == ["away.weather"]
    assert "response.custom_tool_call_input.done" in [one["type"] for one in events]
    done = {"type": "custom_tool_call_output", "call_id": use["call_id"], "output": "ok"}
    last = with_tools.send(RESPONSES, **body | {"input": [*history, use, done]})
    assert cached(last) == events[-1]["response"]["sirchat"]["seen"]
