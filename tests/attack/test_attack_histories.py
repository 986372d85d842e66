"""Clients that cut, slide, clear, edit, insert and go back: a session says what was sent last."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from attacking import attack
from serving import Message, Served, assistant, served, system, user
from template_shapes import tool_tiny

WORDS = "Anna Rome green violin harbour baker my name is the a walks river always never please use"
LONG = "You are a helpful assistant of the town. " + "Speak well. " * 8
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
POLICIES = (
    *("salience", "entropy", "sink", "full", "reservoir", "h2o", "snapkv", "random", "interval"),
    *("window", "anchor"),
)


def text(draw: Random) -> str:
    words = draw.choices(WORDS.split(), k=draw.randint(1, 40))
    return " ".join(words).capitalize() + draw.choice(".?!")


def changed(draw: Random, before: list[Message]) -> list[Message]:
    """What a client sends of its messages `before`."""
    sent, at = list(before), draw.randrange(len(before) or 1)
    match draw.choice(["as it is", "as it is", "window", "cleared", "between", "back", "without"]):
        case "window":
            return sent[2 * draw.randint(0, len(sent) // 2) :]
        case "cleared" if sent:
            sent[at] = sent[at] | {"content": draw.choice(["[cleared]", text(draw)])}
        case "between":
            sent[at : at + draw.randint(0, 3)] = [user(text(draw)), assistant(text(draw))]
        case "back":
            return sent[:at]
        case "without":
            return sent[:at] + sent[at + 1 :]
    return sent


def check(server: Served, messages: list[Message], reply: Any) -> None:
    session = server.server.conversations.find(reply["sirchat"]["id"]).session
    turns = [turn for turn in session.turns if turn.role != "system" and not turn.is_left_out]
    sent = " ".join(one["content"] for one in messages if one["role"] != "system")
    assert " ".join(sent.split()) == " ".join(" ".join(one.text for one in turns[:-1]).split())
    held = session.ledger.held_positions
    assert session.engine.cache.length == len(held)
    for column in (held, *(session.ledger.column(name) for name in ("turn", "round"))):
        assert (np.diff(column) >= 0).all()


def go_on_by_name(draw: Random, server: Served, name: str, named: dict[str, list[Message]]) -> None:
    """Send all messages, the newest, or one; or ask for another reply to the last."""
    messages = [*named[name], user(f"{text(draw)} {len(named[name])}")]
    if len(messages) > 4 and draw.random() < 0.2:
        messages = messages[:-2]
        sent = messages[-2:]
    else:
        sent = messages[draw.choice([0, 0, -1, -1, -3, -5]) :]
    prompt = draw.choice([None, None, None, "Be kind.", f"Now {text(draw)}", LONG])
    response = server.post(
        sent if prompt is None else [system(prompt), *sent],
        sirchat={"conversation": name},
        **({"tools": [TOOL], "tool_choice": "none"} if draw.random() < 0.1 else {}),
    )
    if response.status_code == 400:
        assert "budget" in response.text or "context" in response.text
        return
    assert response.status_code == 200, response.text
    said = response.json()["choices"][0]["message"]["content"]
    check(server, messages, response.json())
    named[name] = [*messages, assistant(said)]


def act(draw: Random) -> None:
    policy, archive = draw.choice(POLICIES), draw.choice(["ram", "ram", "disk", "off"])
    folder = Path(tempfile.mkdtemp())
    talks: list[list[Message]] = [[]]
    named: dict[str, list[Message]] = {"one": [], "two": []}  # each by its name
    settings: dict[str, Any] = {
        "policy": policy,
        "budget": 2048 if policy == "full" else draw.choice([96, 128, 256, 512]),
        "recall": "off" if archive == "off" else draw.choice(["off", "words", "cosine"]),
        "max_new_tokens": draw.choice([1, 6, 20]),
        "archive": archive,
        "archive_limit": draw.choice(["64MiB", "1MiB"]),
        "pin_system": draw.random() < 0.5,
        "evict": draw.choice(["when-full", "before-turn", "between-turns"]),
        "conversations": draw.choice([1, 2, 8]),
        "folder": folder if draw.random() < 0.5 else None,
    }
    with served(tool_tiny(), **settings) as server:
        for step in range(draw.randint(4, 14)):
            if settings["folder"] is not None and draw.random() < 0.3:  # else it can be dropped
                go_on_by_name(draw, server, draw.choice([*named]), named)
                continue
            before = draw.choice(talks)
            messages = [*changed(draw, before), user(text(draw))]
            prompt = draw.choice([None, None, "Be kind.", f"It is {step}. {text(draw)}", LONG])
            sent = messages if prompt is None else [system(prompt), *messages]
            fields: dict[str, Any] = {"tools": [TOOL]} if draw.random() < 0.1 else {}
            response = server.post(sent, **fields)
            if response.status_code == 400:  # more pins than a small budget allows
                assert "budget" in response.text or "context" in response.text
                continue
            assert response.status_code == 200, response.text
            said = response.json()["choices"][0]["message"].get("content")
            if said is None or fields:
                continue
            check(server, messages, response.json())
            if draw.random() < 0.7:
                talks.remove(before)
            talks.append([*messages, assistant(said)])
    shutil.rmtree(folder)


def test_the_session_says_what_the_client_sent_last() -> None:
    attack(act, seconds=60)
