"""The memory of a served conversation changes while it goes on, and stays changed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from chatting import babbler
from serving import Message, Served, assistant, cached, refusal, said, served, told, user
from sirchat.errors import SessionError
from sirchat.saved.store import SessionStore

LONG = " ".join(f"The number {n} is a number." for n in range(12))
SECRET = "My name is Zebulon, and I live in Oslo."


def change(server: Served, ident: str, **fields: Any) -> Any:
    """The JSON of the response, which must be fine."""
    response = server.client.post(f"/v1/sirchat/sessions/{ident}", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


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
    with served(policy="full", folder=tmp_path, max_new_tokens=8) as server:
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
        own = server.ask(messages, sirchat={"budget": 128})["sirchat"]
        assert (own["policy"], own["budget"]) == ("sink", 128)
        assert server.ask([user("Another one.")])["sirchat"]["policy"] == "full"
        messages += [assistant(server.reply(messages)), user("Thanks again.")]
    with served(policy="full", folder=tmp_path, max_new_tokens=8) as server:
        assert memory(server, ident)["policy"] == "sink"
        assert server.ask(messages)["sirchat"]["policy"] == "sink"


def test_pinned_words_stay_and_unpinned_ones_may_go() -> None:
    with served(policy="sink", budget=64, max_new_tokens=4) as server:
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
    with served(policy="full", folder=tmp_path, max_new_tokens=4) as server:
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

    with served(policy="full", folder=tmp_path, max_new_tokens=4) as server:
        ident = asked(server, SECRET)[1]
        change(server, ident, pin="Oslo")  # when that is answered, it is saved
        with monkeypatch.context() as broken:
            broken.setattr(SessionStore, "replace", full)
            address = f"/v1/sirchat/sessions/{ident}"
            error = refusal(server.client.post(address, json={"erase": "Zebulon"}), 500)
            assert "the conversation's file can't be written" in error["message"]
        assert "Zebulon" not in held_text(memory(server, ident))
    assert not [file.name for file in tmp_path.iterdir() if b"Zebulon" in file.read_bytes()]


def test_all_conversations_are_listed_and_one_on_disk_is_shown_too(tmp_path: Path) -> None:
    with served(conversations=1, folder=tmp_path, max_new_tokens=4) as server:
        idents = [asked(server, text)[1] for text in ("Hello Anna.", "Hello <b>Tom</b>.")]
        listed = server.client.get("/v1/sirchat/sessions").json()["data"]
        assert [
            (entry["id"], entry["first"], entry["messages"], entry["in_memory"]) for entry in listed
        ] == [
            (idents[1], "Hello <b>Tom</b>.", 2, True),
            (idents[0], "Hello Anna.", 2, False),
        ]
        assert "Anna" in held_text(memory(server, idents[0]))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "the request changes nothing; allowed: policy, budget, decay, recall, pin"),
        ({"policy": "nosuch"}, 400, 'policy can\'t be "nosuch"'),
        ({"policy": "os:system"}, 400, "a request can't name a policy of your own"),
        ({"budget": 3}, 400, "budget"),
        ({"model": "other"}, 400, "model is not supported"),
        ({"pin": ""}, 400, "pin: String should have at least 1 character"),
        ({"pin": "Nobody said this"}, 400, "Nobody said this"),
        ([], 400, "is not a JSON object"),
    ],
)
def test_what_is_not_possible_is_refused_and_changes_nothing(
    body: Any, status: int, message: str
) -> None:
    with served(policy="full", max_new_tokens=4) as server:
        ident = asked(server, SECRET)[1]
        before = memory(server, ident)
        assert (
            message
            in refusal(server.client.post(f"/v1/sirchat/sessions/{ident}", json=body), status)[
                "message"
            ]
        )
        assert memory(server, ident) == before
        assert server.client.post("/v1/sirchat/sessions/x", json={"budget": 64}).status_code == 404


def test_a_change_during_a_reply_waits_for_its_end() -> None:
    with served(babbler(), policy="full", max_new_tokens=200) as server:
        messages, ident = asked(server, "Hello.", model="babbler")
        messages.append(user("Go on."))
        done: list[Any] = []
        asking = threading.Thread(target=lambda: done.append(server.ask(messages, model="babbler")))
        asking.start()
        while not memory(server, ident)["busy"]:
            pass
        changed = change(server, ident, policy="sink", budget=64)
        asking.join()
    assert done[0]["sirchat"]["policy"] == "full"
    assert changed["resident"] <= 64
    assert changed["seen"] == done[0]["sirchat"]["seen"]


def test_a_changed_memory_is_that_of_a_prompt_with_the_same_commands() -> None:
    with served(policy="full", max_new_tokens=12) as server:
        messages, ident = asked(server, LONG)
        change(server, ident, policy="sink", budget=64)
        change(server, ident, policy="full", budget=1024)
        messages.append(user("Which numbers?"))
        assert server.reply(messages) == told(messages, max_new_tokens=12)
