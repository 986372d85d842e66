"""OpenAI's own client, if it is installed: it chats, streams, stops, calls, and goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving import listening, served, told, user
from template_shapes import WEATHER, script, tool_tiny

ANNA, NAME, ASKED = "My name is Anna.", "What is my name?", "How is the weather in Oslo?"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
MOST = 90  # tokens


def test_the_client_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    openai: Any = pytest.importorskip("openai")
    with served(tool_tiny(), policy="full", max_new_tokens=MOST) as one, listening(one) as url:
        chat_and_call(openai, f"{url}/v1", monkeypatch)


def chat_and_call(openai: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = openai.OpenAI(base_url=address, api_key="none")
    text = told([user(ANNA)], max_new_tokens=MOST)
    create = client.chat.completions.create
    messages: list[Any] = [user(ANNA)]
    cut = create(model="tiny", messages=messages, stop="you")
    assert cut.choices[0].message.content == text[: text.index("you")]
    first = create(model="tiny", messages=messages)
    assert first.choices[0].message.content == text
    stream = create(model="tiny", messages=messages, stream=True)
    pieces = [chunk.choices[0].delta for chunk in stream]
    assert "".join(piece.content or "" for piece in pieces) == text
    messages += [first.choices[0].message, user(NAME)]
    after = create(model="tiny", messages=messages)
    assert after.usage.prompt_tokens_details.cached_tokens > 0
    begun = client.responses.create(model="tiny", input=ANNA)
    assert begun.output_text == text
    items: list[Any] = [user(ANNA), *begun.output, user(NAME)]
    with client.responses.stream(model="tiny", input=items) as stream:
        kinds = {event.type for event in stream}
        assert "response.output_text.delta" in kinds
        assert stream.get_final_response().output_text == after.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="responses are not kept"):
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
    items = [user(ASKED), call, result]
    ended = client.responses.create(model="tiny", input=items, tools=[function])
    assert ended.output_text == "It is cold."
    assert ended.usage.input_tokens_details.cached_tokens > 0
