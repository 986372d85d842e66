"""Files to train on: plain text, transcripts, and JSON Lines of texts or conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from sirchat.errors import SettingError
from sirchat.text.transcript import TranscriptTurn, read_transcript

_HINT = (
    '{"text": ...}, {"messages": [{"role": ..., "content": ...}, ...]}, {"conversations": [...]}, '
    'or {"role": ..., "content": ...}'
)
_PREFIXES = ("USER:", "ASSISTANT:", "SYSTEM:")


@dataclass(frozen=True)
class FileMessage:
    """A message of a conversation: role `system`, `user` or `assistant`, and text."""

    role: str
    text: str


def read_file(path: Path) -> Iterator[str | list[FileMessage]]:
    """The plain texts (str) and conversations of a file.

    - `.jsonl`: each line is a text `{"text"}`, a conversation `{"messages"}` or, as in ShareGPT,
      `{"conversations"}`; lines with `{"role", "content"}` in a row are one conversation.
    - `.json`: ShareGPT, a list of conversations or one.
    - any other: a transcript if it begins with `USER:`, `ASSISTANT:` or `SYSTEM:`, else a text.

    Raises SettingError for a file that can't be read, TranscriptError for a broken transcript.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"data {str(path)!r} can't be read: {error}") from None
    if path.suffix == ".jsonl":
        yield from _lines(text, path)
    elif path.suffix == ".json":
        yield from _sharegpt(text, path)
    elif text.lstrip().startswith(_PREFIXES):
        yield _messages(read_transcript(text.encode(), str(path), "text"))
    else:
        yield text


def _lines(text: str, path: Path) -> Iterator[str | list[FileMessage]]:
    entries = (
        (number, _entry(line, path, number))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    )
    for in_transcript, group in groupby(entries, key=lambda one: "role" in one[1]):
        if in_transcript:
            yield [_message(entry, path, number) for number, entry in group]
            continue
        for number, entry in group:
            if isinstance(entry.get("messages"), list):
                yield [_message(one, path, number) for one in entry["messages"]]
            elif "conversations" in entry:
                yield _conversation(entry, f"{path}, line {number}")
            elif isinstance(entry.get("text"), str):
                yield entry["text"]
            else:
                raise _unknown(path, number)


def _entry(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        raise _unknown(path, number) from None
    if not isinstance(entry, dict):
        raise _unknown(path, number)
    return entry


def _message(entry: Any, path: Path, number: int) -> FileMessage:
    match entry:
        case {"role": str(role), "content": str(content)}:
            return FileMessage(role, content)
        case _:
            raise _unknown(path, number)


def _unknown(path: Path, number: int) -> SettingError:
    message = f"{path}, line {number}, is neither a text nor a conversation"
    return SettingError(message, hint=f"a line is one of {_HINT}")


def _sharegpt(text: str, path: Path) -> Iterator[list[FileMessage]]:
    try:
        whole = json.loads(text)
    except ValueError as error:
        raise SettingError(f"data {str(path)!r} is not JSON: {error}") from None
    if not isinstance(whole, list) or not all(
        isinstance(one, dict) and "conversations" in one for one in whole
    ):
        whole = [whole]  # one conversation, as an object or a list of messages
    for number, one in enumerate(whole, 1):
        yield _conversation(one, f"{path}, conversation {number}")


def _conversation(entry: object, name: str) -> list[FileMessage]:
    return _messages(read_transcript(json.dumps(entry).encode(), name, "sharegpt"))


def _messages(turns: Iterable[TranscriptTurn]) -> list[FileMessage]:
    return [FileMessage(turn.role, turn.content) for turn in turns]
