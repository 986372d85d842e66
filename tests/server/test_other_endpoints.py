"""The endpoints beside chat completions: texts that are continued, responses, Ollama's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chatting import tiny
from serving import Served, assistant, cached, refusal, said, served, system, told, user
from sirchat.server.requests import ChatMessage, RequestError
from sirchat.server.responses import KeptResponses

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
        ("text_completion", reason) for reason in ("stop", "length")
    ]
    lines = server.client.post("/v1/completions", json={"prompt": [text], "stream": True}).text
    *events, done, _ = lines.split("\n\n")
    assert done == "data: [DONE]"
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_a_text_that_is_continued_takes_no_chat_away_and_has_no_control_tokens() -> None:
    with served(conversations=2, policy="full", max_new_tokens=8) as server:
        first = server.ask([user(ANNA)])
        longer = [user(ANNA), assistant(said(first)), user(NAME)]
        for _ in range(3):
            reply = server.client.post("/v1/completions", json={"prompt": "<|end|><|user|>a"})
            plain = tiny().tokenizer.encode("<|end|><|user|>a", split_special_tokens=True)
            assert reply.json()["usage"]["prompt_tokens"] == len(plain) + 1
            assert cached(reply.json()) == 0
        assert server.ask(longer)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def respond(server: Served, said: str, /, **fields: Any) -> Any:
    """The JSON of a response, which must have no error."""
    response = server.client.post("/v1/responses", json={"input": said, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_response_continues_another_and_reads_only_what_is_new(server: Served) -> None:
    first = respond(server, ANNA, instructions="Be kind.", model="tiny")
    (said,) = first["output"]
    text = told([system("Be kind."), user(ANNA)], max_new_tokens=12)
    assert (first["object"], first["status"], first["error"]) == ("response", "completed", None)
    assert (said["role"], said["content"][0]["text"]) == ("assistant", text)
    names = {"instructions": "Be kind.", "previous_response_id": first["id"]}
    second = respond(server, NAME, **names)
    longer = [system("Be kind."), user(ANNA), assistant(text), user(NAME)]
    assert second["output"][0]["content"][0]["text"] == told(longer, max_new_tokens=12)
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == first["sirchat"]["seen"]
    # The same response can be continued in several ways, and without instructions.
    other = respond(server, ANNA, previous_response_id=first["id"])
    plain = [user(ANNA), assistant(text), user(ANNA)]
    assert other["output"][0]["content"][0]["text"] == told(plain, max_new_tokens=12)


def test_a_response_may_be_given_all_messages_as_it_sent_them(server: Served) -> None:
    first = respond(server, ANNA)
    part = {"type": "input_text", "text": ANNA}
    items = [{"role": "user", "content": [part]}, *first["output"], user(NAME)]
    second = server.client.post("/v1/responses", json={"input": items}).json()
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == first["sirchat"]["seen"]
    cut = respond(server, ANNA, max_output_tokens=2)
    assert cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_response_comes_in_events_that_build_it_up(server: Served) -> None:
    lines = server.client.post("/v1/responses", json={"input": ANNA, "stream": True}).text
    events = []
    for block in lines.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(event.get("delta", "") for event in events)
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == text == told([user(ANNA)], max_new_tokens=12)
    assert respond(server, NAME, previous_response_id=final["id"])["status"] == "completed"


def test_a_response_that_is_not_there_can_t_be_continued(server: Served) -> None:
    unstored = respond(server, ANNA, store=False)["id"]
    for ident in ("resp_0", unstored):
        body = {"input": NAME, "previous_response_id": ident}
        error = refusal(server.client.post("/v1/responses", json=body), 404)
        assert (error["param"], error["type"]) == ("previous_response_id", "invalid_request_error")


def test_the_oldest_responses_are_dropped_when_there_are_too_many() -> None:
    kept = KeptResponses()
    for number in range(1002):
        kept.add(str(number), [], [ChatMessage(role="user", content="a")])
    assert kept.messages("1001")
    with pytest.raises(RequestError):
        kept.messages("1")


def test_a_chat_in_ollamas_shape_is_the_same_chat(server: Served) -> None:
    messages = [system("Be kind."), user(ANNA)]
    body: dict[str, Any] = {"model": "tiny:latest", "messages": messages, "keep_alive": "5m"}
    whole = server.client.post("/api/chat", json=body | {"stream": False}).json()
    text = told(messages, max_new_tokens=12)
    assert whole["message"] == {"role": "assistant", "content": text}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("tiny", True, "stop")
    assert whole["eval_count"] > 0 < whole["prompt_eval_count"]
    assert whole["total_duration"] >= whole["eval_duration"] + whole["prompt_eval_duration"] > 0
    response = server.client.post("/api/chat", json=body)
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line["message"]["content"] for line in lines) == text
    longer = [*messages, whole["message"], user(NAME)]
    assert server.ask(longer)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_options_of_ollama_have_their_effect(server: Served) -> None:
    def ask(**options: Any) -> Any:
        body = {"model": "tiny", "messages": [user(ANNA)], "stream": False, "options": options}
        response = server.client.post("/api/chat", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    assert (ask(num_predict=2)["eval_count"], ask(num_predict=2)["done_reason"]) == (2, "length")
    assert ask(num_predict=-1)["done_reason"] == "stop"
    text = ask()["message"]["content"]
    assert ask(stop=[text[3:5]])["message"]["content"] == text[: text.index(text[3:5])]
    assert ask(repeat_penalty=1.0, min_p=0.0, top_p=1.0)["message"]["content"] == text
    hot = {"temperature": 5.0, "top_k": 50}
    assert len({ask(**hot, seed=n)["message"]["content"] for n in (1, 1, 2)}) == 2
    small = server.client.post(
        "/api/chat",
        json={
            "model": "tiny", "stream": False, "messages": [user(ANNA)],
            "options": {"num_ctx": 100}, "sirchat": {"policy": "sink"},
        },
    )  # fmt: skip
    assert small.json()["sirchat"]["budget"] == 100


def test_a_format_can_be_named_in_each_shape(server: Served) -> None:
    schema = {"type": "object", "maxProperties": 0}
    form = {"type": "json_schema", "name": "empty", "schema": schema, "strict": True}
    response = respond(server, ANNA, text={"format": form})
    assert response["output"][0]["content"][0]["text"] == "{}"
    assert response["text"]["format"] == form
    body = {"model": "tiny", "stream": False, "messages": [user(ANNA)]}
    said = [
        server.client.post("/api/chat", json=body | {"format": form}).json()["message"]["content"]
        for form in (schema, "json")
    ]
    assert said[0] == "{}"
    assert said[1].startswith("{")


def test_clients_of_ollama_find_the_model_and_a_version(server: Served) -> None:
    (model,) = server.client.get("/api/tags").json()["models"]
    assert (model["name"], model["model"]) == ("tiny", "tiny")
    assert server.client.get("/api/version").json()["version"]
