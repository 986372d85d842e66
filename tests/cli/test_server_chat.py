"""`sirchat --server URL`: a chat at the prompt whose model and memory a server has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import run
from import_graph import loaded_with, within
from listening import listening
from serving import Served, assistant, served, told, user
from terminal import Terminal

ANNA, NAME = "My name is Anna.", "What is my name?"


@pytest.fixture
def server() -> Iterator[Served]:
    with served(key="secret", policy="full", max_new_tokens=12) as one:
        yield one


@pytest.fixture
def chat(server: Served, tmp_path: Path) -> Iterator[Terminal]:
    environ = {"SIRCHAT_API_KEY": "secret"}
    with (
        listening(server) as address,
        Terminal("--server", address, home=tmp_path, environ=environ) as terminal,
    ):
        yield terminal


def memory(server: Served) -> Any:
    """The memory of the only conversation."""
    key = {"Authorization": "Bearer secret"}
    (one,) = server.client.get("/v1/sirchat/sessions", headers=key).json()["data"]
    return server.client.get(f"/v1/sirchat/sessions/{one['id']}", headers=key).json()


@pytest.mark.slow
def test_replies_are_those_of_the_server_and_its_memory_is_changed_by_commands(
    chat: Terminal, server: Served
) -> None:
    chat.wait("tiny on a server")
    assert "nothing was said yet" in chat.ask("/pin Anna")
    first = told([user(ANNA)], max_new_tokens=12)
    assert first in chat.ask(ANNA)
    longer = [user(ANNA), assistant(first), user(NAME)]
    second = told(longer, max_new_tokens=12)
    assert second in chat.ask(NAME)
    assert len(memory(server)["turns"]) == 4
    assert f"taken back: {NAME}" in chat.ask("/undo")
    assert second in chat.ask(NAME)
    assert second in chat.ask("/retry")
    assert len(memory(server)["turns"]) == 4
    assert "of them pinned" in chat.ask("/pin Anna")
    assert any("pinned" in row["flags"] for row in memory(server)["rows"])
    assert "policy sink" in chat.ask("/policy sink")
    assert memory(server)["policy"] == "sink"
    assert "Anna" in chat.ask("/tokens")
    assert "policy sink" in chat.ask("/erase Anna")
    assert "Anna" not in chat.ask("/tokens")
    assert "did you mean /policy?" in chat.ask("/polcy sink")
    assert 'policy can\'t be "nosuch"' in chat.ask("/policy nosuch")
    chat.ask("/reset")
    assert first in chat.ask(ANNA)
    chat.say("/exit")
    chat.until(lambda: not chat.read())


def test_without_a_server_at_the_url_or_a_terminal_it_says_so() -> None:
    done = run("--server", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert done.stderr == ("sirchat: --server opens a chat, so standard input must be a terminal\n")


def test_it_starts_without_what_loads_a_model() -> None:
    heavy = ("torch", "transformers", "sirchat.chat.session")
    assert not [one for one in loaded_with("sirchat.cli.server_chat") if within(one, *heavy)]
