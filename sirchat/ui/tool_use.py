"""The tools of a chat at the prompt or in a script: which are on, and which calls are allowed."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from sirchat.chat.session import Session
from sirchat.chat.tool_loop import ChatTool, Toolbox, tools_prompt_size
from sirchat.chat.turn import Interrupted, never
from sirchat.errors import SirchatError, UsageError, did_you_mean, format_value
from sirchat.text.tool_calls import ToolCall
from sirchat.tools.config import ToolFlags
from sirchat.tools.servers import READ_RESOURCE, ToolServers, plain_name
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line, pluralize, shorten

if TYPE_CHECKING:
    from sirchat.chat.events import Returned

_CALL_QUESTION = "y does it, n refuses, a always does it in this chat: "
_REFUSAL = "the user refuses this call"
_MAX_CALL_CHARS, _MAX_RESULT_CHARS = 1000, 100  # shown
# Variation selectors and tags; `str.isprintable` knows others.
_INVISIBLE_CHARS = frozenset(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0000, 0xE0200))))
_NO_SERVERS = "no tools: sirchat --tools FILE names their servers"

Ask = Callable[[str, Collection[str]], str]  # shows a question; returns which key was pressed


class ToolUse(Toolbox):
    """The tools that are turned on, of servers that a file names; none at first.

    Tools that match a pattern in `flags` are called without asking, while their servers describe
    them as at first. For others, `ask` gets the user's answer; without it, calls
    are refused. `stops` says whether the user stops a server's start.
    """

    def __init__(
        self,
        flags: ToolFlags,
        screen: Screen,
        ask: Ask | None = None,
        timeout: Callable[[], float] = lambda: 60.0,
        stops: Interrupted = never,
    ) -> None:
        super().__init__(decide=self._decide)
        self._tool_servers, self._screen = ToolServers(flags.servers, screen.note, timeout), screen
        self._ask, self._stops = ask, stops
        self._patterns = flags.allow
        self._always_allowed: list[tuple[str, ChatTool | None]] = []  # by the user, as they were
        self._first_seen = dict[str, ChatTool]()  # as they were when first turned on
        self.is_stopped = False  # by Esc at a question
        self._server_names = list(flags.servers)
        self._is_script = False

    def begin(self, *, is_script: bool = False) -> None:
        """Turn on the tools that the flags allow, and print errors.

        In a script, raises the error of a pattern that turns on no tool.
        """
        self._is_script = is_script
        for pattern in self._patterns:
            servers = [name for name in self._server_names if self._may_match(pattern, name)]
            errors: list[SirchatError] = []
            if not servers:
                hint = f"there are: {', '.join(self._server_names) or 'none; give --tools FILE'}"
                errors = [UsageError(f"--tools-allow {pattern} matches no server", hint=hint)]
            for name in servers:
                try:
                    self._turn_on_tools(self._find_matching(name, pattern))
                except SirchatError as error:
                    errors.append(error)
            if is_script and len(errors) == max(1, len(servers)):
                raise errors[0]
            for problem in errors:
                self._screen.note(str(problem))

    def close(self) -> None:
        self._tool_servers.close()

    def command(self, session: Session, arguments: str) -> None:
        """Run `/tools [NAME|on NAME|off NAME]`; raises UsageError."""
        if not self._server_names:
            raise UsageError(_NO_SERVERS)
        verb, _, name = arguments.strip().partition(" ")
        name = name.strip()
        if not verb:
            self._print_servers()
        elif verb not in ("on", "off"):
            self._print_tools(arguments.strip())
        elif not name:
            raise UsageError(f"/tools {verb} needs a name", hint="/tools lists the servers")
        elif verb == "on":
            self._turn_on(session, name)
        else:
            self._turn_off(name)

    def resource(self, name: str) -> str | None:
        """The text of the resource `SERVER:URI`; None if no server is called so."""
        parts = ((one, name.removeprefix(f"{one}:")) for one in self._server_names)
        found = (pair for pair in parts if pair[1] != name and ":" in pair[1][1:])
        server, uri = next(found, ("", ""))
        if not uri[:1].isalpha():
            return None
        self._list_tools(server)  # starts it
        return self._tool_servers.resource(server, uri, self._stops)

    def _print_servers(self) -> None:
        for server in self._server_names:
            num_on = sum(tool.origin[0] == server for tool in self.tools.values())
            state = "started" if self._tool_servers.is_running(server) else "not started"
            tools = f"{pluralize(num_on, 'tool')} on"
            self._screen.note(f"{displayable_line(server)}: {tools}, {state}")
        self._screen.note("/tools NAME lists a server's tools; /tools on NAME turns them on")

    def _turn_on(self, session: Session, name: str) -> None:
        server = self._find_server(name)
        tools = self._find_matching(server, "*" if name == server else name)
        # Raises an error if their description does not fit.
        tokens = tools_prompt_size(session, Toolbox((self.tools | tools).values()).tools_json)
        self._turn_on_tools(tools)
        size = f"the model reads about {tokens:,} tokens of them with your next message"
        self._screen.note(f"{pluralize(len(tools), 'tool')} turned on; {size}")
        if tokens > session.budget // 2:
            self._screen.note(f"that is more than half of the budget of {session.budget:,}")

    def _turn_off(self, name: str) -> None:
        tools = self.tools.values()
        names = [tool.name for tool in tools if tool.origin[0] == name]
        names = names or [tool.name for tool in tools if self._matches(name, tool.name, tool)]
        if not names:
            raise UsageError(f"/tools off: no tool that is on is called {format_value(name)}")
        for tool_name in names:
            del self.tools[tool_name]
        self._screen.note(f"{pluralize(len(names), 'tool')} turned off")

    def _list_tools(self, server: str) -> list[ChatTool]:
        if not (self._is_script or self._tool_servers.is_running(server)):
            self._screen.note(f"starting the server {server}; Esc stops it")
        return self._tool_servers.list_tools(server, self._stops)

    def _find_matching(self, server: str, pattern: str) -> dict[str, ChatTool]:
        """A server's tools that match a pattern, by name; raises UsageError if there are none."""
        tools = self._list_tools(server)
        matching = {tool.name: tool for tool in tools if self._matches(pattern, tool.name, tool)}
        if not matching:
            tools_named = "tools" if pattern == "*" else f"tool {format_value(pattern)}"
            raise UsageError(f"server {server} has no {tools_named}")
        return matching

    def _print_tools(self, name: str) -> None:
        """List a server's tools, or show those whose name matches as the model reads them."""
        server = self._find_server(name)
        for tool in self._list_tools(server):
            state = "on " if tool.name in self.tools else "off"
            if name == server:
                self._screen.note(f"{state} {tool.name}: {_describe(tool, 100)}")
            elif self._matches(name, tool.name, tool):
                self._screen.note(f"{state} {_readable_json(Toolbox([tool]).tools_json)}")
        if name != server:
            return
        if resources := self._tool_servers.resources(server, self._stops):
            count = pluralize(len(resources), "resource")
            ways = f"{server}__{READ_RESOURCE} lists and reads them; @{server}:URI sends one"
            self._screen.note(f"{count}: {ways}")

    def _find_server(self, name: str) -> str:
        """The server called `name`, or with a tool of this name; raises UsageError if none."""
        names = self._server_names
        server = name if name in names else self._server_prefix(name) or name.partition("__")[0]
        if server not in names:
            raise UsageError(
                f"there is no server {format_value(server)}; there are: {', '.join(names)}",
                hint=did_you_mean(server, names),
            )
        return server

    def _decide(self, call: ToolCall) -> ToolCall | str:
        """The call, or why it is refused."""
        tool = self._reload_tool(call.name)
        is_allowed = self._is_allowed(call.name, tool)
        arguments = _readable_json(call.arguments)
        if is_allowed:
            self._screen.note(f"calls {call.name} {shorten(arguments, _MAX_CALL_CHARS)}")
            return call
        # As a whole: nobody says yes to what is not seen.
        self._screen.note(f"wants to call {call.name} {arguments}")
        if self._ask is None:
            self._screen.note("refused: nobody can be asked; --tools-allow PATTERN allows it")
            return _REFUSAL
        try:
            key = self._ask(_CALL_QUESTION, "yna\x1b")
        except KeyboardInterrupt:
            key = "\x1b"
        if key == "a":
            self._always_allowed.append((call.name, tool))
        self.is_stopped = key == "\x1b"
        return call if key in ("y", "a") else _REFUSAL

    def _reload_tool(self, name: str) -> ChatTool | None:
        """A tool that is on, as its server describes it now; raises SirchatError if it is gone."""
        tool = self.tools.get(name)
        if tool is None or not tool.origin[0]:
            return tool
        server, name_there = tool.origin
        current = next((tool for tool in self._list_tools(server) if tool.name == name), None)
        if current is None:
            del self.tools[name]
            missing = shorten(name_there, _MAX_CALL_CHARS)
            raise SirchatError(f"the server {server} has no tool {missing} any more")
        self._turn_on_tools({name: current})
        return current

    def _turn_on_tools(self, tools: Mapping[str, ChatTool]) -> None:
        """Turn tools on; print which of them their servers have changed since the first time."""
        for name, tool in tools.items():
            if tool != self.tools.get(name, self._first_seen.setdefault(name, tool)):
                description = _describe(tool, _MAX_CALL_CHARS)
                self._screen.note(f"{name} was changed by its server, and is now: {description}")
            self.tools[name] = tool

    def _is_allowed(self, name: str, tool: ChatTool | None) -> bool:
        if (name, tool) in self._always_allowed:
            return True
        is_unchanged = self._first_seen.get(name) == tool
        return is_unchanged and any(self._matches(each, name, tool) for each in self._patterns)

    def _server_prefix(self, pattern: str) -> str | None:
        """The server with whose name a pattern begins, or None."""
        names = self._server_names
        exact = [name for name in names if pattern.startswith(f"{name}__")]
        plain = [name for name in names if pattern.startswith(f"{plain_name(name)}__")]
        return max(exact or plain, key=len, default=None)

    def _matches(self, pattern: str, name: str, tool: ChatTool | None) -> bool:
        """Whether a pattern means a tool; a pattern with a server's name means only its tools."""
        server, name_there = tool.origin if tool is not None else ("", "")
        prefix = self._server_prefix(pattern)
        if prefix is not None:
            if prefix != server:
                return False
            if fnmatchcase(name_there, pattern[len(prefix) + 2 :]):
                return True
        return fnmatchcase(name, pattern) or fnmatchcase(f"{server}__{name_there}", pattern)

    def _may_match(self, pattern: str, server: str) -> bool:
        """Whether a pattern may match a tool of a server whose tools are not known yet."""
        literal_start = pattern.partition("*")[0].partition("?")[0].partition("[")[0]
        prefix = self._server_prefix(pattern)
        return prefix == server or (prefix is None and f"{server}__".startswith(literal_start))


def _describe(tool: ChatTool, max_chars: int) -> str:
    return shorten(displayable_line(" ".join(tool.description.split())), max_chars)


def _readable_json(text: str) -> str:
    """JSON with readable letters and escaped invisible characters; other text is unchanged."""
    with suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), ensure_ascii=False)
    return "".join(
        char if char.isprintable() and char not in _INVISIBLE_CHARS else json.dumps(char)[1:-1]
        for char in text
    )


def run_tools_command(session: Session, arguments: str) -> None:
    """Run the command `/tools` in a chat; raises UsageError if the chat has no tool servers."""
    if not isinstance(session.toolbox, ToolUse):
        raise UsageError(_NO_SERVERS)
    session.toolbox.command(session, arguments)


@contextmanager
def use_tools(flags: ToolFlags, session: Session, screen: Screen) -> Iterator[None]:
    """Context manager: gives a session the tools that flags allow, and asks nobody."""
    tools = ToolUse(flags, screen, timeout=lambda: session.profile.tool_timeout)
    try:
        tools.begin(is_script=True)
        session.toolbox = tools
        yield
    finally:
        tools.close()


def describe_result(result: Returned) -> str:
    text = shorten(displayable_line(" ".join(result.text.split())), _MAX_RESULT_CHARS)
    if result.is_error:
        return f"{result.name} failed: {text.removeprefix('error: ')}"
    return f"{result.name} returned {pluralize(len(result.text), 'character')}: {text}"
