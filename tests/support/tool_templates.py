"""Chat templates that take tools, in the shapes of Qwen 2.5 and Llama 3.1, and a model with one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from chatting import tiny
from sirchat.engine.sampling import FixedIds
from sirchat.models.model import LoadedModel, wrap_model
from template_shapes import tokenizer

QWEN = (
    "{% if tools %}<|im_start|>system\n"
    "{{ messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}"
    "\n\n# Tools\n<tools>{% for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor %}"
    "{{ '\n' }}</tools><|im_end|>\n{% elif messages[0].role == 'system' %}"
    "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant"
    "{% if m.content %}{{ '\n' ~ m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{% set call = call.function %}{{ '\n<tool_call>\n' }}"
    '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "<|im_start|>user{% endif %}{{ '\n<tool_response>\n' }}{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""With `<tool_call>` as a token, as Qwen has it."""

LLAMA = (
    "{% if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}"
    "{{ bos_token }}{% set sys = '' %}{% if messages[0].role == 'system' %}"
    "{% set sys = messages[0].content | trim %}{% set messages = messages[1:] %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday.\n"
    "{% if tools is not none and not tools_in_user_message %}Functions:"
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}{% endif %}{{ sys }}<|eot_id|>"
    "{% for m in messages %}"
    "{% if not (m.role == 'tool' or 'tool_calls' in m) %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% elif 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single calls') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
    "{% else %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

_TINY = (
    QWEN.replace("<|im_start|>{{ m.role }}\n", "<|{{ m.role }}|>")
    .replace("<|im_start|>system\n", "<|system|>")
    .replace("<|im_start|>user", "<|user|>")
    .replace("<|im_start|>assistant\n", "<|assistant|>")
    .replace("<|im_start|>assistant", "<|assistant|>")
    .replace("<|im_end|>\n", "<|end|>")
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@cache
def tool_tokenizer(shape: str) -> Any:
    """A tokenizer whose chat template takes tools."""
    found = copy.deepcopy(tokenizer({"qwen": "chatml", "llama": "llama3"}[shape]))
    found.chat_template = {"qwen": QWEN, "llama": LLAMA}[shape]
    if shape == "qwen":
        found.add_tokens(["<tool_call>", "</tool_call>"])
    return found


@cache
def tool_tiny() -> LoadedModel:
    """The bundled model with a chat template that takes tools."""
    own = copy.deepcopy(tiny().tokenizer)
    own.chat_template = "{{ bos_token }}" + _TINY
    return wrap_model("tiny", tiny().module, own)


def script(monkeypatch: pytest.MonkeyPatch, replies: Sequence[str]) -> None:
    """Let the model give these replies, one after another, whatever it is asked."""
    own = tool_tiny().tokenizer
    left = [[*own.encode(one, add_special_tokens=False), own.eos_token_id] for one in replies]
    monkeypatch.setattr("sirchat.chat.session.Sampler", lambda *_: FixedIds(left.pop(0)))
