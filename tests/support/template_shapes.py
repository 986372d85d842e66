"""Tokenizers with the common shapes of chat templates, built here without a network."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_CORPUS = [
    "USER: ASSISTANT: system user assistant model word Hello there! How are you? I am fine.\n",
    "[INST] [/INST] Remember the name Anna, 12 eggs and (B) a library. What was on my list? \n\n",
] * 20

# Line breaks are tokens of their own, as in the tokenizers that these templates come with.
_WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+"

_HEAD = "{% for m in messages %}"
_TAIL = "{% endfor %}{% if add_generation_prompt %}"

TEMPLATES: dict[str, tuple[str, list[str]]] = {
    "chatml": (
        _HEAD
        + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        + _TAIL
        + "<|im_start|>assistant\n{% endif %}",
        ["<|im_end|>", "<|im_start|>", "<|endoftext|>"],
    ),
    "llama3": (
        "{{ bos_token }}"
        + _HEAD
        + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        + _TAIL
        + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    ),
    "gemma": (
        "{{ bos_token }}"
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + _HEAD
        + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n" + _TAIL + "<start_of_turn>model\n{% endif %}",
        ["<end_of_turn>", "<bos>", "<start_of_turn>"],
    ),
    "mistral": (
        "{{ bos_token }}"
        "{% set sys = '' %}{% set rest = messages %}"
        "{% if messages[0].role == 'system' %}{% set sys = messages[0].content ~ '\n\n' %}"
        "{% set rest = messages[1:] %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}"
        "[INST] {{ (sys if loop.first else '') ~ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        ["</s>", "<s>", "[INST]", "[/INST]"],
    ),
    "vicuna": (
        "{{ bos_token }}"
        "{% if messages[0].role != 'system' %}A chat with a polite assistant. {% endif %}"
        + _HEAD
        + "{% if m.role == 'system' %}{{ m.content }} {% elif m.role == 'user' %}"
        "USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}"
        + _TAIL
        + "ASSISTANT:{% endif %}",
        ["</s>", "<s>"],
    ),
    "qwen3": (
        "{% set ns = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
        "{% endif %}{% endfor %}" + _HEAD + "{% if m.role == 'assistant' %}"
        "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
        "<|im_start|>assistant\n"
        "{% if loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}{{ text }}<|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
        + _TAIL
        + "<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}"
        "<think>\n\n</think>\n\n{% endif %}{% endif %}",
        ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<|endoftext|>"],
    ),
    "plain": ("", ["</s>", "<s>"]),
}
"""Template and control tokens by shape; the first token ends a reply, the second may be a BOS."""

TEXT_TOKENS = ["<tool>", "    "]
"""Added tokens that no template writes; one of them is four spaces."""


@cache
def tokenizer(shape: str) -> Any:
    """A byte-level tokenizer with the shape's template and control tokens."""
    template, control = TEMPLATES[shape]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    bos = next((t for t in control if t in ("<s>", "<bos>", "<|begin_of_text|>")), None)
    built = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=control[0],
        extra_special_tokens=control[1:],
    )
    built.add_tokens(TEXT_TOKENS)
    built.chat_template = template or None
    return built
