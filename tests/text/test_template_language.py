"""What transformers adds to jinja for chat templates does the same here."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from sirchat.text.template_sandbox import render
from template_shapes import TEMPLATES

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hello «there»!"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "How?"},
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}

SOURCES = [
    "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ {'b': 1, 'a': 2} | tojson }}",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "{% set ns = namespace(count=0, self=1) %}{% for m in messages %}"
    "{% set ns.count = ns.count + 1 %}{% endfor %}{{ ns.count }}",
    "  {% if add_generation_prompt %}\n  yes\n  {% endif %}\n{{ dict(a=1)['a'] }}\n",
    "{{ strftime_now('%Y') }} {{ dict.fromkeys('ab') | tojson }} {{ 'x' ~ 1 ~ bos_token }}",
    *(source for source, _ in TEMPLATES.values()),
]


def theirs(source: str, messages: list[dict[str, str]]) -> Any:
    (text,), _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, **NAMES
    )
    return text


@pytest.mark.parametrize("source", SOURCES)
def test_a_template_is_rendered_as_by_transformers(source: str) -> None:
    for messages in (MESSAGES, MESSAGES[1:], MESSAGES[1:2]):
        try:
            wanted = theirs(source, messages)
        except TemplateError as error:
            with pytest.raises(TemplateError, match=str(error)):
                render(source, 100, messages=messages, add_generation_prompt=True, **NAMES)
        else:
            found = render(source, 100, messages=messages, add_generation_prompt=True, **NAMES)
            assert found == wanted


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{% set ns = namespace(_secret=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_what_transformers_refuses_is_refused(source: str) -> None:
    for refuses in (theirs, lambda source, messages: render(source, 9, messages=messages)):
        with pytest.raises(TemplateError):
            refuses(source, MESSAGES)
