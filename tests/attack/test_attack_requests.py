"""Requests of all three APIs, with one to three changes each: a reply, or an error in its shape.

`SIRCHAT_ATTACK=5000` tries so many.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from attacking import attack, mutated, odd_text
from serving import Served, assistant, server_of_module, system, user

_TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
_CHAT = [system("Be brief."), user("My name is Anna."), assistant("Hello!"), user("Who am I?")]
_CALL = {"name": "weather", "arguments": '{"city": "Rome"}'}
_CALLED = [
    user("Rome?"),
    {
        "role": "assistant",
        "tool_calls": [{"id": "call00000", "type": "function", "function": _CALL}],
    },
    {"role": "tool", "tool_call_id": "call00000", "content": [{"type": "text", "text": "snow"}]},
]
_SCHEMA = {"name": "a", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}}
# Valid requests: each path, with the fields that it has.
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {
        "messages": _CHAT, "temperature": 0.5, "top_p": 0.9, "seed": 3, "max_tokens": 3,
        "stop": ["x"], "stream": True, "stream_options": {"include_usage": True}, "user": "a",
        "sirchat": {"conversation": "c"},
    }),
    ("/v1/chat/completions", {
        "messages": _CALLED, "max_completion_tokens": 2, "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": _TOOL}], "tool_choice": "auto",
    }),
    ("/v1/chat/completions", {
        "messages": _CHAT[:2], "max_tokens": 4,
        "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False},
    }),
    ("/v1/chat/completions", {
        "messages": _CHAT[:2], "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": _SCHEMA},
    }),
    ("/v1/responses", {
        "input": [
            *_CHAT[1:],
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "snow"},
        ],
        "instructions": "Be brief.", "max_output_tokens": 3, "temperature": 1, "store": True,
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
        "tools": [{"type": "function", **_TOOL}, {"type": "custom", "name": "patch"}],
        "tool_choice": "none", "metadata": {"a": "b"},
    }),
    ("/v1/responses", {
        "input": "Hi", "stream": True, "max_output_tokens": 2, "conversation": {"id": "d"},
        "tools": [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}],
    }),
    ("/v1/messages", {
        "model": "tiny", "max_tokens": 3, "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            _CHAT[1],
            {"role": "assistant", "content": [
                {"type": "text", "text": "Well"},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "snow"},
                {"type": "text", "text": "And?"},
            ]},
        ],
        "tools": [{"name": "weather", "input_schema": _TOOL["parameters"]}],
        "tool_choice": {"type": "auto"}, "stop_sequences": ["x"], "temperature": 0.5, "top_k": 4,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }),
    ("/v1/messages", {"model": "tiny", "max_tokens": 2, "messages": _CHAT[1:], "stream": True}),
]  # fmt: skip
_ODD_JSON = [
    "1e999", "-1e999", "NaN", "Infinity", "-0", "-0.0", str(2**70), str(-(2**70)), "1e308",
    str(2**63), "1e-400", "1" * 5000, "0.1e1", "true", "null", "[]", "{}", '""', '"\\ud800"',
    '"\\u0000"', "[" * 90 + "]" * 90, "[" * 5000 + "]" * 5000, '{"a":' * 90 + "1" + "}" * 90,
    '{"$ref": "#"}', '{"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}',
    "[null]", '[""]', "[[]]", '"<|end|><|user|>"', "01", "'a'", "/*", "\\", "\x00", "\ufeff",
]  # fmt: skip
_MARK = "\u2603put here"  # where a mutation puts text that is no value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a JSON value, with the keys of what it has."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def mutate(random: Random, body: Any, put: list[str]) -> None:
    """Change a place in a request: another value, a name, a copy, nothing, or raw text."""
    within, key = random.choice([*places(body)])
    match random.randrange(7):
        case 0:
            put.append(random.choice(_ODD_JSON))
            within[key] = f"{_MARK}{len(put) - 1}"
        case 1:
            within[key] = odd_text(random)
        case 2:
            other, name = random.choice([*places(random.choice(VALID)[1])])
            within[key] = json.loads(json.dumps(other[name]))
        case 3:
            del within[key]
        case 4 if isinstance(within, dict):
            within[random.choice(_NAMES)] = within[key]
        case 5 if isinstance(within, dict):
            within[random.choice((odd_text(random, 1), key.upper(), f"{key} "))] = within[key]
        case _ if isinstance(within, list):
            within.extend(json.loads(json.dumps(within)) * random.choice((1, 3)))
        case _:
            # a limit of 10**9 tokens is met, and a reply in JSON may take them all
            large = 200 if key in _TOKEN_LIMITS else 10**9
            within[key] = random.choice((0, -1, 1, 1.5, large, 10**12, True, None, "", [], {}))


_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NAMES = sorted({key for _, body in VALID for _, key in places(body) if isinstance(key, str)})


def fuzzed(random: Random) -> tuple[str, bytes]:
    """The path and the body of a request with some changes."""
    path, valid = random.choice(VALID)
    body, put = json.loads(json.dumps(valid)), list[str]()
    for _ in range(random.choice((1, 1, 2, 3))):
        if body:
            mutate(random, body, put)
    text = json.dumps(body, ensure_ascii=random.random() < 0.7)
    for number, raw in enumerate(put):
        text = text.replace(json.dumps(f"{_MARK}{number}"), raw)
        text = text.replace(f'"{_MARK}{number}"', raw)
    if random.random() < 0.1:  # twice the same key
        text = f'{{"stream": 7, "messages": 1, {text[1:]}' if random.random() < 0.5 else text
    written = text.encode("utf-8", "surrogatepass")
    return path, mutated(random, written, 2) if random.random() < 0.1 else written


def check(path: str, response: Any) -> None:
    """Raise ValueError for a response that is no reply, and no refusal in the shape of its API."""
    status, text = response.status_code, response.text
    if 200 <= status < 300:
        if "json" in response.headers["content-type"]:
            response.json()
        elif '"error"' in text and "failed" in text:
            raise ValueError(text[-400:])
        return
    is_anthropic = path.startswith("/v1/messages")
    match response.json() if 400 <= status < 500 else text:
        case {"type": "error", "error": {"type": str(), "message": str(said)}} if is_anthropic:
            pass
        case {"error": {"message": str(said), "type": _, "param": _, "code": _}} if (
            not is_anthropic
        ):
            pass
        case other:
            raise ValueError(f"{path}, status {status}: {str(other)[:300]}")
    if "\n" in said or len(said) > 1000:
        raise ValueError(f"{path}: {said[:500]!r}")


server = server_of_module(max_new_tokens=4, temperature=0)


def test_a_changed_request_has_a_reply_or_an_error_in_the_shape_of_its_api(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    first = server.reply(_CHAT[1:2], seed=1)

    def send(random: Random) -> None:
        path, body = fuzzed(random)
        caplog.clear()
        response = server.client.post(path, content=body)
        check(path, response)
        for record in caplog.records:
            if record.levelno >= logging.ERROR or record.exc_info:
                raise ValueError(record.getMessage())

    attack(send, few=8)
    assert server.reply(_CHAT[1:2], seed=1) == first
