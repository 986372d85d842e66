"""The tools of a chat at the prompt or in a script: which are on, and whether a call is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from sirchat.chat.session import Session
from sirchat.chat.tool_loop import ChatTool, Toolbox, size_of_tools
from sirchat.chat.turn import Interrupted, never
from sirchat.errors import SirchatError, UsageError, format_value, nearest
from sirchat.text.tool_calls import ToolCall
from sirchat.tools.config import ToolFlags
from sirchat.tools.servers import ToolServers, plain_name
from sirchat.ui.screen import Screen
from sirchat.ui.text import counted, displayable_line, shorten

if TYPE_CHECKING:
    from sirchat.chat.events import Returned

_CALL_QUESTION = "y does it, n refuses, a always does it in this chat, e edits: "
_REFUSAL = "the user refuses this call"
_MAX_CALL_CHARS = 1000  # characters of a call; of a result, a tenth
_INVISIBLE_CHARS = {
    *map(chr, (*range(0xFE00, 0xFE10), *range(0xE0000, 0xE0200)))
}  # beside controls
_NO_SERVERS = "no tools: sirchat --tools FILE names their servers"

Ask = Callable[[str, Collection[str]], str]  # shows a question, and returns the key


class ToolUse(Toolbox):
    """The tools that are on, of the servers that a file names; none at first.

    Tools that match the patterns in `flags` are on, and are called without asking, as long as their
    servers describe them as they did. Of others each call is shown; `ask` gets the user's key, and
    `edit` the changed arguments. Without them nobody can be asked, and such calls are refused.
    `timeout` is as in `ToolServers`, and `stops` says whether the user stops the start of a server.
    """

    def __init__(
        self,
        flags: ToolFlags,
        screen: Screen,
        ask: Ask | None = None,
        edit: Callable[[str], str] = lambda text: text,
        timeout: Callable[[], float] = lambda: 60.0,
        stops: Interrupted = never,
    ) -> None:
        super().__init__(decide=self._decide)
        self._tool_servers, self._screen = ToolServers(flags.servers, screen.note, timeout), screen
        self._ask, self._edit = ask, edit
        self._stops: Interrupted = never
        self._stops_later = stops  # at first the keys are for the prompt
        self._patterns = flags.allow
        self._always_allowed: list[
            tuple[str, ChatTool | None]
        ] = []  # that the user allows, as they were
        self._first_seen: dict[
            str, ChatTool
        ] = {}  # as they were when first turned on, also if now gone
        self.is_stopped = False  # by Esc at a question
        self._server_names, self._is_script = list(flags.servers), False

    def begin(self, *, is_script: bool = False) -> None:
        """Turn on what the flags allow; a server that can't be started is a line.

        In a script, a pattern that turns on no tool is an error.
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
                    self._turn_on_matching(name, pattern)
                except SirchatError as error:
                    errors.append(error)
            if is_script and len(errors) == max(1, len(servers)):
                raise errors[0]
            for problem in errors:
                self._screen.note(str(problem))
        self._stops = self._stops_later

    def close(self) -> None:
        """End all servers."""
        self._tool_servers.close()

    def command(self, session: Session, rest: str) -> None:
        """Run `/tools [NAME|on NAME|off NAME]`; raises UsageError for a wrong name, or none."""
        if not self._server_names:
            raise UsageError(_NO_SERVERS)
        verb, _, name = rest.strip().partition(" ")
        if not verb:
            for one in self._server_names:
                on = sum(tool.origin[0] == one for tool in self.tools.values())
                state = "started" if self._tool_servers.is_running(one) else "not started"
                self._screen.note(f"{displayable_line(one)}: {counted(on, 'tool')} on, {state}")
            self._screen.note("/tools NAME lists a server's tools; /tools on NAME turns them on")
        elif verb in ("on", "off"):
            if not name.strip():
                raise UsageError(f"/tools {verb} needs a name", hint="/tools lists the servers")
            self._switch_tools(session, verb == "on", name.strip())
        else:
            self._show_tools(rest.strip())

    def _switch_tools(self, session: Session, on: bool, name: str) -> None:
        if on:
            count, tokens = self._turn_on_matching(self._find_server(name), name, session)
            size = f"the model reads about {tokens:,} tokens of them with your next message"
            self._screen.note(f"{counted(count, 'tool')} turned on; {size}")
            if tokens > session.budget // 2:
                self._screen.note(f"that is more than half of the budget of {session.budget:,}")
        else:
            tools = self.tools.values()
            gone = [tool.name for tool in tools if tool.origin[0] == name]
            gone = gone or [tool.name for tool in tools if self._matches(name, tool.name, tool)]
            if not gone:
                raise UsageError(f"/tools off: no tool that is on is called {format_value(name)}")
            for tool in gone:
                del self.tools[tool]
            self._screen.note(f"{counted(len(gone), 'tool')} turned off")

    def _list_tools(self, server: str) -> list[ChatTool]:
        if not (self._is_script or self._tool_servers.is_running(server)):
            self._screen.note(f"starting the server {server}")
        return self._tool_servers.tools(server, self._stops)

    def _turn_on_matching(
        self, server: str, pattern: str, session: Session | None = None
    ) -> tuple[int, int]:
        """Turn on tools that a pattern matches, or the user means; returns their and all's size."""
        listed, is_all = self._list_tools(server), session is not None and pattern == server
        tools = {one.name: one for one in listed if is_all or self._matches(pattern, one.name, one)}
        if not tools:
            raise UsageError(f"server {server} has no tool {format_value(pattern)}")
        told = Toolbox((self.tools | tools).values()).told
        tokens = size_of_tools(session, told) if session else 0  # or it raises an error
        self._turn_on_tools(tools)
        return len(tools), tokens

    def _show_tools(self, name: str) -> None:
        server = self._find_server(name)
        for tool in self._list_tools(server):
            sign = "on " if tool.name in self.tools else "off"
            about = shorten(displayable_line(" ".join(tool.description.split())), 100)
            if name == server:
                self._screen.note(f"{sign} {tool.name}: {about}")
            elif self._matches(name, tool.name, tool):
                self._screen.note(f"{sign} {_readable_json(Toolbox([tool]).told)}")

    def _find_server(self, name: str) -> str:
        server = (
            name
            if name in self._server_names
            else self._server_prefix(name) or name.partition("__")[0]
        )
        if server not in self._server_names:
            raise UsageError(
                f"there is no server {format_value(server)}; there are: {', '.join(self._server_names)}",
                hint=nearest(server, self._server_names),
            )
        return server

    def _decide(self, call: ToolCall) -> ToolCall | str:
        """The call as it is to be done, or why it is refused."""
        self.is_stopped = False
        tool = self._reload_tool(call.name)
        is_allowed = (call.name, tool) in self._always_allowed or (
            self._first_seen.get(call.name) == tool and self._is_allowed(call.name, tool)
        )
        while True:
            written = shorten(_readable_json(call.arguments), _MAX_CALL_CHARS)
            if written.endswith("…"):  # nobody says yes to what is not seen
                written += f" (of {len(call.arguments):,} characters; e shows all)"
            self._screen.note(f"{'calls' if is_allowed else 'wants to call'} {call.name} {written}")
            if is_allowed:
                return call
            if self._ask is None:
                self._screen.note("refused: nobody can be asked; --tools-allow PATTERN allows it")
                return _REFUSAL
            try:
                key = self._ask(_CALL_QUESTION, "ynae\x1b")
            except KeyboardInterrupt:
                key = "\x1b"
            if key == "e":
                call = replace(call, arguments=self._let_user_edit(call.arguments))
                continue
            if key == "a":
                self._always_allowed.append((call.name, tool))
            self.is_stopped = key == "\x1b"
            return call if key in ("y", "a") else _REFUSAL

    def _reload_tool(self, name: str) -> ChatTool | None:
        """A tool that is on, as its server describes it now; SirchatError if it is gone."""
        if (before := self.tools.get(name)) is None or not before.origin[0]:
            return before
        server, own = before.origin
        now = {tool.name: tool for tool in self._list_tools(server)}.get(name)
        if now is None:
            del self.tools[name]
            what = f"the server {server} has no tool {shorten(own, _MAX_CALL_CHARS)} any more"
            raise SirchatError(what)
        self._turn_on_tools({name: now})
        return now

    def _turn_on_tools(self, tools: Mapping[str, ChatTool]) -> None:
        """Turn these on; of those that once were something else, a line says so."""
        for name, tool in tools.items():
            if tool != self.tools.get(name, self._first_seen.setdefault(name, tool)):
                about = shorten(
                    displayable_line(" ".join(tool.description.split())), _MAX_CALL_CHARS
                )
                self._screen.note(f"{name} was changed by its server, and is now: {about}")
            self.tools[name] = tool

    def _is_allowed(self, name: str, tool: ChatTool | None) -> bool:
        return any(self._matches(pattern, name, tool) for pattern in self._patterns)

    def _server_prefix(self, pattern: str) -> str | None:
        """The server whose name a pattern begins with; None if it begins with none."""
        begun = [name for name in self._server_names if pattern.startswith(f"{name}__")]
        plain = [name for name in self._server_names if pattern.startswith(f"{plain_name(name)}__")]
        return max(begun or plain, key=len, default=None)

    def _matches(self, pattern: str, name: str, tool: ChatTool | None) -> bool:
        """Whether a pattern means a tool; one that begins with a server's name means only its."""
        server, own = tool.origin if tool is not None else ("", "")
        if (named := self._server_prefix(pattern)) not in (None, server):
            return False
        is_own = named is not None and fnmatchcase(own, pattern[len(named) + 2 :])
        return is_own or any(fnmatchcase(full, pattern) for full in (name, f"{server}__{own}"))

    def _may_match(self, pattern: str, server: str) -> bool:
        """Whether a tool of the server may match."""
        begun = pattern.partition("*")[0].partition("?")[0].partition("[")[0]
        named = self._server_prefix(pattern)
        return named == server or (named is None and f"{server}__".startswith(begun))

    def _let_user_edit(self, arguments: str) -> str:
        shown = _readable_json(arguments)
        changed = self._edit(shown).strip()
        if changed in ("", shown):
            return arguments
        try:
            if not isinstance(json.loads(changed), dict):
                raise ValueError("no object")
        except ValueError as error:
            self._screen.note(f"arguments must be a JSON object: {error}")
            return arguments
        return changed


def _readable_json(text: str) -> str:
    """JSON with its letters as they are; what nobody sees is escaped."""
    with suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), ensure_ascii=False)
    return "".join(
        c if c.isprintable() and c not in _INVISIBLE_CHARS else json.dumps(c)[1:-1] for c in text
    )


def run_tools_command(session: Session, rest: str) -> None:
    """Run the command `/tools` in a chat; raises UsageError if it has no servers of tools."""
    if not isinstance(session.toolbox, ToolUse):
        raise UsageError(_NO_SERVERS)
    session.toolbox.command(session, rest)


@contextmanager
def tools_of(flags: ToolFlags, session: Session, screen: Screen) -> Iterator[None]:
    """Context manager: in it, a session has the tools that flags allow, and nobody is asked."""
    box = ToolUse(flags, screen, timeout=lambda: session.profile.tool_timeout)
    try:
        box.begin(is_script=True)
        session.toolbox = box
        yield
    finally:
        box.close()


def describe_result(result: Returned) -> str:
    """A line about what a tool returned."""
    text = shorten(displayable_line(" ".join(result.text.split())), _MAX_CALL_CHARS // 10)
    if result.is_error:
        return f"{result.name} failed: {text.removeprefix('error: ')}"
    return f"{result.name} returned {counted(len(result.text), 'character')}: {text}"
