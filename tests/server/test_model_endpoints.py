"""The endpoints about the model itself, embeddings, and Ollama's requests that are no chats."""

from __future__ import annotations

import json
import struct
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from chatting import tiny
from serving import CHAT, Served, refusal, served, system, told, user
from sirchat.models.encoder import Encoder

ANNA = "My name is Anna."


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(policy="full", max_new_tokens=12) as one:
        yield one


def last_states(text: str) -> torch.Tensor:
    """What transformers finds after the last layer, before the last norm: [m, d]."""
    model, states = tiny(), list[torch.Tensor]()
    layer = model.module.model.layers[-1]
    hook = layer.register_forward_hook(
        lambda *given: states.append(given[2][0] if isinstance(given[2], tuple) else given[2])
    )
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    with torch.no_grad(), hook:
        model.module(torch.tensor([ids]))
    return states[0].view(len(ids), -1)


def test_a_model_is_found_by_its_name_with_and_without_v1(server: Served) -> None:
    for path in ("/v1/models/tiny", "/models/tiny"):
        found = server.client.get(path).json()
        assert (found["id"], found["object"]) == ("tiny", "model")
    assert refusal(server.client.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    body = {"messages": [user(ANNA)], "seed": 1}
    replies = [server.client.post(path, json=body).json() for path in (CHAT, CHAT[3:])]
    assert replies[0]["choices"] == replies[1]["choices"]


def test_embeddings_are_the_vectors_by_which_recall_finds_sentences(server: Served) -> None:
    texts, encoder = [ANNA, "It rains."], tiny().encoder
    found = server.send("/v1/embeddings", model="tiny", input=texts)
    for text, item in zip(texts, found["data"], strict=True):
        ids = tiny().tokenizer.encode(text, add_special_tokens=False)
        wanted = tiny().encode(ids) if encoder.layers else last_states(text).mean(0)
        wanted = wanted / wanted.norm()
        assert item["embedding"] == pytest.approx(wanted.tolist(), abs=1e-5)
    packed = server.send("/v1/embeddings", input=ANNA, encoding_format="base64")["data"][0]
    numbers = struct.unpack(f"<{len(wanted)}f", b64decode(packed["embedding"]))
    assert list(numbers) == pytest.approx(found["data"][0]["embedding"], abs=1e-6)
    assert found["usage"]["prompt_tokens"] == sum(
        len(tiny().tokenizer.encode(text, add_special_tokens=False)) for text in texts
    )
    as_ollama = server.send("/api/embed", model="tiny:latest", input=texts)["embeddings"]
    assert as_ollama == [item["embedding"] for item in found["data"]]
    one = server.send("/api/embeddings", model="tiny", prompt=ANNA)["embedding"]
    assert one == as_ollama[0]


def test_without_an_encoder_a_vector_is_the_mean_of_the_last_states() -> None:
    with served(replace(tiny(), encoder=Encoder())) as server:
        found = server.send("/v1/embeddings", input=ANNA)
        assert "last layer" in found["sirchat"]["vectors"]
        wanted = last_states(ANNA).mean(0)
        given = found["data"][0]["embedding"]
        assert given == pytest.approx((wanted / wanted.norm()).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [1, 2, 3]}, "input"),  # ids of a tokenizer that is not this model's
        ({"input": []}, "input"),
        ({"input": ANNA, "dimensions": 7}, "dimensions"),
        ({"input": "word " * 20_000}, "input"),
    ],
)
def test_embeddings_that_can_t_be_had_are_refused(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    error = refusal(server.client.post("/v1/embeddings", json=fields))
    assert error["param"].startswith(param)


def test_ollama_cuts_a_long_text_unless_told_not_to(server: Served) -> None:
    long = "word " * 20_000
    body = {"model": "tiny", "input": long}
    assert server.send("/api/embed", **body)["prompt_eval_count"] == tiny().context_length
    refused = server.client.post("/api/embed", json=body | {"truncate": False})
    assert "context length" in refused.json()["error"]


def test_ollama_is_told_what_the_model_is(server: Served) -> None:
    shown = server.send("/api/show", model="tiny")
    kind = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{kind}.context_length"] == tiny().context_length
    assert {"completion", "embedding"} <= set(shown["capabilities"])
    assert shown["details"]["family"] == kind
    for path in ("/api/tags", "/api/ps"):
        (model,) = server.client.get(path).json()["models"]
        assert model["name"] == model["model"] == "tiny"
        assert model["size"] > 1000
    error = server.client.post("/api/show", json={"model": "llama3"})
    assert (error.status_code, type(error.json()["error"])) == (404, str)


def test_ollama_generates_as_a_chat_does(server: Served) -> None:
    body = {"model": "tiny", "prompt": ANNA, "system": "Be kind.", "options": {"num_gpu": 1}}
    whole = server.send("/api/generate", stream=False, **body)
    text = told([system("Be kind."), user(ANNA)], max_new_tokens=12)
    assert (whole["response"], whole["done"]) == (text, True)
    assert "message" not in whole
    lines = [
        json.loads(line)
        for line in server.client.post("/api/generate", json=body).text.split("\n")[:-1]
    ]
    assert "".join(line["response"] for line in lines) == text
    raw = server.send("/api/generate", model="tiny", prompt="My dog is", raw=True, stream=False)
    plain = server.send("/v1/completions", prompt="My dog is")
    assert raw["response"] == plain["choices"][0]["text"]


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_ollama_clients_load_and_unload_by_asking_nothing(server: Served, path: str) -> None:
    answer = server.send(path, model="tiny", keep_alive=0)
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert server.client.post(path, json={"model": "gone"}).status_code == 404


def test_only_pages_of_sites_that_were_named_may_ask() -> None:
    site, other = {"Origin": "https://chat.example"}, {"Origin": "https://evil.example"}
    with served(max_new_tokens=2, cors=["https://chat.example"], key="key") as server:
        asked = {"Access-Control-Request-Method": "POST"}
        allowed = server.client.options(CHAT, headers=site | asked)
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        assert (
            "access-control-allow-origin"
            not in server.client.options(CHAT, headers=other | asked).headers
        )
        key = {"Authorization": "Bearer key"}
        said = server.client.post(CHAT, json={"messages": [user(ANNA)]}, headers=site | key)
        assert said.headers["access-control-allow-origin"] == "https://chat.example"
        refused = server.client.post(CHAT, json={"messages": [user(ANNA)]}, headers=other | key)
        assert "--cors" in refusal(refused, 403)["message"]
