"""Converts calls and results of tools in the messages of requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import groupby

from sirchat.server.requests import ChatMessage, ChatRequest
from sirchat.text.tool_calls import CallParser, ToolCall, calls_key


def call_parser_for(asked: ChatRequest) -> CallParser | None:
    """A parser for calls in the reply to `asked`; None if the reply must not call tools."""
    if not asked.tools or asked.tool_choice == "none":
        return None
    ids = [call.id for message in asked.turns for call in message.tool_calls]
    used = [int(ident[4:]) for ident in ids if re.fullmatch(r"call[0-9]{5}", ident)]
    names = {tool.function.name: tool.function.parameters for tool in asked.tools}
    only_one = not asked.parallel_tool_calls
    return CallParser(names, max(used, default=-1) + 1, only_one=only_one)


def role_text_pairs(messages: Iterable[ChatMessage]) -> list[tuple[str, str]]:
    """Convert messages to pairs of role and text; successive results of tools become one message.

    The role is `user`, `assistant`, `tool` (results) or `calls` (a reply that calls tools). For
    `tool` and `calls`, the text is JSON.
    """
    said: list[tuple[str, str]] = []
    names: dict[str | None, str] = {}  # of the called tools, by the id of the call
    for are_results, group in groupby(messages, lambda message: message.role == "tool"):
        if are_results:
            results = [[m.tool_call_id, m.name or names.get(m.tool_call_id), m.text] for m in group]
            said.append(("tool", json.dumps(results, ensure_ascii=False)))
            continue
        for message in group:
            calls = [
                ToolCall(call.id, call.function.name, call.function.arguments)
                for call in message.tool_calls
            ]
            names |= {call.id: call.name for call in calls}
            text = calls_key(message.text, calls) if calls else message.text
            said.append(("calls" if calls else message.role, text))
    return said
