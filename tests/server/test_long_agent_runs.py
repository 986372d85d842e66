"""An agent whose tools return many times the budget: all is answered, said and found again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving import cached, served, user
from template_shapes import script, tool_tiny

CALLS, BUDGET, TIMES = 8, 128, 6
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}},
    },
}
SECRET = "The password of the cellar is zanzibar."
QUESTION = "What is the password of the cellar?"


def page(number: int) -> str:
    """What the tool returns for a page: long, with a secret, or a question about it, in two."""
    if number == CALLS - 1:
        return QUESTION
    said = SECRET if number == 3 else ""
    sheep = " ".join(f"Sheep {number}{at} grazes." for at in range(6))
    return f"Page {number}. {sheep} {said}"


def test_an_agent_reads_many_times_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [json.dumps({"name": "read", "arguments": {"page": n}}) for n in range(1, CALLS + 1)]
    replies = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    script(monkeypatch, [*replies, "All is read."])
    messages: list[Any] = [user("Read all pages.")]
    settings: dict[str, Any] = {
        "policy": "sink",
        "budget": BUDGET,
        "recall": "words",
    }
    told: list[Any] = []
    shown: list[Any] = []
    with served(tool_tiny(), pin_system=False, max_new_tokens=80, **settings) as server:
        while not told or told[-1]["choices"][0]["finish_reason"] == "tool_calls":
            told.append(server.ask(messages, tools=[TOOL]))
            ident = told[-1]["sirchat"]["id"]
            shown.append(server.client.get(f"/v1/sirchat/sessions/{ident}").json())
            said = told[-1]["choices"][0]["message"]
            messages.append(said)
            for call in said.get("tool_calls", []):
                number = json.loads(call["function"]["arguments"])["page"]
                result = {"role": "tool", "tool_call_id": call["id"], "content": page(number)}
                messages.append(result)
    assert len(told) == CALLS + 1
    assert told[-1]["choices"][0]["message"]["content"] == "All is read."
    assert told[-1]["sirchat"]["seen"] > TIMES * BUDGET
    for one in told:
        memory, usage = one["sirchat"], one["usage"]
        assert memory["held"] <= BUDGET
        assert memory["evicted"] == memory["seen"] - memory["held"]
        assert usage["prompt_tokens_details"]["evicted_tokens"] <= memory["evicted"]
    assert all(cached(one) > 0 for one in told[1:])  # nothing is read again
    (recalled,) = shown[CALLS - 1]["recalled_turns"]
    assert recalled["text"] == SECRET
