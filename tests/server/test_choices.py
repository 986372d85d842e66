"""Several replies and prompts in a request, and what is told or asked of single tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chatting import tiny
from serving import Message, Served, assistant, cached, refusal, said, served, system, user
from template_shapes import WEATHER, script, tool_tiny

TEXT = "/v1/completions"
CHAT = [user("My name is Anna."), assistant("Hello, Anna!"), user("Say something.")]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(policy="full", max_new_tokens=12) as one:
        yield one


def texts(reply: Any) -> list[str]:
    return [one["message"]["content"] for one in reply["choices"]]


def test_several_replies_are_those_of_as_many_requests(server: Served) -> None:
    """The first is that of one request alone; the message before them is read once."""
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 7}
    (alone,) = texts(server.ask(CHAT, **fields))
    reply = server.ask(CHAT, n=3, **fields)
    assert [one["index"] for one in reply["choices"]] == [0, 1, 2]
    assert texts(reply)[0] == alone
    assert len(set(texts(reply))) == 3
    usage = reply["usage"]
    assert usage["completion_tokens"] > 3
    assert usage["prompt_tokens"] == server.ask(CHAT)["usage"]["prompt_tokens"]
    for text in texts(reply):  # the client may go on with each of them
        after = server.ask([*CHAT, assistant(text), user("Why?")])
        assert cached(after) > 0


def test_several_replies_come_in_a_stream_one_after_another(server: Served) -> None:
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 7, "n": 2}
    wanted = texts(server.ask(CHAT, **fields))
    got, ends = ["", ""], list[str]()
    for chunk in server.chunks(CHAT, **fields):
        (choice,) = chunk["choices"]
        got[choice["index"]] += choice["delta"].get("content") or ""
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert got == wanted
    assert len(ends) == 2


def test_each_of_several_replies_has_its_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    with served(tool_tiny(), policy="full", max_new_tokens=60) as one:
        script(monkeypatch, [call, "It rains."])
        first, second = one.ask([user("Weather?")], tools=[WEATHER], n=2)["choices"]
    assert first["finish_reason"] == "tool_calls"
    assert len(first["message"]["tool_calls"]) == 1
    assert (second["message"]["content"], second["finish_reason"]) == ("It rains.", "stop")


def test_a_message_that_is_sent_again_is_not_read_again(server: Served, tmp_path: Path) -> None:
    """Also the first one, under policies that evict, and after a stop; else it is read anew."""
    for settings in ({"policy": "full"}, {"policy": "salience", "budget": 64, "recall": "words"}):
        with served(max_new_tokens=12, **settings) as one:
            for chat in (CHAT[:1], [system("Be kind."), *CHAT]):
                first = one.ask(chat, temperature=0)
                again = one.ask(chat, temperature=0)
                assert said(again) == said(first)
                assert cached(again) == first["usage"]["prompt_tokens"]
                assert again["sirchat"]["seen"] == first["sirchat"]["seen"]
                assert again["sirchat"]["held"] == first["sirchat"]["held"]
                other = one.ask(chat, temperature=0, max_tokens=3)
                assert cached(other) == first["usage"]["prompt_tokens"]
                after = one.ask([*chat, assistant(said(other)), user("And?")])
                assert cached(after) == other["sirchat"]["seen"]
    with served(max_new_tokens=12, folder=tmp_path) as one:
        first = one.ask(CHAT, temperature=0)
    with served(max_new_tokens=12, folder=tmp_path) as one:  # the reply's beginning is not known
        again = one.ask(CHAT, temperature=0)
        assert said(again) == said(first)


def test_several_prompts_are_answered_in_order(server: Served) -> None:
    prompts = ["My name is", "Once upon a time", "My name is"]
    alone = [server.send(TEXT, prompt=one, temperature=0) for one in prompts]
    whole = server.send(TEXT, prompt=prompts, temperature=0)
    assert [one["text"] for one in whole["choices"]] == [r["choices"][0]["text"] for r in alone]
    assert [one["index"] for one in whole["choices"]] == [0, 1, 2]
    total = sum(reply["usage"]["total_tokens"] for reply in alone)
    assert whole["usage"]["total_tokens"] == total
    many = server.send(TEXT, prompt=prompts[:2], n=2, temperature=1.5, seed=3)
    assert [one["index"] for one in many["choices"]] == [0, 1, 2, 3]
    assert len({one["text"] for one in many["choices"]}) > 2


def test_the_likeliest_tokens_are_those_of_the_model(server: Served) -> None:
    """Computed by transformers alone, for a text that the model goes on with."""
    choice = server.send(TEXT, prompt="My name", temperature=0, logprobs=3)["choices"][0]
    model, told = tiny(), choice["logprobs"]
    ids = [model.tokenizer.bos_token_id, *model.tokenizer.encode("My name")]
    ids = ids[1:] if ids[1] == ids[0] else ids
    assert "".join(told["tokens"]) == choice["text"]
    at = 0
    for text, offset, value, best in zip(
        *(told[k] for k in ("tokens", "text_offset", "token_logprobs", "top_logprobs")), strict=True
    ):
        with torch.no_grad():
            chances = model.module(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
        wanted = chances.topk(3)
        names = [model.tokenizer.decode([one]) for one in wanted.indices.tolist()]
        assert list(best) == names
        assert list(best.values()) == pytest.approx(wanted.values.tolist(), abs=1e-3)
        assert value == pytest.approx(chances.max().item(), abs=1e-3)
        assert offset == at
        at += len(text)
        ids.append(int(chances.argmax()))


def test_chats_tell_the_likeliest_tokens_too(server: Served) -> None:
    tokens = server.ask(CHAT, temperature=0, logprobs=True, top_logprobs=2)["choices"][0]
    for one in tokens["logprobs"]["content"]:
        best, second = one["top_logprobs"]
        assert (best["token"], best["bytes"]) == (one["token"], one["bytes"])
        assert best["logprob"] == pytest.approx(one["logprob"], abs=1e-4)
        assert second["logprob"] <= best["logprob"]
    assert refusal(server.post(CHAT, top_logprobs=2))["param"] == "top_logprobs"


def test_a_bias_of_tokens_changes_what_is_said(server: Served) -> None:
    usual = server.reply(CHAT, temperature=0)
    first = server.send("/tokenize", content=usual)["tokens"][0]
    assert not server.reply(CHAT, temperature=0, logit_bias={str(first): -100}).startswith(
        tiny().tokenizer.decode([first])
    )
    word = server.send("/tokenize", content=" name")["tokens"][0]
    biased = server.reply(CHAT, temperature=0, max_tokens=3, logit_bias={str(word): 100})
    assert biased == tiny().tokenizer.decode([word] * 3)
    same = server.send(TEXT, prompt="My", max_tokens=2, logit_bias={str(word): 100})
    assert same["choices"][0]["text"] == tiny().tokenizer.decode([word] * 2)
    assert "allowed" in refusal(server.post(CHAT, logit_bias={"9999999": 1}))["message"]


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": 9}, {"logit_bias": {"a": 1}}])
def test_what_can_not_be_had_is_refused(server: Served, fields: Any) -> None:
    assert refusal(server.post(CHAT, **fields))["param"].startswith(next(iter(fields)))


def test_several_replies_are_had_where_the_archive_has_lost_what_was_held() -> None:
    """All is read again for each; the chat goes on with the last one."""
    with served(policy="sink", budget=64, max_new_tokens=12, archive_limit="64KiB") as one:
        messages: list[Message] = []
        for number in range(5):
            messages.append(user(f"{number}: Anna walks to the harbour and buys violins for Tom."))
            reply = one.ask(messages, n=2, temperature=0)
            first, second = texts(reply)
            assert first == second
            messages.append(assistant(second))
        again = one.ask(messages[:-1], n=2, temperature=0)  # to the last message
        after = one.ask([*messages[:-1], assistant(texts(again)[1]), user("And?")])
        assert cached(after) == again["sirchat"]["seen"]
