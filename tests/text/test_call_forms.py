"""Calls in other forms than JSON: every value comes back as its schema says it is."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirchat.text.reply_parts import CONTROL, Marks, PartSplitter, without_delimiters
from sirchat.text.tokenizer import CONTROL_END, CONTROL_START
from sirchat.text.tool_calls import CallParser

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hot": {"type": "boolean"},
            "near": {"type": "array"},
            "by": {"type": "object"},
            "note": {"type": ["string", "null"]},
            "share": {"type": "number"},
        }
    },
    "time": {"properties": {}},
    "free": {
        "properties": {
            "a": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "c": {"enum": ["01234", "5"]},
            "d": {"anyOf": 5, "oneOf": None, "enum": "x"},
        }
    },
    "odd": {"properties": None},
}
# Texts like marks, and what JSON or Python would read as other values.
_TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=("Cs", "Co")), max_size=12),
    st.sampled_from(
        ["3", "true", "None", '{"a": 1}', 'say "a', "<b>", "a\nb", "</tool_call>", "[1"]
    ),
    st.sampled_from(
        ["call:time{a:1}", "x </parameter> y", "a </arg_value> b", "</function> b", "<function=f>"]
    ),
    st.sampled_from(["b\n```\n", "functions.time:0"]),
)
_JSON = st.one_of(st.integers(), st.booleans(), st.none(), _TEXTS)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "city": _TEXTS,
    "days": st.integers(),
    "hot": st.booleans(),
    "near": st.lists(_JSON, max_size=3),
    "by": st.dictionaries(st.sampled_from(["a", "b"]), _JSON, max_size=2),
    "note": _TEXTS,
    "share": st.floats(allow_nan=False, allow_infinity=False),
}
_CALLS: st.SearchStrategy[Any] = st.one_of(
    st.tuples(st.just("weather"), st.fixed_dictionaries({}, optional=_VALUES)),
    st.tuples(st.just("time"), st.just({})),
)


def _text(value: Any) -> str:
    """A value as templates write it."""
    return value if isinstance(value, str) else json.dumps(value)


def xml(name: str, arguments: dict[str, Any]) -> str:
    told = [f"<parameter={key}>\n{_text(of)}\n</parameter>\n" for key, of in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(told)}</function>\n</tool_call>"


def pairs(name: str, arguments: dict[str, Any]) -> str:
    told = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(told)}</tool_call>"


def in_tags_of_functions(*calls: Any) -> str:
    return "".join(f"<function={name}>{json.dumps(given)}</function>" for name, given in calls)


def lfm2(*calls: Any) -> str:
    """Between control tokens; arguments and tools may have any names."""
    told = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    ]
    start, end = (f"{CONTROL_START}<|tool_call_{side}|>{CONTROL_END}" for side in ("start", "end"))
    return f"{start}[{', '.join(told)}]{end}"


def gemma4(*calls: Any) -> str:
    opening, closing = (
        f"{CONTROL_START}{mark}{CONTROL_END}" for mark in ("<|tool_call>", "<tool_call|>")
    )
    told = (f"{opening}call:{name}{_braces(given)}{closing}" for name, given in calls)
    return "".join(told)


def _braces(value: Any) -> str:
    """A value as Gemma 4's template writes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_braces(of)}" for key, of in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_braces, value)) + "]"
    quote = f'{CONTROL_START}<|"|>{CONTROL_END}'
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def listed(*calls: Any) -> str:
    return json.dumps([{"name": name, "arguments": given} for name, given in calls])


def each(before: str, between: str, after: str) -> Callable[..., str]:
    """Calls of which each has a name, and then JSON of its arguments."""

    def write(*calls: Any) -> str:
        written = (f"{before}{name}{between}{json.dumps(given)}{after}" for name, given in calls)
        return spelled("".join(written))

    return write


def spelled(text: str) -> str:
    """The text with private-use characters around its control tokens."""
    return re.sub(
        r"<\|\w+\|>|<｜[^<>]+｜>|\[[A-Z_]+\]", f"{CONTROL_START}\\g<0>{CONTROL_END}", text
    )


def marks(call: str = "", call_lead: str = "") -> Marks:
    return Marks("<think>", "</think>", call=spelled(call), call_lead=spelled(call_lead))


_SEP = "<｜tool▁sep｜>"
_BEGIN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
# How models write calls, and the marks that are found in their templates.
FORMS: dict[str, tuple[Callable[..., str], Marks]] = {
    "hermes, qwen": (
        lambda *calls: "\n".join(
            f"<tool_call>\n{listed(call)[1:-1]}\n</tool_call>" for call in calls
        ),
        marks(),
    ),
    "llama": (lambda *calls: "; ".join(listed(call)[1:-1] for call in calls), marks()),
    "a list of JSON": (listed, marks()),
    "a list of Python": (lambda *calls: CONTROL.sub("", lfm2(*calls)), marks()),
    "qwen coder, nemotron": (lambda *calls: "\n".join(xml(*call) for call in calls), marks()),
    "glm": (lambda *calls: "\n".join(pairs(*call) for call in calls), marks()),
    "llama, in tags of functions": (in_tags_of_functions, marks()),
    "lfm2": (lfm2, marks(call="<|tool_call_start|>")),
    "gemma 4": (gemma4, Marks(call=f"{CONTROL_START}<|tool_call>{CONTROL_END}")),
    "mistral": (
        lambda *calls: spelled("[TOOL_CALLS]") + listed(*calls), marks(call="[TOOL_CALLS]")
    ),
    "mistral 3": (
        each("[TOOL_CALLS]", "[ARGS]", ""),
        marks(call="[TOOL_CALLS]", call_lead="[TOOL_CALLS]"),
    ),
    "deepseek 3": (
        each(f"{_BEGIN}function{_SEP}", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        marks(call="<｜tool▁calls▁begin｜>", call_lead=_SEP),
    ),
    "deepseek 3.1": (
        each(_BEGIN, _SEP, "<｜tool▁call▁end｜>"),
        marks(call="<｜tool▁calls▁begin｜>", call_lead="<｜tool▁call▁begin｜>"),
    ),
    "kimi": (
        each("<|tool_call_begin|>functions.", ":0<|argument_begin|>", "<|tool_call_end|>"),
        marks(call="<|tool_call_begin|>", call_lead="functions."),
    ),
    "phi, granite": (
        lambda *calls: spelled("<|tool_call|>") + listed(*calls), marks(call="<|tool_call|>")
    ),
    "command": (
        lambda *calls: spelled(f"<|START_ACTION|>{listed(*calls)}<|END_ACTION|>"
            .replace('"name"', '"tool_name"').replace('"arguments"', '"parameters"')),
        marks(call="<|START_ACTION|>"),
    ),
    "gpt-oss": (
        each(" to=functions.", "<|channel|>commentary <|constrain|>json<|message|>", "<|call|>"),
        Marks(
            spelled("<|channel|>analysis<|message|>"),
            spelled("<|end|><|start|>assistant"),
            answer=spelled("<|channel|>final<|message|>"),
            end=spelled("<|end|>"),
            call_lead="to=functions.",
        ),
    ),
}  # fmt: skip
_ALONE = (
    "llama, in tags of functions",
    "llama",
    "gpt-oss",
    "a list of JSON",
    "a list of Python",
)  # a reply is text, or calls


def found(parser: CallParser) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in parser.calls]


def read(parser: CallParser, pieces: list[str], marks: Marks) -> str:
    """Give the parser a reply as the server does; returns the text that is shown."""
    parts, shown = PartSplitter(marks, ["<|tool_call>"]), ""
    for number, piece in enumerate(pieces):
        for said in parts.push(piece, is_end=number == len(pieces) - 1):
            if said.part != "thinking" and not (
                said.part == "call" and parser.hold_back(said.text)
            ):
                shown += parser.push(said.text)[0]
    return shown + parser.finish(without_delimiters(marks.call_lead))[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@given(st.data())
def test_calls_come_back_however_a_reply_is_divided(form: str, data: st.DataObject) -> None:
    """Also behind text, or reasoning that names the mark of a call."""
    write, marks = FORMS[form]
    most = 1 if form == "gpt-oss" else 2
    calls = data.draw(st.lists(_CALLS, min_size=1, max_size=most))
    leads = [""] if form in _ALONE else ["", "Let me look.\n"]
    leads += ["<think>\nA <tool_call>?\n</think>\n"] if marks.opening == "<think>" else []
    lead = data.draw(st.sampled_from(leads))
    reply = lead + write(*calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=6)))
    cuts = [at for at in cuts if reply[:at].count(CONTROL_START) == reply[:at].count(CONTROL_END)]
    pieces = [reply[a:b] for a, b in zip([0, *cuts], [*cuts, len(reply)], strict=True)]
    parser = CallParser(SCHEMAS, 0)
    shown = read(parser, pieces, marks)
    assert found(parser) == calls
    assert shown.strip() == lead.strip() * ("<think>" not in lead)


@pytest.mark.parametrize("form", [lfm2, gemma4])
def test_names_of_tools_and_arguments_need_not_be_pythons(form: Callable[..., str]) -> None:
    calls = [("get-weather.now", {"from": "Oslo (from='x')", "class": -1, "a": [True, None]})]
    parser = CallParser({"get-weather.now": {}}, 0)
    mark = form(*calls).partition(CONTROL_END)[0] + CONTROL_END
    assert read(parser, [form(*calls)], Marks(call=mark)) == ""
    assert found(parser) == calls


@pytest.mark.parametrize(
    ("reply", "calls"),
    [
        ("<function=time>\n</function>", [("time", {})]),  # without tags, of a tool that there is
        ("<function=other>\n</function>", []),
        ('weather\n{"city": "Oslo"}', []),
        ("time\nis short", []),
        ("time", []),
        ("<tool_call>time</tool_call>", [("time", {})]),
        ("<tool_call>nonsense</tool_call>", []),
        ("<tool_call>[(n5)(x=1)]</tool_call>", []),
        ("<tool_call>\n<function=weather>\n<parameter=hot>\nTrue\n</parameter>\n</function>",
         [("weather", {"hot": True})]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\n7\n</parameter>\n</function>",
         [("weather", {"city": "7"})]),
        ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
         [("weather", {"city": "7"})]),
        ("<tool_call>\n<function=weather>\n<parameter=days>\nmany\n</parameter>\n</function>",
         [("weather", {"days": "many"})]),  # what it may not be is for the tool to say
        ("<tool_call>\n<function=weather>\n<parameter=city>\nOs", []),
        ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Os", []),
        ("It is <function=time></function>.", []),
        ("<tool_call>\n<function=free>\n<parameter=a>\n123\n</parameter>\n<parameter=b>\nNone\n"
         "</parameter>\n<parameter=c>\n5\n</parameter>\n<parameter=d>\n5\n</parameter>\n</function>",
         [("free", {"a": "123", "b": None, "c": "5", "d": 5})]),
        ("<tool_call>\n<function=odd>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
         [("odd", {"a": 1})]),
    ],
)  # fmt: skip
def test_what_is_a_call_and_what_is_text(reply: str, calls: Any) -> None:
    parser = CallParser(SCHEMAS, 0)
    shown = parser.push(reply)[0] + parser.finish()[0]
    assert found(parser) == calls
    assert shown == ("" if calls else reply)


def test_a_call_that_is_none_does_not_hold_back_those_after_it() -> None:
    parser = CallParser(SCHEMAS, 0)
    bad = "<tool_call>\n<function=time>\nI do not know</function>\n</tool_call>"
    shown = parser.push(f"{bad}\nText. {xml('weather', {'city': 'Oslo'})}")[0]
    assert shown == f"{bad}\nText."
    assert found(parser) == [("weather", {"city": "Oslo"})]


@pytest.mark.parametrize(
    "reply",
    [
        *("<function=time>\n<par", "<tool_call>\n<function=time>\n<par", "[weather(city='Os"),
        '[{"name": "time", "ar',
    ],
)
def test_half_a_call_of_a_reply_that_was_cut_is_no_text(reply: str) -> None:
    parser = CallParser(SCHEMAS, 0)
    assert parser.push(reply)[0] + parser.finish(is_short=True)[0] == ""
    assert not parser.calls


@pytest.mark.parametrize("reply", ["we", "weather", "time", "time\n", "time\nThe tool", "see time"])
def test_a_reply_that_was_cut_in_or_after_the_name_of_a_tool_is_text(reply: str) -> None:
    parser = CallParser(SCHEMAS, 0)
    assert parser.push(reply)[0] + parser.finish(is_short=True)[0] == reply


@pytest.mark.parametrize(
    "reply",
    [
        *("[1, 2] is a list", "[weather] is fine", "[a](b)", "time\nis short"),
    ],
)
def test_a_text_that_begins_like_a_call_is_shown_at_once(reply: str) -> None:
    parser = CallParser(SCHEMAS, 0)
    shown = [parser.push(char)[0] for char in reply]
    assert "".join(shown) == reply
    assert shown[:9].count("") < 9
    assert parser.finish() == ("", [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" + "a" * 40_000,
        xml("weather", {"city": "</tool_call> word " * 500}),
        pairs("weather", {"city": "</tool_call> word " * 500}),
        *(
            f"<tool_call>{json.dumps({'name': 'weather', 'arguments': {'city': city}})}</tool_call>"
            for city in ("</tool_call>" + "a" * 50_000, '</tool_call> "word" ' * 2500)
        ),
        "<tool_call>[" + "a" * 20_000 + "</tool_call>",
        "[weather(a=" + '"\\""' * 4000,
        " " * 20_000 + "a",
    ],
)
def test_long_calls_take_no_long_time(text: str) -> None:
    parser, start = CallParser(SCHEMAS, 0), time.process_time()
    for at in range(0, len(text), 4):
        parser.push(text[at : at + 4])
    parser.finish()
    assert time.process_time() - start < 10
    assert len(parser.calls) == text.count("city")


def test_a_tag_that_is_named_in_a_text_is_shown_as_it_is_written() -> None:
    parser, reply = CallParser(SCHEMAS, 0), "Put them in <tools> please, or in <tool"
    shown = parser.push(reply)[0]
    assert shown == reply.removesuffix(" <tool")
    assert shown + parser.push("> now.")[0] + parser.finish()[0] == f"{reply}> now."
    parser, call = CallParser(SCHEMAS, 0), "<tool_call>nonsense</tool_call>"
    assert parser.push(f"So:\n\n {call} ")[0] + parser.finish()[0] == f"So:\n\n {call} "


def test_text_after_a_call_between_control_tokens_is_none_of_it() -> None:
    parser, mark = CallParser(SCHEMAS, 0), f"{CONTROL_START}<|tool_call_start|>{CONTROL_END}"
    call = f"{mark}[weather(city='Oslo', hot=true)]{mark.replace('start', 'end')}"
    read(parser, [f"{call}Checking.{call}"], Marks(call=mark))
    assert found(parser) == [("weather", {"city": "Oslo", "hot": True})] * 2


@pytest.mark.parametrize(
    "marked",
    [
        "[weather('Oslo')]",
        "[1, 2]",
        "[" * 5000,
        "[weather(city=open('x'))]",
        "[weather(**{'a': 1})]",
        "[weather(",
        "",
        "[weather(city='Oslo')]\nDone",
        "[weather(city='Oslo')]; x = 3",
        "[weather(city='Oslo'), other(city='Oslo')]",
        '<|python_tag|>cfg = {"name": "time", "parameters": {}}\nprint(cfg)',
        '<|python_tag|>{"name": "time", "parameters": {}}\nprint(1)',
    ],
)  # fmt: skip
def test_python_that_is_not_only_calls_of_tools_is_none(marked: str) -> None:
    parser = CallParser(SCHEMAS, 0)
    assert parser.parse_marked(marked, "") == []
    shown = parser.push(marked)[0] + parser.finish()[0]
    assert (shown, parser.calls) == (marked, [])


@pytest.mark.parametrize(
    "reply",
    [
        "[weather(city='Oslo')]\n[weather(city='Rome')]",
        "[weather(city='Oslo')]; [weather(city='Rome')]",
        *(f"<|python_tag|>{first}; {second}" for first, second in [[
            '{"name": "weather", "parameters": {"city": "Oslo"}}',
            '{"name": "weather", "parameters": {"city": "Rome"}}',
        ]]),
    ],
)  # fmt: skip
def test_no_call_of_several_vanishes(reply: str) -> None:
    calls = [("weather", {"city": city}) for city in ("Oslo", "Rome")]
    parser, marked = CallParser(SCHEMAS, 0), CallParser(SCHEMAS, 0)
    assert parser.push(reply)[0] + parser.finish()[0] == ""
    marked.parse_marked(reply, "")
    assert found(parser) == found(marked) == calls
