"""Messages, items and calls as clients send them, and models write them: all read, none lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import Served, assistant, refusal, server_of_module, system, user
from sirchat.server.fields import RequestError, make_request
from sirchat.server.requests import ChatRequest
from sirchat.text.tool_calls import CallParser
from template_shapes import WEATHER, script, tool_tiny

ASKED = [user("How is the weather in Oslo?")]
FUNCTION: Any = WEATHER["function"]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALLED = {
    "role": "assistant",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "a.b/c", "arguments": {"city": "a"}}}
    ],
}
RESULT: Any = {"role": "tool", "tool_call_id": "c1", "content": "It rains."}
NONE = ("tool", "no result")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


server = server_of_module(tool_tiny, policy="full", max_new_tokens=90)


def turns(*messages: dict[str, Any]) -> list[tuple[str, str]]:
    """Role and text of each turn of the messages; the system prompt is the first, if any."""
    request = make_request(ChatRequest, {"messages": list(messages)})
    found = [] if request.system is None else [("system", request.system)]
    for role, text in request.turns:
        if role == "tool":
            found += [(role, result) for _, _, result in json.loads(text)]
        else:
            found.append(("assistant", json.loads(text)[0]) if role == "calls" else (role, text))
    return found


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([system("a"), system("b"), user("c")], [("system", "a\n\nb"), ("user", "c")]),
        (
            [user("a"), assistant("b"), system("c"), user("d")],
            [("user", "a"), ("assistant", "b"), ("user", "c\n\nd")],
        ),
        (
            [user("a"), assistant("b"), system("c"), system("d")],
            [("user", "a"), ("assistant", "b"), ("user", "c\n\nd")],
        ),
        ([assistant("a"), user("b")], [("user", ""), ("assistant", "a"), ("user", "b")]),
        (
            [user("a"), assistant("b"), assistant("c"), user("d")],
            [("user", "a"), ("assistant", "b\n\nc"), ("user", "d")],
        ),
        ([system("a")], [("system", "a"), ("user", "")]),
        # A reply at the end is over, and an empty one there is none.
        ([user("a"), assistant("b")], [("user", "a"), ("assistant", "b"), ("user", "")]),
        ([user("a"), assistant(" ")], [("user", "a")]),
        ([user("a"), CALLED], [("user", "a"), ("assistant", ""), NONE]),
        ([user("a"), user("b")], [("user", "a"), ("user", "b")]),
        ([user("a") | {"name": "Anna"}], [("user", "Anna: a")]),
        # A window slid over the call; nobody waited for the result; replies without a word.
        ([RESULT, user("a")], [("user", "It rains."), ("user", "a")]),
        ([user("a"), CALLED, user("b")], [("user", "a"), ("assistant", ""), NONE, ("user", "b")]),
        (
            [user("a"), CALLED, RESULT | {"content": None}],
            [("user", "a"), ("assistant", ""), ("tool", "")],
        ),
        (
            [user("a"), assistant("b") | {"content": None}, user("c")],
            [("user", "a"), ("assistant", ""), ("user", "c")],
        ),
        (
            [user("a"), CALLED, RESULT | {"content": [IMAGE, {"type": "text", "text": "b"}]}],
            [("user", "a"), ("assistant", ""), ("tool", "[an image, which can't be seen]\nb")],
        ),
        ([user("a") | {"timestamp": 5, "is_error": False}], [("user", "a")]),
        (
            [user("a"), assistant("b") | {"name": "bot"}, user("c") | {"name": "Jo"}],
            [("user", "a"), ("assistant", "b"), ("user", "Jo: c")],
        ),
        (
            [
                user("a"),
                *(assistant(text) | {"name": name} for text, name in (("b", "x"), ("c", "y"))),
                user("d"),
            ],
            [("user", "a"), ("assistant", "x: b\n\ny: c"), ("user", "d")],
        ),
    ],
)
def test_messages_are_turns_whatever_their_order(
    messages: list[Any], wanted: list[tuple[str, str]]
) -> None:
    assert turns(*messages) == wanted


def test_whole_numbers_may_be_written_as_fractions() -> None:
    given = {"messages": ASKED, "max_tokens": 4.0, "seed": 42.0, "top_k": 3.0}
    request = make_request(ChatRequest, given)
    assert (request.max_tokens, request.seed, request.top_k) == (4, 42, 3)
    with pytest.raises(RequestError, match="seed"):
        make_request(ChatRequest, given | {"seed": 4.5})


@given(st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=7))
def test_of_any_order_no_text_is_lost_and_no_two_replies_follow_each_other(
    roles: list[str],
) -> None:
    roles = [*roles, "user"]
    messages = [{"role": role, "content": f"t{at}"} for at, role in enumerate(roles)]
    request = make_request(ChatRequest, {"messages": messages})
    found = [role for role, _ in request.turns]
    assert found[0] == found[-1] == "user"
    assert "assistant assistant" not in " ".join(found)
    texts = [request.system, *(text for _, text in request.turns)]
    assert [t for text in texts if text for t in text.split()] == [m["content"] for m in messages]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"city": "</tool_call>", "days": 2}', {"city": "</tool_call>", "days": 2}),
        ('{"city": "a \\" </tool_call> <tool_call>"}', {"city": 'a " </tool_call> <tool_call>'}),
        (
            '{"days": NaN, "low": -Infinity, "high": 1e999}',
            {"days": None, "low": None, "high": None},
        ),
        ('{"city": "\\ud83d"}', {"city": "\N{REPLACEMENT CHARACTER}"}),
        ('{"city": "\\ud83d\\ude00"}', {"city": "\N{GRINNING FACE}"}),
        ('"{\\"city\\": \\"Oslo\\"}"', {"city": "Oslo"}),
        ("false", None),
        ('"Oslo"', None),
        ('{"city": "Os', None),
    ],
)
def test_arguments_of_a_call_are_strict_json_of_an_object(
    written: str, arguments: dict[str, Any] | None
) -> None:
    reply = f'Wait.\n<tool_call>\n{{"name": "weather", "arguments": {written}}}\n</tool_call> Bye.'
    for size in (1, 3, len(reply)):
        parser, text = CallParser({"weather"}, 0), ""
        for at in range(0, len(reply), size):
            text += parser.push(reply[at : at + size])[0]
        text += parser.finish()[0]
        if arguments is None:
            assert (text.split("<")[1:], parser.calls) == (reply.split("<")[1:], [])
            continue
        (call,) = parser.calls
        assert json.loads(call.arguments, parse_constant=pytest.fail) == arguments
        assert text.split() == ["Wait.", "Bye."] or text == "Wait.Bye."


@pytest.mark.parametrize("size", range(1, len(CALL) - 12, 3))
@pytest.mark.parametrize("bare", [False, True])
def test_half_a_call_is_never_a_text(size: int, bare: bool) -> None:
    written = CALL[12:-13] if bare else f"Wait.\n{CALL}"
    half = written[: size + (0 if bare else 7)]
    parser = CallParser({"weather"}, 0)
    shown = parser.push(half)[0] + parser.finish(is_short=True)[0]
    if parser.calls:  # it was whole, but for its end
        assert json.loads(parser.calls[0].arguments) == {"city": "Oslo"}
    assert shown.strip() == ("" if bare else "Wait.")


def test_a_call_that_the_limit_cuts_is_not_shown_and_a_stop_string_in_one_cuts_nothing(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most in range(5, 20, 4):
        (choice,) = server.ask(ASKED, tools=[WEATHER], tool_choice="required", max_tokens=most)[
            "choices"
        ]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    script(monkeypatch, [f"Let me look.\n{CALL}", f"Oslo?\n{CALL}\nIt is", "Snow."])
    (choice,) = server.ask(ASKED, tools=[WEATHER], stop=['Oslo"', "x"])["choices"]
    assert choice["message"]["content"] == "Let me look."
    assert choice["finish_reason"] == "tool_calls"
    (choice,) = server.ask(ASKED, tools=[WEATHER], stop=["It"])["choices"]
    assert choice["message"]["content"].strip() == "Oslo?"
    assert len(choice["message"]["tool_calls"]) == 1


_HALF = '"role": "user", "content": "cut \\ud83d", "\\ud83d": null'


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/v1/chat/completions", f'"messages": [{{{_HALF}}}], "max_tokens": 2'),
        ("/v1/responses", '"input": "\\ud83d", "instructions": "\\ude00", "max_output_tokens": 2'),
    ],
)
def test_half_characters_are_replaced_and_endless_numbers_refused(
    server: Served, path: str, own: str
) -> None:
    assert server.client.post(path, content=f"{{{own}}}").status_code == 200
    for number in ("NaN", "Infinity", "-1e999"):
        response = server.client.post(path, content=f'{{{own}, "temperature": {number}}}')
        assert number in refusal(response)["message"]


def test_a_refusal_is_one_short_line_whatever_a_field_is_called(server: Served) -> None:
    """Also for a field that this server calls by another name inside."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": 1.0}}
    for fields in ({"response_format": form}, {"sirchat": {"a\n\u001b[2J": "b", "x" * 10**6: 1}}):
        error = refusal(server.post(ASKED, **fields))
        for text in (error["message"], error["param"]):
            assert len(text) <= 1000
            assert text.isprintable()


def test_a_client_that_leaves_within_its_request_is_no_failure(server: Served) -> None:
    events = iter([{"type": "http.request", "body": b"{", "more_body": True}])
    head = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}

    async def receive() -> Any:
        return next(events, {"type": "http.disconnect"})

    async def send(event: Any) -> None:
        assert event.get("status", 499) == 499

    asyncio.run(server.server.app(head | {"headers": [(b"host", b"localhost")]}, receive, send))
