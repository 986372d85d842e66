"""Tools in a pseudo-terminal: a model that knows its calls by heart, and a server over stdio."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from by_heart import SHAPES, Known, assistant, save_folder, teach, user
from sirchat.paths import sessions_dir
from sirchat.saved.session_list import find_session
from sirchat.saved.store import SessionStore
from sirchat.tools.config import read_servers
from sirchat.tools.servers import ToolServers
from terminal import Terminal
from tool_server import scripted, servers_file

pytestmark = pytest.mark.slow

SHAPE = SHAPES["qwen3"]
_KEYS = "in this chat:"  # the end of the question, which is gone once it is answered
USED = ("weather", "die")
OSLO = '{"city": "Oslo"}'
CALLS = {"Weather?": ("weather", OSLO), "Twice.": ("weather", OSLO)}


def call_of(name: str, given: str) -> str:
    """How the model calls a tool."""
    return SHAPE.call.format(thought="They ask.", name=f"snow__{name}", arguments=given)  # type: ignore[union-attr]


DIES = call_of("die", "{}")
# What each message comes to, and what the model says then.
ENDS = [
    ("Weather?", "It snows in Oslo.", "It is Paris."),
    ("Weather?", "error: the user refuses this call", "Say nothing."),
    ("Twice.", "It snows in Oslo.", DIES),
]


def taught_folder(folder: Path) -> Path:
    """A model that calls the tools `USED` when it is told of them, and answers by the result."""
    servers = ToolServers(read_servers(str(servers_file(folder))), print)
    told = [
        tool.as_json_object
        for name in USED
        for tool in servers.list_tools("snow")
        if name in tool.name
    ]
    servers.close()
    known = []
    for said, (name, given) in CALLS.items():
        call = call_of(name, given)
        known.append(Known((user(said),), call, told))
        function = {"name": f"snow__{name}", "arguments": json.loads(given)}
        history = assistant("", tool_calls=[{"id": "1", "type": "function", "function": function}])
        for asked, text, answer in ENDS:
            if asked == said:
                result = {"role": "tool", "tool_call_id": "1", "content": text}
                kept = (given, call)
                reply = answer if answer == DIES else SHAPE.plain.format(answer=answer)
                known.append(Known((user(said), history, result), reply, told, kept))
    return save_folder(folder / "model", SHAPE, teach(SHAPE, known))


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("tools")
    servers, model = str(servers_file(folder)), str(taught_folder(folder))
    return ("--model", model, "--tools", servers, "--max-new-tokens", "80", "--panel", "off")


@pytest.fixture(scope="module")
def terminal(
    tmp_path_factory: pytest.TempPathFactory, flags: tuple[str, ...]
) -> Iterator[Terminal]:
    with Terminal(*flags, home=tmp_path_factory.mktemp("home")) as chat:
        listed = chat.ask("/tools")
        assert "snow: 0 tools on, not started" in listed
        assert "off snow__weather: It can weather." in chat.ask("/tools snow")
        for name in USED:
            assert "1 tool turned on" in chat.ask(f"/tools on snow__{name}")
        yield chat


def asked(chat: Terminal, text: str, *keys: str) -> str:
    """What is shown below a message in an empty chat, with these keys at questions about calls."""
    chat.ask("/reset")
    chat.say(text)
    for key in keys:
        chat.until(lambda: _KEYS in chat.shown, 20)
        chat.send(key)
    chat.wait_prompt(20)
    return " ".join(chat.shown.split())


def test_a_call_is_shown_and_done_or_refused(terminal: Terminal) -> None:
    shown = asked(terminal, "Weather?", "y")
    assert f"wants to call snow__weather {OSLO}" in shown
    assert "snow__weather returned 17 characters: It snows in Oslo." in shown
    assert "It is Paris." in shown
    shown = asked(terminal, "Weather?", "n")
    assert "snow__weather failed: the user refuses this call" in shown
    assert "Say nothing." in shown


def test_a_call_that_is_cut_at_the_length_limit_is_not_done_and_said_to_be_cut(
    terminal: Terminal,
) -> None:
    terminal.ask("/set max_new_tokens 25")
    shown = asked(terminal, "Weather?")
    terminal.ask("/set max_new_tokens 80")
    assert "reply stopped at the length limit" in shown
    assert "wants to call" not in shown


def test_keys_of_the_next_message_answer_no_question(terminal: Terminal) -> None:
    terminal.ask("/reset")
    terminal.say("Weather?")
    typed, end = "", 100
    for at, key in enumerate("ya" * 50):
        terminal.send(key)
        typed += key
        time.sleep(0.1)
        terminal.read(0.01)
        if "wants to call" in terminal.shown:
            end = min(end, at + 4)
        if at == end:
            break
    terminal.until(lambda: _KEYS in terminal.shown, 20)
    terminal.send("n")
    terminal.until(lambda: f"> {typed}" in terminal.shown, 20)
    assert "snow__weather failed: the user refuses this call" in " ".join(terminal.shown.split())
    terminal.send("\x15")


def test_esc_and_ctrl_c_end_the_start_of_a_server_and_its_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    file = scripted(tmp_path, pid=str(pid), sleep=60)
    with Terminal("--tools", str(file), home=tmp_path) as chat:
        for key, said in (
            ("\x1b", "the server snow can't be started: the user stopped this"),
            ("\x03", "stopped"),
        ):
            chat.say("/tools on snow")
            chat.until(lambda: pid.exists() and "starting the server snow" in chat.shown, 20)
            chat.send(key)
            chat.wait_prompt(20)
            assert said in " ".join(chat.shown.split())
            chat.until(lambda: not _lives(int(pid.read_text())), 20)
            pid.unlink()


@pytest.mark.parametrize("key", ["\x1b", "\x03"])
@pytest.mark.parametrize("way", ["at the prompt", "after Enter", "resumed"])
def test_a_start_that_a_flag_asks_for_can_be_stopped(tmp_path: Path, way: str, key: str) -> None:
    file, flags = scripted(tmp_path, sleep=60), list[str]()
    if way == "resumed":
        with Terminal(home=tmp_path) as chat:
            chat.ask("Hello.")
        flags = ["--resume", "last"]
    with Terminal("--tools", str(file), "--tools-allow", "snow__*", *flags, home=tmp_path) as chat:
        if way == "after Enter":
            chat.send("Hello.\r")
        chat.until(lambda: "starting the server snow" in chat.everything, 20)
        chat.send("typed" + key)
        chat.wait_screen("(?m)^> typed$", 20)
        assert "stopped" in chat.everything
        if way != "resumed":  # whose toolbar says how fast the last reply was
            assert ("tok/s" in chat.everything) == (way == "after Enter")


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_chat_that_is_killed_within_the_loop_has_the_results_until_then(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Terminal(*flags, "--tools-allow", "snow__weather", home=tmp_path) as chat:
        for name in USED[1:]:
            chat.ask(f"/tools on snow__{name}")
        chat.say("Twice.")
        chat.until(lambda: "wants to call snow__die" in chat.shown)
        chat.child.kill(signal.SIGKILL)
        while chat.read():
            pass
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    store = SessionStore.open(find_session(sessions_dir(), "last"))
    turns = [(turn.role, turn.text) for turn in store.turns()]
    store.close()
    assert turns[-3] == ("user", "Twice.")
    assert turns[-1] == ("tool", "It snows in Oslo.")
