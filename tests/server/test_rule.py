"""What of a request can't be had is refused, or has no effect and is said, in each shape."""

from __future__ import annotations

from typing import Any

import pytest

from serving import Served, assistant, refusal, served, server_of_module, user
from template_shapes import WEATHER, tool_quick

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SAID = [user("Hello."), assistant("Hi."), user("Who are you?")]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID},
    RESPONSES: {"input": SAID},
}
HOSTED = {"type": "web_search"}
FUNCTION = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]


server = server_of_module(tool_quick, policy="full", max_new_tokens=6)


@pytest.fixture(scope="module")
def usual(server: Served) -> dict[str, Any]:
    """What is replied at each address."""
    return {path: text(ask(server, path)) for path in BASE}


def part(**more: Any) -> list[dict[str, Any]]:
    """A content that is one part."""
    return [{"type": "text", "text": "Who are you?", **more}]


def last(**more: Any) -> list[dict[str, Any]]:
    """The messages, with more fields of the last one."""
    return [*SAID[:-1], SAID[-1] | more]


def replied(**more: Any) -> list[dict[str, Any]]:
    """The messages, with more fields of the reply."""
    return [SAID[0], SAID[1] | more, SAID[2]]


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def strange(**parameters: Any) -> dict[str, Any]:
    """A tool with these parameters."""
    return {"type": "function", "function": {"name": "a", "parameters": {"properties": parameters}}}


NO_SWITCH = "has no effect: the model's chat template has no switch for it"
NEUTRAL: list[tuple[str, str, Any]] = [
    (CHAT, "logprobs", False),
    (CHAT, "logprobs", []),
    *((CHAT, name, None) for name in ("stop", "tools", "logprobs", "seed", "nosuch", "top_k")),
    *((CHAT, name, 0) for name in ("presence_penalty", "top_logprobs", "store")),
    (CHAT, "n", 1),
    (CHAT, "functions", []),
    (CHAT, "modalities", ["text"]),
    *((CHAT, "reasoning_effort", value) for value in ("none", "medium", "")),
    *((CHAT, "chat_template_kwargs", value) for value in ({}, {"enable_thinking": False})),
    *((CHAT, "stream_options", value) for value in ({}, {"include_obfuscation": True})),
    *((CHAT, "stop", value) for value in ("", [""], [], ["zz"] * 20)),
    *((CHAT, "top_k", value) for value in (0, -1)),
    *((CHAT, "seed", value) for value in (-1, -5, 2**64)),
    *((CHAT, name, -1) for name in ("max_tokens", "max_completion_tokens")),
    *((CHAT, name, 1) for name in ("repetition_penalty", "repeat_penalty")),
    (CHAT, "tools", []),
    (CHAT, "tool_choice", "none"),
    (CHAT, "response_format", {"type": "text"}),
    (CHAT, "messages", last(content=part(cache_control={"type": "ephemeral"}), weight=0)),
    *((CHAT, "messages", last(**{name: None})) for name in ("name", "tool_calls", "nosuch")),
    (CHAT, "messages", replied(reasoning_content="x", refusal="", audio=None, function_call=None)),
    (CHAT, "messages", replied(content=[{"type": "refusal", "refusal": "Hi."}], name="bot")),
    (RESPONSES, "background", False),
    *((RESPONSES, "reasoning", value) for value in ({}, {"effort": "medium", "summary": None})),
    (RESPONSES, "text", {"format": {"type": "text"}}),
    (RESPONSES, "input", replied(id="msg_1", status="in_progress", phase="final_answer")),
    (RESPONSES, "input", [*SAID[:2], {"type": "reasoning", "id": "a", "summary": []}, SAID[2]]),
]
# Schemas that need themselves within themselves, so no JSON by them ends.
ENDLESS: list[Any] = [
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"a": {"anyOf": [{"$ref": "#/$defs/n"}]}},
                "required": ["a"],
            }
        },
    },
]
# What the field itself is named for in the error.
REFUSED: list[tuple[str, str, Any]] = [
    *((CHAT, "n", value) for value in (2, 0, "1")),
    (CHAT, "logit_bias", {"5": 100}),
    (CHAT, "logprobs", True),
    (CHAT, "top_logprobs", 3),
    (CHAT, "functions", [{"name": "weather"}]),
    *((CHAT, name, {"type": "object"}) for name in ("guided_json", "json_schema")),
    (CHAT, "guided_choice", ["yes", "no"]),
    (CHAT, "guided_grammar", "root ::= 'a'"),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "reasoning_effort", "much"),
    *((CHAT, "temperature", value) for value in ("hot", -1)),
    *((CHAT, "top_p", value) for value in (-1, "all")),
    (CHAT, "seed", 1.5),
    (CHAT, "max_tokens", 0),
    (CHAT, "max_completion_tokens", True),
    *((CHAT, "stop", value) for value in (["a"] * 65, 5)),
    (CHAT, "tools", [{"type": "function", "function": {"name": "no blanks"}}]),
    (CHAT, "tools", [{"type": "web_search"}]),
    (
        CHAT,
        "tools",
        [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}],
    ),
    *((CHAT, "tool_choice", value) for value in ("required", "any")),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "weather"}}),
    (CHAT, "messages", []),
    (CHAT, "messages", [{"role": "tool", "content": "x"}]),
    (CHAT, "messages", [{"role": "king", "content": "x"}]),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    (CHAT, "messages", replied(function_call={"name": "weather", "arguments": "{}"})),
    (CHAT, "messages", [user("a")] * 10_001),
    (CHAT, "response_format", {"type": "json_schema"}),
    (CHAT, "response_format", {"type": "json_object", "json_schema": {"name": "a"}}),
    (CHAT, "response_format", form({"type": "nosuch"})),
    (CHAT, "response_format", form({"$ref": "http://127.0.0.1/schema"})),
    (CHAT, "response_format", form({"$ref": "file:///etc/passwd"})),
    (CHAT, "response_format", form({"type": "string", "pattern": "("})),
    *(
        (CHAT, "response_format", form({"type": "integer", name: value}))
        for name, value in (("minimum", 10**400), ("minimum", 2**63), ("maximum", -(2**63)))
    ),
    *((CHAT, "response_format", form(schema)) for schema in ENDLESS),
    (RESPONSES, "input", []),
    (RESPONSES, "background", True),
    (RESPONSES, "reasoning", {"effort": "much"}),
    *((RESPONSES, "tools", [tool]) for tool in ({"type": "x"}, WEATHER)),
    (RESPONSES, "max_output_tokens", 0),
    (RESPONSES, "prompt", {"id": "x"}),
]


def text(response: Any) -> Any:
    """What a reply says."""
    assert response.status_code == 200, response.text
    found = response.json()
    if "choices" in found:
        (choice,) = found["choices"]
        return choice["message"]["content"]
    return found["output"][0]["content"] if "output" in found else found["message"]


def ask(server: Served, path: str, **fields: Any) -> Any:
    return server.client.post(path, json=BASE[path] | {"temperature": 0} | fields)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "field", "value"), NEUTRAL)
def test_a_value_that_changes_nothing_is_taken(
    server: Served, usual: dict[str, Any], path: str, field: str, value: Any
) -> None:
    response = ask(server, path, **{field: value})
    assert text(response) == usual[path]
    assert "X-Sirchat-Note" not in response.headers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "fields", "note"),
    [
        (CHAT, {"user": "a", "frequency_penalty": 0.5, "n": 1}, 'without effect: "user", "frequ'),
        (RESPONSES, {"truncation": "auto", "tools": [HOSTED]}, '"tools.web_search"'),
        *(
            (path, {field: dict.fromkeys(names, 1)}, f'without effect: "{field}.{names[0]}"')
            for path, field, *names in (
                (CHAT, "chat_template_kwargs", "thinking_budget"),
                (RESPONSES, "text", "verbosity"),
                (RESPONSES, "reasoning", "summary"),
            )
        ),
        (CHAT, {"a\n\u001b[2J": "b"}, '"a\\n\\u001b[2J"'),
        (CHAT, {"reasoning_effort": "high"}, f"reasoning high {NO_SWITCH}"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, f"reasoning on {NO_SWITCH}"),
        (RESPONSES, {"reasoning": {"effort": "xhigh"}}, f"reasoning high {NO_SWITCH}"),
        (
            CHAT,
            {"response_format": form({"enum": ["a"], "format": "password", "uniqueItems": True})},
            'a part of the schema is not kept: Unimplemented keys: ["uniqueItems"]; '
            "a part of the schema is not kept: Unknown format: password",
        ),
        *(
            (CHAT, {name: value}, f"{name.replace('repeat', 'repetition')} is {had}")
            for name, value, had in (
                *(("temperature", *pair) for pair in ((1e-8, 0), (0.009, 0.01), (99, 10))),
                *(("top_p", *pair) for pair in ((0, "1e-06"), (1.5, 1))),
                ("min_p", 1, 0.99),
                ("repeat_penalty", 0, 0.1),
            )
        ),
        *(
            (path, {name: [*SAID, assistant("I am")]}, "the last message is the assistant's")
            for path, name in ((CHAT, "messages"), (RESPONSES, "input"))
        ),
        *(
            (CHAT, {"response_format": form({"enum": ["a"], "format": value})}, said)
            for value, said in (
                ("\u65e5\u672c", "Unknown format: \\u65e5\\u672c"),
                ("a\r\nX-B: c", "Unknown format: a X-B: c"),
                ("\u001b[2J", "Unknown format: \\u001b[2J"),
            )
        ),
        (
            CHAT,
            {"tools": [strange(b={"enum": [1]})], "tool_choice": "required"},
            "",
        ),
    ],
)
def test_what_is_not_quite_had_is_said_in_a_header(
    path: str, fields: Any, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a stream begins, on a busy machine, before all is known of its reply.
    monkeypatch.setattr("sirchat.server.app._HEADERS_SECONDS", 60)
    with served(tool_quick(), policy="sink", budget=512, max_new_tokens=3) as server:
        for stream in (path == CHAT, path != CHAT):
            response = ask(server, path, **fields, stream=stream)
            assert response.status_code == 200, response.text
            said = response.headers.get("X-Sirchat-Note", "")
            assert note in said
            assert said.isprintable()


CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}


def calling(**function: Any) -> dict[str, Any]:
    """A message with a call of these fields."""
    return CALLING | {"tool_calls": [{"id": "a", "function": function}]}


def nested(kind: type[list[Any] | dict[str, Any]]) -> Any:
    """A list or object in which others are, one within another."""
    deep: Any = kind()
    for _ in range(400):
        deep = [deep] if kind is list else {"a": deep}
    return deep


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def returned(ident: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": ident, "content": "Snow."}


def refused(server: Served, path: str, fields: dict[str, Any], status: int = 400) -> str:
    """The field and the message of the error."""
    one = {"messages": [user("Hello.")]} if path == CHAT else {}
    response = server.client.post(path, json=BASE[path] | one | fields)
    error = refusal(response, status)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    return f"{error['param']}: {error['message']}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        *((path, {field: value}, field) for path, field, value in REFUSED),
        (CHAT, {"sirchat": {"policy": "sink"}}, "sirchat.policy is not supported"),
        (CHAT, {"tools": [WEATHER], "tool_choice": named("days")}, "tool_choice names no tool"),
        (CHAT, {"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        (
            CHAT,
            {"tools": [strange(b={"type": "nosuch"})], "tool_choice": "required"},
            "tool_choice has a schema that can't be used",
        ),
        *(
            (RESPONSES, {"input": [SAID[0], item]}, "input: responses are not kept")
            for item in ({"type": "item_reference", "id": "a"}, {"id": "a"})
        ),
        (
            CHAT,
            {"messages": [user("a"), CALLING, returned("a"), assistant("c"), returned("a")]},
            'tool result 2 answers the call "a", but the reply before has no such call',
        ),
        (CHAT, {"messages": [user("a"), calling(name="weather")]}, "arguments: Field required"),
        (
            CHAT,
            {"messages": [user("a"), calling(name="weather", arguments=nested(dict))]},
            "nested too deeply",
        ),
        (CHAT, {"tools": [strange(b=nested(dict))]}, "nested too deeply"),
        (RESPONSES, {"tools": [{"type": "web_search", "filters": nested(list)}]}, "nested too"),
        (
            CHAT,
            {"messages": [user("a"), CALLING, {"role": "tool", "content": "b"}]},
            "tool_call_id",
        ),
        (CHAT, {"messages": [user("a") | {"tool_calls": [CALL]}]}, "only the assistant"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (
            RESPONSES,
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "other"}},
            "tool_choice",
        ),
        (
            RESPONSES,
            {
                "input": [
                    {"type": "function_call", "call_id": "b", "name": "c", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "a", "output": "b"},
                ]
            },
            "no such call",
        ),
    ],
)
def test_what_can_t_be_had_is_refused_and_said(
    server: Served, path: str, fields: dict[str, Any], words: str
) -> None:
    assert words in refused(server, path, fields)


CALLED: dict[str, Any] = {
    "type": "function_call",
    "call_id": "c",
    "name": "weather",
    "arguments": "{}",
}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "c", "output": "a"}


@pytest.mark.parametrize(
    ("item", "lacks"),
    [
        (CALLED, "arguments"),
        (CALLED, "name"),
        (CALLED, "call_id"),
        (CALLED | {"call_id": "a b"}, ""),
        (CALLED | {"namespace": "n", "name": "a" * 127}, ""),
        (CALLED | {"arguments": []}, ""),
        (OUTPUT, "call_id"),
        (OUTPUT | {"output": [{"type": "input_file", "file_id": "a"}]}, ""),
        (user("a"), "content"),
        (user("a") | {"type": "nosuch"}, ""),
        (5, ""),
    ],
)
def test_a_wrong_item_of_a_response_is_refused_by_its_place(
    server: Served, item: Any, lacks: str
) -> None:
    """As the client counts the items: those that are not read, too."""
    given = {k: v for k, v in item.items() if k != lacks} if isinstance(item, dict) else item
    unread = {"type": "reasoning", "id": "rs_1", "summary": []}
    problem = refused(server, RESPONSES, {"input": [user("a"), unread, given]})
    assert problem.startswith("input.2")
    assert lacks.removeprefix("call_") in problem


@pytest.mark.parametrize("last", [assistant(""), CALLING, CALLING | {"content": "b"}])
def test_a_last_message_that_no_reply_follows_has_no_note(
    server: Served, last: dict[str, Any]
) -> None:
    response = ask(server, CHAT, messages=[user("a"), last])
    assert response.status_code == 200, response.text
    assert "X-Sirchat-Note" not in response.headers


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
