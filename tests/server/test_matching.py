"""Clients that change what they send: nothing that stays as it was is read again.

The slow way to the same tokens is a server that reads each whole request (`--reuse exact`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from chatting import quick
from serving import Message, Served, assistant, cached, held_text, said, served, system, told, user
from sirchat.server.conversation import MIN_SHARED_CHARS
from template_shapes import script, tool_quick

pytestmark = pytest.mark.slow

WORDS = "Anna Rome green violin harbour baker Tuesday lunch my name is the city river"
TURNS = 11
BRIEF = system("You are a helpful assistant, and brief.")


def copied(tool: Any, name: str) -> Any:
    return tool | {"function": tool["function"] | {"name": name}}


def text(draw: Random, words: int = 12) -> str:
    return " ".join(draw.choices(WORDS.split(), k=words)).capitalize() + "."


def as_it_is(turn: int, before: list[Message]) -> list[Message]:
    return [BRIEF, *before]


def with_time(turn: int, before: list[Message]) -> list[Message]:
    return [system(f"It is {9 + turn} o'clock. You are a helpful assistant."), *before]


def window(turn: int, before: list[Message]) -> list[Message]:
    return [BRIEF, *before[-8:]]


def window_alone(turn: int, before: list[Message]) -> list[Message]:
    return before[-8:]


def cut_in_half(turn: int, before: list[Message]) -> list[Message]:
    if len(before) > 16:
        del before[: len(before) // 4 * 2]
    return [BRIEF, *before]


def cleared(turn: int, before: list[Message]) -> list[Message]:
    old = len(before) - 6
    return [
        BRIEF,
        *(user("[cleared]") if at < old and at % 4 == 0 else one for at, one in enumerate(before)),
    ]


def summed_up(turn: int, before: list[Message]) -> list[Message]:
    if turn == 8:
        before[:10] = [user("In short: Anna was in Rome."), assistant("I see.")]
    return [BRIEF, *before]


def spoken(
    server: Served,
    sent: Callable[[int, list[Message]], list[Message]],
    turns: int = TURNS,
    **fields: Any,
) -> list[tuple[list[Message], Any]]:
    """Each request of a talk, and the response to it."""
    draw, before, asked = Random(1), list[Message](), list[tuple[list[Message], Any]]()
    for turn in range(turns):
        messages = [*sent(turn, before), user(f"{turn}: {text(draw)}")]
        reply = server.ask(messages, **fields)
        asked.append((messages, reply))
        before += [messages[-1], assistant(said(reply))]
    return asked


def read_anew(asked: Sequence[tuple[list[Message], Any]]) -> list[int]:
    return [reply["usage"]["prompt_tokens"] - cached(reply) for _, reply in asked]


SETTINGS: dict[str, Any] = {"policy": "full", "max_new_tokens": 6}


@cache
def read_as_it_is() -> int:
    """How many tokens are read for a talk that each request sends whole."""
    with served(quick(), **SETTINGS) as server:
        return sum(read_anew(spoken(server, as_it_is)))


def conversations(server: Served) -> int:
    return len(server.client.get("/v1/sirchat/sessions").json()["data"])


@pytest.mark.parametrize(
    ("sent", "most"),
    [
        (as_it_is, 0),
        (with_time, 24 * TURNS),  # the system prompt
        (window, 0),
        (window_alone, 0),
        (cut_in_half, 0),
        (cleared, 14 * TURNS),  # a mark of what was cleared
        (summed_up, 40),
    ],
)
def test_only_what_changed_is_read(
    sent: Callable[[int, list[Message]], list[Message]], most: int
) -> None:
    with served(quick(), **SETTINGS) as server:
        asked = spoken(server, sent)
        # Until it is sure that a talk is the same one, a change makes it another.
        assert conversations(server) <= 3
        *_, (messages, reply) = asked
        shown = held_text(server, reply)
    read = read_anew(asked)
    early = sum(read[:3])
    assert sum(read) <= read_as_it_is() + most + early
    with served(quick(), reuse="exact", **SETTINGS) as server:
        whole = held_text(server, server.ask(messages))
    end = messages[-1]["content"]
    assert shown[: shown.index(end)] == whole[: whole.index(end)]


def test_a_server_may_compute_all_exactly() -> None:
    with served(quick(), policy="full", max_new_tokens=8, reuse="exact") as server:
        exactly = read_anew(spoken(server, window, 9))
    with served(quick(), policy="full", max_new_tokens=8) as server:
        by_messages = read_anew(spoken(server, window, 9))
        again = server.post([user("Hello.")])
    assert sum(by_messages) < sum(exactly) / 3
    assert again.headers["X-Sirchat-Reused"] == "0"


SECRET = "The password of the harbour office is walnut."
ASKED = "What is the password of the harbour office?"


@pytest.mark.parametrize("recall", ["words", "off"])
def test_what_left_the_window_is_recalled_if_the_conversation_allows_it(recall: str) -> None:
    draw, before = Random(2), [user(SECRET), assistant("I see.")]
    with served(quick(), policy="salience", budget=512, max_new_tokens=8, recall="words") as server:
        for _ in range(8):
            messages = [*before[-6:], user(text(draw))]
            before += [messages[-1], assistant(server.reply(messages))]
        (talk,) = server.client.get("/v1/sirchat/sessions").json()["data"]
        server.send(f"/v1/sirchat/sessions/{talk['id']}", recall=recall)
        reply = server.ask([*before[-6:], user(ASKED)])
        shown = server.client.get(f"/v1/sirchat/sessions/{reply['sirchat']['id']}").json()
    assert (reply["sirchat"]["recalled"] > 0) == (recall == "words")
    assert shown["left_out"] == reply["sirchat"]["left_out"] > 0


def test_two_chats_with_the_same_few_words_stay_apart() -> None:
    """Else one would remember what the other was told."""
    talk = [user("Hello."), assistant("Hello! How can I help you?")]
    assert sum(len(one["content"]) for one in talk) < MIN_SHARED_CHARS
    with served(quick(), policy="salience", budget=512, max_new_tokens=8, recall="words") as server:
        first = [user(SECRET), assistant("I see."), *talk]
        one = server.ask([*first, user("Thanks.")])
        other = server.ask([*talk, user(ASKED)])
    assert one["sirchat"]["id"] != other["sirchat"]["id"]
    assert cached(other) == 0
    assert other["sirchat"]["recalled"] == 0


def test_chats_with_equal_examples_and_an_equal_end_stay_apart() -> None:
    """What stands before that in which they differ does not count: all clients may send it."""
    examples = [user(text(Random(7), 40)), assistant(text(Random(8), 40))]
    end = [user("Thanks."), assistant("You are welcome.")]
    with served(quick(), policy="salience", budget=512, max_new_tokens=8, recall="words") as server:
        alice = [*examples, user(SECRET), assistant("I see."), user("Hm."), assistant("Yes?"), *end]
        server.ask([BRIEF, *alice, user("Bye.")])
        bob = [*examples, user("Hello."), assistant("Hello."), *end, user(ASKED)]
        for prompt in (BRIEF, system("It is nine o'clock.")):
            reply = server.ask([prompt, *bob])
            assert reply["sirchat"]["left_out"] == reply["sirchat"]["recalled"] == 0


def test_a_refused_request_leaves_nothing_for_the_next() -> None:
    draw, before = Random(9), list[Message]()
    with served(quick(), policy="full", max_new_tokens=8) as server:
        for _ in range(6):
            messages = [*before, user(text(draw))]
            before = [*messages, assistant(server.reply(messages))]
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}
        refused = server.post([*before[4:], user("Hm.")], response_format=form)
        assert refused.status_code == 400
        reply = server.ask([*before, user("And now?")])
        whole = held_text(server, reply)
    assert reply["usage"]["prompt_tokens"] - cached(reply) < 20
    assert all(one["content"] in whole for one in before if one["role"] == "user")


def test_exact_requests_do_not_go_on_in_an_edited_chat(tmp_path: Path) -> None:
    draw, before = Random(10), list[Message]()
    with served(quick(), policy="full", max_new_tokens=8, folder=tmp_path) as server:
        for _ in range(8):
            messages = [*before[-6:], user(text(draw))]
            before += [messages[-1], assistant(server.reply(messages))]
    with served(quick(), policy="full", max_new_tokens=8, folder=tmp_path, reuse="exact") as server:
        assert cached(server.ask([*messages, before[-1], user("And now?")])) == 0


def test_a_branch_after_an_edit_goes_back_to_where_it_says() -> None:
    draw, before = Random(11), list[Message]()
    with served(quick(), policy="full", max_new_tokens=8) as server:
        for _ in range(6):
            before += [user(text(draw)), assistant("I see.")]
        server.ask([BRIEF, *before, user("Hm.")])
        now = [system("It is nine o'clock."), *before]
        now += [user("And now?"), assistant(server.reply([*now, user("And now?")]))]
        now += [user("And then?"), assistant(server.reply([*now, user("And then?")]))]
        other = [*now[:-4], user("Where is the harbour?")]
        reply = server.ask(other)
        whole = held_text(server, reply)
    assert all(one["content"] in whole for one in other)
    assert "And then?" not in whole


def test_what_was_erased_is_not_read_again() -> None:
    draw, before = Random(12), list[Message]()
    with served(quick(), policy="full", max_new_tokens=8) as server:
        for number in range(6):
            said = "My dog is called Rex." if number == 3 else text(draw)
            messages = [*before, user(said)]
            reply = server.ask(messages)
            before = [*messages, assistant(reply["choices"][0]["message"]["content"])]
        ident = reply["sirchat"]["id"]
        server.send(f"/v1/sirchat/sessions/{ident}", erase="Rex")
        reply = server.ask([*before[6:], user("What is my dog called?")])
        assert reply["sirchat"]["id"] == ident
        assert "Rex" not in held_text(server, reply)


def test_one_who_goes_on_from_before_has_both(tmp_path: Path) -> None:
    draw, before = Random(3), list[Message]()
    with served(quick(), policy="full", max_new_tokens=8, folder=tmp_path) as server:
        for _ in range(8):
            before += [user(text(draw)), assistant(server.reply([*before, user(text(draw))]))]
        other = [user("[cleared]"), *before[1:8], user("Another question.")]
        branch = server.ask(other)
        again = server.ask([*before, user("And this one.")])
    assert cached(branch) > 0
    assert branch["sirchat"]["id"] != again["sirchat"]["id"]
    assert again["usage"]["prompt_tokens"] - cached(again) < 40


def test_after_a_restart_a_window_slides_on(tmp_path: Path) -> None:
    draw, before = Random(4), list[Message]()
    settings: dict[str, Any] = {"policy": "salience", "budget": 256, "max_new_tokens": 8}
    for _ in range(2):
        with served(quick(), folder=tmp_path, **settings) as server:
            for _ in range(5):
                messages = [BRIEF, *before[-6:], user(text(draw))]
                reply = server.ask(messages)
                before += [messages[-1], assistant(said(reply))]
            first = server.ask([BRIEF, *before[-6:], user(text(draw))])
            before += [user("Never mind."), assistant("I see.")]
    assert first["sirchat"]["left_out"] > 0
    assert first["usage"]["prompt_tokens"] - cached(first) < 40


def test_after_a_restart_what_both_begin_with_is_not_read(tmp_path: Path) -> None:
    """A client that shows documents with the last question alone."""
    draw, before = Random(13), list[Message]()
    for restarted in (False, True):
        with served(quick(), policy="full", max_new_tokens=8, folder=tmp_path) as server:
            for _ in range(1 if restarted else 6):
                shown = user(f"{text(draw, 30)} What of it?")
                reply = server.ask([BRIEF, *before, shown])
                before += [user("What of it?"), assistant(said(reply))]
    assert reply["usage"]["prompt_tokens"] - cached(reply) < 100
    assert reply["usage"]["prompt_tokens"] > 130


TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}},
    },
}


def test_cleared_results_of_tools_are_all_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [json.dumps({"name": "read", "arguments": {"page": n}}) for n in range(8)]
    script(monkeypatch, [f"<tool_call>\n{call}\n</tool_call>" for call in calls])
    messages: list[Any] = [user("Read all pages, and tell me what they say of the harbour.")]
    draw, read = Random(5), list[int]()
    with served(tool_quick(), policy="full", max_new_tokens=60) as server:
        for _ in calls:
            shown = [
                one | {"content": "[cleared]"}
                if one["role"] == "tool" and at < len(messages) - 4
                else one
                for at, one in enumerate(messages)
            ]
            reply = server.ask(shown, tools=[TOOL])
            read.append(reply["usage"]["prompt_tokens"] - cached(reply))
            message = reply["choices"][0]["message"]
            ident = message["tool_calls"][0]["id"]
            result = {"role": "tool", "tool_call_id": ident, "content": text(draw, 60)}
            messages += [message, result]
        assert conversations(server) == 1
    new = read[1]  # one result
    assert all(count < new + 60 for count in read[2:])


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_system_prompt_is_read_once_for_all_chats(tools: list[Any]) -> None:
    long = system("You are a helpful assistant of the harbour office. " * 6)
    with served(tool_quick(), policy="salience", budget=1024, max_new_tokens=8) as server:
        first = server.ask([long, user("My name is Anna.")], tools=tools)
        other = server.ask([long, user("Where is the harbour?")], tools=tools)
        same = server.ask([long, user("My name is Anna.")], tools=tools)
    assert cached(first) == 0
    assert cached(other) > 60
    assert other["usage"]["prompt_tokens"] - cached(other) < 25
    assert said(same) == said(first)
    messages = [long, user("Where is the harbour?")]
    assert tools or said(other) == told(messages, tool_quick, max_new_tokens=8)
    assert other["sirchat"]["id"] != first["sirchat"]["id"]


def test_a_system_prompt_is_not_read_again_after_a_restart(tmp_path: Path) -> None:
    """By a new chat; that which has read it may have a name."""
    long = system("You are a helpful assistant of the harbour office. " * 45)
    for name in ({}, {"conversation": "mine"}):
        settings: dict[str, Any] = {"policy": "full", "max_new_tokens": 8}
        with served(quick(), folder=tmp_path, **settings) as server:
            first = server.ask([long, user("My name is Anna.")], sirchat=name)
        with served(quick(), folder=tmp_path, **settings) as server:
            other = server.ask([long, user("Where is the harbour?")], temperature=0)
            assert cached(other) > 400
            assert other["sirchat"]["id"] != first["sirchat"]["id"]
            assert len(server.client.get("/v1/sirchat/sessions").json()["data"]) >= 2
        messages = [long, user("Where is the harbour?")]
        assert said(other) == told(messages, quick, max_new_tokens=8)


def test_tools_behind_another_time_are_not_read_again() -> None:
    tools = [copied(TOOL, f"weather{number}") for number in range(5)]
    with served(tool_quick(), **SETTINGS) as server:
        asked = spoken(server, with_time, 7, tools=tools, tool_choice="none")
        messages, reply = asked[-1]
        shown = held_text(server, reply)
        assert max(read_anew(asked)[4:]) < 100 < read_anew(asked)[0] / 5
        # Of those tools, which saw the time of another chat before them, no other chat has any.
        prompt = messages[0]
        other = server.ask([prompt, user("Hello?")], tools=tools, tool_choice="none")
        assert cached(other) == 0
    with served(tool_quick(), reuse="exact", **SETTINGS) as server:
        whole = held_text(server, server.ask(messages, tools=tools, tool_choice="none"))
    end = messages[-1]["content"]
    assert shown[: shown.index(end)] == whole[: whole.index(end)]
