"""Tools at the other endpoints: OpenAI's responses, and Ollama's chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serving import Served, refusal, served, user
from template_shapes import WEATHER, script, tool_tiny

ASKED = "How is the weather in Oslo?"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tool_tiny(), policy="full", max_new_tokens=160) as one:
        yield one


def respond(server: Served, said: Any, **fields: Any) -> Any:
    response = server.client.post("/v1/responses", json={"input": said, "tools": [TOOL], **fields})
    assert response.status_code == 200, response.text
    return response.json()


def cached(response: Any) -> int:
    count: int = response["usage"]["input_tokens_details"]["cached_tokens"]
    return count


def returned(call: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "Snow."}


def test_a_response_calls_a_tool_and_the_next_one_reads_only_what_it_returned(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [f"Let me look.\n{CALL}\n{CALL}", "It is cold.", "It is warm."])
    first = respond(server, ASKED)
    text, call, other = first["output"]
    assert text["content"][0]["text"] == "Let me look."
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    results = [returned(call), returned(other)]
    second = respond(server, results, previous_response_id=first["id"])
    assert cached(second) == first["sirchat"]["seen"]
    (said,) = second["output"]
    assert said["content"][0]["text"] == "It is cold."
    # A client may also send all items again, as they came.
    third = respond(server, [user(ASKED), *first["output"], *results])
    assert cached(third) == first["sirchat"]["seen"]


def test_a_call_comes_in_events_that_build_it_up(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [CALL, f"Well.\n{CALL}"])
    for said in ([], ["Well."]):
        body = {"input": ASKED, "tools": [TOOL], "stream": True}
        lines = server.client.post("/v1/responses", json=body).text.strip().split("\n\n")
        events = [json.loads(line.split("data: ")[1]) for line in lines]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
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
        assert built == [*said, output[-1]["arguments"]]


def test_a_response_can_be_made_to_call_a_tool(server: Served) -> None:
    days = {"type": "integer", "minimum": 1, "maximum": 9}
    function = TOOL | {"parameters": {"type": "object", "properties": {"days": days}}}
    fields: dict[str, Any] = {"tools": [function], "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "name": "weather"}):
        response = respond(server, ASKED, tool_choice=choice, **fields)
        (call,) = response["output"]
        assert call["name"] == "weather"
        assert response["tool_choice"] == choice


def test_in_ollamas_shape_calls_have_no_ids_and_nothing_is_read_twice(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(messages: list[Any], **fields: Any) -> list[Any]:
        body = {"model": "tiny", "tools": [WEATHER], "messages": messages, **fields}
        response = server.client.post("/api/chat", json=body)
        assert response.status_code == 200, response.text
        return [json.loads(line) for line in response.text.splitlines()]

    question = "And in Rome?"
    script(monkeypatch, [f"Let me look.\n{CALL}\n{CALL}", "It is cold.", CALL, "Bye."])
    (first,) = ask([user(question)], stream=False)
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    wanted = {"role": "assistant", "content": "Let me look.", "tool_calls": [call, call]}
    assert (first["message"], first["done_reason"]) == (wanted, "stop")
    results = [
        {"role": "tool", "content": "Snow.", "tool_name": "weather"},
        {"role": "tool", "content": "Sun."},
    ]
    messages: list[Any] = [user(question), first["message"], *results]
    (second,) = ask(messages, stream=False)
    assert second["message"]["content"] == "It is cold."
    messages += [second["message"], user("And now?")]
    pieces = ask(messages)
    assert [call for piece in pieces for call in piece["message"].get("tool_calls", [])] == [call]
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    listed = server.client.get("/v1/sirchat/sessions").json()["data"]
    (count,) = [entry["messages"] for entry in listed if entry["first"] == question]
    assert count == 6  # one conversation: what tools returned in a row is one message
    messages += [pieces[0]["message"], {"role": "tool", "content": "Rain.", "tool_name": "other"}]
    body = {"model": "tiny", "tools": [WEATHER], "messages": messages}
    assert "no such call" in refusal(server.client.post("/api/chat", json=body))["message"]
