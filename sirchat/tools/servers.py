"""Servers of tools, by MCP: each starts when it is first needed, and ends with the chat."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from pydantic import ValidationError

from sirchat.chat.tool_loop import ChatTool
from sirchat.chat.turn import Interrupted
from sirchat.errors import SirchatError, UsageError
from sirchat.tools import guard
from sirchat.tools.config import ServerFields

_END = 6.0  # seconds that a server may take to end
_LIST = 5.0  # seconds that a server that runs may take to list its tools; else it hangs
_LOOK = 0.1  # seconds between two looks whether the user stops a call
_MOST_HANGS = 2  # without an answer in between, after which only the user starts a server again
_LONGEST_NAME = 64
_SHOWN = 80  # characters of a line that is no message
_CLOSED = -32000  # the code of an error of a connection that has ended


class ToolServers:
    """The servers of a chat; a thread with an event loop talks to those that were started.

    `note` gets a line about each that ends by itself, or writes what is no message. `limit` returns
    the seconds that a start or a call may take; news of progress renew them.
    """

    def __init__(
        self,
        servers: Mapping[str, ServerFields],
        note: Callable[[str], None],
        limit: Callable[[], float] = lambda: 60.0,
    ) -> None:
        self.servers, self._note, self._limit = servers, note, limit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[str, _Running] = {}
        self._hangs: dict[str, int] = {}

    def tools(self, name: str, *, by_user: bool = False) -> list[ChatTool]:
        """The tools of a server as it lists them now; it is started if need be.

        SirchatError if that fails, or if it hung before and nobody asks for it but the model.
        """
        if by_user:
            self._hangs.pop(name, None)
        running = self._running.get(name)
        if running is not None and not running.ended.done():
            try:
                self._wait(running, running.list_tools(), min(_LIST, self._limit()))
            except _HangsError:
                self._hangs[name] -= 1  # nothing was called, so it can start again at once
                running = self._start(name)
        else:
            running = self._start(name)
        return [
            ChatTool(
                re.sub(r"[^\w-]", "_", f"{name}__{tool.name}", flags=re.ASCII)[:_LONGEST_NAME],
                tool.description or "",
                dict(tool.input_schema),
                partial(self._call, running, tool.name),
                (name, tool.name),
            )
            for tool in running.listed
        ]

    def is_running(self, name: str) -> bool:
        """Whether a server was started, and has not ended."""
        return name in self._running and self._running[name].begun.done()

    def close(self) -> None:
        """End all servers."""
        for running in self._running.values():
            running.end()
        for running in self._running.values():
            with suppress(Exception):  # the guard kills what does not end
                running.ended.result(_END)
        self._running = {}
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _start(self, name: str) -> _Running:
        try:
            import mcp  # noqa: F401
        except ImportError:
            problem = "tools need the package mcp"
            raise UsageError(problem, hint="pip install 'sirchat[tools]'") from None
        if self._hangs.get(name, 0) >= _MOST_HANGS:
            why = f"the server {name} does not answer, and was started again before"
            raise SirchatError(why, hint=f"/tools on {name} starts it once more")
        # It would print tracebacks on the screen.
        logging.getLogger("mcp").setLevel(logging.CRITICAL + 1)
        running = _Running(name, self.servers[name])
        self._running[name] = running
        try:
            running.ended = self._submit(running.serve())
            self._wait(running, running.begin(), self._limit())
        except BaseException as error:
            running.ended.cancel()
            self._running.pop(name, None)
            if not isinstance(error, SirchatError):
                raise
            why = running.last_words() or str(error)
            raise SirchatError(f"the server {name} can't be started: {why}") from None
        return running

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_exception_handler(lambda *_: None)  # as for the logger
            threading.Thread(target=self._loop.run_forever, name="tools", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(
        self,
        running: _Running,
        work: Coroutine[Any, Any, Any],
        limit: float,
        interrupted: Interrupted = lambda: False,
    ) -> Any:
        """What a server answers; SirchatError if that is an error, or does not come in time."""
        name, running.heard = running.name, time.monotonic()
        self._note_strange(running)
        request, begun = self._submit(work), running.begun.done()
        try:
            while not wait((request,), _LOOK).done:
                if what := self._note_strange(running):
                    raise SirchatError(what)
                if interrupted():
                    raise SirchatError("the user stopped this call")
                if begun and running.ended.done():
                    break
                if time.monotonic() > running.heard + limit:
                    self._end(running)
                    self._hangs[name] = self._hangs.get(name, 0) + 1
                    raise _HangsError(f"it does not answer within {limit:g} seconds")
            else:
                return request.result()
        except SirchatError:
            raise
        except Exception as error:
            root = _root(error)
            if not begun or (getattr(root, "code", None) != _CLOSED and not running.ended.done()):
                why = str(root).partition("\n")[0] or type(root).__name__
                raise SirchatError(why) from None
        finally:
            request.cancel()
        self._end(running)
        self._note(f"the server {name} has ended; the next call starts it again")
        raise SirchatError(f"the server {name} has ended")

    def _note_strange(self, running: _Running) -> str:
        """Say once that a server writes what is no message; returns that if it may be an answer."""
        what = ""
        while running.strange:
            line, is_json = running.strange.popleft()
            said = f"the server {running.name} writes what is no message: {line}"
            if not running.is_strange:
                self._note(said)
            running.is_strange = True
            what = said if is_json else what
        return what

    def _end(self, running: _Running) -> None:
        running.end()
        self._running.pop(running.name, None)

    def _call(
        self, running: _Running, tool: str, arguments: dict[str, Any], interrupted: Interrupted
    ) -> str:
        call = running.call(tool, arguments)
        try:
            result = self._wait(running, call, self._limit(), interrupted)
        except _HangsError as error:
            self._note(f"the server {running.name} is ended: {error}")
            raise
        self._hangs.pop(running.name, None)
        text = "\n".join(map(_written, result.content))
        structured = getattr(result, "structured_content", None)
        if not text and structured is not None:
            text = json.dumps(structured, ensure_ascii=False)
        if result.is_error:
            raise SirchatError(text)
        return text


class _HangsError(SirchatError):
    """A server does not answer in time."""


class _Running:
    """A server that was started; its coroutines run in the thread of the servers.

    `begun` and `ended` say when, `listed` are its tools, `strange` has lines that are no messages,
    each with whether it is JSON, and `heard` is when the wait for an answer began anew.
    """

    def __init__(self, name: str, fields: ServerFields) -> None:
        self.name, self._fields = name, fields
        self.begun: Future[None] = Future()
        self.ended: Future[None] = Future()
        self.listed: list[Any] = []
        self.strange = deque[tuple[str, bool]](maxlen=8)
        self.is_strange = False  # and a line has said so
        self.heard = 0.0
        self._client: Any = None
        self._errors: Any = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    async def serve(self) -> None:
        """Start the server, and keep the connection until `end`."""
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(self._connection())
                await self.list_tools()
                self.begun.set_result(None)
                await self._end.wait()
        except BaseException as error:
            if not self.begun.done():
                self.begun.set_exception(_root(error))

    async def begin(self) -> None:
        """Wait until the server has started, and has listed its tools."""
        await asyncio.wrap_future(self.begun)

    async def list_tools(self) -> None:
        """Let the server list its tools anew."""
        listed, cursor = list[Any](), None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            listed += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        self.listed = listed

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool; returns the SDK's result."""

        async def progress(*_: object) -> None:
            self.heard = time.monotonic()

        return await self._client.call_tool(tool, arguments, progress_callback=progress)

    def end(self) -> None:
        """Let the server end; any thread may call this."""
        if self._loop is not None and self._end is not None:
            self._loop.call_soon_threadsafe(self._end.set)

    def last_words(self) -> str:
        """The last line that the server has written to its standard error."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.readlines()]
        return next((line for line in reversed(lines) if line), "")

    def _connection(self) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        fields = self._fields
        if fields.url:
            transport = _http(fields)
        else:
            command = [fields.command, *fields.args]
            if sys.platform != "win32":
                command = [sys.executable, "-I", guard.__file__, str(os.getpid()), *command]
            parameters = StdioServerParameters(
                command=command[0], args=command[1:], env=fields.env, cwd=fields.cwd
            )
            transport = stdio_client(parameters, errlog=self._errors)
        # The tools are listed to see whether they have changed, so nothing is kept.
        return Client(transport, message_handler=self._receive, cache=None)

    async def _receive(self, message: object) -> None:
        if isinstance(message, ValidationError):
            problem = message.errors(include_url=False)[0]
            line, is_json = problem["input"], True
            if problem["type"] != "json_invalid":
                line = json.dumps(line)
            else:  # lone surrogates are JSON, but not pydantic's
                try:
                    json.loads(line)
                except ValueError:
                    is_json = False
            self.strange.append((line[:_SHOWN], is_json))


def _http(fields: ServerFields) -> Any:
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    client = create_mcp_http_client(headers=fields.headers)
    return streamable_http_client(fields.url, http_client=client)


def _root(error: BaseException) -> BaseException:
    """The first error within groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _written(part: Any) -> str:
    """A part of a result as text; what is no text is named, not fetched."""
    match part.type:
        case "text":
            return str(part.text)
        case "resource_link":
            return f"[link, not fetched: {part.uri} {part.name}]"
        case "resource":
            text = getattr(part.resource, "text", None)
            return f"[resource, not shown: {part.resource.uri}]" if text is None else str(text)
        case kind:
            size = len(getattr(part, "data", "")) * 3 // 4
            return f"[{kind}, not shown: {getattr(part, 'mime_type', '?')}, {size:,} bytes]"
