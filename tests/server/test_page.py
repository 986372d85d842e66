"""The server's page as a user meets it: it chats, and shows the memory of each conversation."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from chatting import babbler
from serving import listening, served, told, user
from sirchat.engine.sampling import Sampler
from statement_telling import FACTS, OTHERS, telling

_NODE = Path(__file__).parents[1] / "support" / "page_in_node.js"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
]


@contextmanager
def page(**settings: Any) -> Iterator[Any]:
    """Yields a function that does one thing on the page, and tells what it then shows."""
    model = settings.pop("model", None)
    with served(model, **settings) as server, listening(server) as url:
        command = ["node", str(_NODE), f"{url}/"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as node:

            def do(**action: Any) -> Any:
                if action.get("press") == "stop":  # asked again until what is waited for shows
                    time.sleep(0.05)
                assert node.stdin is not None
                assert node.stdout is not None
                print(json.dumps(action), file=node.stdin, flush=True)
                return json.loads(node.stdout.readline())

            do.server = server  # type: ignore[attr-defined]
            try:
                yield do
            finally:
                node.kill()


def test_messages_are_sent_and_replies_and_memory_shown() -> None:
    settings = {"temperature": 0.0, "seed": 0, "max_new_tokens": 12, "compile": "off"}
    with page(**settings) as do:
        text = "My name is <b>Anna</b> & you?\u202e"
        shown = do(type=text)
        first = told([user(text)], max_new_tokens=12)
        assert shown["talk"][0] == ["user", "My name is <b>Anna</b> & you?\ufffd"]
        assert "&lt;b>Anna" in shown["html"]
        assert [shown["talk"][-1][1], len(shown["talk"])] == [first, 2]
        assert shown["hash"].startswith("#")
        while len(shown["list"]) < 1 or not shown["counts"]:  # asked for after the reply
            shown = do(press="stop")
        assert "tokens held, 0 evicted" in shown["counts"]
        again = do(type="What is my name?")
        talk = [user(text), {"role": "assistant", "content": first}, user("What is my name?")]
        assert again["talk"][-1][1] == told(talk, max_new_tokens=12)
        assert again["hash"] == shown["hash"]
        assert do(press="new")["talk"] == []
        other = do(type="Tell me a joke.")
        assert len(other["talk"]) == 2
        assert other["hash"] != again["hash"]
        while len(other["list"]) < 2:
            other = do(press="stop")


def test_a_conversation_of_another_program_is_shown_and_left_alone() -> None:
    with page(max_new_tokens=4, compile="off") as do:
        do.server.ask([user("Hello.")])
        shown = do(press="stop")
        while not shown["hash"] or "tokens held" not in shown["counts"]:
            shown = do(press="stop")
        assert shown["disabled"]
        assert not do(press="new")["disabled"]


def test_a_reply_can_be_stopped_and_an_error_is_said() -> None:
    with page(model=babbler(), max_new_tokens=1500, compile="off") as do:
        shown = do(type="Go on.", stop=True)
        assert len(shown["talk"][-1][1]) > 0
        assert shown["said"] == ""
        assert shown["hash"]
        while "tokens held" not in shown["counts"]:  # asked for after the reply
            shown = do(press="stop")
    with page(key="secret", compile="off") as do:
        assert do(type="Hello.")["said"] == "this server needs its API key"


def test_what_is_typed_during_a_reply_stays_and_what_could_not_be_sent_comes_back() -> None:
    with page(model=babbler(), max_new_tokens=40, compile="off") as do:
        assert do(type="Hello.", meanwhile="And then?")["typed"] == "And then?"
        assert do(type="Hello.")["typed"] == ""
    with page(key="Šchlüssel", model=babbler(), max_new_tokens=1500, compile="off") as do:
        assert do(type="Hello.")["typed"] == "Hello."
        do(press="unlock", key="Šchlüssel")
        stopped = do(type="Go on.", stop=True)
        assert [stopped["typed"], len(stopped["talk"])] == ["", 2]


def test_a_first_reply_that_is_cut_off_is_in_its_own_conversation() -> None:
    with page(model=babbler(), stop_loops=False, max_new_tokens=100_000, compile="off") as do:
        other = {"messages": [user("Of another program.")], "max_tokens": 1}
        shown = do(type="Go on.", other=other, stop=True)
        listed = do.server.client.get("/v1/sirchat/sessions").json()["data"]
        assert shown["hash"] == next(f"#{one['id']}" for one in listed if one["first"] == "Go on.")
        assert shown["talk"][0] == ["user", "Go on."]
        do(press="new")
        threading.Timer(1, do.server.server.replies.end).start()
        ended = do(type="To the end.")
        assert (ended["talk"][0], ended["waits"]) == (["user", "To the end."], False)
        assert ended["said"] == "the server is ending"


def test_a_reply_that_fails_and_a_store_that_is_full_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual, calls = Sampler.pick, count(100)

    def fails_late(*arguments: Any) -> int:
        if next(calls) == 4:
            raise RuntimeError
        return usual(*arguments)

    monkeypatch.setattr(Sampler, "pick", fails_late)
    with page(model=babbler(), max_new_tokens=8, compile="off") as do:
        shown = do(type="Hello.", full=True)
        assert shown["said"].startswith("the browser can't store this: it is gone when ")
        assert len(shown["talk"]) == 2
        shown = do(type="And?")
        assert [len(shown["talk"]), shown["said"], shown["waits"]] == [4, "", False]
        do(press="new")
        calls = count()
        shown = do(type="Fail.")
        assert shown["said"] == "the reply failed: RuntimeError"
        assert shown["talk"][0] == ["user", "Fail."]
        assert len(do(type="And now?")["talk"]) == 4
        do(press="new")
        calls = count()
        shown = do(type="Fail again.", full=True)
        assert shown["said"].startswith("the reply failed: RuntimeError; the browser can't store ")


def test_the_budget_is_shown_as_segments_and_what_was_told_as_held_in_part_or_not() -> None:
    with page(model=telling(), budget=96, policy="sink", max_new_tokens=8, compile="off") as do:
        shown = do(type=FACTS[0])
        while not shown["told"]:  # it is asked for after the reply
            shown = do(press="stop")
        assert shown["told"] == [f'held, of what you told: "{FACTS[0]}"']
        segments = dict(shown["full"])
        assert sum(segments.values()) == 96
        assert f"{segments['user']} yours, {segments['assistant']} the model's" in shown["counts"]
        for text in OTHERS:
            shown = do(type=text)
        while shown["told"][0].startswith("held, "):  # the page looks every two seconds
            shown = do(press="stop")
        assert shown["told"] == ['held in part: "My cat …"']  # the first tokens always stay
