"""The marks of a template are found, and divide a reply in its parts, however it is cut."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from by_heart import SHAPES
from by_heart import tokenizer as shaped
from sirchat.text.reply_parts import (
    REASONING_MARKS,
    Marks,
    PartSplitter,
    find_marks,
    without_delimiters,
)
from sirchat.text.template import Template
from sirchat.text.template_sandbox import render
from sirchat.text.tokenizer import CONTROL_END, CONTROL_START
from sirchat.text.tool_calls import CallParser
from sirchat.text.transcript import split_reasoning
from template_shapes import template, with_template

COUNT = int(os.environ.get("SIRCHAT_ATTACK", "100"))

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}REPLY"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nHEADER{% endif %}"
)
_LAST = "{% if loop.last and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n"


def chatml(reply: str = "{{ m.content }}", header: str = "") -> str:
    return _CHATML.replace("REPLY", reply).replace("HEADER", header)


THINK: dict[str, Any] = {"opening": "<think>", "closing": "</think>"}
# By name: the source of a template, and the marks that must be found in it.
FOUND: dict[str, tuple[str, dict[str, Any]]] = {
    "no word of it": (chatml(), THINK),
    "after the last question": (chatml(_LAST + "{% endif %}\n{{ m.content }}"), THINK),
    "opened by the header": (
        chatml(_LAST + "{% endif %}\n{{ m.content }}", "<think>\n"),
        THINK | {"opens_in_header": True},
    ),
    "closed by the header": (
        chatml(_LAST + "{% endif %}{{ m.content }}", "<think>\n\n</think>\n\n"),
        THINK,
    ),
    "an empty thought in history": (
        chatml("<think>{{ m.reasoning_content or '' }}</think>{{ m.content }}", "<think>"),
        THINK | {"opens_in_header": True, "history_lead": "</think>", "answer": "</think>"},
    ),
    "another name": (
        chatml("<a:b>{{ m.thinking }}</a:b>\n{{ m.content }}"),
        {"opening": "<a:b>", "closing": "</a:b>", "history_lead": "<a:b></a:b>\n"},
    ),
    "control tokens": (
        chatml("{% if m.reasoning %}<|a|>{{ m.reasoning }}<|/a|>{% endif %}{{ m.content }}"),
        {"opening": "<|a|>", "closing": "<|/a|>"},
    ),
    "words": (
        chatml(
            "{% if m.reasoning %}{{ m.reasoning }}\n[BEGIN ANSWER]\n{% endif %}{{ m.content }}",
            "My steps:\n",
        ),
        {
            "opening": "<|im_start|>assistant"[-1:],
            "closing": "[BEGIN ANSWER]",
            "opens_in_header": True,
        },
    ),
    "tokens around the answer, too": (
        chatml(
            "{% if m.thinking %}<|START_THINKING|>{{ m.thinking }}<|END_THINKING|>{% endif %}"
            "<|START_TEXT|>{{ m.content }}<|END_TEXT|>"
        ),
        {"opening": "<|START_THINKING|>", "closing": "<|END_THINKING|>"}
        | {"answer": "<|START_TEXT|>", "history_lead": "<|START_TEXT|>"},
    ),
    "parts of a content": (
        chatml(
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}"
            "{% endif %}{% endfor %}{% endif %}"
        ),
        {"opening": "[THINK]", "closing": "[/THINK]"},
    ),
    "a content as it is, and the source names marks": (
        chatml("{{ m.content if m.content is string else m.content | tojson }}")
        + "{# thinking [/THINK] #}",
        {"opening": "[THINK]", "closing": "[/THINK]"},
    ),
    "one message after another": (
        "{% for m in messages %}{% if m.reasoning %}<|begin|>{{ m.role }}<|think|>{{ m.reasoning }}"
        "<|end|>{% endif %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|begin|>assistant{% endif %}",
        {"opening": "<|think|>", "closing": "<|end|><|begin|>assistant", "end": "<|end|>"}
        | {"answer": "<|content|>", "history_lead": "<|content|>"},
    ),
    "receivers": (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.reasoning %} to=self<|message|>"
        "{{ m.reasoning }}<|eom|><|start|>{{ m.role }}{% endif %}"
        "{% if m.role == 'assistant' %} to=user{% endif %}<|message|>{{ m.content }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        {"opening": "to=self<|message|>", "closing": "<|eom|><|start|>assistant"}
        | {"answer": "to=user<|message|>", "history_lead": " to=user<|message|>"},
    ),
    "harmony": (
        template("harmony"),
        {
            "opening": "<|channel|>analysis<|message|>",
            "closing": "<|end|><|start|>assistant",
            "answer": "<|channel|>final<|message|>",
            "history_lead": "<|channel|>final<|message|>",
            "end": "<|end|>",
            "call_end": "<|call|>",
            "call_lead": "to=functions.",
        },
    ),
    "gemma": (  # its template leaves calls out
        template("gemma4"),
        {"opening": "<|channel>thought", "closing": "<channel|>"},
    ),
    "deepseek": (
        template("deepseek"),
        THINK
        | {"opens_in_header": True}
        | {"call": "<｜tool▁calls▁begin｜>", "call_end": "<｜end▁of▁sentence｜>"}
        | {"call_lead": "<｜tool▁sep｜>"},
    ),
    "mistral": (
        template("mistral-tools"),
        THINK | {"call": "[TOOL_CALLS]", "call_end": "</s>", "call_lead": "[TOOL_CALLS]"},
    ),
    "qwen": (template("qwen3-tools"), THINK | {"call": "<tool_call>", "call_end": "<|im_end|>"}),
}
_CONTROLS = re.compile(
    r"<\|[^<>|]+\|?>|<[^<>|]+\|>|<｜[^<>]+｜>|\[/?(?:THINK|TOOL_CALLS|ARGS)\]|</s>|</?tool_call>"
)


def spelled(text: str) -> str:
    return _CONTROLS.sub(f"{CONTROL_START}\\g<0>{CONTROL_END}", text)


def marks_of(source: str, added: Sequence[str] = ()) -> Marks:
    def rendered(messages: Sequence[dict[str, Any]], prompt: bool) -> str | None:
        names = {"bos_token": "<s>", "eos_token": "</s>", "tools": None}
        try:
            return render(source, messages=[*messages], add_generation_prompt=prompt, **names)
        except (TemplateError, TypeError):
            return None

    return find_marks(rendered, spelled, source, added)


@pytest.mark.parametrize("name", FOUND)
def test_the_marks_are_those_that_the_template_writes(name: str) -> None:
    source, wanted = FOUND[name]
    found = {
        key: without_delimiters(v) if isinstance(v, str) else v
        for key, v in vars(marks_of(source)).items()
    }
    del found["call_sample"]  # it is no mark
    if name == "words":  # its opening is the end of the header: it is never written again
        found["opening"] = found["opening"][-1]
    assert {key: value for key, value in found.items() if value} == wanted


@pytest.mark.parametrize("pair", REASONING_MARKS)
def test_marks_that_the_tokenizer_alone_has_are_known(pair: tuple[str, str]) -> None:
    marks = marks_of(chatml(), pair)
    assert (without_delimiters(marks.opening), without_delimiters(marks.closing)) == pair


@pytest.mark.parametrize(
    ("mark", "call"),
    [
        ("<|tool_call_start|>", '[weather(city="Oslo")]'),
        ("<|python_tag|>", '{"name": "weather", "parameters": {"city": "Oslo"}}'),
        ("[TOOL_CALLS]", '[{"name": "weather", "arguments": {"city": "Oslo"}}]'),
        ("<|tool_call|>", '[{"name": "weather", "arguments": {"city": "Oslo"}}]'),
    ],
)
def test_calls_of_a_mark_that_the_tokenizer_alone_has_are_in_the_reply(
    mark: str, call: str
) -> None:
    it = with_template(template("chatml"), "chatml")
    it.add_special_tokens({"additional_special_tokens": [mark, "<|tool_call_end|>"]})
    made = Template(it)
    assert without_delimiters(made.marks.call) == mark
    assert it.convert_tokens_to_ids(mark) not in made.stop_ids(None)
    stream, parser = made.reply_stream(), CallParser(["weather"], 0)
    for one in it.encode(f"Wait.{mark}{call}", add_special_tokens=False):
        held = [piece.text for piece in stream.push_id(one) if piece.part == "call"]
        assert all(map(parser.hold_back, held))
    assert parser.finish(made.marks.call_lead)[0] == ""
    assert [(one.name, one.arguments) for one in parser.calls] == [("weather", '{"city": "Oslo"}')]
    stream = made.reply_stream()
    said = f"Wait.{mark}{call}"
    stream.push_ids(it.encode(said, add_special_tokens=False))
    assert [name for _, name in stream.bounds] == ["answer", "call"]


@pytest.mark.parametrize(
    ("pair", "is_within"),
    [
        (("<|begin_of_box|>", "<|end_of_box|>"), True),
        (("<ref>", "</ref>"), False),
        (("<|endoftext|>", "<|fim_pad|>"), False),
    ],
)
def test_control_tokens_that_no_template_names_end_a_reply_unless_they_are_known_in_replies(
    pair: tuple[str, str], is_within: bool
) -> None:
    it = with_template(chatml(), "chatml")
    it.add_special_tokens({"additional_special_tokens": [*pair]})
    made = Template(it)
    ids = it.convert_tokens_to_ids([*pair])
    assert {one in made.stop_ids(None) for one in ids} == {not is_within}
    stream = made.reply_stream()
    said = [piece for one in it.encode(f"So {pair[0]}7{pair[1]}.") for piece in stream.push_id(one)]
    if is_within:
        assert "".join(piece.text for piece in [*said, *stream.flush()]) == "So 7."


@pytest.mark.parametrize(
    ("question", "answer", "stop"),
    [
        ("<start_of_turn>user\nQ<end_of_turn>\n", "A<end_of_turn>\n", "<end_of_turn>"),
        ("### Instruction:\nQ\n\n", "A\n\n", "\n### Instruction:"),
        ("### User\nQ\n\n", "A\n\n", "\n### User\n"),
        ("[INST] Q [/INST] ", "A ", "[INST]"),
        ("用户：Q\n", "A\n", "\n用户："),
        ("Q", "A", ""),
    ],
)
def test_what_begins_the_next_turn_as_text_ends_a_reply(
    question: str, answer: str, stop: str
) -> None:
    asked, said = question.replace("Q", "{{ m.content }}"), answer.replace("A", "{{ m.content }}")
    source = "{% for m in messages %}{% if m.role == 'user' %}" + asked + "{% else %}" + said
    made = Template(with_template(source + "{% endif %}{% endfor %}", "plain"))
    assert made.marks.stop == stop
    reply = f"Yes. # User guide [1]\n{question}" if stop else "Yes."
    said = "".join(piece.text for piece in made.reply_stream().push(reply, is_end=True))
    assert said.strip() == reply[: reply.find(stop, 5) if stop else None].strip()


@pytest.mark.parametrize(
    ("prompt", "name", "values"),
    [
        ("{% if not enable_thinking %}</think>{% endif %}", "enable_thinking", (True, False, True)),
        ("{% if reasoning is false %}</think>{% endif %}", "reasoning", (True, False, True)),
        (
            "{% if reasoning_effort not in (undefined, 'none', 'high') %}"
            "{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}",
            "reasoning_effort",
            ("high", "none", "high"),
        ),
        (
            "{{ 1 if reasoning_effort == 'no_think' else reasoning_effort }}",
            "reasoning_effort",
            ("high", "no_think", "low"),
        ),
        ("{{ reasoning_effort }}", "reasoning_effort", (None, "low", "low")),
    ],
)
def test_reasoning_is_switched_by_the_variable_that_the_template_has(
    prompt: str, name: str, values: tuple[object, ...]
) -> None:
    switches = Template(with_template(chatml(header=prompt), "chatml")).switches
    for wanted, value in zip(("on", "off", "low"), values, strict=True):
        assert switches.variables(wanted) == ({} if value is None else {name: value})
        told = switches.problem(wanted)
        assert ("its effort is low" in told) == (wanted == "off" and value == "low")


@pytest.mark.parametrize("name", SHAPES)
def test_no_token_within_a_reply_ends_it(name: str) -> None:
    shape, it = SHAPES[name], shaped(SHAPES[name])
    made = Template(it)
    declared = it.convert_tokens_to_ids(list(shape.ends))
    stops = made.stop_ids(declared)
    assert set(declared) <= made.end_ids(declared) <= stops
    for reply in filter(None, (shape.thinking, shape.plain, shape.call)):
        text, _, after = reply.partition("{answer}")
        text = text.format(thought="a", name="c", arguments="d")
        ids = it.encode(text, add_special_tokens=False)
        assert not stops & {*(ids if after else ids[:-1])}
        assert after or ids[-1] in made.end_ids(None)
    assert not stops & {*it.convert_tokens_to_ids(["<|constrain|>"])} - {it.unk_token_id, None}


def divided(marks: Marks, text: str, hidden: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The parts of a whole reply: a slow oracle, which looks for one mark after another."""
    parts: list[tuple[str, str]] = []
    begin, stop = marks.head
    between = marks.closing.removeprefix(marks.end) if marks.end else ""

    def add(part: str, text: str, *, is_new: bool) -> None:
        written = re.sub(
            f"{CONTROL_START}(.*?){CONTROL_END}",
            lambda m: "" if part != "call" and m[1] in hidden else m[1],
            text,
        )
        if written := written.lstrip() if is_new else written:
            gap = "\n\n" if is_new and any(name == part for name, _ in parts) else ""
            parts.append((part, gap + written))

    part, is_new, is_first = "", marks.opens_in_header, True
    while text:
        if not part:
            rest = text.lstrip()
            found = [
                (len(mark), name)
                for mark, name in (
                    (between, "between"),
                    (marks.opening, "thinking"),
                    (marks.answer, "answer"),
                    (marks.call, "call"),
                )
                if mark and rest.startswith(mark)
            ]
            if begin and rest.startswith((begin, "to=")) and stop in rest:
                head = rest[: rest.index(stop) + len(stop)]
                words = re.sub(f"{CONTROL_START}.*?{CONTROL_END}", " ", head).split()
                told = re.sub(f"{CONTROL_START}.*?{CONTROL_END}", " ", marks.opening).split()
                name = "thinking" if set(words) & set(told) else "answer"
                name = "call" if any(word.startswith("to=") for word in words) else name
                name = {marks.opening: "thinking", marks.answer: "answer"}.get(head, name)
                found = [(len(head), name)]
            size, name = max(found, key=lambda one: one[0], default=(0, ""))
            if name == "between":
                text, is_new = rest[size:], True
                continue
            part = name or ("thinking" if marks.opens_in_header and is_first else "answer")
            is_new = (is_new or bool(size)) and part != "call"
            text = text if part == "answer" and not is_new else rest
            text = text[size:] if part != "call" else text
            is_first = False
            continue
        marked = {marks.closing: ""} if part == "thinking" or marks.end else {}
        if marks.end:
            marked[marks.end] = "" if part == "thinking" else "end"
        if part == "answer":
            again = {marks.opening: "thinking", marks.call: "call"}
            marked |= {m: name for m, name in again.items() if m.startswith(CONTROL_START)}
            marked[marks.stop] = "end"
        marked.pop("", None)
        places = [(text.index(m), -len(m), m) for m in marked if m in text]
        at, _, mark = min(places, default=(len(text), 0, ""))
        said, text = text[:at], text[at:]
        add(part, said.rstrip() if part == "thinking" else said, is_new=is_new)
        if mark:
            if marked[mark] == "end":
                break
            part = marked[mark]
            text = text if part == "call" else text[len(mark) :]
            is_new = part != "call"
    return parts


def joined(parts: Sequence[tuple[str, str]]) -> dict[str, str]:
    names = dict.fromkeys(name for name, _ in parts)
    return {name: "".join(text for part, text in parts if part == name) for name in names}


_FOUND = {name: marks_of(source) for name, (source, _) in FOUND.items()}
_FOUND["a line of the user"] = Marks("<think>", "</think>", stop="\nUSER:")
_FOUND["nothing"] = Marks()
_WORDS = (
    "a", "b c", " ", "\n", "\n\n", "<", "</", "think>", "to=", "USER:", "Yes.", "{}", "[", "é",
)  # fmt: skip


def some_reply(random: random.Random, marks: Marks) -> str:
    texts = [text for text in vars(marks).values() if isinstance(text, str) and text]
    texts += [text[: random.randint(1, len(text))] for text in texts if CONTROL_START not in text]
    texts += [
        spelled(token) for token in ("<|other|>", "<tool_call>", "<|message|>", "<|channel|>")
    ]
    texts += ["commentary to=functions.f ", "commentary", "analysis", "assistant", "user"]
    return "".join(
        random.choice(random.choice((texts, _WORDS))) for _ in range(random.randint(0, 9))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", _FOUND)
def test_a_reply_is_divided_in_the_same_way_however_it_is_cut(name: str) -> None:
    marks, chance = _FOUND[name], random.Random(name)
    for _ in range(COUNT):
        text = some_reply(chance, marks)
        wanted = joined(divided(marks, text, ["<|other|>"]))
        for cuts in (0, 1, 3, len(text)):
            splitter, before, given = PartSplitter(marks, ["<|other|>"]), 0, []
            # A control token comes whole.
            places = [
                m.end()
                for m in re.finditer(
                    f"{CONTROL_START}[^{CONTROL_END}]*{CONTROL_END}|.", text, re.DOTALL
                )
            ]
            for at in [*sorted(chance.choices(places or [0], k=cuts)), len(text)]:
                given += splitter.push(text[before:at])
                before = at
            given += splitter.push("", is_end=True)
            assert joined([(one.part, one.text) for one in given]) == wanted, repr(text)
            assert [one.end for one in given] == sorted(one.end for one in given)
            assert all(one.end <= len(without_delimiters(text)) for one in given)


@pytest.mark.parametrize(
    ("reply", "thinking", "answer"),
    [
        ("<think>\nwhy?\n</think>\n\n Yes.", "why?", "Yes."),
        ("\n <think>why?</think>Yes. <think>a</think>", "why?", "Yes. <think>a</think>"),
        ("so he is</think>\nYes.", "so he is", "Yes."),
        ("<think>cut off", "cut off", ""),
        ("Yes, <think>a</think>.", "", "Yes, <think>a</think>."),
        ("\n\nYes.", "", "\n\nYes."),
        ("<thin", "", "<thin"),
        ("", "", ""),
    ],
)
def test_a_reply_that_is_read_is_divided_by_tags(reply: str, thinking: str, answer: str) -> None:
    assert split_reasoning(reply) == (thinking, answer)
    pieces = PartSplitter(
        Marks("<think>", "</think>", opens_in_header=reply.startswith("so"))
    ).push(reply, is_end=True)
    said = joined([(piece.part, piece.text) for piece in pieces])
    assert (said.get("thinking", ""), said.get("answer", "")) == (thinking, answer)


def test_nothing_of_an_ordinary_reply_is_held_back() -> None:
    splitter = PartSplitter(Marks("<think>", "</think>"))
    assert [splitter.push(text)[0].text for text in "Hello, <think>"] == [*"Hello, <think>"]
