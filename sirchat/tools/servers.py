"""Servers of tools, by MCP: each starts when it is first needed, and ends with the chat."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from sirchat.chat.tool_loop import ChatTool
from sirchat.chat.turn import Interrupted
from sirchat.errors import SirchatError, UsageError
from sirchat.tools import guard
from sirchat.tools.config import ServerFields

_START, _END = 60.0, 6.0  # seconds that a server may take for it
_LOOK = 0.1  # seconds between two looks whether the user stops a call
_LONGEST_NAME = 64
_CLOSED = -32000  # the code of an error of a connection that has ended


class ToolServers:
    """The servers of a chat; a thread with an event loop talks to those that were started.

    `note` gets a line about each that ends by itself.
    """

    def __init__(self, servers: Mapping[str, ServerFields], note: Callable[[str], None]) -> None:
        self.servers, self._note = servers, note
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[str, _Running] = {}

    def tools(self, name: str) -> list[ChatTool]:
        """The tools of a server, which is started if need be; SirchatError if that fails."""
        running = self._start(name)
        tools = list[ChatTool]()
        for tool in running.listed:
            full = re.sub(r"[^\w-]", "_", f"{name}__{tool.name}", flags=re.ASCII)[:_LONGEST_NAME]
            run = partial(self._call, name, tool.name)
            tools.append(ChatTool(full, tool.description or "", dict(tool.input_schema), run))
        return tools

    def is_running(self, name: str) -> bool:
        """Whether a server was started, and has not ended."""
        return name in self._running

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
        if (running := self._running.get(name)) is not None and not running.ended.done():
            return running
        try:
            import mcp  # noqa: F401
        except ImportError:
            problem = "tools need the package mcp"
            raise UsageError(problem, hint="pip install 'sirchat[tools]'") from None
        running = _Running(name, self.servers[name])
        try:
            running.ended = self._submit(running.serve())
            running.begun.result(_START)
        except Exception as error:
            running.ended.cancel()
            why = running.last_words() or str(error) or "it does not answer"
            raise SirchatError(f"the server {name} can't be started: {why}") from None
        self._running[name] = running
        return running

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="tools", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(
        self, name: str, tool: str, arguments: dict[str, Any], interrupted: Interrupted
    ) -> str:
        running = self._start(name)
        call = self._submit(running.client.call_tool(tool, arguments))
        while True:
            try:
                result = call.result(_LOOK)
                break
            except TimeoutError:
                if interrupted():
                    call.cancel()
                    raise SirchatError("the user stopped this call") from None
                if not running.ended.done():
                    continue
            except Exception as error:
                if getattr(error, "code", _CLOSED) != _CLOSED:
                    raise SirchatError(str(error)) from None
            call.cancel()
            running.end()
            self._running.pop(name, None)
            self._note(f"the server {name} has ended; the next call starts it again")
            raise SirchatError(f"the server {name} has ended")
        text = "\n".join(map(_written, result.content))
        structured = getattr(result, "structured_content", None)
        if not text and structured is not None:
            text = json.dumps(structured, ensure_ascii=False)
        if result.is_error:
            raise SirchatError(text)
        return text


class _Running:
    """A server that was started: `begun` and `ended` say when, `listed` are its tools."""

    def __init__(self, name: str, fields: ServerFields) -> None:
        self._name, self._fields = name, fields
        self.begun: Future[None] = Future()
        self.ended: Future[None] = Future()
        self.listed: list[Any] = []
        self.client: Any = None
        self._errors: Any = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    async def serve(self) -> None:
        """Start the server, and keep the connection until `end`."""
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with AsyncExitStack() as stack:
                self.client = await stack.enter_async_context(self._client(stack))
                cursor = None
                while True:
                    page = await self.client.list_tools(cursor=cursor)
                    self.listed += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        break
                self.begun.set_result(None)
                await self._end.wait()
        except BaseException as error:
            if not self.begun.done():
                self.begun.set_exception(_root(error))

    def end(self) -> None:
        """Let the server end; any thread may call this."""
        if self._loop is not None and self._end is not None:
            self._loop.call_soon_threadsafe(self._end.set)

    def last_words(self) -> str:
        """The last line that the server has written to its standard error."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.readlines()]
        return next((line for line in reversed(lines) if line), "")

    def _client(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        fields = self._fields
        if fields.url:
            return Client(_http(fields))
        command = [fields.command, *fields.args]
        if sys.platform != "win32":
            command = [sys.executable, "-I", guard.__file__, str(os.getpid()), *command]
        parameters = StdioServerParameters(
            command=command[0], args=command[1:], env=fields.env, cwd=fields.cwd
        )
        return Client(stdio_client(parameters, errlog=self._errors))


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
