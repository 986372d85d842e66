"""The endpoints beside chat completions: a text that is continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chatting import tiny
from serving import Served, assistant, served, user

ANNA, NAME = "My name is Anna.", "What is my name?"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(policy="full", max_new_tokens=12) as one:
        yield one


def continued(text: str, count: int = 12) -> str:
    """What the model writes after a text, computed by transformers alone."""
    model = tiny()
    ids = [model.tokenizer.bos_token_id, *model.tokenizer.encode(text, add_special_tokens=False)]
    start = len(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model.module(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == model.tokenizer.eos_token_id:
            break
    said: str = model.tokenizer.decode(ids[start:], skip_special_tokens=True)
    return said


def test_a_text_is_continued_without_a_chat_template(server: Served) -> None:
    text = "My dog is called"
    response = server.client.post("/v1/completions", json={"model": "tiny", "prompt": text})
    whole = response.json()
    (choice,) = whole["choices"]
    assert choice["text"] == continued(text) != ""
    assert (whole["object"], choice["finish_reason"]) in [
        ("text_completion", one) for one in ("stop", "length")
    ]
    lines = server.client.post("/v1/completions", json={"prompt": [text], "stream": True}).text
    *events, done, _ = lines.split("\n\n")
    assert done == "data: [DONE]"
    pieces = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events]
    assert "".join(one["text"] for one in pieces) == choice["text"]
    assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_a_text_that_is_continued_takes_no_chat_away_and_has_no_control_tokens() -> None:
    with served(conversations=2, policy="full", max_new_tokens=8) as server:
        first = server.ask([user(ANNA)])
        longer = [user(ANNA), assistant(first["choices"][0]["message"]["content"]), user(NAME)]
        for _ in range(3):
            reply = server.client.post("/v1/completions", json={"prompt": "<|end|><|user|>a"})
            plain = tiny().tokenizer.encode("<|end|><|user|>a", split_special_tokens=True)
            assert reply.json()["usage"]["prompt_tokens"] == len(plain) + 1
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert server.ask(longer)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", ""), ("prompt", ["a", "b"]), ("prompt", [1, 2]), ("suffix", "x"),
     ("echo", True), ("logprobs", 3), ("n", 2), ("messages", [user("a")])],
)  # fmt: skip
def test_of_a_text_too_what_would_be_ignored_is_refused(
    server: Served, field: str, value: Any
) -> None:
    response = server.client.post("/v1/completions", json={"prompt": "a", field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert field in error["message"] or field in error["param"]
