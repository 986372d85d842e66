"""Reads and writes transcripts: plain lines, USER:/ASSISTANT: text, messages in JSON.

All but JSON of several lines is read line by line, so that each line from a pipe is answered at
once. No line is run as a command. In JSON Lines, an object that is no message may switch settings.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, Literal, get_args

from sirchat.errors import TranscriptError, UsageError, did_you_mean
from sirchat.text.text_file import without_surrogates
from sirchat.text.tool_calls import append_calls

RoleName = Literal["system", "user", "assistant", "tool"]
Line = tuple[int, str]  # number (from 1), text without the newline

FORMATS = ("auto", "jsonl", "text", "lines")
_ROLES: dict[str, RoleName] = {name: name for name in get_args(RoleName)}
# The prefixes of a text's turns, all in the case of its first one.
_PREFIXES = [
    re.compile("({}|{}|{}): ?(.*)".format(*map(case, ("user", "assistant", "system"))))
    for case in (str.upper, str.title, str.lower)
]
# Maximum size of a line, in bytes, and of a JSON document, in characters; parsed JSON can take
# fifty times as much memory.
MAX_LINE_BYTES = 2**22
_OBJECT = re.compile(r'\s*(?:\[\s*)?\{\s*"[^"\\]*"\s*:')
_BRACKETS = re.compile(r"\s*\[?\s*\{?\s*")  # with which an object may begin in a later line
_FORMAT_HINT = 'a message is {"role": ..., "content": ...}; --format lines reads it as text'
# Control characters that `json` does not escape, and those that change the direction of writing.
_CONTROLS = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# Around the reasoning of a reply written as one text.
THINK_OPEN, THINK_CLOSE = "<think>\n", "\n</think>\n\n"
# The reasoning with its tags; if the template wrote `<think>`, the reply has the end tag alone.
_TAGS = re.compile(r"\A\s*+(?:<think>)?+(?:(?!<think>).)*?</think>|\A\s*<think>.*", re.DOTALL)


@dataclass(frozen=True)
class TranscriptTurn:
    """One message, and the line on which it starts (from 1).

    `thinking`, the reasoning of a reply, is written but not read.
    """

    role: RoleName
    content: str
    line: int
    thinking: str = ""


@dataclass(frozen=True)
class SettingsSwitch:
    """The line `{"switch": {NAME: VALUE}}`: settings that change before the next turn."""

    settings: dict[str, Any]
    line: int


TranscriptItem = TranscriptTurn | SettingsSwitch


def iter_turns(stream: BinaryIO, name: str, format: str = "auto") -> Iterator[TranscriptItem]:
    """Yield turns and switches of a UTF-8 `stream`, each as soon as the format allows.

    Raises UsageError for an unknown format. While reading, raises TranscriptError, which has
    `name`, the line and the problem.
    """
    if format not in FORMATS:
        raise UsageError(
            f'there is no transcript format "{format}"; it must be one of {", ".join(FORMATS)}',
            hint=did_you_mean(format, FORMATS),
        )
    lines = _numbered(stream, name)
    return _parse_detected(lines, name) if format == "auto" else _parse_as(lines, name, format)


def parse_transcript(data: bytes, name: str, format: str = "auto") -> list[TranscriptTurn]:
    """All turns of a transcript, which may not switch settings; errors as for `iter_turns`."""
    turns = list[TranscriptTurn]()
    for item in iter_turns(io.BytesIO(data), name, format):
        if isinstance(item, SettingsSwitch):
            raise _error(name, item.line, "settings can't be switched here")
        turns.append(item)
    return turns


def write_jsonl(turns: Iterable[TranscriptTurn], stream: BinaryIO) -> None:
    """Write each turn as a line of JSON in UTF-8; see `message_record`."""
    for turn in turns:
        record = message_record(turn.role, turn.content, turn.thinking)
        stream.write(terminal_safe_json(record).encode() + b"\n")


def join_reasoning(thinking: str, answer: str) -> str:
    """A reply as one text, with its reasoning, if any, in tags."""
    return f"{THINK_OPEN}{thinking}{THINK_CLOSE}{answer}" if thinking else answer


def split_reasoning(text: str) -> tuple[str, str]:
    """Split a reply into the reasoning in tags at its beginning, or "", and the answer."""
    if (found := _TAGS.match(text)) is None:
        return "", text
    thinking = found[0].strip().removeprefix("<think>").removesuffix("</think>")
    return thinking.strip(), text[found.end() :].lstrip()


def message_record(role: str, content: str, thinking: str) -> dict[str, str]:
    """A message for JSON; reasoning, if any, is in `reasoning_content`."""
    more = {"reasoning_content": thinking} if thinking else {}
    return {"role": role, "content": content, **more}


def terminal_safe_json(value: object, indent: int | None = None) -> str:
    """A value as JSON that can't control a terminal; other non-ASCII characters are not escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _numbered(stream: BinaryIO, name: str) -> Iterator[Line]:
    # readline returns as soon as a line is complete, also from a pipe; read would wait.
    lines = iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b"")
    for number, raw in enumerate(lines, start=1):
        if len(raw) > MAX_LINE_BYTES:
            problem = f"the line is too long; allowed: up to {MAX_LINE_BYTES:,} bytes"
            raise _error(name, number, problem)
        if b"\0" in raw:
            raise _error(name, number, "not text: it contains NUL bytes")
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _error(name, number, "not UTF-8") from None
        yield number, text.removesuffix("\n").removesuffix("\r")


def _error(name: str, line: int, problem: str) -> TranscriptError:
    return TranscriptError(f"{name}, line {line}: {problem}")


def _parse_as(lines: Iterator[Line], name: str, format: str) -> Iterator[TranscriptItem]:
    match format:
        case "jsonl":
            return _json_turns(lines, name)
        case "text":
            return _prefixed_turns(lines, name)
        case _:
            return _plain_turns(lines)


def _parse_detected(lines: Iterator[Line], name: str) -> Iterator[TranscriptItem]:
    head = list[Line]()
    for line in filter(lambda line: line[1].strip(), lines):
        head.append(line)
        if not _BRACKETS.fullmatch(begun := _joined(head)):
            format = "text" if any(p.match(begun.strip()) for p in _PREFIXES) else "lines"
            format = "jsonl" if _OBJECT.match(begun) else format
            yield from _parse_as(chain(head, lines), name, format)
            return
    yield from _plain_turns(head)


def parse_json(text: str, name: str, line: int = 1) -> Any:
    """Parse the JSON that begins at `line` of the file `name`; raises TranscriptError with both."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line, problem = line + error.lineno - 1, error.msg
    except (ValueError, RecursionError):
        problem = "a number is too long, or brackets are nested too deeply"
    raise TranscriptError(f"{name}, line {line}: not valid JSON: {problem}", hint=_FORMAT_HINT)


def _plain_turns(lines: Iterable[Line]) -> Iterator[TranscriptTurn]:
    return (TranscriptTurn("user", text, number) for number, text in lines if text.strip())


def _prefixed_turns(lines: Iterator[Line], name: str) -> Iterator[TranscriptTurn]:
    """Yield the turns of a text with prefixes such as `USER:`."""
    pattern: re.Pattern[str] | None = None
    role, start, content = _ROLES["user"], 0, list[str]()
    for number, text in lines:
        pattern = pattern or next((one for one in _PREFIXES if one.fullmatch(text)), None)
        if pattern is None and text.strip():
            raise _error(name, number, "text before the first USER:, ASSISTANT: or SYSTEM:")
        if pattern is not None and (prefixed := pattern.fullmatch(text)):
            yield from _text_turn(role, content, start)
            role, start, content = _ROLES[prefixed[1].lower()], number, [prefixed[2]]
        else:
            content.append(text)
    yield from _text_turn(role, content, start)


def _text_turn(role: RoleName, lines: list[str], start: int) -> Iterator[TranscriptTurn]:
    content = "\n".join(lines).strip("\n")
    if content.strip():
        yield TranscriptTurn(role, content, start)


def _json_turns(lines: Iterator[Line], name: str) -> Iterator[TranscriptItem]:
    """Yield turns and switches of JSON values: one a line, or one list of messages."""
    switched = 0  # the line of a switch after the last turn
    values = _json_values(lines, name)
    for line, value in values:
        if isinstance(value, dict) and "switch" in value and "role" not in value:
            switched = line
            yield _switch(value["switch"], name, line)
        elif isinstance(value, dict) and "role" in value:
            turn = _turn(value, name, line)
            if switched and turn.role in ("assistant", "tool"):
                problem = f"settings can't be switched before the {turn.role} turn of line"
                raise _error(name, switched, f"{problem} {line}, which answers a message")
            switched = 0
            yield turn
        else:
            messages = value.get("messages") if isinstance(value, dict) else value
            if not isinstance(messages, list):
                problem = f"{name}, line {line}: this JSON is neither a message nor a list of some"
                raise TranscriptError(problem, hint=_FORMAT_HINT)
            for number, message in enumerate(messages, 1):
                yield _turn(message, name, line, f"message {number}: ")
            if (more := next(values, None)) is not None:
                raise _error(name, more[0], "a second conversation begins; a file may have one")


def _json_values(lines: Iterator[Line], name: str) -> Iterator[tuple[int, Any]]:
    """Yield JSON values, each with the line in which it begins."""
    written = ((number, text) for number, text in lines if text.strip())
    if (first := next(written, None)) is None:
        return
    try:
        json.loads(first[1])
    except (ValueError, RecursionError):
        whole = _joined(_limited(chain([first], lines), name))
        yield first[0], parse_json(whole, name, first[0])
        return
    for number, text in chain([first], written):
        yield number, parse_json(text, name, number)


def _switch(settings: object, name: str, line: int) -> SettingsSwitch:
    if not isinstance(settings, dict):
        problem = '"switch" must be an object of settings, such as {"policy": "sink"}'
        raise _error(name, line, problem)
    return SettingsSwitch(settings, line)


def _turn(message: object, name: str, line: int, place: str = "") -> TranscriptTurn:
    """The turn of a message; `place` begins the text of an error about it."""
    if not isinstance(message, dict):
        raise _error(name, line, f"{place}a message must be a JSON object")
    for key in ("role", "content"):
        if key not in message:
            raise _error(name, line, f'{place}the message has no "{key}"')
    role, said = message["role"], message["content"]
    if not isinstance(role, str) or role not in _ROLES:
        given = json.dumps(role, ensure_ascii=False)[:60]
        allowed = "system, user, assistant or tool"
        raise _error(name, line, f'{place}"role" can\'t be {given}; it must be {allowed}')
    calls = message.get("tool_calls") if role == "assistant" else None
    try:
        content = _content("" if said is None and calls else said)
    except ValueError as error:
        raise _error(name, line, f'{place}"content" {error}') from None
    if calls:
        content = append_calls(content, calls)
    return TranscriptTurn(_ROLES[role], content, line)


def _content(value: object) -> str:
    """The text of a message; raises ValueError that says what is wrong with it."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = list[str]()
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ValueError("must be a string or a list of text parts")
    content = "".join(texts)
    if content != without_surrogates(content):
        raise ValueError("contains half of a surrogate pair")
    return content


def _limited(lines: Iterable[Line], name: str) -> Iterator[Line]:
    """Yield the lines of one JSON document; raises TranscriptError if it is too long."""
    size = 0
    for number, text in lines:
        size += len(text) + 1
        if size > MAX_LINE_BYTES:
            raise TranscriptError(
                f"{name}, line {number}: too long; allowed: {MAX_LINE_BYTES:,} characters of JSON",
                hint="JSON Lines, one message in each line, has no limit",
            )
        yield number, text


def _joined(lines: Iterable[Line]) -> str:
    return "\n".join(text for _, text in lines)
