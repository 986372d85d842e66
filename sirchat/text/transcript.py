"""Reads and writes transcripts: plain lines, USER:/ASSISTANT: text, JSON Lines, ShareGPT.

All formats but ShareGPT are read line by line, so that each line that comes through a pipe is
answered at once. No line of a transcript is run as a command.
"""

from __future__ import annotations

import io
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, BinaryIO, Literal

from sirchat.errors import TranscriptError, UsageError, nearest

RoleName = Literal["system", "user", "assistant"]
Line = tuple[int, str]  # number (from 1), text without the newline

FORMATS = ("auto", "jsonl", "sharegpt", "text", "lines")
_ROLES: dict[str, RoleName] = {"system": "system", "user": "user", "assistant": "assistant"}
_SHAREGPT_ROLES: dict[str, RoleName] = {"system": "system", "human": "user", "gpt": "assistant"}
_KEYS = ("conversations", "messages")  # of the list of messages in a ShareGPT object
_PREFIX = re.compile(r"(user|assistant|system): ?(.*)", re.IGNORECASE)
MOST_BYTES = 2**22
"""Maximum size of a line, in bytes, and of a JSON document, in characters.

Parsed JSON can take fifty times as much memory.
"""

_MOST_LINES = 500_000  # of a JSON document
_OBJECT = re.compile(r'\s*(?:\[\s*)?\{\s*"[^"\\]*"\s*:')
_REFUSED = {
    "unknown": "neither a message nor a conversation",
    "broken": "not valid",
    "deep": "nested too deeply, or has a number that is too long",
}
"""Names of the kinds of JSON that are refused, each with the reason for error messages."""

_JSON_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class TranscriptTurn:
    """One message of a transcript.

    `line` is the number of the line on which it starts, from 1; `conversation` is the number of its
    conversation in the file, from 0.
    """

    role: RoleName
    content: str
    line: int
    conversation: int = 0


def iter_turns(stream: BinaryIO, name: str, format: str = "auto") -> Iterator[TranscriptTurn]:
    """Yield the turns of a UTF-8 `stream`, each as soon as it is complete, if the format allows.

    `name` stands for the stream in error messages; `format` is one of `FORMATS`. Raises UsageError
    for an unknown format, and TranscriptError, with the line and the problem, while reading.
    """
    if format not in FORMATS:
        raise UsageError(
            f'there is no transcript format "{format}"; it must be one of {", ".join(FORMATS)}',
            hint=nearest(format, FORMATS),
        )
    lines = _numbered(stream, name)
    return _detected(lines, name) if format == "auto" else _parsed(lines, name, format)


def parse_transcript(data: bytes, name: str, format: str = "auto") -> list[TranscriptTurn]:
    """All turns of the transcript `data`, which is UTF-8.

    `name` stands for the transcript in error messages; `format` is one of `FORMATS`. Raises
    UsageError for an unknown format, and TranscriptError for data that does not have this format.
    """
    return list(iter_turns(io.BytesIO(data), name, format))


def one_conversation(turns: Iterable[TranscriptTurn], name: str) -> Iterator[TranscriptTurn]:
    """Yield the turns; raises TranscriptError at the first turn of a second conversation."""
    for turn in turns:
        if turn.conversation:
            raise TranscriptError(
                f"{name}, line {turn.line}: a second conversation begins",
                hint="a transcript may have one conversation; put each into its own file",
            )
        yield turn


def write_jsonl(turns: Iterable[TranscriptTurn], stream: BinaryIO) -> None:
    """Write each turn as a line of JSON, `{"role", "content"}`, in UTF-8."""
    for turn in turns:
        record = {"role": turn.role, "content": turn.content}
        stream.write(json_text(record).encode() + b"\n")


_CONTROLS = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def json_text(value: object, indent: int | None = None) -> str:
    """A value as JSON without control characters; other non-ASCII characters are not escaped.

    Python's `json` escapes only controls below U+0020. This function also escapes those from U+007F
    to U+009F and the bidirectional controls, so that the text can't control a terminal.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _numbered(stream: BinaryIO, name: str) -> Iterator[Line]:
    # readline returns as soon as a line is complete, also from a pipe; read would wait.
    lines = iter(lambda: stream.readline(MOST_BYTES + 1), b"")
    for number, raw in enumerate(lines, start=1):
        if len(raw) > MOST_BYTES:
            raise _error(name, number, f"the line is too long; allowed: up to {MOST_BYTES:,} bytes")
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _error(name, number, "not UTF-8") from None
        yield number, text.removesuffix("\n").removesuffix("\r")


def _error(name: str, line: int, problem: str) -> TranscriptError:
    return TranscriptError(f"{name}, line {line}: {problem}")


def _parsed(lines: Iterator[Line], name: str, format: str) -> Iterator[TranscriptTurn]:
    match format:
        case "jsonl":
            return _jsonl(lines, name)
        case "sharegpt":
            return _sharegpt(_JsonText(_joined(lines, name), name))
        case "text":
            return _text(lines, name)
        case _:
            return _plain(lines)


def _detected(lines: Iterator[Line], name: str) -> Iterator[TranscriptTurn]:
    """Detect the transcript's format, and yield its turns.

    The first non-blank line tells the format. If this line begins a JSON value that has several
    lines, all lines are read first.
    """
    first = next((line for line in lines if line[1].strip()), None)
    if first is None:
        return
    rest: Iterator[Line] = chain([first], lines)
    format = _format_of(first[1])
    if format == "unfinished":
        seen = list(_limited(rest, name))
        rest = iter(seen)
        format = _format_of_whole(_joined(seen, name))
    if problem := _REFUSED.get(format):
        raise TranscriptError(
            f"{name}, line {first[0]}: this JSON is {problem}",
            hint='a message is {"role": ..., "content": ...}; --format lines reads it as text',
        )
    yield from _parsed(rest, name, format)


def _format_of(first: str) -> str:
    """The format of a transcript with this first line.

    "unfinished": a JSON value goes on in the next line. A key of `_REFUSED`: the JSON is refused.
    """
    if _PREFIX.match(first):
        return "text"
    if not first.lstrip().startswith(("{", "[")):
        return "lines"
    try:
        value = json.loads(first)
    except json.JSONDecodeError as error:
        return "unfinished" if error.pos >= len(first.rstrip()) else _format_of_broken(first)
    except (ValueError, RecursionError):
        return "deep"
    return _format_of_json(value)


def _format_of_whole(text: str) -> str:
    """The format, as in `_format_of`, of a transcript whose first JSON value has several lines."""
    try:
        return _format_of_json(json.JSONDecoder().raw_decode(text.lstrip())[0])
    except json.JSONDecodeError:
        return _format_of_broken(text)
    except (ValueError, RecursionError):
        return "deep"


def _format_of_broken(text: str) -> str:
    """For invalid JSON: "broken" if it begins like an object or a list of objects, else "lines"."""
    return "broken" if _OBJECT.match(text) else "lines"


def _format_of_json(value: object) -> str:
    """The format of a transcript that begins with this JSON value.

    Returns "unknown" for an object that is neither a message nor a conversation.
    """
    if isinstance(value, dict) and "role" in value:
        return "jsonl"
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, dict):
        return "lines"
    keys = _KEYS if first is value else (*_KEYS, "role", "from")
    return "unknown" if first.keys().isdisjoint(keys) else "sharegpt"


def _plain(lines: Iterator[Line]) -> Iterator[TranscriptTurn]:
    return (TranscriptTurn("user", text, number) for number, text in lines if text.strip())


def _text(lines: Iterator[Line], name: str) -> Iterator[TranscriptTurn]:
    """Yield the turns of a text in which each turn begins with a prefix such as `USER:`.

    A prefix counts only if it is written in the same case as the first prefix: `USER:`, `User:` or
    `user:`. A turn without text is left out.
    """
    role: RoleName | None = None
    start, content, case = 0, list[str](), str.upper
    for number, text in lines:
        prefixed = _PREFIX.fullmatch(text)
        if prefixed and role is None:
            cases = (str.upper, str.title, str.lower)
            case = next((one for one in cases if one(prefixed[1]) == prefixed[1]), case)
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


def _jsonl(lines: Iterator[Line], name: str) -> Iterator[TranscriptTurn]:
    for number, text in lines:
        if text.strip():
            yield _turn(_JsonText(text, name, number).only_value(), name, number)


def _sharegpt(document: _JsonText) -> Iterator[TranscriptTurn]:
    """Yield every message of every conversation in a ShareGPT file, with its conversation's number.

    The file may contain several JSON values, one after another.
    """
    conversations = chain.from_iterable(
        _conversations(document, start, value) for start, value in document.values()
    )
    for number, messages in enumerate(conversations):
        for at, message in messages:
            yield replace(_turn(message, document.name, document.line(at)), conversation=number)


def _conversations(
    document: _JsonText, start: int, value: object
) -> Iterator[Iterable[tuple[int, object]]]:
    """Yield the messages of each conversation in the JSON `value`, one iterable per conversation.

    Each message comes with the index of its first character in the text of `document`. `start` is
    the index of the first character of `value`.
    """
    match value:
        case {"conversations": list()}:
            yield document.items(document.member(start, "conversations"))
        case {"messages": list()}:
            yield document.items(document.member(start, "messages"))
        case list() if any(
            isinstance(one, dict) and not one.keys().isdisjoint(_KEYS) for one in value
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
        raise _error(name, line, f'"{role_key}" can\'t be {given}; it must be {_either(roles)}')
    return TranscriptTurn(
        roles[role], _content(message[content_key], content_key, name, line), line
    )


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def _content(value: object, key: str, name: str, line: int) -> str:
    """The text of a message, from the JSON `value` of `key`: a string, or a list of text parts.

    Raises TranscriptError, which names the `line`, for any other value.
    """
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
    """Yield the lines of one JSON document.

    Raises TranscriptError if there are too many lines or characters.
    """
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


def _joined(lines: Iterable[Line], name: str) -> str:
    """Join the lines of a transcript, which are numbered, to one text.

    If the first line's number is not 1, the text begins with as many blank lines as are missing, so
    that the numbers of lines stay right.
    """
    numbered = list(_limited(lines, name))
    skipped = numbered[0][0] - 1 if numbered else 0
    return "\n" * skipped + "\n".join(text for _, text in numbered)


class _JsonText:
    """A JSON text, and where each of its values is, so that errors can name a line.

    The index of a value is the index of the value's first character in the text.
    """

    def __init__(self, text: str, name: str, first_line: int = 1) -> None:
        self.text = text
        self.name = name
        self._first_line = first_line
        self._line_ends = [match.start() for match in re.finditer("\n", text)]
        self._decoder = json.JSONDecoder()

    def line(self, at: int) -> int:
        """The number of the line that contains the character with index `at` in the text."""
        return self._first_line + bisect_left(self._line_ends, at)

    def only_value(self) -> object:
        """Parse the text, which must be one JSON value; return it, or raise TranscriptError."""
        at = self._skip_space(0)
        value, end = self._decode(at)
        if self._skip_space(end) < len(self.text):
            raise self._invalid(end, "there is more after the first value")
        return value

    def values(self) -> Iterator[tuple[int, object]]:
        """Yield the index and the value of each top-level JSON value in the text."""
        at = self._skip_space(0)
        while at < len(self.text):
            value, end = self._decode(at)
            yield at, value
            at = self._skip_space(end)

    def items(self, at: int) -> Iterator[tuple[int, object]]:
        """Yield the index and the value of each item of the JSON list that begins at index `at`.

        The list must be valid JSON.
        """
        at = self._skip_space(at + 1)
        while self.text[at] != "]":
            value, end = self._decode(at)
            yield at, value
            at = self._next(end)

    def member(self, at: int, key: str) -> int:
        """The index of the value of `key` in the JSON object that begins at index `at`.

        If the object has `key` several times, the last value counts.
        """
        found, at = at, self._skip_space(at + 1)
        while self.text[at] != "}":
            name, end = self._decode(at)
            start = self._next(end)
            if name == key:
                found = start
            _, end = self._decode(start)
            at = self._next(end)
        return found

    def _next(self, end: int) -> int:
        """The index of the next value, or closing bracket, after a value that ends at `end`."""
        at = self._skip_space(end)
        return self._skip_space(at + 1) if self.text[at] in ",:" else at

    def _skip_space(self, at: int) -> int:
        space = _JSON_SPACE.match(self.text, at)
        return space.end() if space else at

    def _decode(self, at: int) -> tuple[Any, int]:
        try:
            return self._decoder.raw_decode(self.text, at)
        except json.JSONDecodeError as error:
            raise self._invalid(error.pos, error.msg) from None
        except (ValueError, RecursionError):
            raise self._invalid(
                at, "a number is too long, or brackets are nested too deeply"
            ) from None

    def _invalid(self, at: int, problem: str) -> TranscriptError:
        return _error(self.name, self.line(at), f"not valid JSON: {problem}")
