"""Random and mutated transcripts are read, or refused in one line."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from attacking import attack, mutated, odd_text
from sirchat.errors import TranscriptError
from sirchat.text.transcript import FORMATS, parse_transcript

_KEYS = ["role", "content", "from", "value", "conversations", "messages", "type", "text", ""]
_ROLES = ["user", "assistant", "system", "human", "gpt", "User", 1, None, [], {}, "\ud800"]


def json_value(random: Random, depth: int = 0) -> Any:
    """A random JSON value, often nearly a conversation."""
    kind = random.randrange(8 if depth < 4 else 5)
    if kind == 0:
        return random.choice([None, True, 0, -1, 1e308, 10**400, 2**63, 1.5])
    if kind < 5:
        return random.choice(_ROLES) if random.random() < 0.4 else odd_text(random, 1)
    if kind == 5:
        return [json_value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 6:
        names = random.choices(_KEYS, k=random.randrange(4))
        return {name: json_value(random, depth + 1) for name in names}
    message = {random.choice(("role", "from")): random.choice(_ROLES)}
    return message | {random.choice(("content", "value")): json_value(random, depth + 2)}


def transcript(random: Random) -> bytes:
    """A transcript of some format, often a damaged one."""
    kind = random.randrange(5)
    if kind == 0:
        text = "\n".join(json.dumps(json_value(random)) for _ in range(random.randrange(1, 5)))
    elif kind == 1:
        indent = random.choice((None, 1))
        text = json.dumps({"conversations": [json_value(random) for _ in range(3)]}, indent=indent)
    elif kind == 2:
        heads = ["USER: ", "user:", "Assistant: ", "SYSTEM:", ""]
        lines = (random.choice(heads) + odd_text(random, 1) for _ in range(random.randrange(1, 6)))
        text = "\n".join(lines)
    elif kind == 3:
        text = random.choice(("[", '{"a":', "[{", '"', "-", "1")) * random.choice((3, 500, 200_000))
    else:
        text = odd_text(random)
    encoding = random.choice(["utf-8"] * 6 + ["utf-16", "utf-8-sig", "utf-7"])
    data = text.encode(encoding, random.choice(("surrogatepass", "replace")))
    return mutated(random, data) if random.random() < 0.5 else data


@pytest.mark.slow
def test_every_transcript_is_read_or_refused_in_one_line() -> None:
    def read(random: Random) -> None:
        for turn in parse_transcript(transcript(random), "t", random.choice(FORMATS)):
            assert turn.role in ("user", "assistant", "system")
            turn.content.encode()

    attack(read, 1500)


PAST = [
    b'{"role": "user", "content": ' + b"[" * 100_000,
    b"[" * 3_000_000,
    b'{"role": "user", "content": "\\ud800"}',
    b'{"role": "user", "content": ' + b"9" * 5000 + b"}",
    b'[{"a": ' * 100_000,
]


@pytest.mark.parametrize("data", PAST, ids=range(len(PAST)))
@pytest.mark.parametrize("format", ["jsonl", "sharegpt", "auto"])
def test_what_once_hung_or_took_gigabytes_is_refused_at_once(data: bytes, format: str) -> None:
    with pytest.raises(TranscriptError):
        parse_transcript(data, "t", format)


@pytest.mark.parametrize(
    "text",
    ['{"role": "user", "content": "x"} and more', '{"role": "user"', '{\n"messages": [\n{"role":',
     ' [ {"from": "human" "value": 1}]', "[" * 100_000],
)  # fmt: skip
def test_broken_json_is_not_taken_for_text(text: str) -> None:
    with pytest.raises(TranscriptError, match="--format lines reads it as text"):
        parse_transcript(text.encode(), "t")
    assert parse_transcript(text.encode(), "t", "lines")


@pytest.mark.parametrize("text", ["[sigh] well", "[[Paris]] is", "{x: 1}", "{\nint x;\n}", "[1, 2"])
def test_text_in_brackets_is_text(text: str) -> None:
    turns = parse_transcript(text.encode(), "t")
    assert [turn.content for turn in turns] == text.split("\n")
