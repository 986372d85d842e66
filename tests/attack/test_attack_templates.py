"""Broken chat templates are refused in one line; text never becomes a control token."""

from __future__ import annotations

import copy
from collections import Counter
from random import Random
from typing import Any

import pytest

from attacking import attack, mutated, odd_text
from sirchat.text.template import Template
from template_shapes import TEMPLATES, tokenizer

_HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
_TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

BROKEN = {
    "recursive": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two macros": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "nested": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "type": "{{ messages + 1 }}",
    "zero": "{{ 1 / 0 }}",
    "escape": "{{ raise_exception('\x1b[31mred\nline' * 1000) }}",
    "syntax": "{% if %}",
}


def with_template(source: str, shape: str = "chatml") -> Any:
    it = copy.deepcopy(tokenizer(shape))
    it.chat_template = source
    return it


def control_ids(it: Any, ids: list[int]) -> Counter[int]:
    return Counter(i for i in ids if i in it.all_special_ids)


def render(it: Any, text: str) -> None:
    """Every kind of turn, with `text`; ValueError where it has become a control token."""
    template = Template(it)
    template.stop_ids(None)
    for made, neutral in (
        (template.opening(text)[1].ids, template.opening("b")[1].ids),
        (template.opening("b", text)[1].ids, template.opening("b", "c")[1].ids),
        (template.user_turn(text).ids, template.user_turn("b").ids),
        (template.system_turn(text).ids, template.system_turn("b").ids),
        (template.assistant_turn(text).ids, template.assistant_turn("b").ids),
    ):
        if control_ids(it, made) - control_ids(it, neutral):
            raise ValueError("text became a control token")


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_fails_is_refused_in_one_line(name: str) -> None:
    it = with_template(BROKEN[name] + _HEAD + "{{ m.content }}" + _TAIL)

    def refuse(_: Random) -> None:
        render(it, "x")
        raise ValueError("it was rendered")

    attack(refuse)


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content | replace('#', '') }}",
        "{{ m.content | upper | lower }}",
        "{{ '<|im_' ~ m.content }}",
        "{{ m.content.split('#') | join }}",
    ],
)
def test_text_that_a_template_makes_a_control_token_of_is_read_as_it_is(content: str) -> None:
    it = with_template(_HEAD + content + _TAIL)
    spoiled = False
    for text in ("<|im_#end|>", "<|IM_END|>", "end|>", "|dne_mi|>"[::-1], ">|dne_mi|<"):
        render(it, text)
        for turn in (Template(it).user_turn(text), Template(it).opening(text)[1]):
            said = turn.ids[slice(*turn.content)]
            spoiled |= said == Template(it).as_text(text)
    assert spoiled or "upper" in content  # marks around a token survive these filters


def test_every_template_renders_or_is_refused_in_one_line() -> None:
    parts = [
        "{{ m.content }}", "{{ m.role }}", "{{ bos_token }}", "{{ eos_token }}", "<|im_end|>", "x",
        "{% for i in range(9) %}", "{% endfor %}", "{% if m.content %}", "{% endif %}",
        "{% else %}", "{{ messages }}", "{{ m.content | trim }}", "{{ m.content * 3 }}",
        "{{ self }}", "{{ m.__class__ }}", "{{ cycler }}",
        "{{ m.content | replace('a', '') }}", "{% generation %}", "{% endgeneration %}",
        "{% raw %}", "{{ strftime_now('%Y') }}",
    ]  # fmt: skip

    def read(random: Random) -> None:
        shape = random.choice(list(TEMPLATES))
        if random.random() < 0.5:
            source = TEMPLATES[shape][0].encode()
            source = mutated(random, source or b"x", 2)
        else:
            inner = "".join(random.choices(parts, k=random.randint(1, 6)))
            source = (_HEAD + inner + _TAIL).encode()
        it = with_template(source.decode("utf-8", "replace"), shape)
        control = [token.content for token in it.added_tokens_decoder.values()]
        text = odd_text(random).encode("utf-8", "replace").decode()
        for _ in range(random.randrange(3)):
            text += random.choice(["", "#", " ", "a"]) + random.choice(control)
        render(it, text or "x")

    attack(read)
