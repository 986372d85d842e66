"""Servers of tools: the file that names them, their calls, and that none outlives its chat.

`SIRCHAT_ATTACK=300` kills so many chats.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from sirchat.chat.tool_loop import ChatTool
from sirchat.errors import SirchatError, UsageError
from sirchat.tools import guard
from sirchat.tools.config import ServerFields, ToolFlags, read_servers
from sirchat.tools.servers import ToolServers
from tool_server import OverHttp, servers_file

KILLS = int(os.environ.get("SIRCHAT_ATTACK", "2"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolServers]:
    notes.clear()
    one = ToolServers(read_servers(str(servers_file(tmp_path_factory.mktemp("s")))), notes.append)
    yield one
    one.close()


notes: list[str] = []


def named(servers: ToolServers, name: str) -> ChatTool:
    return next(tool for tool in servers.tools("snow") if tool.name == f"snow__{name}")


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("", "no list of servers"),
        ('{"servers": {}}', "no list of servers"),
        ('{"mcpServers": {"a": {}}}', 'server "a" needs a command or a url'),
        ('{"mcpServers": {"a": {"command": "b", "url": "http://c"}}}', "a command or a url"),
        ('{"mcpServers": {"a": {"url": "c"}}}', "url: String should match"),
        ('{"mcpServers": {"a": {"command": ["b"]}}}', "command: Input should be a valid string"),
    ],
)
def test_a_file_that_names_no_servers_is_an_error(
    tmp_path: Path, written: str, problem: str
) -> None:
    (tmp_path / "a.json").write_text(written)
    with pytest.raises(UsageError, match=problem):
        read_servers(str(tmp_path / "a.json"))
    with pytest.raises(UsageError, match="cannot be read"):
        read_servers(str(tmp_path / "b.json"))
    with pytest.raises(UsageError, match="no effect without --tools"):
        ToolFlags.of(None, ["a"])


def test_calls_return_text_and_name_what_is_none(servers: ToolServers) -> None:
    assert not servers.is_running("snow")
    assert named(servers, "weather").run({"city": "Oslo"}, bool) == "It snows in Oslo."
    assert named(servers, "structured").run({}, bool) == '{"snow": 3}'
    parts = "[image, not shown: image/png, 3 bytes]\n[link, not fetched: file:///a a]\nthe text"
    assert named(servers, "parts").run({}, bool) == parts
    assert len(named(servers, "many").run({"size": 400_000}, bool)) == 2_000_000
    with pytest.raises(SirchatError, match="it can't"):
        named(servers, "fail").run({}, bool)


def test_a_server_over_http_gets_the_headers_and_ends_as_others_do() -> None:
    http = ThreadingHTTPServer(("127.0.0.1", 0), OverHttp)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{http.server_port}/mcp"
    known = ServerFields(url=url, headers={"Authorization": "Bearer key"})
    ended = list[str]()
    servers = ToolServers({"snow": known, "closed": ServerFields(url=url)}, ended.append)
    assert named(servers, "weather").run({"city": "Oslo"}, bool) == "It snows in Oslo."
    with pytest.raises(SirchatError, match="it can't"):
        named(servers, "fail").run({}, bool)
    with pytest.raises(SirchatError, match="closed can't be started: Server returned"):
        servers.tools("closed")
    weather = named(servers, "weather")
    http.shutdown()
    http.server_close()
    with pytest.raises(SirchatError, match="the server snow has ended"):
        weather.run({"city": "Oslo"}, bool)
    assert ended == ["the server snow has ended; the next call starts it again"]
    servers.close()


def test_a_server_that_cannot_start_says_why(servers: ToolServers) -> None:
    with pytest.raises(SirchatError, match="the server broken can't be started: no key"):
        servers.tools("broken")


def test_a_dead_server_is_a_line_and_starts_again(servers: ToolServers) -> None:
    before = named(servers, "pid").run({}, bool)
    with pytest.raises(SirchatError, match="the server snow has ended"):
        named(servers, "die").run({}, bool)
    assert notes == ["the server snow has ended; the next call starts it again"]
    assert named(servers, "pid").run({}, bool) != before


def test_a_stopped_call_ends_at_once(servers: ToolServers) -> None:
    start, wait = time.monotonic(), named(servers, "wait")
    with pytest.raises(SirchatError, match="the user stopped this call"):
        wait.run({}, lambda: time.monotonic() > start + 0.3)
    assert time.monotonic() < start + 20


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[ToolServers]:
    """Servers that may take a second for a call."""
    notes.clear()
    found = read_servers(str(servers_file(tmp_path)))
    one = ToolServers(found, notes.append, lambda: 60 if not one.is_running("snow") else 1)
    yield one
    one.close()


@pytest.mark.parametrize("line", ["null", "5", "{}", '{"jsonrpc": "2.0", "id": 9}', r'"\ud800"'])
def test_an_answer_that_is_no_message_is_an_error_at_once(
    servers: ToolServers, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    start, what = time.monotonic(), "the server snow writes what is no message"
    with pytest.raises(SirchatError, match=what):
        named(servers, "write").run({"line": line}, bool)
    assert time.monotonic() < start + 20
    assert named(servers, "weather").run({"city": "Oslo"}, bool) == "It snows in Oslo."
    assert capfd.readouterr() == ("", "")  # nothing of a library's logger


def test_a_server_may_write_its_log_where_messages_go_and_a_line_says_so(
    hasty: ToolServers,
) -> None:
    for number in range(3):
        assert named(hasty, "write").run({"line": f"log {number}"}, bool) == ""
    assert notes == ["the server snow writes what is no message: log 0"]


def test_news_of_progress_renew_the_time_of_a_call(hasty: ToolServers) -> None:
    named(hasty, "pid")
    assert named(hasty, "steps").run({}, bool) == "done"


def test_a_hung_server_is_started_again_once_and_then_only_by_the_user(hasty: ToolServers) -> None:
    pids = [named(hasty, "pid").run({}, bool)]
    for _ in range(2):
        wait = named(hasty, "wait")
        with pytest.raises(SirchatError, match="it does not answer within 1 seconds"):
            wait.run({}, bool)
    with pytest.raises(SirchatError, match="does not answer, and was started again before"):
        hasty.tools("snow")
    hasty.tools("snow", by_user=True)
    pids.append(named(hasty, "pid").run({}, bool))
    assert len({*pids}) == 2
    with pytest.raises(SirchatError):  # it has answered since, so it is started again
        named(hasty, "wait").run({}, bool)
    assert named(hasty, "pid").run({}, bool) not in pids
    assert notes == ["the server snow is ended: it does not answer within 1 seconds"] * 3


def test_a_call_after_a_stopped_one_does_not_wait_for_it(hasty: ToolServers) -> None:
    wait, start = named(hasty, "wait"), time.monotonic()
    with pytest.raises(SirchatError, match="the user stopped this call"):
        wait.run({}, lambda: True)
    assert named(hasty, "weather").run({"city": "Oslo"}, bool) == "It snows in Oslo."
    assert time.monotonic() < start + 20


@pytest.mark.skipif(sys.platform == "win32", reason="there, the SDK ends what it has started")
def test_no_server_outlives_a_chat_that_is_killed(tmp_path: Path) -> None:
    found = read_servers(str(servers_file(tmp_path)))
    for _ in range(KILLS):
        reading, writing = os.pipe()
        if not (chat := os.fork()):
            pid = named(ToolServers(found, print), "pid").run({}, bool)
            os.write(writing, f"{pid}\n".encode())
            time.sleep(60)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            server = int(told.readline())
        assert _lives(server)
        os.kill(chat, signal.SIGKILL)
        os.waitpid(chat, 0)
        _await_end(server)


@pytest.mark.skipif(sys.platform == "win32", reason="there, no guard runs")
@pytest.mark.parametrize("is_gone", [False, True])
def test_the_guard_ends_all_that_a_server_has_started(is_gone: bool) -> None:
    """When the server ends, or if the chat was gone before the guard began to look."""
    chat, last = (1, "sleep 60") if is_gone else (os.getpid(), "true")
    server = ["sh", "-c", f"sleep 60 >/dev/null & echo $!; {last}"]
    command = [sys.executable, "-I", guard.__file__, str(chat), *server]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as ran:
        assert ran.stdout
        started = [int(line) for line in ran.stdout]  # to its end, which all have then written
    assert ran.returncode == -signal.SIGKILL
    for pid in started:
        _await_end(pid)


def test_a_server_that_does_not_answer_ends(tmp_path: Path) -> None:
    mute = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    args = ["-S", "-c", f"{mute}; time.sleep(60)"]
    mutes = {"mute": ServerFields(command=sys.executable, args=args)}
    servers = ToolServers(mutes, print, lambda: 1)
    with pytest.raises(SirchatError, match="mute can't be started: it does not answer"):
        servers.tools("mute")
    _await_end(int((tmp_path / "pid").read_text()))
    servers.close()


def _await_end(pid: int) -> None:
    deadline = time.monotonic() + 20
    while _lives(pid):
        assert time.monotonic() < deadline, "the server lives on"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
