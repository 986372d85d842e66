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
from template_shapes import template, tokenizer

_SOURCES = {shape: template(f"{shape}-tools") for shape in ("qwen", "llama")}
_TINY = (
    _SOURCES["qwen"]
    .replace("<|im_start|>{{ m.role }}\n", "<|{{ m.role }}|>")
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
    made = copy.deepcopy(tokenizer({"qwen": "chatml", "llama": "llama3"}[shape]))
    made.chat_template = _SOURCES[shape]
    if shape == "qwen":
        made.add_tokens(["<tool_call>", "</tool_call>"])
    return made


@cache
def tool_tiny() -> LoadedModel:
    """The bundled model with a chat template that takes tools."""
    with_tools = copy.deepcopy(tiny().tokenizer)
    with_tools.chat_template = "{{ bos_token }}" + _TINY
    return wrap_model("tiny", tiny().module, with_tools)


def script(monkeypatch: pytest.MonkeyPatch, replies: Sequence[str]) -> None:
    """Let the model give these replies, one after another, whatever it is asked."""
    ids = tool_tiny().tokenizer
    left = [[*ids.encode(text, add_special_tokens=False), ids.eos_token_id] for text in replies]
    monkeypatch.setattr("sirchat.chat.session.Sampler", lambda *_: FixedIds(left.pop(0)))
