"""The memory of a served conversation changes while it goes on; and the page that shows it."""

from __future__ import annotations

import re
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from chatting import babbler, quick
from serving import Message, Served, assistant, cached, refusal, said, served, system, user
from sirchat.errors import SessionError
from sirchat.saved.autosave import Autosave
from sirchat.saved.store import SessionStore
from template_shapes import WEATHER, tool_quick, tool_tiny

LONG = " ".join(f"The number {n} is a number." for n in range(12))
SECRET = "My name is Zebulon, and I live in Oslo."


def change(server: Served, ident: str, **fields: Any) -> Any:
    return server.send(f"/v1/sirchat/sessions/{ident}", **fields)


def memory(server: Served, ident: str) -> Any:
    return server.client.get(f"/v1/sirchat/sessions/{ident}").json()


def held_text(shown: Any) -> str:
    return "".join(row["text"] for row in shown["rows"])


def asked(server: Served, text: str, **fields: Any) -> tuple[list[Message], str]:
    """The messages of a first round, and the conversation's id."""
    reply = server.ask([user(text)], **fields)
    messages = [user(text), assistant(said(reply))]
    return messages, reply["sirchat"]["id"]


def test_policy_and_budget_change_at_once_and_hold_for_the_next_replies(tmp_path: Path) -> None:
    with served(quick(), policy="full", folder=tmp_path, max_new_tokens=8) as server:
        messages, ident = asked(server, LONG)
        done = change(server, ident, policy="sink", budget=64, decay=0.9, recall="words")
        assert (done["policy"], done["budget"], done["decay"]) == ("sink", 64, 0.9)
        assert done["resident"] <= 64 < done["seen"]
        assert [event["what"] for event in done["events"] if event["event"] == "switch"] == [
            *("policy", "budget", "decay", "recall")
        ]
        messages.append(user("Thanks."))
        reply = server.ask(messages)
        assert (reply["sirchat"]["policy"], reply["sirchat"]["budget"]) == ("sink", 64)
        assert server.ask([user("Another one.")])["sirchat"]["policy"] == "full"
        messages += [assistant(server.reply(messages)), user("Thanks again.")]
    with served(quick(), policy="full", folder=tmp_path, max_new_tokens=8) as server:
        assert memory(server, ident)["policy"] == "sink"
        assert server.ask(messages)["sirchat"]["policy"] == "sink"


def test_pinned_words_stay_and_unpinned_ones_may_go() -> None:
    with served(quick(), policy="sink", budget=64, max_new_tokens=4) as server:
        messages, ident = asked(server, f"{SECRET} {LONG}")
        messages.append(user(LONG))
        server.reply(messages)
        assert "Zebulon" not in held_text(memory(server, ident))
        done = change(server, ident, pin="Zebulon")
        assert "Zebulon" in held_text(done)
        assert (done["events"][-1]["event"], done["events"][-1]["pinned"]) == ("pin", True)
        messages.append(assistant(server.reply(messages)))  # another reply keeps the pins
        server.reply([*messages, user(LONG)])
        assert "Zebulon" in held_text(memory(server, ident))
        change(server, ident, unpin="Zebulon")
        messages += [user(LONG), assistant("Yes."), user(LONG)]
        server.reply(messages)
        assert "Zebulon" not in held_text(memory(server, ident))


def test_erased_words_are_in_no_file_and_not_read_again_from_the_history(tmp_path: Path) -> None:
    with served(quick(), policy="full", folder=tmp_path, max_new_tokens=4) as server:
        messages, ident = asked(server, SECRET)
        done = change(server, ident, erase="Zebulon")
        assert done["events"][-1]["event"] == "erase"
        assert "Zebulon" not in held_text(done)
        reply = server.ask([*messages, user("Thanks.")])
        assert cached(reply) == done["seen"]
        assert "Zebulon" not in held_text(memory(server, ident))
    assert not [file.name for file in tmp_path.iterdir() if b"Zebulon" in file.read_bytes()]


def test_words_that_could_not_be_erased_from_the_file_are_said_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SessionError("the disk is full")

    with served(quick(), policy="full", folder=tmp_path, max_new_tokens=4) as server:
        ident = asked(server, SECRET)[1]
        change(server, ident, pin="Oslo")  # when that is answered, it is saved
        with monkeypatch.context() as broken:
            broken.setattr(SessionStore, "append", full)
            address = f"/v1/sirchat/sessions/{ident}"
            error = refusal(server.client.post(address, json={"erase": "Zebulon"}), 500)
            assert "the conversation's file can't be written" in error["message"]
        assert "Zebulon" not in held_text(memory(server, ident))
    assert not [file.name for file in tmp_path.iterdir() if b"Zebulon" in file.read_bytes()]


def test_all_conversations_are_listed_and_one_on_disk_is_shown_too(tmp_path: Path) -> None:
    with served(quick(), conversations=1, folder=tmp_path, max_new_tokens=4) as server:
        idents = [asked(server, text)[1] for text in ("Hello Anna.", "Hello <b>Tom</b>.")]
        listed = server.client.get("/v1/sirchat/sessions").json()["data"]
        assert [
            (entry["id"], entry["first"], entry["messages"], entry["in_memory"]) for entry in listed
        ] == [(idents[1], "Hello <b>Tom</b>.", 2, True), (idents[0], "Hello Anna.", 2, False)]
        assert "Anna" in held_text(memory(server, idents[0]))


def test_what_is_not_possible_is_refused_and_changes_nothing() -> None:
    with served(quick(), policy="full", max_new_tokens=4) as server:
        ident = asked(server, SECRET)[1]
        before = memory(server, ident)
        for body, message in (
            ({}, "the request changes nothing; allowed: policy, budget, decay, recall, pin"),
            ({"policy": "nosuch"}, 'policy can\'t be "nosuch"'),
            ({"policy": "os:system"}, "a request can't name a policy of your own"),
            ({"budget": 3}, "budget"),
            ({"model": "other"}, "model is not supported"),
            ({"pin": ""}, "pin: String should have at least 1 character"),
            ({"pin": "Nobody said this"}, "Nobody said this"),
            ([], "is not a JSON object"),
        ):
            response = server.client.post(f"/v1/sirchat/sessions/{ident}", json=body)
            assert message in refusal(response)["message"]
        assert memory(server, ident) == before
        assert server.client.post("/v1/sirchat/sessions/x", json={"budget": 64}).status_code == 404


def test_a_change_during_a_reply_waits_for_its_end() -> None:
    with served(babbler(), policy="full", max_new_tokens=200) as server:
        messages, ident = asked(server, "Hello.", model="babbler")
        messages.append(user("Go on."))
        done: list[Any] = []
        asking = threading.Thread(target=lambda: done.append(server.ask(messages, model="babbler")))
        asking.start()
        while asking.is_alive() and not memory(server, ident)["busy"]:
            pass  # a busy machine may see no moment of it
        changed = change(server, ident, policy="sink", budget=64)
        asking.join()
    assert done[0]["sirchat"]["policy"] == "full"
    assert changed["resident"] <= 64
    assert changed["seen"] == done[0]["sirchat"]["seen"]


def test_changes_at_the_same_time_are_made_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Autosave.save

    def slow(saving: Autosave) -> None:
        sleep(0.03)
        usual(saving)

    monkeypatch.setattr(Autosave, "save", slow)
    with served(quick(), policy="full", folder=tmp_path, max_new_tokens=4) as server:
        _, ident = asked(server, SECRET)
        changes = [{"erase": "Zebulon"}, {"erase": "Oslo"}, {"policy": "sink"}, {"decay": 0.9}]
        with ThreadPoolExecutor(4) as at_once:
            shown = list(at_once.map(lambda fields: change(server, ident, **fields), changes))
        assert len(shown) == len(changes)
        assert not {"Zebulon", "Oslo"} & set(held_text(memory(server, ident)).split())


def test_the_page_needs_no_key_allows_its_own_script_and_style_and_names_no_other_place() -> None:
    with served(quick(), key="secret", max_new_tokens=4) as server:
        response = server.client.get("/")
        assert server.client.get("/v1/sirchat/sessions").status_code == 401
        key = {"Authorization": "Bearer secret"}
        listed = server.client.get("/v1/sirchat/sessions", headers=key).json()
    assert listed["data"] == []
    assert "salience" in listed["policies"]
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        own = b64encode(sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{own}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"https?:|//[a-z]|src=|href=|innerHTML|insertAdjacent", response.text)


def test_what_the_page_shows_can_not_turn_around_or_hide_other_text() -> None:
    with served(quick(), max_new_tokens=4) as server:
        page = server.client.get("/").text
    (controls,) = re.findall(r"const CONTROLS = /(.*)/g;", page)
    for shown in ("a", "\n", "\t", "é", "\u05d0", "\u0627", "\u200d", "\ufe0f", "😀"):
        assert not re.search(controls, shown)
    for control in ("\x00", "\x07", "\x1b", "\x7f", "\x9b", "\u200f", "\u202e", "\u2066"):
        assert re.search(controls, control)
    assert "made.textContent = text.replace(CONTROLS" in page


def test_a_rule_in_a_history_that_is_sent_at_once_is_kept() -> None:
    rule = "Always answer in one sentence."
    history = [user(f"Hello. {rule}"), assistant("I will."), *[user(LONG), assistant("Yes.")] * 3]
    with served(quick(), policy="sink", budget=96, max_new_tokens=4) as server:
        ident = server.ask([*history, user("And now?")])["sirchat"]["id"]
        assert rule in held_text(memory(server, ident))
        facts = server.client.get(f"/v1/sirchat/sessions/{ident}/facts").json()["data"]
        assert [(one["text"], one["is_rule"]) for one in facts] == [(rule, True)]


def many_tools(count: int) -> list[Any]:
    function: Any = WEATHER["function"]
    tools = ({**function, "name": f"weather{number}"} for number in range(count))
    return [{"type": "function", "function": each} for each in tools]


def test_the_budget_holds_system_prompt_and_tools_twice(tmp_path: Path) -> None:
    """It is raised as far as they need, which each reply says, also in other chats and later."""
    chat, tools = [system("Be kind."), user("Hello, who are you?")], many_tools(4)
    with served(tool_quick(), budget=160, max_new_tokens=4, folder=tmp_path) as one:
        first = one.post(chat, tools=tools)
        reply = first.json()
        budget = reply["sirchat"]["budget"]
        rows = memory(one, reply["sirchat"]["id"])["rows"]
        assert sum("pinned" in row["flags"] for row in rows) == budget // 2
        assert f"budget is {budget}" in first.headers["X-Sirchat-Note"]
        other = one.post([chat[0], user("A new chat.")], tools=tools)
        assert cached(other.json()) > budget // 2 - 8
        assert other.json()["sirchat"]["budget"] == budget
        plain = one.ask([user("Hi!")])
        assert plain["sirchat"]["budget"] == 160
    longer = [*chat, assistant(said(reply)), user("And now?")]
    with served(tool_quick(), budget=160, max_new_tokens=4, folder=tmp_path) as one:
        later = one.ask(longer, tools=tools)
        assert (later["sirchat"]["budget"], later["sirchat"]["id"]) == (
            budget,
            reply["sirchat"]["id"],
        )


@pytest.mark.slow
def test_tools_that_take_most_of_the_context_are_not_pinned(tmp_path: Path) -> None:
    chat, tools = [system("Be kind."), user("Hello, who are you?")], many_tools(10)
    with served(tool_tiny(), budget=160, max_new_tokens=4, folder=tmp_path) as one:
        first = one.post(chat, tools=tools)
        reply = first.json()
        assert reply["sirchat"]["budget"] == tool_tiny().context_length
        assert "which are not pinned" in first.headers["X-Sirchat-Note"]
        assert cached(one.ask([chat[0], user("A new chat.")], tools=tools)) > 1000
    longer = [*chat, assistant(said(reply)), user("And now?")]
    with served(tool_tiny(), budget=160, max_new_tokens=4, folder=tmp_path) as one:
        assert cached(one.ask(longer, tools=tools)) > 1000


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_no_budget_holds_are_refused_before_the_reply(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirchat.server.app._HEADERS_SECONDS", 60)  # a busy machine takes long
    with served(tool_tiny(), budget=160, max_new_tokens=4) as one:
        asked = one.post([user("Hi!")], tools=many_tools(120), stream=stream)
        error = refusal(asked)
        assert error["code"] == "context_length_exceeded"
        assert "at most" in error["message"]
