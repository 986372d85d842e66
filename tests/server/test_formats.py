"""Replies in a format: JSON, by a schema or without, with the model's own probabilities."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from chatting import session, smallest
from json_replies import PERSON, check_person
from serving import Served, assistant, refusal, said, served, server_of_module, told, user
from sirchat.chat.formats import ModelFormats
from sirchat.engine.sampling import Sampler, Sampling, TokenFilter
from sirchat.server.fields import RequestError, make_request
from sirchat.server.replies import reply_format
from sirchat.server.requests import ChatRequest
from sirchat.text.reply_parts import Marks
from template_shapes import template, tool_tiny, with_template

MANY = int(os.environ.get("SIRCHAT_ATTACK", "5"))
FORMATS = ModelFormats()
ASKED = [user("My name is Anna, and I have 2 dogs.")]


def by_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}


server = server_of_module(policy="full", max_new_tokens=90)


def test_a_reply_is_as_the_schema_says_whole_or_in_a_stream(server: Served) -> None:
    reply = server.ask(ASKED, response_format=by_schema(PERSON))
    (choice,) = reply["choices"]
    check_person(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    chunks = server.chunks(ASKED, response_format=by_schema(PERSON))
    pieces = [chunk["choices"][0] for chunk in chunks]
    text = "".join(piece["delta"].get("content", "") for piece in pieces)
    assert text == choice["message"]["content"]
    hot = {"temperature": 3.0, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.3}
    for seed in range(3):
        check_person(server.reply(ASKED, response_format=by_schema(PERSON), seed=seed, **hot))
    # The next reply is free again.
    longer = [*ASKED, assistant(text), user("Thanks.")]
    assert server.reply(longer) == told(longer, max_new_tokens=90)


def test_a_model_whose_highest_ids_are_added_tokens_replies_in_json() -> None:
    tokenizer = with_template(template("chatml"))
    tokenizer.add_tokens(["</aside>"])  # as </think> of Qwen 3, no special token
    with served(smallest("tiny", tokenizer), policy="full", max_new_tokens=40) as server:
        text = server.reply(ASKED, response_format={"type": "json_object"})
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        for token in (added[0], added[-1]):  # the last one is not special
            control = server.ask(ASKED, response_format=by_schema({"enum": [token]}))
            assert json.loads(said(control)) == token
    assert text.startswith("{")


def test_a_format_that_can_t_be_kept_is_refused(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"type": "json_object"}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        error = refusal(server.post(ASKED, response_format=form))
        assert "pip install 'sirchat[server]'" in error["message"]
    monkeypatch.setattr("sirchat.text.template.Template.marks", Marks(opens_in_header=True))
    asked = [user("Something that was not asked before.")]
    assert "reasoning" in refusal(server.post(asked, response_format=form))["message"]


# Texts that a tokenizer, a grammar or JSON may take for something else.
_TEXTS = st.one_of(
    st.sampled_from(
        ["<|end|>", "a <|user|> b", "</tool_call>", "\\", '"', "%json", "\n", "\U0001f600"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
_PLAIN = st.one_of(
    st.builds(lambda texts: {"enum": texts}, st.lists(_TEXTS, min_size=1, max_size=3)),
    st.builds(lambda text: {"const": text}, _TEXTS),
    st.builds(lambda text: {"const": {text: [text, None]}}, _TEXTS),
    st.builds(lambda text: {"type": "string", "pattern": f"^{re.escape(text)}$"}, _TEXTS),
    st.integers(0, 3).map(lambda n: {"type": "string", "minLength": n, "maxLength": n + 2}),
    st.builds(
        lambda least, size: {"type": "integer", "minimum": least, "maximum": least + size},
        st.integers(-(10**20), 10**20), st.integers(-1, 99),
    ),
    st.sampled_from(
        [
            *({"type": kind} for kind in ("null", "boolean", "number", ["string", "null"])),
            *({"type": "string", "format": kind} for kind in ("date", "uuid", "password")),
            {"$ref": "#/$defs/node"}, {"not": {}}, {"uniqueItems": True, "maxItems": 1},
            {"minimum": 10**400}, {"maximum": 10**20}, {"$ref": "#/nowhere"}, {"pattern": "("},
        ]
    ),
)  # fmt: skip


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(_TEXTS, inner, max_size=3)
    return st.one_of(
        named.map(lambda found: {"type": "object", "properties": found, "required": [*found]}),
        named.map(
            lambda found: {"type": "object", "properties": found, "additionalProperties": False}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda found: {"anyOf": found}),
        inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2}),
        inner.map(lambda item: {"type": "array", "prefixItems": [item], "items": False}),
    )


_SCHEMAS = st.recursive(_PLAIN, _larger, max_leaves=6).map(
    lambda schema: schema | {"$defs": {"node": {"enum": ["<|end|>", None]}}}
)
_NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"<|end|>": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["<|end|>"],
            "additionalProperties": False,
        }
    },
}


def _write(form: TokenFilter, choose: random.Random, ends: Any, tokenizer: Any) -> str | None:
    """What a model may say in a format, which ends as soon as it can; None if it goes on long."""
    ids: list[int] = []
    closers = tokenizer.convert_tokens_to_ids(['"', "}", "]"])
    while len(ids) < 300:
        mask = form(ids)
        if mask[list(ends)].any():
            return str(tokenizer.decode(ids))
        may = [i for i in closers if mask[i]] if len(ids) > 20 else []
        ids.append(choose.choice(may or torch.nonzero(mask).flatten().tolist()))
    return None


@settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck))
@example(_NODE, 0)
@example({"type": "integer", "minimum": -(10**20), "maximum": -(10**20) + 35}, 0)
@given(_SCHEMAS, st.integers(0, 99))
def test_a_reply_by_any_schema_is_valid_json_or_the_schema_is_refused(
    schema: Any, seed: int
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    model = tool_tiny()
    own = session(model, policy="full")
    try:
        asked = make_request(ChatRequest, {"messages": ASKED, "response_format": by_schema(schema)})
        form = reply_format(FORMATS, asked, [], own)
        assert form is not None
    except RequestError as error:
        event(f"refused with {error.status}")
        assume(error.status == 400)
        return
    ends = own.template.end_ids(None)
    said = _write(form, random.Random(seed), ends, model.tokenizer)
    event("long" if said is None else "ended")
    if said is not None:
        kept = re.sub('"(uniqueItems|propertyNames)": ', '"other": ', json.dumps(schema))
        jsonschema.validate(json.loads(said, parse_constant=pytest.fail), json.loads(kept))


CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "<|end|>"]}}}
STRICT: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": CITY | {"required": ["city"]}},
}


def begun(text: str) -> Any:
    """What samples the ids of a text first, and then what the model says."""
    ids = tool_tiny().tokenizer.encode(text, add_special_tokens=False)

    def make(sampling: Sampling, attempt: int = 0, allowed: Any = None) -> Sampler:
        def forced(said: Any) -> Any:
            mask = allowed(said)
            if len(said) >= len(ids):
                return mask
            assert mask[ids[len(said)]], (text, said)
            return torch.arange(len(mask)) == ids[len(said)]

        return Sampler(sampling, attempt, forced)

    return make


@pytest.mark.parametrize(("text", "parallel"), [("Let me look.\n", False), ("a < b <tool> ", True)])
def test_a_strict_call_is_by_its_schema_from_its_mark_on(
    text: str, parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirchat.chat.conversation.Sampler", begun(f"{text}<tool_call>"))
    with served(tool_tiny(), policy="full", max_new_tokens=100) as own:
        for stream in (False, True):
            fields = {"tools": [STRICT], "parallel_tool_calls": parallel, "temperature": 1.5}
            if stream:
                pieces = [chunk["choices"][0] for chunk in own.chunks(ASKED, **fields)]
                calls = [c for piece in pieces for c in piece["delta"].get("tool_calls", ())]
            else:
                (choice,) = own.ask(ASKED, **fields)["choices"]
                calls = choice["message"]["tool_calls"]
                assert (choice["message"]["content"] or "").startswith(text.strip())
            for call in calls:
                assert call["function"]["name"] == "f"
                assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "<|end|>")
            assert calls


def test_with_strict_tools_a_reply_without_calls_is_what_it_was() -> None:
    with served(tool_tiny(), policy="full", max_new_tokens=30) as own:
        loose = json.loads(json.dumps(STRICT).replace("true", "null"))
        assert own.reply(ASKED, tools=[STRICT]) == own.reply(ASKED, tools=[loose])


@pytest.mark.parametrize("begin", ["<tool_call>", "{", ""])
def test_a_reply_with_tools_and_a_format_is_calls_or_json(
    begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirchat.chat.conversation.Sampler", begun(begin))
    with served(tool_tiny(), policy="full", max_new_tokens=90) as own:
        (choice,) = own.ask(ASKED, tools=[STRICT], response_format=by_schema(PERSON))["choices"]
        for call in choice["message"].get("tool_calls", ()):
            assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "<|end|>")
        if choice["finish_reason"] == "stop":
            check_person(choice["message"]["content"])
        else:
            assert choice["finish_reason"] == "tool_calls"
