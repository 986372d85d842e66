"""Tokenizers with the common shapes of chat templates, some with tools; built without a network."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chatting import quick, tiny
from native_library import read_in_native_code
from sirchat.engine.sampling import ForcedPrefixSampler, Sampling
from sirchat.models.model import LoadedModel, wrap_model

_CORPUS = [
    "USER: ASSISTANT: system user assistant model word Hello there! How are you? I am fine.\n",
    "[INST] [/INST] Remember the name Anna, 12 eggs and (B) a library. What was on my list? \n\n",
] * 20

# Line breaks are tokens of their own, as in the tokenizers that these templates come with.
_WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+"

FOLDER = Path(__file__).parent / "templates"

# Control tokens by shape; the first ends a reply, the second may be a BOS.
_CONTROL = {
    "chatml": ["<|im_end|>", "<|im_start|>", "<|endoftext|>"],
    "llama3": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "gemma": ["<end_of_turn>", "<bos>", "<start_of_turn>"],
    "mistral": ["</s>", "<s>", "[INST]", "[/INST]"],
    "vicuna": ["</s>", "<s>"],
    "qwen3": ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<|endoftext|>"],
}
# Added tokens that no template writes; one of them is four spaces.
TEXT_TOKENS = ["<tool>", "    "]
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


def template(name: str) -> str:
    """The Jinja source of a chat template in `templates/`."""
    return (FOLDER / f"{name}.jinja").read_text("utf-8").removesuffix("\n")


TEMPLATES = {
    **{shape: (template(shape), tokens) for shape, tokens in _CONTROL.items()},
    "plain": ("", ["</s>", "<s>"]),
}


def _chat(header: str, prompt: str, system: str = "true") -> str:
    """A template like Qwen's: what stands before a reply of a history, and before a new one."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n" + header
        + "{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
        "{% elif m.role == 'user' or " + system + " %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + prompt + "{% endif %}"
    )  # fmt: skip


_THOUGHT = (
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% else %}</think>{% endif %}"
)
# What templates write before replies of a history, and before one to generate; tokens of `qwen3`.
HEADERS = {
    "thinking is asked for": _chat("", "<think>\n"),
    "a history has empty thoughts": _chat("<think>\n\n</think>\n\n", ""),
    "both have other empty thoughts": _chat("<think></think>\n", "<think>\n\n</think>"),
    "thinking is kept": _chat(_THOUGHT, "</think>"),
    "a prompt has more words": _chat("", "Let me think.\n"),
    "no reply is asked for": _chat("", "").partition("{% if add_generation")[0],
    "a reply is always asked for": _chat("", "<think>\n").replace("add_generation_prompt", "true"),
}
# Templates that do not write all of a system prompt.
WITHOUT_SYSTEM = {
    "drops it": _chat("", "", system="false"),
    "cuts it": _chat("", "").replace(
        "{{ m.content }}", "{{ m.content[:12] if m.role == 'system' else m.content }}"
    ),
    "wants one word": "{% if ' ' in messages[0].content and messages[0].role == 'system' %}"
    "{{ raise_exception('too long') }}{% endif %}" + _chat("", ""),
}


def with_template(source: str, shape: str = "qwen3") -> Any:
    """The tokenizer of a shape with this chat template."""
    made = copy.deepcopy(tokenizer(shape))
    made.chat_template = source
    return made


def byte_level(words: str, corpus: Sequence[str], size: int) -> Tokenizer:
    """A tokenizer of bytes and merges of bytes, within the words that a pattern finds."""
    backend = Tokenizer(models.BPE())
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    return backend


@cache
def tokenizer(shape: str) -> Any:
    """A byte-level tokenizer with the shape's template and control tokens."""
    source, control = TEMPLATES[shape]
    bos = next((t for t in control if t in ("<s>", "<bos>", "<|begin_of_text|>")), None)
    built = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(_WORDS, _CORPUS, 400),
        bos_token=bos,
        eos_token=control[0],
        extra_special_tokens=control[1:],
    )
    built.add_tokens(TEXT_TOKENS)
    built.chat_template = source or None
    return built


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
    return _with_tools(tiny())


@cache
def tool_quick() -> LoadedModel:
    """The model `quick` with a chat template that takes tools."""
    return _with_tools(quick())


def _with_tools(plain: LoadedModel) -> LoadedModel:
    tokenizer = copy.deepcopy(plain.tokenizer)
    tokenizer.chat_template = "{{ bos_token }}" + _TINY
    model = wrap_model("tiny", plain.module, tokenizer)
    read_in_native_code(model)
    return model


def call(**arguments: object) -> str:
    """A call of the tool `weather`, as `tool_quick`'s template writes it."""
    written = json.dumps({"name": "weather", "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def script(monkeypatch: pytest.MonkeyPatch, replies: Sequence[str]) -> None:
    """Let the model give these replies, one after another, whatever it is asked."""
    ids = tool_tiny().tokenizer
    left = [[*ids.encode(text, add_special_tokens=False), ids.eos_token_id] for text in replies]
    monkeypatch.setattr(
        "sirchat.chat.conversation.Sampler", lambda *_: ForcedPrefixSampler(left.pop(0), Sampling())
    )
