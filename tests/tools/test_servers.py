"""Servers of tools: the file that names them, their calls, and that none outlives its chat.

`SIRCHAT_ATTACK=300` kills so many chats.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sirchat.chat.tool_loop import ChatTool
from sirchat.errors import SirchatError, UsageError
from sirchat.tools.config import ServerFields, ToolFlags, read_servers
from sirchat.tools.servers import ToolServers
from tool_server import OverHttp, scripted, servers_file, tool

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("SIRCHAT_ATTACK", "2"))


@pytest.fixture(autouse=True)
def _is_ended_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung server is waited for less long than the library's two seconds."""
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.3)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolServers]:
    notes.clear()
    one = ToolServers(read_servers(str(servers_file(tmp_path_factory.mktemp("s")))), notes.append)
    yield one
    one.close()


notes: list[str] = []
KEY = {"Authorization": "Bearer key"}


def named(servers: ToolServers, name: str) -> ChatTool:
    return next(tool for tool in servers.list_tools("snow") if tool.name == f"snow__{name}")


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("", "no list of servers"),
        ("[]", "no list of servers"),
        ('{"time": {}}', "no list of servers"),
        ('{"mcpServers":\n {"a" 1}}', "no list of servers: .* line 2 column 7"),
        ('{"mcpServers": // ,\n {"a" /**/ 1,}}', "no list of servers: .* line 2 column 12"),
        ('{"mcpServers": {"a": {}}}', 'server "a" needs a command or a url'),
        (
            '{"mcpServers": {"a": {"command": "b", "url": "http://c"}}}',
            "a command or a url, and not both",
        ),
        ('{"mcpServers": {"a": {"url": "c"}}}', "url: String should match"),
        ('{"mcpServers": {"a": {"command": ["b"]}}}', "command: Input should be a valid string"),
        ("[" * 100_000, "no list of servers"),
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
    with pytest.raises(UsageError, match="cannot be read"):
        read_servers("~nosuchuser/b.json")
    with pytest.raises(UsageError, match="no effect without --tools"):
        ToolFlags.of(None, ["a"])


@pytest.mark.parametrize(
    ("name", "written"),
    [
        (
            "claude.json",
            '{"mcpServers": {"a": {"command": "b", "env": {"PORT": 80}, "args": null}}}',
        ),
        ("cursor.json", '\ufeff{"mcpServers": {"a": {"command": "b", "env": {"PORT": "80"}}}}'),
        (
            "vscode.json",
            """{"inputs": [], "servers": {"a": {"type": "stdio", "command": "b", "url": "",
            "env": {"PORT": 80}}, "off": {"command": "c", "disabled": true}}}""",
        ),
        (
            "settings.json",
            """{"mcp": {"servers": { // "mine"
            "a": {"command": "b", /* a
            port, */ "env": {"PORT": "80",},},  // and no more
            }, }}""",
        ),
        (
            "commented.json",
            f"""{{"servers": {{"a": {{"command": "b", {"/" * 60}
            // "url": "https://a", {"//a" * 60}
            "env": {{"PORT": "80"}}}}}}}}""",
        ),
        ("config.toml", '[mcp_servers.a]\ncommand = "b"\nenv = { PORT = "80" }  # codex'),
    ],
)
def test_files_of_other_programs_are_taken_as_they_are(
    tmp_path: Path, name: str, written: str
) -> None:
    (tmp_path / name).write_text(written, "utf-8")
    one = {"a": ServerFields(command="b", env={"PORT": "80"})}
    assert read_servers(str(tmp_path / name)) == one
    urls = (ServerFields.model_validate({name: "http://a//b"}).url for name in ("url", "serverUrl"))
    assert [*urls] == ["http://a//b"] * 2


def test_variables_are_filled_in_and_one_that_is_not_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", 'a"b\\c')
    monkeypatch.setenv("HOST", "example.com")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("MISSING", raising=False)
    fields = ServerFields(
        args=["${EMPTY:-x} ${MISSING:-y z} ${EMPTY}", "$KEY ${1} ${a%b}", "${userHome}"],
        env={"A": "${KEY}", "B": "<${env:KEY}>"},
        url="https://${HOST}/mcp",
        headers={"Authorization": "Bearer ${KEY}"},
    ).filled()
    assert fields.args == ["x y z ", "$KEY ${1} ${a%b}", str(Path.home())]
    assert fields.env == {"A": 'a"b\\c', "B": '<a"b\\c>'}
    assert fields.url == "https://example.com/mcp"
    assert fields.headers == {"Authorization": 'Bearer a"b\\c'}
    for written in ("${MISSING}", "${env:MISSING}", "${input:MISSING}"):
        servers = ToolServers({"a": ServerFields(command="b", env={"A": written})}, print)
        with pytest.raises(SirchatError, match=r"can't be started: the variable .*MISSING is"):
            servers.list_tools("a")


def test_a_home_folder_is_filled_in_and_a_command_line_in_one_text_gets_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = read_servers(str(scripted(tmp_path, results={"one": {}})))["snow"]
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "python").symlink_to(sys.executable)
    at_home = fields.model_copy(update={"command": "~/python", "cwd": "~"})
    servers = ToolServers({"snow": at_home}, print)
    assert named(servers, "one").run({}, bool) == ""
    servers.close()
    servers = ToolServers({"a": ServerFields(command="npx -y time")}, print)
    with pytest.raises(SirchatError, match=r'npx -y time. .*belongs into "args"'):
        servers.list_tools("a")
    servers.close()


def text(written: str) -> dict[str, str]:
    return {"type": "text", "text": written}


PARTS = [
    {"type": "image", "data": "AAAA", "mimeType": "image/png"},
    {"type": "resource_link", "uri": "file:///a", "name": "a"},
    {"type": "resource", "resource": {"uri": "file:///b", "text": "the text"}},
]
# Results of calls, and what the model is told.
RESULTS: list[tuple[dict[str, Any], str]] = [
    ({"content": [text("Oslo")], "structuredContent": {"result": "Oslo"}}, "Oslo"),
    ({"content": [], "structuredContent": {"a": [1, "Zürich"]}}, '{"a": [1, "Zürich"]}'),
    ({"content": [text("2 items.")], "structuredContent": {"a": [1]}}, '2 items.\n{"a": [1]}'),
    ({"content": [text('{ "a":[1] }')], "structuredContent": {"a": [1]}}, '{ "a":[1] }'),
    ({"content": [text("no " * 1000)], "isError": True}, f"error: {'no ' * 1000}"),
    ({"content": [], "isError": True}, "error: the tool does not say why"),
    (
        {"content": PARTS},
        "[image, not shown: image/png]\n[resource_link, not shown: file:///a]\nthe",
    ),
    ({"content": [{"type": "video"}]}, "error: its answer breaks the protocol: content.0"),
    ({"content": [{"type": "text"}]}, "error: its answer breaks the protocol: content.0"),
    ({"content": [text("so \ud800")]}, "error: its answer has half a character (a lone surroga"),
]


def test_a_result_is_its_text_and_other_values_and_an_error_is_told(tmp_path: Path) -> None:
    made = scripted(tmp_path, results={f"r{n}": result for n, (result, _) in enumerate(RESULTS)})
    servers = ToolServers(read_servers(str(made)), print)
    for number, (result, told) in enumerate(RESULTS):
        try:
            came = named(servers, f"r{number}").run({}, bool)
        except (RuntimeError, SirchatError) as error:
            came = f"error: {error}"
        assert came == told if "structuredContent" in result else came.startswith(told)
    servers.close()


def test_a_server_over_http_gets_the_headers_and_ends_as_others_do() -> None:
    ended = list[str]()
    with listening(OverHttp) as url:
        known, closed = ServerFields(url=f"{url}/mcp", headers=KEY), ServerFields(url=f"{url}/mcp")
        servers = ToolServers({"snow": known, "closed": closed}, ended.append)
        weather = named(servers, "weather")
        assert weather.run({"city": "Oslo"}, bool) == "It snows in Oslo."
        with pytest.raises(RuntimeError, match="it can't"):
            named(servers, "fail").run({}, bool)
        with pytest.raises(SirchatError, match=r"closed can't be started: .* HTTP 401: is the key"):
            servers.list_tools("closed")
    with pytest.raises(SirchatError, match="the server snow has ended"):
        weather.run({"city": "Oslo"}, bool)
    assert ended == ["the server snow has ended; the next call starts it again"]
    servers.close()


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


@pytest.fixture(scope="module")
def over_http() -> Iterator[str]:
    with listening(OverHttp) as url:
        yield url


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        (403, r'is the key in its "headers" right\?'),
        (404, r'is its "url" right\?'),
        (429, "too many requests"),
        (503, "a fault there"),
    ],
)
def test_a_refusal_over_http_has_its_number_and_what_is_probably_wrong(
    over_http: str, status: int, meaning: str
) -> None:
    servers = ToolServers({"snow": ServerFields(url=f"{over_http}/{status}")}, print)
    with pytest.raises(SirchatError, match=rf"can't be started: .*, HTTP {status}: {meaning}$"):
        servers.list_tools("snow")
    servers.close()


class Elsewhere(BaseHTTPRequestHandler):
    """What is asked for at another address is counted; else the answer is as the path says."""

    asked: ClassVar[list[dict[str, str]]] = []

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        if kind == "other":
            self.asked.append(dict(self.headers))
        length = int(self.headers["Content-Length"] or 0)
        self.rfile.read(length)
        # Another host by its name: to the client, localhost is not 127.0.0.1.
        other = f"http://localhost:{self.headers['Host'].rpartition(':')[2]}/other"
        places = {"moved": other, "file": "file:///etc/passwd", "tls": "https://localhost:1/other"}
        self.send_response(307 if kind in places else 200)
        self.send_header("Location", places.get(kind, ""))
        self.send_header("Content-Type", {"html": "text/html"}.get(kind, "application/json"))
        self.send_header("Content-Length", "9")
        self.end_headers()
        self.wfile.write({"html": b"<p>\x1b[2J </p>", "half": b'{"json'}.get(kind, b"not json!"))

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_server_over_http_that_sends_elsewhere_or_nonsense_is_a_line_and_gets_no_key_there() -> (
    None
):
    kinds = ["moved", "file", "tls", "html", "half", "none"]
    with listening(Elsewhere) as url:
        fields = {kind: ServerFields(url=f"{url}/{kind}", headers=KEY) for kind in kinds}
        servers = ToolServers(fields, print)
        for kind in kinds:
            with pytest.raises(SirchatError, match=f"server {kind} can't be started: ") as error:
                servers.list_tools(kind)
            assert str(error.value).isprintable()
        servers.close()
    assert not Elsewhere.asked


def test_a_server_over_http_that_has_forgotten_the_chat_is_started_anew(over_http: str) -> None:
    servers = ToolServers({"snow": ServerFields(url=f"{over_http}/mcp", headers=KEY)}, notes.append)
    weather = named(servers, "weather")
    OverHttp.sessions.clear()
    with pytest.raises(SirchatError, match="the server snow has ended"):
        weather.run({"city": "Oslo"}, bool)
    assert named(servers, "weather").run({"city": "Oslo"}, bool) == "It snows in Oslo."
    servers.close()
    notes.clear()


def test_a_server_that_cannot_start_says_why(servers: ToolServers) -> None:
    with pytest.raises(SirchatError, match="the server broken can't be started: no key"):
        servers.list_tools("broken")


def test_a_dead_server_is_a_line_and_starts_again(servers: ToolServers) -> None:
    before = named(servers, "pid").run({}, bool)
    with pytest.raises(SirchatError, match="the server snow has ended"):
        named(servers, "die").run({}, bool)
    assert notes == ["the server snow has ended; the next call starts it again"]
    assert named(servers, "pid").run({}, bool) != before


def test_a_server_that_refuses_a_call_under_the_code_of_an_ended_connection_runs_on(
    tmp_path: Path,
) -> None:
    (odd := tmp_path / "odd").touch()
    file, said = scripted(tmp_path, tools=[tool("pid")], odd=str(odd)), list[str]()
    servers = ToolServers(read_servers(str(file)), said.append)
    pid = named(servers, "pid")
    before = pid.run({}, bool)
    refused = {"id": "ID", "error": {"code": -32000, "message": "wait 30 s"}}
    odd.write_text(json.dumps({"jsonrpc": "2.0", **refused}) + "\n")
    with pytest.raises(SirchatError, match=r"^wait 30 s$"):
        pid.run({}, bool)
    assert (pid.run({}, bool), said) == (before, [])
    servers.close()


def test_a_stopped_call_ends_at_once_and_the_next_one_does_not_wait_for_it(
    servers: ToolServers,
) -> None:
    start, wait = time.monotonic(), named(servers, "wait")
    with pytest.raises(SirchatError, match="the user stopped this"):
        wait.run({}, lambda: time.monotonic() > start + 0.3)
    assert named(servers, "weather").run({"city": "Oslo"}, bool) == "It snows in Oslo."
    assert time.monotonic() < start + 20


def test_a_tool_without_parameters_has_a_schema_that_templates_can_read(tmp_path: Path) -> None:
    whole = {"type": "object"}
    tools = [
        {"name": f"n{number}", "inputSchema": one}
        for number, one in enumerate((whole, {**whole, "properties": None}))
    ]
    servers = ToolServers(read_servers(str(scripted(tmp_path, tools=tools))), print)
    for one in tools:
        assert named(servers, str(one["name"])).parameters == {"type": "object", "properties": {}}
    servers.close()


def test_tools_whose_names_look_alike_are_told_apart(tmp_path: Path) -> None:
    long = "a" * 64
    names = ["read file", "read_file", "read/file", f"{long}1", f"{long}2"]
    results = {name: {"content": [text(name)]} for name in names}
    servers = ToolServers(read_servers(str(scripted(tmp_path, results=results))), print)
    tools = servers.list_tools("snow")
    assert [tool.run({}, bool) for tool in tools] == names
    assert [tool.name for tool in tools[:3]] == [
        f"snow__read_file{end}" for end in ("", "_2", "_3")
    ]
    assert len({tool.name for tool in tools}) == 5
    assert max(len(tool.name) for tool in tools) == 64
    assert servers.list_tools("snow") == tools  # in the same words
    servers.close()


def test_what_a_server_lists_or_complains_without_end_is_cut(tmp_path: Path) -> None:
    endless = scripted(tmp_path, results={"one": {}}, cursor="more", noise=30_000_000)
    servers = ToolServers(read_servers(str(endless)), print)
    assert len(servers.list_tools("snow")) == 100  # pages
    errors = servers._running["snow"]._errors
    deadline = time.monotonic() + 20
    while os.fstat(errors.fileno()).st_size > 1 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    servers.close()


def test_a_result_of_many_megabytes_is_cut_and_the_model_is_told(
    servers: ToolServers,
) -> None:
    found = named(servers, "many").run({"size": 900_000}, bool)
    assert found.endswith("\n[cut: the result has 4,500,000 characters]")
    assert len(found) < 4_000_100
    assert named(servers, "weather").run({"city": "Oslo"}, bool) == "It snows in Oslo."


def test_the_start_of_a_server_can_be_stopped_and_leaves_no_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    servers = ToolServers(read_servers(str(scripted(tmp_path, pid=str(pid), sleep=60))), print)
    with pytest.raises(SirchatError, match="snow can't be started: the user stopped this"):
        servers.list_tools("snow", pid.exists)
    _await_end(int(pid.read_text()))
    pid.unlink()

    def ctrl_c() -> bool:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        servers.list_tools("snow", ctrl_c)
    _await_end(int(pid.read_text()))
    servers.close()


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[ToolServers]:
    """Servers that may take a second for a call."""
    notes.clear()
    found = read_servers(str(servers_file(tmp_path)))
    one = ToolServers(found, notes.append, lambda: 60 if not one.is_running("snow") else 1)
    yield one
    one.close()


def test_news_of_progress_renew_the_time_of_a_call(hasty: ToolServers) -> None:
    named(hasty, "pid")
    assert named(hasty, "steps").run({}, bool) == "done"


def test_a_hung_server_ends_and_starts_again_and_a_chat_that_ends_waits_for_it(
    hasty: ToolServers,
) -> None:
    pids = list[str]()
    for _ in range(2):
        pids.append(named(hasty, "pid").run({}, bool))
        with pytest.raises(SirchatError, match="it does not answer within 1 seconds"):
            named(hasty, "wait").run({}, bool)
    assert len(set(pids)) == 2
    hasty.close()
    assert not _lives(int(pids[1]))


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


def test_a_server_that_closes_its_output_has_ended(tmp_path: Path) -> None:
    file, said = scripted(tmp_path, tools=[tool("close")]), list[str]()
    servers = ToolServers(read_servers(str(file)), said.append, lambda: 20)
    with pytest.raises(SirchatError, match="the server snow has ended"):
        named(servers, "close").run({}, bool)
    assert said == ["the server snow has ended; the next call starts it again"]
    servers.close()


def test_a_server_that_does_not_answer_ends(tmp_path: Path) -> None:
    mute = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    args = ["-S", "-c", f"{mute}; time.sleep(60)"]
    mutes = {"mute": ServerFields(command=sys.executable, args=args)}
    servers = ToolServers(mutes, print, lambda: 1)
    with pytest.raises(SirchatError, match="mute can't be started: it does not answer"):
        servers.list_tools("mute")
    servers.close()
    assert not _lives(int((tmp_path / "pid").read_text()))


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
