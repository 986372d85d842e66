"""Tools: what the model calls or must call, what they return, and that no round is read twice."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatting import quick
from serving import Served, assistant, cached, refusal, said, served, system, told, user
from sirchat.errors import ModelError
from sirchat.models.model import wrap_model
from sirchat.text.other_templates import PromptedTools, ToolTemplate
from sirchat.text.tool_calls import CallParser, ToolCall, calls_from_key, calls_key
from template_shapes import WEATHER, script, tool_quick, tool_tokenizer

ASKED = [system("Be kind."), user("How is the weather in Oslo?")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'
FUNCTION = {"name": "weather", "arguments": '{"city": "Oslo", "days": 1}'}
CALLED = {"id": "call00000", "type": "function", "function": FUNCTION}


@pytest.fixture
def server() -> Iterator[Served]:
    with served(tool_quick(), policy="full", max_new_tokens=90) as one:
        yield one


def returned(text: str, ident: str = "call00000") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": ident, "content": text}


def calling(*calls: dict[str, Any], text: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


def test_a_call_in_a_reply_is_returned_as_one_and_streamed(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"Let me look.\n{CALL}"
    tags = "<function=weather>\n<parameter=city>\n7\n</parameter>\n</function>"
    script(monkeypatch, [said, said, tags])
    (choice,) = server.ask(ASKED, tools=[WEATHER])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == calling(CALLED, text="Let me look.")
    first, *pieces = [chunk["choices"][0] for chunk in server.chunks(ASKED, tools=[WEATHER])]
    assert first["delta"]["role"] == "assistant"
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == "Let me look."
    (call,) = [one for piece in pieces for one in piece["delta"].get("tool_calls", [])]
    assert call == {"index": 0, **CALLED}
    assert pieces[-1]["finish_reason"] == "tool_calls"
    (choice,) = server.ask([user("And in 7?")], tools=[WEATHER])["choices"]
    (call,) = choice["message"]["tool_calls"]
    # In other forms than JSON, values have the types of the schema.
    assert json.loads(call["function"]["arguments"]) == {"city": "7"}


def test_what_a_tool_returned_is_read_and_nothing_before_it_is_read_again(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [CALL, "It is cold.", CALL, "It is warm."])
    messages: list[Any] = [*ASKED]
    seen, ids = 0, []
    for text in ("Snow.", "Sun."):
        reply = server.ask(messages, tools=[WEATHER])
        assert cached(reply) == seen
        message = reply["choices"][0]["message"]
        assert message["content"] is None
        (call,) = message["tool_calls"]
        ids.append(call["id"])
        # Clients write the arguments anew.
        call["function"]["arguments"] = json.dumps({"days": 1, "city": "Oslo"}, indent=1)
        messages += [message, returned(text, call["id"])]
        after = server.ask(messages, tools=[WEATHER])
        assert cached(after) == reply["sirchat"]["seen"]
        seen = after["sirchat"]["seen"]
        messages += [after["choices"][0]["message"], user("And now?")]
    assert len(set(ids)) == 2
    assert messages[-2]["content"] == "It is warm."


def test_arguments_that_are_nested_deeply_are_text() -> None:
    deep = '{"a":' * 100 + "1" + "}" * 100
    _, (call,) = calls_from_key(calls_key("", [ToolCall("a", "weather", deep)]))
    assert call["function"]["arguments"] == deep


def test_other_tools_are_another_conversation(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, ["Hello."] * 5)
    longer = [*ASKED, assistant("Hello."), user("Thanks.")]
    server.ask(ASKED, tools=[WEATHER])
    assert cached(server.ask(longer)) == 0
    assert cached(server.ask(longer, tools=[WEATHER])) > 0


def test_without_a_choice_of_tools_the_reply_is_text(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [CALL, "Hello."])
    (choice,) = server.ask(ASKED, tools=[WEATHER], tool_choice="none")["choices"]
    assert (choice["message"], choice["finish_reason"]) == (assistant(CALL), "stop")
    longer = [*ASKED, choice["message"], user("Thanks.")]
    assert cached(server.ask(longer, tools=[WEATHER], tool_choice="none")) > 0


def test_a_model_whose_template_takes_no_tools_is_told_of_them_by_a_text_if_it_is_short() -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    with served(quick(), policy="full", max_new_tokens=60) as plain:
        read = plain.ask(ASKED)["usage"]["prompt_tokens"]
        for tool in (WEATHER, strict):
            told = plain.ask(ASKED, tools=[tool])
            assert told["usage"]["prompt_tokens"] > read + 50
        city = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
        chosen = {"type": "function", "function": {"name": "weather", "parameters": city}}
        (choice,) = plain.ask(ASKED, tools=[chosen], tool_choice=named("weather"))["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        called = [*ASKED, calling(CALLED), returned("x")]
        assert plain.ask(called, tools=[WEATHER])["usage"]["prompt_tokens"] > read + 50
    with served(quick(), policy="sink", budget=256) as small:
        usual = small.ask(ASKED)
        response = small.post(ASKED, tools=[WEATHER] * 9)
        assert response.json()["usage"]["prompt_tokens"] == usual["usage"]["prompt_tokens"]
        assert said(response.json()) == said(usual)
        assert "tools are left out" in response.headers["x-sirchat-note"]


def test_tools_that_can_t_be_read_do_not_change_how_the_next_request_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fails, usual = [ModelError("a tool can't be read")], PromptedTools.opening

    def opening(self: PromptedTools, content: str, system: str | None = None) -> Any:
        if fails:
            raise fails.pop()
        return usual(self, content, system)

    monkeypatch.setattr(PromptedTools, "opening", opening)
    asked: dict[str, Any] = {"tools": [WEATHER] * 9, "sirchat": {"conversation": "a"}}
    with served(quick(), policy="sink", budget=256) as small:
        small.ask(ASKED, sirchat=asked["sirchat"])
        assert refusal(small.post(ASKED, **asked))["param"] == "tools"
        response = small.post(ASKED, **asked)
        assert "tools are left out" in response.headers["x-sirchat-note"]


ARGUMENTS = {"city": "Oslo"}
ONE = json.dumps({"name": "weather", "arguments": ARGUMENTS})
LLAMA = ONE.replace("arguments", "parameters")
ANSWERED = f'```json\n{ONE[:-1]}, "response": "Rain."}}\n```'  # no other call


@pytest.mark.parametrize(
    ("reply", "text", "calls"),
    [
        (f"<tool_call>\n{ONE}\n</tool_call>", "", 1),
        (f"Wait. \n<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>\n", "Wait.", 2),
        (f"<tool_call>\n{ONE}", "", 1),  # the end token came in place of the tag
        (f"\n{LLAMA}", "", 1),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2),
        ("<tool_call>\n{broken\n</tool_call> a", "<tool_call>\n{broken\n</tool_call> a", 0),
        ("<tool_call>\n{broken", "<tool_call>\n{broken", 0),
        (
            '<tool_call>{"name": "a b", "arguments": {}}',
            '<tool_call>{"name": "a b", "arguments": {}}',
            0,
        ),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', 0),
        (f"{LLAMA} is how to call it", f"{LLAMA} is how to call it", 0),
        (f"It is {LLAMA}", f"It is {LLAMA}", 0),
        (f"```json\n{ONE}\n```", "", 1),
        (f"```json\n{ONE}\n```\nSo?", f"```json\n{ONE}\n```\nSo?", 0),
        (ANSWERED, ANSWERED, 0),
        ("```json\n5\n```", "```json\n5\n```", 0),
        ('```json\n{"city": "Oslo"}\n```', '```json\n{"city": "Oslo"}\n```', 0),
        (f"So: ```json\n{LLAMA}\n```", f"So: ```json\n{LLAMA}\n```", 0),
        ("a <b> < tool\n", "a <b> < tool\n", 0),
        (" <tool", " <tool", 0),
        ("", "", 0),
    ],
)
@given(st.data())
def test_calls_are_found_however_the_reply_is_divided(
    reply: str, text: str, calls: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=8)))
    parser = CallParser({"weather"}, 7)
    shown = ""
    found: list[ToolCall] = []
    for start, end in zip([0, *cuts], [*cuts, len(reply)], strict=True):
        more, new = parser.push(reply[start:end])
        shown, found = shown + more, [*found, *new]
    more, new = parser.finish()
    assert shown + more == text
    assert [*found, *new] == parser.calls
    assert [call.id for call in parser.calls] == [f"call{n:05}" for n in range(7, 7 + calls)]
    assert all(json.loads(call.arguments) == ARGUMENTS for call in parser.calls)


def test_a_call_ends_before_an_argument_that_is_not_known() -> None:
    parser = CallParser({"weather"}, 0, single_call=True, known_arguments={"weather": ("city",)})
    said = '{"name": "weather", "arguments": {"city": "Os, \\"a\\": lo", "wind": {"speed'
    for char in f"<tool_call>\n{said}":
        parser.push(char)
    (call,) = parser.calls
    assert json.loads(call.arguments) == {"city": 'Os, "a": lo'}
    assert parser.has_ended


BARE = '{"name": "weather", "parameters": {"city": "Oslo"}}'


def tool(called: str, **properties: Any) -> dict[str, Any]:
    """A tool whose parameters are all required."""
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": called, "parameters": parameters}}


CITY = tool("city", name={"$ref": "#/$defs/city"})
CITY["function"]["parameters"]["$defs"] = {"city": {"enum": ["Oslo", "Rome"]}}
DAYS = tool("days", number={"type": "integer", "minimum": 1, "maximum": 9})


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def check_calls(calls: list[Any]) -> None:
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


@pytest.mark.parametrize("choice", ["required", "city"])
def test_a_required_call_is_made_as_its_schema_says(server: Served, choice: str) -> None:
    fields: dict[str, Any] = {"tools": [CITY, DAYS], "parallel_tool_calls": False}
    fields["tool_choice"] = choice if choice == "required" else named(choice)
    reply = server.ask(ASKED, **fields)
    (said,) = reply["choices"]
    assert (said["finish_reason"], said["message"]["content"]) == ("tool_calls", None)
    (call,) = said["message"]["tool_calls"]
    check_calls([call])
    assert call["function"]["name"] in (choice, *(("city", "days") if choice == "required" else ()))
    chunks = [chunk["choices"][0] for chunk in server.chunks(ASKED, **fields)]
    (streamed,) = [call for piece in chunks for call in piece["delta"].get("tool_calls", [])]
    assert streamed == {"index": 0, **call}
    after = server.ask(
        [*ASKED, said["message"], returned("Snow.", call["id"])], tools=[CITY, DAYS], max_tokens=4
    )
    assert cached(after) == reply["sirchat"]["seen"]


@pytest.mark.parametrize("most", [1, 8])
def test_several_calls_may_be_made_where_one_is_required_and_several_are_allowed(
    server: Served, most: int
) -> None:
    sampled: dict[str, Any] = {"temperature": 10, "max_tokens": 250}  # often it goes on if it may
    sampled |= {"parallel_tool_calls": True} if most > 1 else {}
    counts = list[int]()
    for seed in range(3):
        fields = {"tools": [DAYS], "tool_choice": "required", "seed": seed, **sampled}
        (said,) = server.ask(ASKED, **fields)["choices"]
        check_calls(said["message"]["tool_calls"])
        counts.append(len(said["message"]["tool_calls"]))
    assert min(most, 2) <= max(counts) <= most
    # The next reply is free again.
    assert server.reply(ASKED, max_tokens=20) == told(ASKED, quick, max_new_tokens=20)


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
    after = server.ask([*ASKED, said["message"], returned("Snow.", call["id"])], tools=[WEATHER])
    assert cached(after) == reply["sirchat"]["seen"]
    assert after["choices"][0]["message"] == assistant("It is cold.")


def test_of_calls_that_show_only_at_the_end_the_others_are_not_kept_in_memory(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [user("And in Rome?")]
    script(monkeypatch, [f"{BARE}; {BARE}", "It is cold."])
    (said,) = server.ask(asked, tools=[WEATHER], parallel_tool_calls=False)["choices"]
    (call,) = said["message"]["tool_calls"]
    after = server.ask([*asked, said["message"], returned("Snow.", call["id"])], tools=[WEATHER])
    assert cached(after) == 0


def test_a_model_whose_template_writes_calls_in_another_way_refuses_to_require_one() -> None:
    own = copy.deepcopy(tool_quick().tokenizer)
    written = '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
    assert written in own.chat_template
    own.chat_template = own.chat_template.replace(written, "{{ call.name }}: {{ call.arguments }}")
    with served(wrap_model("tiny", quick().module, own), max_new_tokens=4) as server:
        error = refusal(server.post(ASKED, tools=[CITY], tool_choice="required"))
        assert error["param"] == "tool_choice"
        assert server.reply(ASKED, tools=[CITY])


def test_a_header_says_that_calls_of_this_template_would_not_be_found(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = copy.deepcopy(tool_quick().tokenizer)
    own.chat_template = own.chat_template.replace('"arguments"', '"given"')
    with served(wrap_model("tiny", quick().module, own), max_new_tokens=4) as other:
        note = other.post(ASKED, tools=[WEATHER]).headers["X-Sirchat-Note"]
        assert "calls may be shown as text" in note
        assert "X-Sirchat-Note" not in other.post([user("Hi.")]).headers
        told = [*ASKED, calling(CALLED), returned("Snow.")]
        assert "X-Sirchat-Note" not in other.post(told).headers  # it may not call any
    script(monkeypatch, ["Hello."])
    assert "X-Sirchat-Note" not in server.post(ASKED, tools=[WEATHER]).headers


@pytest.mark.parametrize(
    ("shape", "form"),
    [("qwen", ("<tool_call>\n", "arguments", "\n</tool_call>")), ("llama", ("", "parameters", ""))],
)
def test_how_calls_are_written_is_found_by_rendering_one(shape: str, form: Any) -> None:
    assert ToolTemplate(tool_tokenizer(shape), None).call_form() == form
