"""Transcripts: formats, their detection, and the errors for bad files."""

from __future__ import annotations

import io
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirchat.errors import TranscriptError, UsageError
from sirchat.text import transcript
from sirchat.text.transcript import (
    FORMATS,
    SettingsSwitch,
    TranscriptTurn,
    iter_turns,
    parse_transcript,
    write_jsonl,
)

ROLES = st.sampled_from(["system", "user", "assistant"])
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def read(text: str | bytes, format: str = "auto") -> list[tuple[str, str, int]]:
    data = text if isinstance(text, bytes) else text.encode()
    return [(turn.role, turn.content, turn.line) for turn in parse_transcript(data, "t", format)]


def refusal(text: str | bytes, format: str = "auto") -> str:
    with pytest.raises(TranscriptError) as caught:
        read(text, format)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(st.lists(st.tuples(ROLES, st.text())))
def test_any_turns_are_read_as_they_were_written(given: list[tuple[str, str]]) -> None:
    turns = [TranscriptTurn(role, text, line) for line, (role, text) in enumerate(given, 1)]  # type: ignore[arg-type]
    file = io.BytesIO()
    write_jsonl(turns, file)
    assert parse_transcript(file.getvalue(), "t") == turns


@pytest.mark.parametrize("format", FORMATS)
def test_empty_input_has_no_turns(format: str) -> None:
    assert read(b"", format) == read(b"\n \r\n", format) == []


@pytest.mark.parametrize("prefix", [str.upper, str.title, str.lower])
def test_a_prefixed_turn_goes_on_until_the_next_prefix_of_the_same_case(
    prefix: Callable[[str], str],
) -> None:
    system, user, reply = (f"{prefix(role)}:" for role in ("system", "user", "assistant"))
    text = f"\n{system} be brief\n{user} one\n\n  two\nUsEr: x\n\n{reply}\n  three\n{user}\n{reply}"
    said = [("system", "be brief", 2), ("user", "one\n\n  two\nUsEr: x", 3)]
    assert read(text) == read(text, "text") == [*said, ("assistant", "  three", 8)]


@pytest.mark.parametrize("one", [MESSAGES, {"messages": MESSAGES}])
def test_a_second_conversation_is_refused(one: Any) -> None:
    assert refusal(f"{json.dumps(one)}\n\n" * 2) == (
        "t, line 3: a second conversation begins; a file may have one"
    )


def test_an_object_of_json_lines_switches_settings_and_no_text_of_a_turn_does() -> None:
    switch = '{"switch": {"policy": "sink", "budget": 256}}'
    said = json.dumps({"role": "user", "content": switch, "switch": {"budget": 64}})
    lines = f"{switch}\n{said}\n{switch}\n".encode()
    settings = {"policy": "sink", "budget": 256}
    first, message, last = iter_turns(io.BytesIO(lines), "t")
    assert (first, last) == (SettingsSwitch(settings, 1), SettingsSwitch(settings, 3))
    assert message == TranscriptTurn("user", switch, 2)
    assert read(f"Hello.\n{switch}\n", "lines")[1] == ("user", switch, 2)
    assert read(f"Hello.\n{switch}\n")[1] == ("user", switch, 2)
    assert read(f"USER: a\n{switch}\n") == [("user", f"a\n{switch}", 1)]
    assert refusal('{"switch": "sink"}').startswith('t, line 1: "switch" must be an object')
    assert refusal(lines) == "t, line 1: settings can't be switched here"  # in what trains a model
    for role in ("assistant", "tool"):
        answer = json.dumps({"role": role, "content": "b"}).encode()
        between = rf"t, line 3: settings can't be switched before the {role} turn of line 4"
        with pytest.raises(TranscriptError, match=between):
            list(iter_turns(io.BytesIO(lines + answer), "t"))


@pytest.mark.parametrize("line", [b'{"role": "user", "content": "a"}', b"a"])
def test_byte_order_mark_and_crlf_are_no_part_of_a_turn(line: bytes) -> None:
    data = b"\xef\xbb\xbf" + line + b"\r\n" + line + b"\r\n"
    assert read(data) == [("user", "a", 1), ("user", "a", 2)]


@pytest.mark.parametrize(
    ("text", "format", "line"),
    [
        ("\nhi", "jsonl", 2),
        ('{"role": "user", "content": "a"} b', "jsonl", 1),
        ("[\n}", "jsonl", 2),
        ('{"a": 1}', "jsonl", 1),
        ("1", "jsonl", 1),
        ("[" * 99999, "jsonl", 1),
        ("\nhi\nUSER: a", "text", 2),
    ],
)
def test_a_named_format_is_not_guessed(text: str, format: str, line: int) -> None:
    assert refusal(text, format).startswith(f"t, line {line}: ")
    with pytest.raises(UsageError, match="did you mean jsonl"):
        iter_turns(io.BytesIO(b""), "t", "json")


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("hi\n\n  there\n/quit", [("user", "hi", 1), ("user", "  there", 3), ("user", "/quit", 4)]),
        (
            '\n{"role": "user", "content": "a"}\n\n{"role": "assistant", "content": ""}\n',
            [("user", "a", 2), ("assistant", "", 4)],
        ),
        (
            '[\n{"role": "user",\n "content": "a"},\n{"role": "assistant", "content": "b"}]',
            [("user", "a", 1), ("assistant", "b", 1)],
        ),
        (
            '{"role": "user", "content": '
            '[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}',
            [("user", "ab", 1)],
        ),
    ],
    ids=["lines", "json lines", "a list of messages", "parts of a text"],
)
def test_a_turn_knows_the_line_it_begins_in(text: str, turns: list[tuple[str, str, int]]) -> None:
    assert read(text) == turns


@pytest.mark.parametrize(
    "text",
    ["[smile] hi", "{x}\nhi", "[1, 2]\nhi", "[\nhi", "[]", "[" * 99, "12 apples", "[[Paris]] is",
     "{x: 1}", "{\nint x;\n}", "[1, 2"],
)  # fmt: skip
def test_a_first_line_that_only_looks_like_json_is_plain(text: str) -> None:
    assert [turn[1] for turn in read(text)] == text.split("\n")


@pytest.mark.parametrize(
    "text",
    ['{"foo": 1}', '{\n"foo": 1\n}', '{"foo": 1}\n{"foo": 2}', '\n{"conversations": [1]}'],
)
def test_other_json_is_refused_unless_it_is_called_lines(text: str) -> None:
    assert "neither a message nor a list of some" in refusal(text)
    assert "--format lines" in refusal(text)
    assert read(text, "lines")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("one", [MESSAGES, {"messages": MESSAGES}], ids=["list", "object"])
def test_messages_of_one_list_begin_where_its_json_does(indent: int | None, one: Any) -> None:
    text = "\n" + json.dumps(one, indent=indent)
    assert read(text) == [("user", "hi", 2), ("assistant", "yes", 2)]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (b"hi\n\xff", 2, "not UTF-8"),
        ('{"role": "user", "content": "a"}\n{"role"', 2, "not valid JSON"),
        ('{"role": "user", "content": "a"}\n[1]', 2, "message 1: a message must be a JSON object"),
        ('[{"role": "user", "content": "a"}, 1]', 1, "message 2: a message must be a JSON object"),
        ('{"role": "user", "content": "a"}\n{"role": "user"}', 2, 'no "content"'),
        ('{"role": "user", "content": 3}', 1, '"content" must be a string'),
        ('{"role": "user", "content": ' + "9" * 5000 + "}", 1, "not valid JSON"),
        ('{"role": "user", "content": [{"type": "image_url"}]}', 1, "list of text parts"),
        ('{"role": "user", "content": "\\ud800"}', 1, "surrogate"),
        ('{"role": "critic", "content": "a"}', 1, "it must be system, user, assistant or tool"),
        ('{"role": ["user"], "content": "a"}', 1, "it must be system, user, assistant or tool"),
        (
            '[{"role": "user",\n "content": "a"},\n {"role": "user"}]',
            1,
            'message 2: the message has no "content"',
        ),
        ('{"messages": "hi"}', 1, "neither a message nor a list"),
        (json.dumps(MESSAGES) + "\nhi", 2, "not valid JSON"),
    ],
)
def test_a_refusal_names_the_file_the_line_and_the_problem(
    text: str | bytes, line: int, problem: str
) -> None:
    message = refusal(text)
    assert message.startswith(f"t, line {line}: ")
    assert problem in message


class Arriving(io.BytesIO):
    """A pipe with one line in it: reading on would block."""

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        assert line, "waits for more"
        return line


@pytest.mark.parametrize("line", [b"hi\n", b"[smile]\n", b'{"role": "user", "content": "hi"}\n'])
def test_a_line_is_a_turn_before_the_next_one_arrives(line: bytes) -> None:
    turns = iter_turns(Arriving(line + line), "pipe")
    assert [next(turns).line, next(turns).line] == [1, 2]


# Memory is traced with this share of the real limits and inputs: tracing takes most of the time
SHARE = 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        b'{"role": "user", "content": "' + b"x" * (25_000_000 // SHARE),  # bad JSON in one line
        b"[" + b"{}," * (1_500_000 // SHARE) + b"]",
        b"[\n" + b"{},\n" * (1_500_000 // SHARE) + b"]",
        b"[\n" * (1_500_000 // SHARE),
        b"x" * (25_000_000 // SHARE),
    ],
    ids=["bad", "wide", "lines", "open", "plain"],
)
def test_what_would_take_all_memory_or_time_is_refused_at_once(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript, "MAX_LINE_BYTES", transcript.MAX_LINE_BYTES // SHARE)
    tracemalloc.start()
    begun = time.process_time()
    try:
        with pytest.raises(TranscriptError) as caught:
            parse_transcript(data, "talk", "jsonl")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert time.process_time() - begun < 40 / SHARE  # on a slow processor, too
    assert most < 100 / SHARE * 2**20
