"""Reads and writes transcripts: plain lines, USER:/ASSISTANT: text, JSON Lines, ShareGPT.

All formats but ShareGPT are read line by line, so that each line that comes through a pipe is
answered at once. No line of a transcript is run as a command; in
JSON Lines, an object apart from the messages may switch settings.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, BinaryIO, Literal, get_args

from sirchat.errors import TranscriptError, UsageError, nearest
from sirchat.text.located_json import LocatedJson
from sirchat.text.tool_calls import with_calls

RoleName = Literal["system", "user", "assistant", "tool"]
Line = tuple[int, str]  # number (from 1), text without the newline

FORMATS = ("auto", "jsonl", "sharegpt", "text", "lines")
_ROLES: dict[str, RoleName] = {name: name for name in get_args(RoleName)}
_SHAREGPT_ROLES: dict[str, RoleName] = {"system": "system", "human": "user", "gpt": "assistant"}
_KEYS = ("conversations", "messages")  # of the list of messages in a ShareGPT object
_PREFIX = re.compile(r"(user|assistant|system): ?(.*)", re.IGNORECASE)
# Maximum size of a line, in bytes, and of a JSON document, in characters; parsed JSON can take
# fifty times as much memory.
MOST_BYTES = 2**22
_MOST_LINES = 500_000  # of a JSON document
_OBJECT = re.compile(r'\s*(?:\[\s*)?\{\s*"[^"\\]*"\s*:')
_REFUSED = {  # the kinds of JSON that are refused, and why
    "unknown": "neither a message nor a conversation",
    "broken": "not valid",
    "deep": "nested too deeply, or has a number that is too long",
}
# Control characters that `json` does not escape, and those that change the direction of writing.
_CONTROLS = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
OPEN, CLOSE = "<think>\n", "\n</think>\n\n"  # around the reasoning of a reply written as one text
# The reasoning with its tags; if the template wrote `<think>`, the reply has the end tag alone.
_TAGS = re.compile(r"\A\s*+(?:<think>)?+(?:(?!<think>).)*?</think>|\A\s*<think>.*", re.DOTALL)


@dataclass(frozen=True)
class TranscriptTurn:
    """One message, the line on which it starts (from 1) and its conversation (from 0).

    `thinking`, the reasoning of a reply, is written, not read.
    """

    role: RoleName
    content: str
    line: int
    conversation: int = 0
    thinking: str = ""


@dataclass(frozen=True)
class SettingsSwitch:
    """The line `{"switch": {NAME: VALUE}}`: settings that change before the next turn."""

    settings: dict[str, Any]
    line: int
    conversation: int = 0


TranscriptItem = TranscriptTurn | SettingsSwitch


def iter_turns(stream: BinaryIO, name: str, format: str = "auto") -> Iterator[TranscriptItem]:
    """Yield turns and switches of a UTF-8 `stream`, each as soon as the format allows.

    Raises UsageError for an unknown format, and TranscriptError, with `name`, the line and the
    problem, while reading.
    """
    if format not in FORMATS:
        raise UsageError(
            f'there is no transcript format "{format}"; it must be one of {", ".join(FORMATS)}',
            hint=nearest(format, FORMATS),
        )
    lines = _numbered(stream, name)
    return _parse_detected(lines, name) if format == "auto" else _parse_as(lines, name, format)


def parse_transcript(data: bytes, name: str, format: str = "auto") -> list[TranscriptTurn]:
    """All turns of the transcript `data`, which may not switch settings; see `iter_turns`."""
    turns = list[TranscriptTurn]()
    for item in iter_turns(io.BytesIO(data), name, format):
        if isinstance(item, SettingsSwitch):
            raise _error(name, item.line, "settings can't be switched here")
        turns.append(item)
    return turns


def one_conversation(turns: Iterable[TranscriptItem], name: str) -> Iterator[TranscriptItem]:
    """Yield the turns; raises TranscriptError at the first turn of a second conversation."""
    for turn in turns:
        if turn.conversation:
            raise TranscriptError(
                f"{name}, line {turn.line}: a second conversation begins",
                hint="a transcript may have one conversation; put each into its own file",
            )
        yield turn


def write_jsonl(turns: Iterable[TranscriptTurn], stream: BinaryIO) -> None:
    """Write each turn as a line of JSON, see `message_record`, in UTF-8."""
    for turn in turns:
        record = message_record(turn.role, turn.content, turn.thinking)
        stream.write(terminal_safe_json(record).encode() + b"\n")


def tagged(thinking: str, answer: str) -> str:
    """A reply as one text, with its reasoning, if it has some, in tags."""
    return f"{OPEN}{thinking}{CLOSE}{answer}" if thinking else answer


def split_tagged(text: str) -> tuple[str, str]:
    """The reasoning of a reply, which stands in tags at its beginning, or ""; and the answer."""
    if (found := _TAGS.match(text)) is None:
        return "", text
    thinking = found[0].strip().removeprefix("<think>").removesuffix("</think>")
    return thinking.strip(), text[found.end() :].lstrip()


def message_record(role: str, content: str, thinking: str) -> dict[str, str]:
    """A message for JSON; reasoning, if there is some, is its `reasoning_content`."""
    more = {"reasoning_content": thinking} if thinking else {}
    return {"role": role, "content": content, **more}


def terminal_safe_json(value: object, indent: int | None = None) -> str:
    """A value as JSON that can't control a terminal; other non-ASCII characters are not escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _numbered(stream: BinaryIO, name: str) -> Iterator[Line]:
    # readline returns as soon as a line is complete, also from a pipe; read would wait.
    lines = iter(lambda: stream.readline(MOST_BYTES + 1), b"")
    for number, raw in enumerate(lines, start=1):
        if len(raw) > MOST_BYTES:
            raise _error(name, number, f"the line is too long; allowed: up to {MOST_BYTES:,} bytes")
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
            return _jsonl_turns(lines, name)
        case "sharegpt":
            return _sharegpt_turns(LocatedJson(_joined(list(_limited(lines, name))), name))
        case "text":
            return _prefixed_turns(lines, name)
        case _:
            return _plain_turns(lines)


def _parse_detected(lines: Iterator[Line], name: str) -> Iterator[TranscriptItem]:
    """Yield the turns, whose format the first non-blank line, or the first JSON value, tells."""
    first = next((line for line in lines if line[1].strip()), None)
    if first is None:
        return
    rest: Iterator[Line] = chain([first], lines)
    format = _format_of(first[1])
    if format == "unfinished":
        seen = list(_limited(rest, name))
        rest = iter(seen)
        format = _format_of(_joined(seen), is_whole=True)
    if problem := _REFUSED.get(format):
        raise TranscriptError(
            f"{name}, line {first[0]}: this JSON is {problem}",
            hint='a message is {"role": ..., "content": ...}; --format lines reads it as text',
        )
    yield from _parse_as(rest, name, format)


def _format_of(text: str, *, is_whole: bool = False) -> str:
    """The format of a transcript with this first line, or this text if `is_whole`.

    "unfinished": a JSON value goes on in the next line. A key of `_REFUSED`: the JSON is refused.
    """
    text = text.strip()
    if _PREFIX.match(text):
        return "text"
    if not text.startswith(("{", "[")):
        return "lines"
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        if error.pos >= len(text) and not is_whole:
            return "unfinished"
        return "broken" if _OBJECT.match(text) else "lines"
    except (ValueError, RecursionError):
        return "deep"
    if end < len(text) and not is_whole:
        return "broken" if _OBJECT.match(text) else "lines"
    return _format_of_json(value)


def _format_of_json(value: object) -> str:
    if isinstance(value, dict) and ("role" in value or "switch" in value):
        return "jsonl"
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, dict):
        return "lines"
    keys = _KEYS if first is value else (*_KEYS, "role", "from")
    return "unknown" if first.keys().isdisjoint(keys) else "sharegpt"


def _plain_turns(lines: Iterator[Line]) -> Iterator[TranscriptTurn]:
    return (TranscriptTurn("user", text, number) for number, text in lines if text.strip())


def _prefixed_turns(lines: Iterator[Line], name: str) -> Iterator[TranscriptTurn]:
    """Yield the turns of a text with prefixes such as `USER:`, all in the case of the first."""
    role: RoleName | None = None
    start, content, case = 0, list[str](), str.upper
    for number, text in lines:
        prefixed = _PREFIX.fullmatch(text)
        if prefixed and role is None:
            cases = (str.upper, str.title, str.lower)
            case = next((cased for cased in cases if cased(prefixed[1]) == prefixed[1]), case)
        if prefixed and case(prefixed[1]) == prefixed[1]:
            if role:
                yield from _text_turn(role, content, start)
            role, start, content = _ROLES[prefixed[1].lower()], number, [prefixed[2]]
        elif role:
            content.append(text)
        elif text.strip():
            raise _error(name, number, "text before the first USER:, ASSISTANT: or SYSTEM:")
    if role:
        yield from _text_turn(role, content, start)


def _text_turn(role: RoleName, lines: list[str], start: int) -> Iterator[TranscriptTurn]:
    content = "\n".join(lines).strip("\n")
    if content.strip():
        yield TranscriptTurn(role, content, start)


def _jsonl_turns(lines: Iterator[Line], name: str) -> Iterator[TranscriptItem]:
    switched = 0  # the line of a switch after the last turn
    for number, text in lines:
        if text.strip():
            value = LocatedJson(text, name, number).only_value()
            if not isinstance(value, dict) or "switch" not in value or "role" in value:
                turn = _turn(value, name, number)
                if switched and turn.role in ("assistant", "tool"):
                    problem = f"settings can't be switched before the {turn.role} turn of line"
                    raise _error(name, switched, f"{problem} {number}, which answers a message")
                switched = 0
                yield turn
            elif isinstance(settings := value["switch"], dict):
                switched = number
                yield SettingsSwitch(settings, number)
            else:
                problem = '"switch" must be an object of settings, such as {"policy": "sink"}'
                raise _error(name, number, problem)


def _sharegpt_turns(document: LocatedJson) -> Iterator[TranscriptTurn]:
    """Yield the messages of all conversations in a file of one or several JSON values."""
    conversations = chain.from_iterable(
        _conversations(document, start, value) for start, value in document.values()
    )
    for number, messages in enumerate(conversations):
        for at, message in messages:
            yield replace(_turn(message, document.name, document.line(at)), conversation=number)


def _conversations(
    document: LocatedJson, start: int, value: object
) -> Iterator[Iterable[tuple[int, object]]]:
    """Yield, for each conversation in the JSON at index `start`, its messages and their indices."""
    match value:
        case {"conversations": list()}:
            yield document.items(document.member(start, "conversations"))
        case {"messages": list()}:
            yield document.items(document.member(start, "messages"))
        case list() if any(
            isinstance(item, dict) and not item.keys().isdisjoint(_KEYS) for item in value
        ):
            for at, item in document.items(start):
                yield from _conversations(document, at, item)
        case list():
            yield document.items(start)
        case {"conversations": _} | {"messages": _}:
            problem = '"conversations" or "messages" must be a list'
            raise _error(document.name, document.line(start), problem)
        case _:
            raise _error(document.name, document.line(start), "not a conversation in ShareGPT form")


def _turn(message: object, name: str, line: int) -> TranscriptTurn:
    if not isinstance(message, dict):
        raise _error(name, line, "a message must be a JSON object")
    sharegpt = "from" in message and "role" not in message
    role_key, content_key = ("from", "value") if sharegpt else ("role", "content")
    roles = _SHAREGPT_ROLES if sharegpt else _ROLES
    for key in (role_key, content_key):
        if key not in message:
            raise _error(name, line, f'the message has no "{key}"')
    role = message[role_key]
    if not isinstance(role, str) or role not in roles:
        given = json.dumps(role, ensure_ascii=False)[:60]
        *others, last = roles
        allowed = f"{', '.join(others)} or {last}"
        raise _error(name, line, f'"{role_key}" can\'t be {given}; it must be {allowed}')
    calls = message.get("tool_calls") if role == "assistant" else None
    said = message[content_key]
    content = _content("" if said is None and calls else said, content_key, name, line)
    if calls:
        content = with_calls(content, calls)
    return TranscriptTurn(roles[role], content, line)


def _content(value: object, key: str, name: str, line: int) -> str:
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = list[str]()
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _error(name, line, f'"{key}" must be a string or a list of text parts')
    content = "".join(texts)
    try:
        content.encode()
    except UnicodeEncodeError:
        raise _error(name, line, f'"{key}" contains half of a surrogate pair') from None
    return content


def _limited(lines: Iterable[Line], name: str) -> Iterator[Line]:
    """Yield the lines of one JSON document; TranscriptError if there are too many or too long."""
    size = 0
    for count, (number, text) in enumerate(lines, start=1):
        size += len(text)
        if size > MOST_BYTES or count > _MOST_LINES:
            problem = (
                f"too long; allowed: {MOST_BYTES:,} characters in {_MOST_LINES:,} lines of JSON"
            )
            raise TranscriptError(
                f"{name}, line {number}: {problem}",
                hint="JSON Lines, one message in each line, has no limit",
            )
        yield number, text


def _joined(lines: list[Line]) -> str:
    """Join lines to one text, in which each has its number."""
    skipped = lines[0][0] - 1 if lines else 0
    return "\n" * skipped + "\n".join(text for _, text in lines)
