"""Servers of tools that send anything: no traceback, no hang, and a chat that goes on.

`SIRCHAT_ATTACK=2000` makes as many calls of one, whose answers and lists are odd.
"""

from __future__ import annotations

import io
import json
import sys
import time
from contextlib import suppress
from random import Random
from typing import Any

import pytest

import odd_tool_server
from attacking import attack, refuse_odd_display
from chatting import session
from sirchat.errors import UsageError
from sirchat.tools.config import ServerFields, ToolFlags
from sirchat.ui.replay import print_reply
from sirchat.ui.screen import Screen
from sirchat.ui.tool_use import ToolUse, run_tools_command
from template_shapes import script, tool_tiny

_SECONDS = 20.0  # of a start
_HANGS = 0.4  # of a call, which an odd answer may leave without one


def specials(chat: Any) -> int:
    """How many tokens of a chat's results are control tokens."""
    model = chat.model.tokenizer
    return sum(row.role == "tool" and row.id in model.all_special_ids for row in rows(chat))


def rows(chat: Any) -> Any:
    return chat.tokens(range(chat.seen))


def test_whatever_a_server_of_tools_sends_the_chat_goes_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = {"odd": ServerFields(command=sys.executable, args=["-S", odd_tool_server.__file__])}
    out, limit = io.StringIO(), [_SECONDS]
    screen = Screen(out, out)
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.3)  # of a hung one
    use = ToolUse(ToolFlags(servers), screen, lambda *_: "y", timeout=lambda: limit[0])

    def call(random: Random) -> None:
        out.seek(0)
        out.truncate()
        chat = session(tool_tiny(), policy="sink", budget=600, max_new_tokens=90)
        chat.toolbox = use
        limit[0] = _SECONDS
        with suppress(UsageError):  # too many, or too large ones, to be pinned
            run_tools_command(chat, "on odd")
        use.tools = {name: one for name, one in use.tools.items() if one.origin[1] == "odd"}
        name = next(iter(use.tools), "odd__odd")
        called = {"name": name, "arguments": {"seed": random.randrange(2**32)}}
        said = [f"<tool_call>\n{json.dumps(called)}\n</tool_call>", "So.", "Fine."]
        script(monkeypatch, said)
        begun = time.monotonic()
        limit[0] = _HANGS
        for message in ("How is it?", "And now?"):
            print_reply(chat, message, screen, as_json=False)
        if time.monotonic() - begun > 30:
            raise ValueError("it hangs")
        if [turn.text for turn in chat.turns if turn.role == "assistant"][1:] != said[1:]:
            raise ValueError(f"the chat does not go on: {chat.turns}")
        if count := specials(chat):
            raise ValueError(f"{count} control tokens in a result")
        refuse_odd_display(out.getvalue())
        if "Traceback" in out.getvalue():
            raise ValueError(out.getvalue())
        if printed := "".join(capfd.readouterr()):
            raise ValueError(f"printed: {printed[:300]!r}")

    try:
        attack(call, few=2, seconds=30)
    finally:
        use.close()
