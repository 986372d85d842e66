"""Reasoning comes apart from the answer on every endpoint, and calls in the form of their model."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from by_heart import ANSWER, GREETING, NAME, QUESTION, SHAPES, THOUGHT, teach, tokenizer, user
from chatting import smallest
from serving import CHAT, Served, cached, served
from sirchat.models.model import wrap_model
from sirchat.server.replies import ReplyEnd, ReplyText
from sirchat.server.responses import ResponsesSerializer
from template_shapes import template, with_template

_USAGE = ["prompt_tokens", "prompt_tokens_details", "completion_tokens", "total_tokens"]
_USAGE += ["completion_tokens_details"]
_MADE = ["gpt-oss", "deepseek", "qwen3"][: 3 if os.environ.get("SIRCHAT_ATTACK") else 2]


@pytest.fixture(scope="module", params=_MADE)
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    shape = SHAPES[request.param]
    model = wrap_model("heart", teach(shape), tokenizer(shape))
    with served(model, temperature=0, max_new_tokens=60) as server:
        yield server


def test_usage_counts_the_reasoning_and_the_answer_sent_back_goes_on(server: Served) -> None:
    reply = server.ask([user(QUESTION)], model="heart")
    message, usage = reply["choices"][0]["message"], reply["usage"]
    assert message == {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len(THOUGHT.split()) < thought < usage["completion_tokens"]
    deltas = [c["choices"][0]["delta"] for c in server.chunks([user(QUESTION)], model="heart")]
    for field in ("content", "reasoning_content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == message[field]
    for sent in (message, {"role": "assistant", "content": ANSWER}):
        after = server.ask([user(QUESTION), sent, user(NAME)], model="heart")
        assert after["choices"][0]["message"]["content"] == GREETING
        assert cached(after) >= reply["sirchat"]["seen"]


def test_a_reply_that_is_cut_in_its_reasoning_has_no_answer(server: Served) -> None:
    reply = server.ask([user(QUESTION)], model="heart", max_tokens=7)
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert THOUGHT.startswith(choice["message"]["reasoning_content"])


def test_stop_strings_are_of_the_answer(server: Served) -> None:
    for stop, answer in ((THOUGHT[:4], ANSWER), ("Paris", "It is ")):
        message = server.ask([user(QUESTION)], model="heart", stop=stop)["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == (answer, THOUGHT)


def test_a_response_has_an_item_of_reasoning_and_events_build_it_up(server: Served) -> None:
    lines = server.client.post("/v1/responses", json={"input": QUESTION, "stream": True}).text
    events = [json.loads(one[6:]) for one in lines.split("\n") if one.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith("_text.delta"):
            kind = event["type"].split(".")[1]
            texts[kind] = texts.get(kind, "") + event["delta"]
    assert texts == {"reasoning_text": THOUGHT, "output_text": ANSWER}
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    response = events[-1]["response"]
    assert response["output"] == done
    thought, said = done
    assert [(part["type"], part["text"]) for part in (*thought["content"], *said["content"])] == [
        *texts.items()
    ]
    assert (thought["type"], thought["summary"], said["type"]) == ("reasoning", [], "message")
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    items = [user(QUESTION), thought, said, user(NAME)]
    assert server.send("/v1/responses", input=items)["output"][-1]["content"][0]["text"] == GREETING


def test_a_response_has_an_item_for_each_reasoning() -> None:
    async def parts() -> AsyncIterator[ReplyText | ReplyEnd]:
        for thinking, text in (("a", ""), ("", "b"), ("c", ""), ("d", ""), ("", "e")):
            yield ReplyText(text, thinking=thinking)
        yield ReplyEnd("stop", dict.fromkeys(_USAGE, 0), {})

    async def told(*, streamed: bool) -> Any:
        shape = ResponsesSerializer({"input": "x"}, "m")
        if not streamed:
            return (await shape.collect_response(parts()))["output"]
        lines = [event.split("data: ")[1] async for event in shape.events(parts())]
        return json.loads(lines[-1])["response"]["output"]

    for streamed in (False, True):
        output = asyncio.run(told(streamed=streamed))
        texts = [(item["type"], item["content"][0]["text"]) for item in output]
        if streamed:
            assert texts == [("reasoning", "a"), ("message", "be"), ("reasoning", "cd")]
        else:
            assert texts == [("reasoning", "acd"), ("message", "be")]
        assert len({item["id"] for item in output}) == len(output)


@pytest.fixture(scope="module")
def switchable() -> Iterator[Served]:
    """A server of a model whose template reasons unless that is switched off."""
    model = smallest("switchable", with_template(template("qwen3")))
    with served(model, max_new_tokens=2) as server:
        yield server


_OFF: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"reasoning_effort": "none"}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    ("/v1/responses", {"reasoning": {"effort": "none"}}),
    ("/v1/messages", {"thinking": {"type": "disabled"}, "max_tokens": 2}),
]
_READ = ("prompt_tokens", "input_tokens")
_AS_IT_IS: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, {"reasoning_effort": value}) for value in ("medium", "high")),
    *((CHAT, {}), (CHAT, {"chat_template_kwargs": {"enable_thinking": True}})),
    ("/v1/responses", {"reasoning": {"effort": "low", "summary": "auto"}}),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}, "max_tokens": 2}),
]


@pytest.mark.parametrize(
    ("path", "fields", "is_off"),
    [*((*one, True) for one in _OFF), *((*one, False) for one in _AS_IT_IS)],
)
def test_a_request_switches_reasoning_off_by_the_field_of_its_kind(
    switchable: Served, path: str, fields: dict[str, Any], is_off: bool
) -> None:
    asked: dict[str, Any] = {"input": "Hi."} if "responses" in path else {"messages": [user("Hi.")]}
    asked |= {"stream": False}
    response = switchable.client.post(path, json={"model": "switchable", **asked, **fields})
    assert response.status_code == 200, response.text
    assert "no switch" not in response.headers.get("X-Sirchat-Note", "")
    found = response.json()
    usage = found.get("usage", found)
    read = next(usage[name] for name in _READ if name in usage)
    read += usage.get("cache_read_input_tokens", 0)  # which Anthropic counts apart
    encode = partial(with_template("").encode, add_special_tokens=False)
    ids = encode("<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n")
    assert read == len(ids) + is_off * len(encode("<think>\n\n</think>\n\n"))
