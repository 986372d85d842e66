"""`sirchat serve`: what it refuses in one line before it loads a model, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import threading
import urllib.request
from pathlib import Path

import pytest

from command import refused, run
from serving import serve_program
from sirchat.cli.serve import load_server
from sirchat.config.profile import Profile


def test_a_port_that_is_in_use_is_refused_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, error = refused("serve", "--port", str(port))
    assert code == 1
    assert f'sirchat: can\'t listen at "127.0.0.1", port {port}: ' in error
    assert "(choose another --host or --port; --port 0 takes a free one)" in error


def test_the_api_key_may_be_in_the_environment_and_packages_may_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = run("serve", "--host", "0.0.0.0", "--model", "/no/such", SIRCHAT_API_KEY="secret")
    assert done.returncode == 1
    assert "/no/such" in done.stderr
    assert "secret" not in done.stderr + run("serve", "--help", SIRCHAT_API_KEY="secret").stdout
    monkeypatch.setattr("sirchat.cli.serve.find_spec", lambda name: None)
    error = "sirchat: the server is not installed (pip install 'sirchat[server]')\n"
    assert refused("serve") == (2, error)


def test_the_model_is_loaded_in_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has loaded a model keeps OpenMP workers, which would slow down replies."""
    found: list[threading.Thread] = []

    def load(*args: object) -> None:
        found.append(threading.current_thread())

    monkeypatch.setattr("sirchat.cli.serve.load_profile_model", load)
    monkeypatch.setattr("sirchat.server.app.ChatServer", lambda *args, **named: None)
    load_server(Profile(model="tiny"), False, {}, "127.0.0.1", None)
    found[0].join(60)
    assert not found[0].is_alive()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_the_replies_under_way(
    tmp_path: Path, endless: str, number: int, code: int
) -> None:
    flags = ("-m", endless, "--budget", "64", "--max-new-tokens", "1000000")
    with serve_program(tmp_path, *flags) as (process, address):
        body = {"messages": [{"role": "user", "content": "Hello."}], "stream": True}
        url = f"{address}/chat/completions"
        with urllib.request.urlopen(url, json.dumps(body).encode()) as stream:
            for _ in range(20):
                stream.readline()
            process.send_signal(number)
            *_, last = (line for line in stream if line.strip())
        assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == (
            "the server is ending"
        )
        assert process.wait() == code
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_server_that_ends_keeps_its_conversations(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    home = tmp_path_factory.mktemp("h")
    with serve_program(home, "-m", "tiny") as (process, url):
        assert process.stdout is not None
        told_page = process.stdout.readline()
        assert told_page == f"chat with it, and see its memory, in a browser: {url[:-2]}\n"
        body = json.dumps({"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4})
        urllib.request.urlopen(f"{url}/chat/completions", body.encode()).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert list((home / "data" / "served").glob("*.sqlite"))
