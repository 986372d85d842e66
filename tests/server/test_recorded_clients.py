"""Requests in the shape of a program that can't be run here: Codex."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving import Served, server_of_module
from template_shapes import WEATHER, script, tool_tiny

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
FUNCTION: Any = WEATHER["function"]


server = server_of_module(tool_tiny, policy="sink", budget=1024, max_new_tokens=60)


def lines(server: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """The JSON of each line, or event, of a stream."""
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    found = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in found if line.startswith("{")]


def test_codex(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(role: str, *texts: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        parts = [{"type": kind, "text": text} for text in texts]
        return {"type": "message", "role": role, "content": parts}

    begun = [message("developer", "Rules.", "More rules."), message("user", "<environment/>")]
    body: dict[str, Any] = {
        "model": "tiny",
        "instructions": "You are a coding agent.",
        "input": [*begun, message("user", "Weather in Oslo?")],
        "tools": [{"type": "function", "strict": False, **FUNCTION}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "service_tier": None,
        "prompt_cache_key": "0199-a",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "0199-b"},
    }
    script(monkeypatch, [CALL, "It is cold."])
    events = lines(server, "/v1/responses", body)
    assert {"response.created", "response.output_item.done"} <= {each["type"] for each in events}
    *_, end = events
    assert end["type"] == "response.completed"
    assert set(end["response"]["usage"]) >= {"input_tokens", "output_tokens", "total_tokens"}
    (item,) = end["response"]["output"]
    call = {name: item[name] for name in ("type", "name", "arguments", "call_id")}
    thought: Any = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "-3 degrees"}
    body["input"] += [thought, call, output]
    told = lines(server, "/v1/responses", body)
    deltas = [each["delta"] for each in told if each["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "It is cold."
    assert told[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0
