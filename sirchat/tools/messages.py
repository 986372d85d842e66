"""What servers of tools send, as the SDK and a model can take it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any


@asynccontextmanager
async def mended(transport: Any) -> AsyncIterator[Any]:
    """Context manager: a transport, in which an odd tool, or part of a result, loses no other."""
    async with transport as (received, sent):
        yield _Mended(received), sent


class _Mended(AbstractAsyncContextManager[None]):
    """A stream of messages, mended as they come."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aexit__(self, *error: object) -> None:
        await self._stream.aclose()

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in self._stream:
            result = getattr(getattr(message, "message", None), "result", None)
            if isinstance(result, dict) and "capabilities" not in result:
                _mend(result)
            yield message


def _mend(result: dict[str, Any]) -> None:
    if isinstance(tools := result.get("tools"), list):
        named = [one for one in tools if isinstance(one, dict) and isinstance(one.get("name"), str)]
        least = {"type": "object"}
        result["tools"] = [
            {"name": one["name"], "description": str(one.get("description") or "")}
            | {"inputSchema": least | {"properties": {}} | _schema(one.get("inputSchema")) | least}
            for one in named
        ]
        return
    parts = result.get("content") or []
    text = "\n".join(map(_as_text, parts if isinstance(parts, list) else [parts]))
    value = result.pop("structuredContent", None)
    if value is not None and not _says(text, value):
        text += ("\n" if text else "") + _json(value)
    result |= {"content": [{"type": "text", "text": text}], "isError": bool(result.get("isError"))}


def _schema(given: Any) -> dict[str, Any]:
    """A schema in which each property is an object, as chat templates take for granted."""
    schema = dict(given) if isinstance(given, dict) else {}
    if "properties" in schema:
        known = schema["properties"] if isinstance(schema["properties"], dict) else {}
        schema["properties"] = {name: _schema(one) for name, one in known.items()}
    if not isinstance(schema.get("required", []), list):
        del schema["required"]
    return schema


def _says(text: str, value: Any) -> bool:
    """Whether a text says the structured value of a result; SDKs wrap one that is no object."""
    inner = value["result"] if isinstance(value, dict) and [*value] == ["result"] else value
    items = inner if isinstance(inner, list) else []
    each = [one if isinstance(one, str) else _json(one) for one in items]
    forms = [_json(value), _json(inner), str(inner), *(["".join(each)] if each else [])]
    return "".join(text.split()) in ("".join(form.split()) for form in forms)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_text(part: Any) -> str:
    """A part of a result as text; what is no text is named, not fetched."""
    match part:
        case {"type": "resource_link", "uri": uri}:
            return f"[link, not fetched: {uri} {part.get('name', '')}]"
        case {"text": str(text)} | {"resource": {"text": str(text)}} | str(text):
            return text
        case {"resource": {"uri": uri}}:
            return f"[resource, not shown: {uri}]"
        case {"type": kind}:
            size = len(str(part.get("data", ""))) * 3 // 4
            return f"[{kind}, not shown: {part.get('mimeType', '?')}, {size:,} bytes]"
    return _json(part)
