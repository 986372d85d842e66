"""Served conversations on disk: they leave memory, come back, and outlive the server."""

from __future__ import annotations

import json
import signal
import socket
import stat
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from chatting import quick, tiny
from serving import Message, Served, assistant, cached, said, serve_program, served, told, user
from sirchat.cli.serve import load_server
from sirchat.config.profile import Profile
from sirchat.engine.reader import Reader
from sirchat.errors import SessionError
from sirchat.saved.store import SessionStore

NAMES = ("Anna", "Tom", "Eva")
ASKED = "What is my name?"


def begin(server: Served, name: str, **fields: Any) -> list[Message]:
    """A conversation's first round, and the next question."""
    messages = [user(f"My name is {name}.")]
    return [*messages, assistant(server.reply(messages, **fields)), user(ASKED)]


def wait_until_saved(server: Served) -> None:
    """Wait until the thread that saves has nothing more to do."""
    while any(one["busy"] for one in server.client.get("/v1/sirchat/sessions").json()["data"]):
        time.sleep(0.01)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often keys and values of a whole conversation are computed again."""
    found: list[int] = []
    read_again = Reader.read_again

    def counted(self: Reader, ids: list[int], *rest: Any) -> None:
        found.append(len(ids))
        read_again(self, ids, *rest)

    monkeypatch.setattr(Reader, "read_again", counted)
    return found


def test_a_conversation_that_left_memory_comes_back_without_being_read_again(
    tmp_path: Path, reading: list[int]
) -> None:
    with served(
        quick(), policy="full", conversations=1, folder=tmp_path, max_new_tokens=8
    ) as server:
        talks = {name: begin(server, name) for name in NAMES}
        for name in (*NAMES, "Anna"):
            reply = server.ask(talks[name])
            assert cached(reply) > 0
            assert said(reply) == told(talks[name], quick, max_new_tokens=8)
            talks[name] += [assistant(said(reply)), user(ASKED)]
    assert not reading


def told_by_the_memory(server: Served, reply: Any) -> list[float]:
    """The surprisal of each held token in the conversation of a reply."""
    memory = server.client.get(f"/v1/sirchat/sessions/{reply['sirchat']['id']}").json()
    return [row["surprisal"] for row in memory["rows"]]


@pytest.mark.parametrize("policy", ["sink", "salience"])
def test_after_a_restart_the_next_reply_is_bit_for_bit_the_one_without_it(
    tmp_path: Path, policy: str, reading: list[int]
) -> None:
    settings: dict[str, Any] = {"policy": policy, "budget": 64, "max_new_tokens": 12}
    with served(quick(), **settings) as server:
        whole = begin(server, "Anna and I live in Oslo, beside the lake")
        wanted = server.ask(whole)
        surprisals = told_by_the_memory(server, wanted)
    with served(quick(), folder=tmp_path, **settings) as server:
        messages = begin(server, "Anna and I live in Oslo, beside the lake")
        before = server.ask(messages[:1])["sirchat"]  # the same again: another reply to it
    assert messages == whole
    with served(quick(), folder=tmp_path, **settings) as server:
        again = server.ask(messages)
        assert told_by_the_memory(server, again) == surprisals
    assert again["sirchat"].pop("id") == before["id"]
    wanted["sirchat"].pop("id")
    for part in ("choices", "usage", "sirchat"):
        assert again[part] == wanted[part]
    assert not reading


def test_a_conversation_that_begins_anew_is_listed_and_counted_as_it_was(tmp_path: Path) -> None:
    hello = [user("Hello.")]
    with served(quick(), folder=tmp_path, max_new_tokens=4) as server:
        ids = [server.ask(hello)["sirchat"]["id"]]
    with served(quick(), folder=tmp_path, max_new_tokens=4) as server:
        url = f"/v1/sirchat/sessions/{ids[0]}"
        assert server.client.get(url).status_code == 200  # loaded, and so without an undo
        ids.append(server.ask(hello)["sirchat"]["id"])
        wait_until_saved(server)
        listed = server.client.get("/v1/sirchat/sessions").json()["data"]
        assert [one["id"] for one in listed] == ids[::-1]
        assert server.client.get(url).json()["rows"]


def test_settings_of_the_new_server_hold_for_conversations_of_the_old_one(tmp_path: Path) -> None:
    with served(quick(), folder=tmp_path, policy="full", max_new_tokens=8) as server:
        messages = begin(server, "Anna")
    with served(quick(), folder=tmp_path, policy="sink", budget=64, max_new_tokens=3) as server:
        reply = server.ask(messages)
    assert cached(reply) > 0
    assert (reply["sirchat"]["policy"], reply["sirchat"]["budget"]) == ("sink", 64)
    assert reply["usage"]["completion_tokens"] <= 3


def test_files_are_private_and_no_more_than_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    with served(quick(), folder=folder, conversations=1, saved=2, max_new_tokens=4) as server:
        talks = {name: begin(server, name) for name in NAMES}
        kept = {name: cached(server.ask(talks[name])) > 0 for name in ("Eva", "Tom", "Anna")}
    assert kept == {"Eva": True, "Tom": True, "Anna": False}
    files = sorted(folder.iterdir())
    assert sorted(file.suffix for file in files) == [".safetensors"] * 2 + [".sqlite"] * 2
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.slow
def test_branches_with_which_nobody_goes_on_push_out_no_other_conversation(tmp_path: Path) -> None:
    """A client inserts documents, each time other ones, before its newest question."""
    talk, others, limit = list[Message](), list[list[Message]](), 8
    for start in (0, 7):  # as well after a restart
        with served(
            quick(), folder=tmp_path, conversations=2, saved=limit, max_new_tokens=4
        ) as server:
            if not start:
                talk, others = begin(server, "Ben")[:2], [begin(server, "Anna")]
                oslo = [user("I live in Oslo.")]
                oslo.append(assistant(server.reply(oslo)))
                for name in ("Tom", "Eva"):  # two branches, and the client goes on with both
                    asked = [*oslo, user(f"I am {name}.")]
                    asked += [assistant(server.reply(asked)), user(ASKED)]
                    others.append([*asked, assistant(server.reply(asked)), user("And now?")])
            for number in range(start, start + 7):
                question = user(f"Question {number}?")
                document = {"role": "system", "content": f"Document {number}."}
                talk += [question, assistant(server.reply([*talk, document, question]))]
    with served(quick(), folder=tmp_path, conversations=2, saved=limit, max_new_tokens=4) as server:
        for messages in others:
            assert cached(server.ask(messages)) > 0
        assert len(server.client.get("/v1/sirchat/sessions").json()["data"]) <= limit


@pytest.mark.parametrize("save", [True, False])
def test_with_no_save_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: bool
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    profile = Profile(save=save, max_new_tokens=4, compile="off")
    server = load_server(profile, False, {}, "127.0.0.1", None)
    Served(server).ask([user("Hello.")])
    server.replies.close()
    assert (tmp_path / "data" / "served").exists() == save


def test_a_file_that_is_damaged_or_of_another_model_is_left_out(tmp_path: Path) -> None:
    with served(quick(), folder=tmp_path, max_new_tokens=4) as server:
        messages = begin(server, "Anna")
    with served(tiny(), folder=tmp_path) as server:
        assert server.client.get("/v1/sirchat/sessions").json()["data"] == []
    for one in tmp_path.glob("*.sqlite"):
        one.write_bytes(b"damaged" * 100)
    with served(quick(), folder=tmp_path, max_new_tokens=4) as server:
        assert cached(server.ask(messages)) == 0


def test_a_file_that_was_deleted_meanwhile_is_left_out(tmp_path: Path) -> None:
    with served(
        quick(), policy="full", folder=tmp_path, conversations=1, max_new_tokens=8
    ) as server:
        messages = begin(server, "Anna")
        others = [begin(server, "Tom") for _ in range(2)]
        wait_until_saved(server)
        for one in list(tmp_path.glob("*.sqlite"))[:-1]:
            one.unlink()
        for talk in (messages, *others, messages):
            assert server.reply(talk) == told(talk, quick, max_new_tokens=8)


def test_a_full_disk_breaks_no_reply_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise SessionError("the disk is full")

    with served(quick(), folder=tmp_path, max_new_tokens=4, conversations=2) as server:
        messages = begin(server, "Anna")
        wait_until_saved(server)
        with monkeypatch.context() as broken:
            broken.setattr(SessionStore, "append", full)
            for name in ("Tom", "Eva"):
                begin(server, name)
            reply = server.reply(messages)
            wait_until_saved(server)
        assert [record.message for record in caplog.records] == [
            "conversations can't be saved now: the disk is full"
        ]
        assert len(list(tmp_path.glob("*.sqlite"))) == 1  # that of Anna, from before
        messages += [assistant(reply), user("Thanks.")]
        reply = server.reply(messages)  # saved again
    with served(quick(), folder=tmp_path, max_new_tokens=4) as server:
        assert cached(server.ask([*messages, assistant(reply), user(ASKED)])) > 0


def post(url: str, messages: list[Message], **fields: Any) -> Any:
    """The open response to a request."""
    return urllib.request.urlopen(url, json.dumps({"messages": messages, **fields}).encode())


def _wait_for_the_end(port: int) -> None:
    """Wait until nothing listens: what was killed may only have passed the signal on."""
    with suppress(OSError):
        while True:
            socket.create_connection(("127.0.0.1", port), 1).close()
            time.sleep(0.02)


@pytest.mark.slow
def test_after_kill_in_the_middle_of_a_reply_the_last_finished_turn_is_there(
    tmp_path: Path, endless: str
) -> None:
    flags = ("-m", endless, "--budget", "64", "--max-new-tokens", "1000000")
    messages = [user("My name is Anna.")]
    memory: list[dict[str, Any]] = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        with serve_program(tmp_path, *flags) as (process, address):
            url = f"{address}/chat/completions"
            with post(url, messages, max_tokens=8) as response:
                reply = json.load(response)
            memory.append({**reply["sirchat"], "cached": cached(reply)})
            messages += [assistant(said(reply)), user(ASKED)]
            with post(url, messages, stream=True) as stream:
                for _ in range(20):
                    stream.readline()
                process.send_signal(number)
                process.wait()
                _wait_for_the_end(urlsplit(url).port or 0)  # a client that leaves ends its reply
    first, second = memory
    assert second["id"] == first["id"]
    assert second["cached"] == first["seen"]


def test_conversations_leave_for_the_disk_if_they_take_too_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each takes is told: the held tokens, and those archived in memory."""
    with served(quick(), policy="full", max_new_tokens=4, folder=tmp_path) as server:
        server.ask([user("Hello!")])
        (alone,) = server.client.get("/v1/sirchat/sessions").json()["data"]
    assert alone["bytes"] > 0
    most = 4 * alone["bytes"]
    monkeypatch.setattr("sirchat.server.pool.free_memory", lambda: most)
    with served(quick(), policy="full", max_new_tokens=4, folder=tmp_path / "b") as server:
        for number in range(6):
            server.ask([user(f"The number is {number}.")])
            wait_until_saved(server)  # until then none can leave
        told = server.client.get("/v1/sirchat/sessions").json()["data"]
    assert len(told) == 6
    assert 0 < sum(one["in_memory"] for one in told) < 4
