"""Several replicas behind a router, as Ray Serve connects them: each has its own conversations."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from chatting import quick
from serving import CHAT, URL, Message, assistant, cached, said, system, user
from sirchat.config.profile import Profile
from sirchat.errors import UsageError
from sirchat.server import cluster
from sirchat.server.cluster import Replica, Router, replica_of
from sirchat.server.pool import Limits

NAMES = ("Anna", "Tom", "Eva", "Kim", "Leo", "Mia")
ASKED = "What is my name?"
KEY = {"Authorization": "Bearer key"}


class Handle:
    """As Ray's handle of a replica; `number` is how often it was asked."""

    def __init__(self, replica: Replica) -> None:
        self.replica: Replica | None = replica
        self.answer, self.number = self, 0

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    async def remote(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        self.number += 1
        if self.replica is None:
            raise RuntimeError("the actor died")
        async for message in self.replica.answer(pickle.loads(pickle.dumps(scope)), body):
            yield pickle.loads(pickle.dumps(message))


def replica(folder: Path) -> Replica:
    """A replica that doesn't compile `tiny`, which all tests share."""
    settings: dict[str, Any] = {"policy": "sink", "budget": 64, "max_new_tokens": 6}
    return Replica(Profile(compile="off", **settings), Limits(conversations=4), folder, "key")


@pytest.fixture
def handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Handle]]:
    monkeypatch.setattr(cluster, "load_model_of", lambda profile: quick())
    found = [Handle(replica(tmp_path / str(number))) for number in range(2)]
    yield found
    for one in found:
        if one.replica is not None:
            one.replica.__del__()


@pytest.fixture
def client(handles: list[Handle]) -> TestClient:
    router = Router(*handles)
    route = Route("/{path:path}", router.__call__, methods=["GET", "POST"])
    return TestClient(Starlette(routes=[route]), base_url=URL, headers=KEY)


def ask(client: TestClient, messages: list[Message]) -> Any:
    response = client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    return response.json()


def talk(client: TestClient, name: str, rounds: int) -> tuple[list[Message], int]:
    """A conversation of some rounds, in which nothing is read twice; and the tokens it has seen."""
    messages, seen = [user(f"My name is {name}.")], 0
    for _ in range(rounds):
        reply = ask(client, messages)
        assert cached(reply) == seen
        seen = reply["sirchat"]["seen"]
        messages += [assistant(said(reply)), user(ASKED)]
    return messages, seen


def test_all_requests_of_a_conversation_go_to_the_replica_that_has_it(
    client: TestClient, handles: list[Handle]
) -> None:
    for name in NAMES:
        talk(client, name, 2)
    assert all(each.number > 1 for each in handles)
    assert sum(one.number for one in handles) == 2 * len(NAMES)


def test_a_named_conversation_goes_on_where_it_is_whatever_is_sent(client: TestClient) -> None:
    for number, name in enumerate(NAMES):
        seen, how = 0, ("sirchat", "header")[number % 2]
        for text in (f"My name is {name}.", ASKED, "And now?"):
            body: dict[str, Any] = {"messages": [user(text)]}
            headers = {"X-Sirchat-Conversation": name} if how == "header" else {}
            if how == "sirchat":
                body["sirchat"] = {"conversation": name}
            reply = client.post("/v1/chat/completions", json=body, headers=headers).json()
            assert cached(reply) == seen
            seen = reply["sirchat"]["seen"]


def test_a_replica_that_died_comes_back_with_its_conversations(
    client: TestClient, handles: list[Handle], tmp_path: Path
) -> None:
    talks = [talk(client, name, 2) for name in NAMES[:4]]
    died, handles[0].replica = handles[0].replica, None
    assert died is not None
    died.__del__()  # as Ray ends it
    states = [
        client.post("/v1/chat/completions", json={"messages": messages}).status_code
        for messages, _ in talks
    ]
    assert set(states) == {200, 503}
    handles[0].replica = replica(tmp_path / "0")
    for (messages, seen), state in zip(talks, states, strict=True):
        if state == 503:
            reply = ask(client, messages)
            assert cached(reply) == seen


def test_each_replica_checks_the_key_and_the_request(client: TestClient) -> None:
    del client.headers["Authorization"]
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/sirchat/sessions").status_code == 404
    assert client.get("/health").json() == {"status": "ok"}
    response = client.post("/v1/chat/completions", content="{", headers=KEY)
    assert (response.status_code, response.json()["error"]["param"]) == (400, None)


def place_of(path: str, name: str = "", count: int = 1000, **body: Any) -> int:
    return replica_of(count, path, json.dumps(body).encode(), name)


def test_how_a_conversation_begins_or_its_name_says_its_replica_in_each_shape() -> None:
    messages = [system("Be kind."), user("Hello.")]
    place = place_of(CHAT, messages=messages)
    parts = [{"type": "text", "text": "Hello.", "cache_control": {"type": "ephemeral"}}]
    more = [assistant("Hi."), user("And now?")]
    assert place == place_of(CHAT[3:], messages=[messages[0], {"role": "user", "content": parts}])
    assert place == place_of(CHAT, messages=[*messages, *more], model="tiny")
    assert place == place_of("/v1/responses", instructions="Be kind.", input="Hello.")
    assert place != place_of(CHAT, messages=[user("Hello.")])
    assert place != place_of(CHAT, messages=[messages[0], user("Hello!")])
    named = place_of(CHAT, "Anna", messages=messages)
    assert named != place
    assert named == place_of("/v1/responses", "Tom", input="Hi.", conversation={"id": "Anna"})
    assert named == place_of(CHAT, "Tom", messages=more, sirchat={"conversation": "Anna"})


def test_a_further_replica_takes_its_share_of_the_conversations_and_no_other_moves() -> None:
    before, after = (
        [place_of("/v1/responses", count=count, input=str(number)) for number in range(600)]
        for count in (2, 3)
    )
    assert all(new in (old, 2) for old, new in zip(before, after, strict=True))
    assert all(150 < after.count(number) < 250 for number in range(3))


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({}, "", "replicas need an API key"),
        ({"replicas": "0"}, "key", "replicas"),
        ({"nosuch": "1"}, "key", "nosuch"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    settings: dict[str, str], key: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_API_KEY", key)
    with pytest.raises((UsageError, ValidationError), match=message):
        cluster.app(settings)  # as Ray Serve calls it: with the texts of the command line
