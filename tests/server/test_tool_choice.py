"""Calls that a request requires, of any tool or of one; and replies with one call at most."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from chatting import tiny
from serving import Served, assistant, cached, refusal, served, told, user
from sirchat.models.model import wrap_model
from sirchat.text.other_templates import ToolTemplate
from template_shapes import WEATHER, script, tool_tiny, tool_tokenizer

ASKED = [user("How is the weather in Oslo?")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BARE = '{"name": "weather", "parameters": {"city": "Oslo"}}'


def tool(called: str, **properties: Any) -> dict[str, Any]:
    """A tool whose parameters are all required."""
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": called, "parameters": parameters}}


CITY = tool("city", name={"$ref": "#/$defs/city"})
CITY["function"]["parameters"]["$defs"] = {"city": {"enum": ["Oslo", "Rome"]}}
DAYS = tool("days", number={"type": "integer", "minimum": 1, "maximum": 9})


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tool_tiny(), policy="full", max_new_tokens=90) as one:
        yield one


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def check(calls: list[Any]) -> None:
    """Check that each call is one of CITY or DAYS, as its schema says."""
    for call in calls:
        function = call["function"]
        given = json.loads(function["arguments"])
        assert function["arguments"] == json.dumps(given)
        if function["name"] == "city":
            assert given in ({"name": "Oslo"}, {"name": "Rome"})
        else:
            assert function["name"] == "days"
            assert list(given) == ["number"]
            assert given["number"] in range(1, 10)


@pytest.mark.parametrize("choice", ["required", "city", "days"])
def test_a_required_call_is_made_as_its_schema_says(server: Served, choice: str) -> None:
    fields: dict[str, Any] = {"tools": [CITY, DAYS], "parallel_tool_calls": False}
    fields["tool_choice"] = choice if choice == "required" else named(choice)
    reply = server.ask(ASKED, **fields)
    (said,) = reply["choices"]
    assert (said["finish_reason"], said["message"]["content"]) == ("tool_calls", None)
    (call,) = said["message"]["tool_calls"]
    check([call])
    assert call["function"]["name"] in (choice, *(("city", "days") if choice == "required" else ()))
    chunks = [chunk["choices"][0] for chunk in server.chunks(ASKED, **fields)]
    (streamed,) = [call for piece in chunks for call in piece["delta"].get("tool_calls", [])]
    assert streamed == {"index": 0, **call}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Snow."}
    after = server.ask([*ASKED, said["message"], result], tools=[CITY, DAYS], max_tokens=4)
    assert cached(after) == reply["sirchat"]["seen"]


def test_several_calls_may_be_made_where_one_is_required(server: Served) -> None:
    sampled = {"temperature": 2.0, "seed": 0, "max_tokens": 250}
    (said,) = server.ask(ASKED, tools=[DAYS], tool_choice="required", **sampled)["choices"]
    assert 1 <= len(said["message"]["tool_calls"]) <= 8
    check(said["message"]["tool_calls"])
    # The next reply is free again.
    assert server.reply(ASKED) == told(ASKED, max_new_tokens=90)


def test_a_strict_tool_is_called_by_its_schema_where_a_call_is_required(server: Served) -> None:
    strict = copy.deepcopy(CITY)
    strict["function"]["strict"] = True
    (said,) = server.ask(ASKED, tools=[strict], tool_choice=named("city"))["choices"]
    check(said["message"]["tool_calls"])
    assert "strict" in refusal(server.post(ASKED, tools=[strict]))["message"]


@pytest.mark.parametrize("text", ["", "Let me look.\n"])
def test_a_reply_without_parallel_calls_ends_after_the_first(
    server: Served, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    script(monkeypatch, [f"{text}{CALL}\n{CALL}\nWell.", "It is cold."])
    reply = server.ask(ASKED, tools=[WEATHER], parallel_tool_calls=False)
    (said,) = reply["choices"]
    assert (said["message"]["content"] or "") == text.strip()
    (call,) = said["message"]["tool_calls"]
    assert said["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Snow."}
    after = server.ask([*ASKED, said["message"], result], tools=[WEATHER])
    assert cached(after) == reply["sirchat"]["seen"]
    assert after["choices"][0]["message"] == assistant("It is cold.")


def test_of_calls_that_show_only_at_the_end_the_others_are_not_kept_in_memory(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [user("And in Rome?")]
    script(monkeypatch, [f"{BARE}; {BARE}", "It is cold."])
    (said,) = server.ask(asked, tools=[WEATHER], parallel_tool_calls=False)["choices"]
    (call,) = said["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Snow."}
    after = server.ask([*asked, said["message"], result], tools=[WEATHER])
    assert cached(after) == 0


def test_a_model_whose_template_writes_calls_in_another_way_refuses_to_require_one() -> None:
    own = copy.deepcopy(tool_tiny().tokenizer)
    written = '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
    assert written in own.chat_template
    own.chat_template = own.chat_template.replace(written, "{{ call.name }}: {{ call.arguments }}")
    with served(wrap_model("tiny", tiny().module, own), max_new_tokens=4) as server:
        error = refusal(server.post(ASKED, tools=[CITY], tool_choice="required"))
        assert error["param"] == "tool_choice"
        assert server.reply(ASKED, tools=[CITY])


@pytest.mark.parametrize(
    ("shape", "form"),
    [("qwen", ("<tool_call>\n", "arguments", "\n</tool_call>")), ("llama", ("", "parameters", ""))],
)
def test_how_calls_are_written_is_found_by_rendering_one(shape: str, form: Any) -> None:
    assert ToolTemplate(tool_tokenizer(shape), None).call_form() == form
