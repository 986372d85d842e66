"""Calls in other forms than JSON: every value comes back as its schema says it is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirchat.text.control_tokens import END, START
from sirchat.text.tool_calls import CallParser

MANY = int(os.environ.get("SIRCHAT_ATTACK", 1))
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
    st.sampled_from(["x </parameter> y", "a </arg_value> b", "</function> b", "<function=f>"]),
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


def python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def found(parser: CallParser) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in parser.calls]


@pytest.mark.parametrize("form", [xml, pairs])
@settings(max_examples=60 * MANY)
@given(st.data())
def test_calls_come_back_however_a_reply_is_divided(
    form: Callable[[str, dict[str, Any]], str], data: st.DataObject
) -> None:
    calls = data.draw(st.lists(_CALLS, min_size=1, max_size=2))
    lead = data.draw(st.sampled_from(["", "Let me look.\n"]))
    reply = lead + "\n".join(form(*call) for call in calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=6)))
    parser, shown = CallParser(SCHEMAS, 0), ""
    for start, end in zip([0, *cuts], [*cuts, len(reply)], strict=True):
        shown += parser.push(reply[start:end])[0]
    shown += parser.rest()[0]
    assert found(parser) == calls
    assert shown.strip() == lead.strip()


@settings(max_examples=60 * MANY)
@given(st.lists(_CALLS, min_size=1, max_size=3))
def test_calls_in_a_list_of_python_between_control_tokens_come_back(calls: Any) -> None:
    parser = CallParser(SCHEMAS, 0)
    told = ", ".join(python(*call) for call in calls)
    parser.read(f"{START}<|tool_call_start|>{END}[{told}]", "")
    assert found(parser) == calls


@pytest.mark.parametrize(
    ("reply", "calls"),
    [
        ("<function=time>\n</function>", [("time", {})]),  # without tags, of a tool that there is
        ("<function=other>\n</function>", []),
        ("<tool_call>time</tool_call>", [("time", {})]),
        ("<tool_call>nonsense</tool_call>", []),
        ("<tool_call>\n<function=weather>\n<parameter=hot>\nTrue\n</parameter>\n</function>",
         [("weather", {"hot": True})]),
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
    shown = parser.push(reply)[0] + parser.rest()[0]
    assert found(parser) == calls
    assert shown == ("" if calls else reply)


def test_a_call_that_is_none_does_not_hold_back_those_after_it() -> None:
    parser = CallParser(SCHEMAS, 0)
    bad = "<tool_call>\n<function=time>\nI do not know</function>\n</tool_call>"
    shown = parser.push(f"{bad}\nText. {xml('weather', {'city': 'Oslo'})}")[0]
    assert shown == f"{bad}\nText."
    assert found(parser) == [("weather", {"city": "Oslo"})]


@pytest.mark.parametrize("reply", ["<function=time>\n<par", "<tool_call>\n<function=time>\n<par"])
def test_half_a_call_of_a_reply_that_was_cut_is_no_text(reply: str) -> None:
    parser = CallParser(SCHEMAS, 0)
    assert parser.push(reply)[0] + parser.rest(is_short=True)[0] == ""
    assert not parser.calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" + "a" * 40_000,
        xml("weather", {"city": "</tool_call> word " * 500}),
        pairs("weather", {"city": "</tool_call> word " * 500}),
    ],
)
def test_long_calls_take_no_long_time(text: str) -> None:
    parser, start = CallParser(SCHEMAS, 0), time.process_time()
    for at in range(0, len(text), 4):
        parser.push(text[at : at + 4])
    parser.rest()
    assert time.process_time() - start < 10
    assert len(parser.calls) == text.count("city") > 0 or "aaaa" in text


def test_text_after_a_call_between_control_tokens_is_none_of_it() -> None:
    parser, end = CallParser(SCHEMAS, 0), f"{START}<|tool_call_end|>{END}"
    call = f"{START}<|tool_call_start|>{END}[weather(city='Oslo', hot=true)]{end}"
    parser.read(f"{call}Checking.{call}", "")
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
    ],
)
def test_python_that_is_no_list_of_calls_is_none(marked: str) -> None:
    parser = CallParser(SCHEMAS, 0)
    assert parser.read(marked, "") == []
