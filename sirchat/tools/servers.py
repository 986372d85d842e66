"""Tool servers, by MCP: each starts when it is first needed, and ends with the chat."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import chain, count
from typing import Any

from pydantic import ValidationError

from sirchat.chat.tool_loop import STOPPED, ChatTool
from sirchat.chat.turn import Interrupted, never
from sirchat.errors import SirchatError, UsageError
from sirchat.tools.config import ServerFields

_END_SECONDS = 6.0  # seconds that a server may take to end
_LIST_SECONDS = 5.0  # seconds that a server that runs may take to list its tools; else it hangs
_REASON_SECONDS = 1.0  # seconds until an ended connection says why
_POLL_SECONDS = 0.1  # seconds between two looks whether the user stops a call
_MAX_NAME_CHARS = 64
READ_RESOURCE = "read_resource"  # the tool that a server with resources gets
_RESOURCE_TOOL = "Reads a resource of this server by its URI. Without a URI, it lists them."
# More would take the memory, or the disk, that the chat needs.
_MAX_PAGES = 100  # of tools or resources that a server lists
_MAX_RESULT_CHARS = 4_000_000  # characters of a result
_MAX_EVENT_BYTES = 16_000_000  # bytes of a message over HTTP
_MAX_STDERR_BYTES = 1 << 20  # bytes that are kept of a server's standard error
# What is probably wrong, by the number with which a server refuses a request.
_KEY, _URL = 'is the key in its "headers" right?', 'is its "url" right?'
_REFUSALS = {401: _KEY, 403: _KEY, 404: _URL, 405: _URL, 429: "too many requests"}
# The SDK's errors if a connection has ended, and if a server over HTTP knows a chat no more. Their
# codes are those of errors of a server's own, too.
_GONE = ("Connection closed", "Session terminated")


class ToolServers:
    """The servers of a chat; a thread with an event loop talks to those that were started.

    `note` gets a line about each server that ends by itself. `limit` returns the seconds that a
    start or a call may take; each report of progress restarts this time.
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
        self._ending: list[_Running] = []
        self._origins: dict[str, tuple[str, str]] = {}  # server and own name, by a tool's full name

    def list_tools(self, name: str, interrupted: Interrupted = never) -> list[ChatTool]:
        """The tools that a server lists now; starts the server first if necessary.

        Raises SirchatError if that fails.
        """
        running = self._running.get(name)
        if running is not None and not running.ended.done():
            try:
                limit = min(_LIST_SECONDS, self._limit())
                self._wait(running, running.list_tools(), limit, interrupted)
            except _HangsError:  # such as in a call that was stopped
                running = self._start(name, interrupted)
        else:
            running = self._start(name, interrupted)
        tools = [
            ChatTool(
                self._full_name((name, tool.name)),
                tool.description or "",
                # Chat templates need the properties.
                {**tool.input_schema, "properties": tool.input_schema.get("properties") or {}},
                partial(self._call, running, tool.name),
                (name, tool.name),
                running.instructions,
            )
            for tool in running.listed
        ]
        if running.has_resources and all(tool.origin[1] != READ_RESOURCE for tool in tools):
            origin, schema = (name, READ_RESOURCE), {"properties": {"uri": {"type": "string"}}}
            told = self._full_name(origin), _RESOURCE_TOOL, {"type": "object", **schema}
            read = partial(self._read_resource, running)
            tools.append(ChatTool(*told, read, origin, running.instructions))
        return tools

    def resources(self, name: str, interrupted: Interrupted = never) -> list[Any]:
        """The resources that a server, which was started, lists now."""
        running = self._running[name]
        listed: list[Any] = self._wait(
            running, running.list_resources(), self._limit(), interrupted
        )
        return listed

    def resource(self, name: str, uri: str, interrupted: Interrupted = never) -> str:
        """The text of a resource of a server, which was started."""
        return self._read_resource(self._running[name], {"uri": uri}, interrupted)

    def is_running(self, name: str) -> bool:
        return name in self._running and self._running[name].begun.done()

    def close(self) -> None:
        for running in list(self._running.values()):
            self._end(running)
        for running in self._ending:
            running.is_gone.wait(_END_SECONDS)  # the SDK kills what does not end
        self._ending = []
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _full_name(self, origin: tuple[str, str]) -> str:
        """A tool's name for the model; a number tells tools of equal names apart."""
        plain = plain_name("__".join(origin))
        ends = chain([""], map("_{}".format, count(2)))
        names = (plain[: _MAX_NAME_CHARS - len(end)] + end for end in ends)
        return next(name for name in names if self._origins.setdefault(name, origin) == origin)

    def _start(self, name: str, interrupted: Interrupted) -> _Running:
        try:
            import mcp  # noqa: F401
        except ImportError:
            problem = "tools need the package mcp"
            raise UsageError(problem, hint="pip install 'sirchat[tools]'") from None
        # It would print tracebacks on the screen.
        logging.getLogger("mcp").setLevel(logging.CRITICAL + 1)
        running = _Running(name, self.servers[name])
        self._running[name] = running
        try:
            running.ended = self._submit(running.serve())
            self._wait(running, running.begin(), self._limit(), interrupted)
        except BaseException as error:
            running.ended.cancel()
            self._end(running)
            if not isinstance(error, SirchatError):
                raise
            why = str(error) if str(error) == STOPPED else running.last_words() or str(error)
            is_line = "No such file" in why and " " in self.servers[name].command
            hint = 'what follows the first word of "command" belongs into "args"' if is_line else ""
            raise SirchatError(f"the server {name} can't be started: {why}", hint=hint) from None
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
        interrupted: Interrupted,
    ) -> Any:
        """A server's answer; raises SirchatError if it is an error, or does not come in time."""
        name = running.name
        running.heard, running.is_unread = time.monotonic(), False
        request, begun = self._submit(work), running.begun.done()
        try:
            while not wait((request,), _POLL_SECONDS).done:
                if interrupted():
                    raise SirchatError(STOPPED)
                if running.is_unread:
                    raise SirchatError("its answer has half a character (a lone surrogate)")
                if begun and running.ended.done():
                    break
                if time.monotonic() > running.heard + limit:
                    self._end(running)
                    raise _HangsError(f"it does not answer within {limit:g} seconds")
            else:
                return request.result()
        except SirchatError:
            raise
        except Exception as error:
            root, status = _first_error(error), running.status
            if not begun or not (str(root) in _GONE or running.ended.done()):
                why = str(root).partition("\n")[0] or type(root).__name__
                if isinstance(root, ValidationError):
                    problem = root.errors(include_url=False)[0]
                    place = ".".join(map(str, problem["loc"]))
                    why = f"its answer breaks the protocol: {place}: {problem['msg']}"
                if status >= 400:
                    why += f", HTTP {status}: {_REFUSALS.get(status, 'a fault there')}"
                raise SirchatError(why) from None
        finally:
            request.cancel()
        self._end(running)
        wait((running.ended,), _REASON_SECONDS)
        ended = f"the server {name} has ended"
        self._note(f"{ended}; the next call starts it again")
        raise SirchatError(ended)

    def _end(self, running: _Running) -> None:
        running.ends = True
        self._running.pop(running.name, None)
        self._ending = [one for one in self._ending if not one.is_gone.is_set()] + [running]

    def _call(
        self, running: _Running, tool: str, arguments: dict[str, Any], interrupted: Interrupted
    ) -> str:
        call = running.call(tool, arguments)
        result = self._wait(running, call, self._limit(), interrupted)
        text = "\n".join(map(_as_text, result.content))
        if (values := result.structured_content) is not None and not _is_told(text, values):
            text = "\n".join(filter(None, [text, json.dumps(values, ensure_ascii=False)]))
        text = _cut(text)
        if result.is_error:
            raise RuntimeError(text or "the tool does not say why")  # in all its lines
        return text

    def _read_resource(
        self, running: _Running, arguments: dict[str, Any], interrupted: Interrupted
    ) -> str:
        """The text of a resource; of an empty URI, those that the server lists."""
        if uri := str(arguments.get("uri") or ""):
            result = self._wait(running, running.read(uri), self._limit(), interrupted)
            return _cut("\n".join(map(_as_text, result.contents)))
        resources = self._wait(running, running.list_resources(), self._limit(), interrupted)
        return _cut("\n".join(f"{one.uri}: {one.description or one.name}" for one in resources))


def _is_told(text: str, values: dict[str, Any]) -> bool:
    """Whether a result's text has its values: as JSON, or as the SDK's servers have single ones."""
    if text and values.keys() == {"result"}:
        return True
    with suppress(ValueError, RecursionError):
        return bool(json.loads(text) == values)
    return False


class _HangsError(SirchatError):
    """A server does not answer in time."""


class _Running:
    """A server that was started; its coroutines run in the thread of the servers."""

    def __init__(self, name: str, fields: ServerFields) -> None:
        self.name, self._fields = name, fields
        self.begun: Future[None] = Future()
        self.ended: Future[None] = Future()
        # `ends`: the server is asked to end. `is_unread`: the SDK could not read an answer.
        self.ends = self.is_unread = False
        self.is_gone = threading.Event()  # set when the process has ended
        self.listed: list[Any] = []  # its tools
        self.has_resources = False
        self.instructions = ""
        self.status = 0  # of the last answer over HTTP
        self.heard = 0.0  # when the wait for an answer began anew
        self._client: Any = None
        self._errors: Any = tempfile.TemporaryFile()  # noqa: SIM115

    async def serve(self) -> None:
        """Start the server, and keep the connection until `ends` is set."""
        try:
            async with AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(self._connection())
                self.instructions = self._client.instructions or ""
                await self.list_tools()
                self.begun.set_result(None)
                while not self.ends:
                    if os.fstat(self._errors.fileno()).st_size > _MAX_STDERR_BYTES:
                        self._errors.seek(0)  # the server's place in it, too
                        self._errors.truncate()
                    await asyncio.sleep(_POLL_SECONDS)
        except BaseException as error:
            if not self.begun.done():
                self.begun.set_exception(_first_error(error))
        finally:
            self.is_gone.set()

    async def begin(self) -> None:
        """Wait until the server has started and has listed its tools."""
        await asyncio.wrap_future(self.begun)

    async def list_tools(self) -> None:
        can = self._client.server_capabilities
        self.has_resources = can.resources is not None
        has_others = self.has_resources or can.prompts is not None
        is_asked = can.tools is not None or not has_others  # some servers have no such method
        self.listed = await _all_pages(self._client.list_tools, "tools") if is_asked else []

    async def list_resources(self) -> list[Any]:
        ask = self._client.list_resources
        return await _all_pages(ask, "resources") if self.has_resources else []

    async def read(self, uri: str) -> Any:
        return await self._client.read_resource(uri)

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        async def progress(done: float, total: float | None, message: str | None) -> None:
            self.heard = time.monotonic()

        return await self._client.call_tool(tool, arguments, progress_callback=progress)

    async def _receive(self, message: object) -> None:
        if isinstance(message, ValidationError):
            with suppress(TypeError, ValueError):  # a lone surrogate is JSON, but not pydantic's
                self.is_unread |= "id" in json.loads(message.errors()[0]["input"])

    def last_words(self) -> str:
        """The last line that the server wrote to its standard error."""
        size = os.fstat(self._errors.fileno()).st_size
        self._errors.seek(max(0, size - _MAX_STDERR_BYTES))
        lines = self._errors.read(_MAX_STDERR_BYTES).decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _connection(self) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        async def note_status(response: Any) -> None:
            if response.request.method == "POST":
                self.status = response.status_code

        fields = self._fields.filled()
        if fields.url:
            http = create_mcp_http_client(fields.headers)
            http.event_hooks = {"response": [note_status]}
            transport: Any = streamable_http_client(
                fields.url, http_client=http, max_sse_event_size=_MAX_EVENT_BYTES
            )
        else:
            parameters = StdioServerParameters(
                command=os.path.expanduser(fields.command),
                args=fields.args,
                env=fields.env,
                cwd=fields.cwd and os.path.expanduser(fields.cwd),
            )
            transport = stdio_client(parameters, errlog=self._errors)
        # The tools are listed to see whether they have changed, so nothing is kept.
        return Client(transport, message_handler=self._receive, cache=None)


async def _all_pages(ask: Callable[..., Coroutine[Any, Any, Any]], what: str) -> list[Any]:
    """What a server lists, such as `tools`, of up to 100 pages."""
    listed, cursor = list[Any](), None
    for _ in range(_MAX_PAGES):
        page = await ask(cursor=cursor)
        listed += getattr(page, what)
        if not (cursor := page.next_cursor):
            break
    return listed


def plain_name(name: str) -> str:
    """Replace characters that tool names may not have; the length stays the same."""
    return re.sub(r"[^\w-]", "_", name, flags=re.ASCII)


def _as_text(part: Any) -> str:
    """A part of a result as text; other content is only named, not fetched."""
    inner = getattr(part, "resource", part)
    if isinstance(text := getattr(inner, "text", None), str):
        return text
    what = getattr(inner, "uri", None) or inner.mime_type
    return f"[{getattr(part, 'type', 'resource')}, not shown: {what}]"


def _cut(text: str) -> str:
    if len(text) <= _MAX_RESULT_CHARS:
        return text
    return f"{text[:_MAX_RESULT_CHARS]}\n[cut: the result has {len(text):,} characters]"


def _first_error(error: BaseException) -> BaseException:
    """The first single error in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
