"""Clients that others wrote, if they are installed: each chats, streams, stops, calls, goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import Served, listening, served, told, user
from template_shapes import WEATHER, script, tool_tiny

ANNA, NAME, ASKED = "My name is Anna.", "What is my name?", "How is the weather in Oslo?"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
FUNCTION = 'def weather(city: str) -> str:\n    "The weather."\n    return "-3 degrees"'
MOST = 90  # tokens


@pytest.fixture
def openai() -> Any:
    return pytest.importorskip("openai")


@pytest.fixture
def langchain() -> Any:
    return pytest.importorskip("langchain_openai")


@pytest.fixture
def program() -> str:
    return shutil.which("llm") or pytest.skip("the program llm is not installed")


@pytest.fixture
def server() -> Iterator[Served]:
    with served(tool_tiny(), policy="full", max_new_tokens=MOST) as one:
        yield one


@pytest.fixture
def address(server: Served) -> Iterator[str]:
    with listening(server) as found:
        yield f"{found}/v1"


@pytest.fixture
def text() -> str:
    """The reply to ANNA."""
    return told([user(ANNA)], max_new_tokens=MOST)


def test_the_client_of_openai(
    openai: Any, address: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = openai.OpenAI(base_url=address, api_key="none")
    create = client.chat.completions.create
    messages: list[Any] = [user(ANNA)]
    first = create(model="tiny", messages=messages)
    assert first.choices[0].message.content == text
    stream = create(model="tiny", messages=messages, stream=True)
    pieces = [chunk.choices[0].delta for chunk in stream]
    assert "".join(piece.content or "" for piece in pieces) == text
    assert (
        create(model="tiny", messages=messages, stop="you").choices[0].message.content
        == text[: text.index("you")]
    )
    messages += [first.choices[0].message, user(NAME)]
    after = create(model="tiny", messages=messages)
    assert after.usage.prompt_tokens_details.cached_tokens > 0
    begun = client.responses.create(model="tiny", input=ANNA)
    assert begun.output_text == text
    with client.responses.stream(model="tiny", input=NAME, previous_response_id=begun.id) as stream:
        kinds = {event.type for event in stream}
        assert "response.output_text.delta" in kinds
        assert stream.get_final_response().output_text == after.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.create(model="tiny", input=NAME, previous_response_id="resp_0")
    with pytest.raises(openai.BadRequestError, match="n can't be 3"):
        create(model="tiny", messages=messages, n=3)
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        create(model="tiny", messages=messages, tool_choice="required")
    script(monkeypatch, [CALL, CALL, "It is cold.", CALL, "It is cold."])
    messages = [user(ASKED)]
    with client.chat.completions.stream(model="tiny", messages=messages, tools=[WEATHER]) as stream:
        stream.until_done()
    (called,) = stream.get_final_completion().choices
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    whole = create(model="tiny", messages=messages, tools=[WEATHER])
    assert whole.choices[0].message.tool_calls[0].function.name == "weather"
    result = {"role": "tool", "tool_call_id": call.id, "content": "-3 degrees"}
    messages += [called.message, result]
    last = create(model="tiny", messages=messages, tools=[WEATHER])
    assert last.choices[0].message.content == "It is cold."
    assert last.usage.prompt_tokens_details.cached_tokens > 0
    function: Any = {"type": "function", "strict": False, **WEATHER["function"]}  # type: ignore[dict-item]
    with client.responses.stream(model="tiny", input=ASKED, tools=[function]) as stream:
        stream.until_done()
    begun = stream.get_final_response()
    (call,) = begun.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "-3 degrees"}
    ended = client.responses.create(
        model="tiny", input=[result], tools=[function], previous_response_id=begun.id
    )
    assert ended.output_text == "It is cold."
    assert ended.usage.input_tokens_details.cached_tokens > 0


def test_langchain(
    langchain: Any, address: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = langchain.ChatOpenAI(base_url=address, api_key="none", model="tiny")
    first = model.invoke(ANNA)
    assert first.content == text
    assert "".join(piece.content for piece in model.stream(ANNA)) == text
    assert model.invoke(ANNA, stop=["you"]).content == text[: text.index("you")]
    after = model.invoke([("user", ANNA), first, ("user", NAME)])
    assert after.usage_metadata["input_token_details"]["cache_read"] > 0
    answered = model.with_structured_output(
        {"title": "a", "type": "object", "properties": {}, "maxProperties": 0}, method="json_schema"
    )
    assert answered.invoke(ANNA) == {}
    script(monkeypatch, [CALL, CALL, "It is cold."])
    bound = model.bind_tools([WEATHER])
    called = bound.invoke(ASKED)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    pieces = list(bound.stream(ASKED))
    assert sum(pieces[1:], pieces[0]).tool_calls == called.tool_calls
    result = {"role": "tool", "tool_call_id": call["id"], "content": "-3 degrees"}
    last = bound.invoke([("user", ASKED), called, result])
    assert last.content == "It is cold."
    assert last.usage_metadata["input_token_details"]["cache_read"] > 0


def test_llm(
    program: str, server: Served, address: str, text: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    models = "- {{model_id: sirchat, model_name: tiny, api_base: {}, supports_tools: true}}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models.format(address))

    def ask(*words: str) -> str:
        found = subprocess.run(
            [program, "-m", "sirchat", *words],
            env={**os.environ, "LLM_USER_PATH": str(tmp_path), "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout.removesuffix("\n")

    assert ask(ANNA) == text
    assert ask(ANNA, "--no-stream") == text
    assert ask("-c", NAME) == server.reply(
        [user(ANNA), {"role": "assistant", "content": text}, user(NAME)]
    )
    assert ask(ANNA, "-o", "stop", "you") == text[: text.index("you")]
    script(monkeypatch, [CALL, "It is cold."])
    assert ask(ASKED, "--functions", FUNCTION).endswith("It is cold.")
