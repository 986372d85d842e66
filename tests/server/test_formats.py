"""Replies in a format: JSON, by a schema or without, with the model's own probabilities."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chatting import session
from serving import Served, assistant, refusal, served, told, user
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.text.reply_marks import Marks

ASKED = [user("My name is Anna, and I have 2 dogs.")]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "dogs": {"type": "integer", "maximum": 99, "minimum": 0},
        "mood": {"enum": ["good", "bad"]},
    },
    "required": ["name", "dogs", "mood"],
    "additionalProperties": False,
}


def by_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(policy="full", max_new_tokens=90) as one:
        yield one


def check(text: str) -> None:
    """Check that a text is a person as the schema says, in one line."""
    found = json.loads(text)
    assert text == json.dumps(found, ensure_ascii=False)
    assert list(found) == ["name", "dogs", "mood"]
    assert isinstance(found["name"], str)
    assert 0 <= found["dogs"] <= 99
    assert found["mood"] in ("good", "bad")


def test_a_reply_is_as_the_schema_says_whole_or_in_a_stream(server: Served) -> None:
    reply = server.ask(ASKED, response_format=by_schema(PERSON))
    (choice,) = reply["choices"]
    check(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    chunks = server.chunks(ASKED, response_format=by_schema(PERSON))
    pieces = [chunk["choices"][0] for chunk in chunks]
    text = "".join(piece["delta"].get("content", "") for piece in pieces)
    assert text == choice["message"]["content"]
    hot = {"temperature": 3.0, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.3}
    for seed in range(3):
        check(server.reply(ASKED, response_format=by_schema(PERSON), seed=seed, **hot))
    # The next reply is free again.
    longer = [*ASKED, assistant(text), user("Thanks.")]
    assert server.reply(longer) == told(longer, max_new_tokens=90)


def test_a_reply_is_some_json_object(server: Served) -> None:
    text = server.reply(ASKED, response_format={"type": "json_object"}, max_tokens=40)
    assert text.startswith("{")
    with served(policy="full") as own:
        schema = {"type": "object", "maxProperties": 0}
        assert own.reply(ASKED, response_format=by_schema(schema)) == "{}"


def test_the_log_probabilities_are_those_of_the_model_without_the_format(server: Served) -> None:
    form = by_schema(PERSON)
    choice = server.ask(ASKED, response_format=form, logprobs=True)["choices"][0]
    slow = session(policy="full")
    list(slow.read_user(ASKED[0]["content"]))
    (score,) = slow.score_continuations([choice["message"]["content"]])
    found = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert sum(found) == pytest.approx(sum(score.log_probabilities), rel=0.05)
    assert min(found) < -1  # it would not have said so on its own


def test_a_format_that_can_t_be_kept_is_refused(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"type": "json_object"}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        error = refusal(server.post(ASKED, response_format=form))
        assert "pip install 'sirchat[server]'" in error["message"]
    monkeypatch.setattr("sirchat.text.template.Template.marks", Marks(is_open=True))
    assert "reasoning" in refusal(server.post(ASKED, response_format=form))["message"]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(3.0, 2, 0.1, repetition_penalty=1.5)])
def test_the_sampler_chooses_only_what_is_allowed_after_its_own_choices(sampling: Sampling) -> None:
    asked: list[list[int]] = []

    def allowed(ids: Any) -> Any:
        asked.append(list(ids))
        return torch.tensor([number in (3, 5 + len(ids)) for number in range(10)])

    sampler = Sampler(sampling, allowed=allowed)
    logits = torch.tensor([9.0, 8, 7, -50, 0, 1, 2, 3, 4, 5])
    picked = [sampler.pick(logits, lambda _: [1, 2], at) for at in range(4)]
    assert picked == [5, 6, 7, 8]
    assert asked == [picked[:n] for n in range(4)]
