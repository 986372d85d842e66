"""`sirchat ask` over a running server: the same output, sooner."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from chatting import babbler, tiny
from command import Done, run
from serving import served
from sirchat.cli.asking import answer_question
from sirchat.cli.serve import _private_socket
from sirchat.paths import server_socket

JOKE = "Tell me a joke."


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a short path, as that of a Unix socket must be."""
    folder = tmp_path_factory.mktemp("h")
    monkeypatch.setenv("SIRCHAT_HOME", str(folder))
    monkeypatch.setenv("SIRCHAT_MODEL", "tiny")
    return folder


@pytest.fixture
def server(home: Path) -> Iterator[list[str]]:
    """A running server for `tiny`, with a key; the paths that were asked for."""
    yield from listening("tiny", tiny())


def listening(name: str, model: Any) -> Iterator[list[str]]:
    asked: list[str] = []
    with (
        served(model, key="secret", answer=answer_question, name=name, compile="off") as one,
        _private_socket(name) as private,
    ):
        assert private is not None
        private.listen()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def noting(message: Any) -> None:
                if message["type"] == "http.response.start":
                    asked.append(f"{scope['method']} {scope['path']} {message['status']}")
                await send(message)

            await one.server.app(scope, receive, noting)

        running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [private]})
        thread.start()
        try:
            yield asked
        finally:
            running.should_exit = True
            thread.join()


def both(*arguments: str, text: str = "") -> tuple[Done, Done]:
    """What `ask` does by a server, and without one."""
    return tuple(run("ask", *arguments, "--server", how, text=text) for how in ("auto", "off"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([JOKE], ""),
        ([JOKE, "--max-new-tokens", "3", "--policy", "sink"], ""),
        ([JOKE, "--temperature", "2", "--seed", "7", "--system", "Be kind."], ""),
        (["Who has it?"], "Anna has a red bicycle. " * 100),
        (["Who has it?", "--budget", "64"], "Anna has a red bicycle. " * 20),
        ([JOKE, "--policy", "sink", "--budget", "3"], ""),
        (["Go.", "--policy", "full"], "one two three " * 3000),
    ],
)
def test_output_errors_and_exit_code_are_those_without_a_server(
    server: list[str], arguments: list[str], text: str
) -> None:
    by_server, without = both(*arguments, text=text)
    assert by_server == without
    assert server == ["POST /v1/sirchat/ask 200"] or without.returncode == 2


def test_the_events_are_those_without_a_server(server: list[str]) -> None:
    def events(done: Done) -> list[Any]:
        found = [json.loads(line) for line in done.stdout.splitlines()]
        return [{k: v for k, v in one.items() if not k.startswith("seconds")} for one in found]

    by_server, without = both("--json", "--policy", "sink", "--budget", "64", JOKE * 20)
    assert events(by_server) == events(without)
    assert server
    spacing = re.sub(r"[0-9.e-]+", "0", by_server.stdout), re.sub(r"[0-9.e-]+", "0", without.stdout)
    assert spacing[0] == spacing[1]


def test_another_model_or_other_settings_of_it_do_without_the_server(server: list[str]) -> None:
    assert run("ask", JOKE).stdout
    assert server == ["POST /v1/sirchat/ask 200"]
    assert run("ask", JOKE, "--model", "tiny-anchor").stdout
    assert run("ask", JOKE, "--policy", "sirchat.memory.policies.sink:Sink").returncode in (0, 1, 2)
    assert len(server) == 1
    assert run("ask", JOKE, "--dtype", "float32").stdout
    assert server[1:] == ["POST /v1/sirchat/ask 409"]


def test_a_socket_that_a_killed_server_left_is_no_obstacle(home: Path) -> None:
    path = server_socket("tiny")
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert run("ask", JOKE).returncode == 0
    with _private_socket("tiny") as mine:
        assert mine is not None
        mine.listen()
        with _private_socket("tiny") as second:
            assert second is None
        assert path.exists()
    assert not path.exists()


def test_a_server_that_ends_in_mid_reply_is_said_and_the_reply_not_repeated(home: Path) -> None:
    said = b'{"id": "a"}\n[["stream", "Half a"]]\n'
    with _private_socket("tiny") as private:
        assert private is not None
        private.listen()

        def answer() -> None:
            client, _ = private.accept()
            asked = b""
            while not asked.endswith(b"}"):  # what is unread would reset the connection
                asked += client.recv(65536)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + said)
            client.close()

        answering = threading.Thread(target=answer)
        answering.start()
        done = run("ask", JOKE)
        answering.join()
    assert (done.returncode, done.stdout) == (1, "Half a")
    assert done.stderr == "sirchat: the server ended before the reply was complete\n"


def test_only_the_user_can_open_the_socket(home: Path) -> None:
    with _private_socket("tiny"):
        path = server_socket("tiny")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (
            ["--server", "nonsense"],
            2,
            '--server can\'t be "nonsense"; allowed: auto, off, or a URL',
        ),
        (["--server", "http://127.0.0.1:9"], 1, "can't be asked: "),
        (["--server", "http://h", "--resume", "last"], 2, "--server has no effect with --resume"),
    ],
)
def test_a_wrong_server_is_refused_in_one_line(
    home: Path, flags: list[str], code: int, message: str
) -> None:
    done = run("ask", JOKE, *flags)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_the_reply_as_without_a_server(
    home: Path, monkeypatch: pytest.MonkeyPatch, endless: str
) -> None:
    monkeypatch.setenv("SIRCHAT_MODEL", endless)
    flags = ("ask", "--json", "--max-new-tokens", "1000000", "--temperature", "0", "Hello.")
    for asked in listening(endless, babbler()):
        killing = threading.Thread(target=_interrupt_once, args=(asked,))
        killing.start()
        done = run(*flags)
        killing.join()
        assert asked[1].startswith("DELETE /v1/sirchat/ask/")
    assert done.returncode == 130
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["event"] for one in events if one["event"] != "evict"] == [
        *("session", "turn", "turn", "end")
    ]
    assert events[-2]["finish"] == "interrupt"


def _interrupt_once(asked: list[str]) -> None:
    while not asked:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)


def test_the_client_imports_no_heavy_library(server: list[str], home: Path) -> None:
    code = (
        "import sys; sys.argv = ['sirchat', 'ask', 'Tell me a joke.']\n"
        "from sirchat.cli import main\n"
        "try: main()\n"
        "finally: print([n for n in ('torch', 'transformers', 'openai', 'numpy', 'prompt_toolkit')"
        " if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stdout.startswith(run("ask", JOKE, "--server", "off").stdout)
