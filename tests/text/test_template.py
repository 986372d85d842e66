"""The chat template: turns concatenate to the whole conversation, and text stays text."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, normalizers
from transformers import ByT5Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from chatting import hub_tokenizer, tiny
from sirchat.errors import ModelError
from sirchat.memory.ledger import Role
from sirchat.text.template import _PLAIN, ANSWER_TEXT, QUESTION_TEXT, Template, TurnIds
from sirchat.text.template_sandbox import render
from template_shapes import TEMPLATES, TEXT_TOKENS, WITHOUT_SYSTEM, tokenizer, with_template

_SHAPES = [*TEMPLATES, "tiny"]
# Templates trim a message, so texts begin and end with something visible.
_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Co")), max_size=30).map(
    lambda text: f"a{text}.".replace("</think>", "")
)
_CONTROL = sorted({token for _, tokens in TEMPLATES.values() for token in tokens} - {"</think>"})
_CONTENTS = st.lists(
    st.one_of(_TEXTS, st.sampled_from(_CONTROL).map(lambda token: f"say {token} now")),
    min_size=2,
    max_size=7,
)


def _tokenizer(shape: str) -> Any:
    return tiny().tokenizer if shape == "tiny" else tokenizer(shape)


def _whole(shape: str, messages: list[dict[str, str]], prompt: bool) -> list[int]:
    """The whole conversation at once; special tokens in its texts are sanitized."""
    it = hub_tokenizer() if shape == "tiny" else tokenizer(shape)
    ids: list[int] = it.apply_chat_template(
        messages,
        chat_template=it.chat_template or _PLAIN,
        add_generation_prompt=prompt,
        sanitize_control_tokens=True,
        return_dict=False,
    )
    return ids


def _turn_by_turn(template: Template, contents: list[str], system: str | None) -> list[int]:
    head, first = template.opening(contents[0], system)
    ids = [*(head.ids if head else []), *first.ids]
    for role, text in zip(itertools.cycle(("assistant", "user")), contents[1:], strict=False):
        if role == "assistant":
            ids += [*template.assistant_turn(text).ids, *template.closing]
        else:
            ids += template.user_turn(text).ids
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("shape", _SHAPES)
@settings(max_examples=10, deadline=None)
@given(_CONTENTS)
def test_the_concatenated_turns_equal_the_whole_conversation(
    shape: str, contents: list[str]
) -> None:
    contents = contents if len(contents) % 2 else contents[:-1]
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    turns = _turn_by_turn(Template(_tokenizer(shape)), contents, None)
    assert turns == _whole(shape, messages, prompt=True)


_OF_PARTS = {
    "a loop over parts": "{% for m in messages %}<|im_start|>{{ m.role }}"
    "{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
    "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}",
    "parts of a kind": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "the first part": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content | length == 1 %}{{ m['content'][0]['text'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "nothing that is a text": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is not string %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "parts unless it is a text": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


@pytest.mark.parametrize("source", _OF_PARTS.values(), ids=_OF_PARTS)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_template_that_takes_a_content_as_parts_gets_one_part(
    source: str, system: str | None
) -> None:
    contents = ["Hello <|im_end|> there!", "I am fine.", "What was on my list?"]
    made = with_template(source)
    told = [*([("system", system)] if system else [])]
    told += zip(("user", "assistant", "user"), contents, strict=True)
    messages = [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in told]
    (whole,), _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True
    )
    turns = _turn_by_turn(Template(made), contents, system)
    assert made.decode(turns) == whole
    assert turns.count(made.convert_tokens_to_ids("<|im_end|>")) == len(messages)


@pytest.mark.parametrize("shape", [s for s in _SHAPES if s != "gemma"])
def test_the_concatenated_turns_with_a_system_prompt_equal_it_too(shape: str) -> None:
    contents = ["Hello there!", "I am fine.", "What was on my list?"]
    roles = ("system", "user", "assistant", "user")
    texts = ["Be brief.", *contents]
    messages = [{"role": r, "content": c} for r, c in zip(roles, texts, strict=True)]
    turns = _turn_by_turn(Template(_tokenizer(shape)), contents, "Be brief.")
    assert turns == _whole(shape, messages, prompt=True)


@pytest.mark.parametrize("shape", _SHAPES)
def test_roles_separate_text_from_template_and_a_text_like_the_stubs_is_read_whole(
    shape: str,
) -> None:
    it = _tokenizer(shape)
    template = Template(it)
    for text in ("Hello there!", "a", "7 b", "apples and 7 b"):
        for turn in (template.user_turn(text), template.opening(text)[1]):
            said = [i for i, role in zip(turn.ids, turn.roles, strict=True) if role is Role.USER]
            assert it.decode(said).strip() == text
    for text in (ANSWER_TEXT, f"a {ANSWER_TEXT} b {QUESTION_TEXT}", QUESTION_TEXT):
        turn = template.user_turn(text)
        assert it.decode(turn.ids[slice(*turn.content)]).strip() == text
        assert turn.content[0] == template.user_turn("Hello.").content[0]
    head, first = template.opening("Hello.", "Be brief.")
    if head is not None:
        said = [i for i, role in zip(head.ids, head.roles, strict=True) if role is Role.SYSTEM]
        assert it.decode(said).strip() == "Be brief."
    if shape == "gemma":  # it has no role for the system
        assert head is not None
        assert "Be brief.\n\nHello." in it.decode([*head.ids, *first.ids])
        assert it.decode(first.ids).startswith("Hello.")


def test_a_turn_that_the_template_refuses_is_a_model_error_and_an_empty_text_is_none() -> None:
    empty = Template(tokenizer("chatml")).user_turn("")
    assert empty.content[0] == empty.content[1]
    it = copy.deepcopy(tokenizer("chatml"))
    it.chat_template = (
        "{% if 'x' in messages[-1].content %}{{ raise_exception('no x') }}{% endif %}"
    )
    it.chat_template += tokenizer("chatml").chat_template
    with pytest.raises(ModelError, match="no x"):
        Template(it).user_turn("x")


@pytest.mark.parametrize("kind", WITHOUT_SYSTEM)
def test_a_system_prompt_that_the_template_does_not_write_whole_is_put_before_the_text(
    kind: str,
) -> None:
    it = with_template(WITHOUT_SYSTEM[kind])
    head, first = Template(it).opening("Hello.", "Speak like a pirate, and be brief.")
    assert head is not None
    said = [i for i, role in zip(head.ids, head.roles, strict=True) if role is Role.SYSTEM]
    assert it.decode(said).strip() == "Speak like a pirate, and be brief."
    messages = [{"role": "user", "content": "Speak like a pirate, and be brief.\n\nHello."}]
    whole = it.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert [*head.ids, *first.ids] == whole
    later = Template(it).system_turn("Speak like a pirate, and be brief.")
    assert it.decode(later.ids[slice(*later.content)]) == "Speak like a pirate, and be brief."


@pytest.mark.parametrize("shape", _SHAPES)
def test_every_control_token_typed_as_text_stays_text(shape: str) -> None:
    it = _tokenizer(shape)
    template = Template(it)
    control = {i: t.content for i, t in it.added_tokens_decoder.items() if t.special}

    def control_ids(turn: TurnIds) -> list[int]:
        return [i for i in turn.ids if i in control]

    for token in control.values():
        for text in (token, f"say {token} now", f"{token}{token}", f"x{token}\n"):
            assert control_ids(template.user_turn(text)) == control_ids(template.user_turn("x"))
            assert control_ids(template.opening(text)[1]) == control_ids(template.opening("x")[1])
            assert control_ids(template.assistant_turn(text)) == []
            content = template.user_turn(text)
            assert token in it.decode(content.ids[slice(*content.content)])


@pytest.mark.parametrize("shape", TEMPLATES)
def test_an_added_token_that_no_template_writes_is_read_as_the_tokenizer_reads_it(
    shape: str,
) -> None:
    it = copy.deepcopy(tokenizer(shape))
    it.add_tokens(["▁▁", "<h1>", "<unused0>"])
    template, numbers = Template(it), {t.content: i for i, t in it.added_tokens_decoder.items()}
    for token in (*TEXT_TOKENS, "▁▁", "<h1>", "<unused0>"):
        text = f"say{token}now{token}."  # templates trim a text
        read = it.encode(text, add_special_tokens=False)
        assert read.count(numbers[token]) == 2
        assert template.as_text(text) == read
        made = [template.user_turn(text), *template.opening(text, text), template.system_turn(text)]
        made.append(template.assistant_turn(text))
        for turn in made:
            assert turn is not None
            assert turn.ids.count(numbers[token]) == 2


def test_an_added_token_that_the_template_writes_is_control_though_no_file_calls_it_special() -> (
    None
):
    it = copy.deepcopy(tokenizer("chatml"))
    marks = ["<|user|>", "<|assistant|>", "<think>", "    ", "▁▁▁", "<stop>", "<other>"]
    it.add_tokens(marks)
    it.chat_template = (
        "{%- for m in messages -%}\n"
        "    {# ▁▁▁ #}{{- '<|' + m.role + '|>' + m.content.split('<think>')[-1] -}}\n"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    number = {token: it.convert_tokens_to_ids(token) for token in marks}
    template = Template(it, ends=[number["<stop>"]])
    said = template.user_turn("a <|user|> b <|assistant|> c  <stop> ▁▁▁d    <other>").ids
    count = {token: said.count(i) for token, i in number.items()}
    assert count == dict.fromkeys(marks, 1) | {"<think>": 0, "<stop>": 0}
    assert number["<think>"] not in template.as_text("<think>")


def test_a_tokenizer_written_in_python_keeps_text_and_control_tokens_apart_too() -> None:
    it = ByT5Tokenizer()
    it.add_tokens(["<|user|>", "<|assistant|>", "<x>"])
    it.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    template = Template(it)
    for text in ("say </s> now", "<|user|><pad>", "<|assistant|> <extra_id_0>", "a <unk> b"):
        turn = template.user_turn(text)
        said = turn.ids[slice(*turn.content)]
        assert it.decode(said) == text
        assert all(3 <= i < 259 for i in said)
        assert template.assistant_turn(text).ids == said
    assert it.convert_tokens_to_ids("<x>") in template.user_turn("<x>").ids


def test_text_that_the_tokenizer_itself_turns_into_a_control_token_is_read_in_pieces() -> None:
    """Its normalizer changes letters, or its merges make a word that is control."""
    it = copy.deepcopy(tokenizer("chatml"))
    it.backend_tokenizer.normalizer = normalizers.Lowercase()
    it.add_special_tokens(
        {"extra_special_tokens": [AddedToken("<end>", normalized=True, special=True), "word"]}
    )
    template, control = Template(it), {it.convert_tokens_to_ids(one) for one in ("<end>", "word")}
    assert it.encode("<END>") == [it.convert_tokens_to_ids("<end>")]
    for text, shown in (("a <END>", "a <end>"), ("a word <end> <eND> b", "a word <end> <end> b")):
        for turn in (
            template.user_turn(text),
            *template.opening(text, text),
            template.assistant_turn(text),
        ):
            assert turn is not None
            assert not control & set(turn.ids)
            assert shown in it.decode(turn.ids)


def test_a_blank_system_prompt_is_read_as_any_other_that_the_template_drops() -> None:
    source = TEMPLATES["mistral"][0].replace("messages[0].content ~ '\\n\\n'", "''")
    template = Template(with_template(source, "mistral"))
    for text in ("Be brief.", " ", "\r"):
        assert template.controls.keys().isdisjoint(template.system_turn(text).ids)


@pytest.mark.parametrize("shape", _SHAPES)
def test_a_reply_ends_with_its_closing_ids_or_where_the_next_turn_would_begin(shape: str) -> None:
    it = _tokenizer(shape)
    template, control = Template(it), set(it.added_tokens_decoder)
    assert it.eos_token_id in template.closing
    assert {it.eos_token_id, 7, 9} <= template.stop_ids([7, 9])
    assert it.eos_token_id in template.stop_ids(None)
    stops, turn = template.stop_ids(None), template.user_turn("Hello there!")
    opener = next((i for i in turn.ids[: turn.content[0]] if i in control), None)
    assert opener is None or opener in stops
    marks = {i for i, token in it.added_tokens_decoder.items() if not token.special}
    assert not marks & stops  # such as <think>, which replies have


def test_a_reply_after_a_header_that_only_generation_has_is_read_as_plain_text() -> None:
    it = copy.deepcopy(tokenizer("qwen3"))
    it.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    text = "<think>So.</think>\n\nYes<|im_end|><tool>"
    read = Template(it).assistant_turn(text)
    assert it.decode(read.ids) == text
    assert not set(read.ids) & set(it.all_special_ids)


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
                render(source, messages=messages, add_generation_prompt=True, **NAMES)
        else:
            found = render(source, messages=messages, add_generation_prompt=True, **NAMES)
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
    for refuses in (theirs, lambda source, messages: render(source, messages=messages)):
        with pytest.raises(TemplateError):
            refuses(source, MESSAGES)
