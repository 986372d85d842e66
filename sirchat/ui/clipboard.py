"""The clipboard: the platform's tool where there is one, or the terminal itself (OSC 52)."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from sirchat.errors import UsageError
from sirchat.text.surrogates import without_surrogates

_SECONDS = 3.0
"""After which a tool is given up."""


class _Tool(NamedTuple):
    """A program that takes the clipboard's text on standard input.

    `display` is the variable that says that there is a display, where it needs one; a tool without
    one writes the clipboard of the machine that it runs on.
    """

    command: tuple[str, ...]
    display: str = ""
    encoding: str = "utf-8"


_TOOLS = (
    _Tool(("wl-copy",), "WAYLAND_DISPLAY"),
    _Tool(("xclip", "-selection", "clipboard"), "DISPLAY"),
    _Tool(("xsel", "--clipboard", "--input"), "DISPLAY"),
    _Tool(("pbcopy",)),
    _Tool(("clip.exe",), encoding="utf-16-le"),
    _Tool(("termux-clipboard-set",)),
)


def copy_with_tool(text: str, environ: Mapping[str, str]) -> str:
    """Put a text on the clipboard; returns the name of the tool that did it.

    Raises UsageError where there is no tool, or none of them does it.
    """
    remote = bool(environ.get("SSH_CONNECTION") or environ.get("SSH_TTY"))
    problems = []
    for tool in _TOOLS:
        is_ours = bool(environ.get(tool.display)) if tool.display else not remote
        program = shutil.which(tool.command[0], path=environ.get("PATH")) if is_ours else None
        if program is not None:
            problem = _run(program, tool, text)
            if not problem:
                return tool.command[0]
            problems.append(f"{tool.command[0]} {problem}")
    hint = "/copy --osc52 asks your terminal to do it"
    if problems:
        raise UsageError(f"nothing is copied: {'; '.join(problems)}", hint=hint)
    if remote:
        raise UsageError("nothing is copied: over ssh no tool reaches your clipboard", hint=hint)
    names = ", ".join(tool.command[0] for tool in _TOOLS)
    raise UsageError(
        f"nothing is copied: there is no display, or none of the tools {names}", hint=hint
    )


def osc52(text: str) -> str:
    """The escape sequence by which a terminal puts a text on its clipboard, if it allows that."""
    encoded = base64.b64encode(without_surrogates(text).encode()).decode()
    return f"\x1b]52;c;{encoded}\x07"


def _run(program: str, tool: _Tool, text: str) -> str:
    """Run a tool; returns what went wrong, or nothing.

    Some tools stay in the background to serve the text: they get no pipe of ours that would be
    waited for, and a session of their own, which Ctrl-C does not reach.
    """
    try:
        done = subprocess.run(
            [program, *tool.command[1:]],
            input=without_surrogates(text).encode(tool.encoding),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ,
            timeout=_SECONDS,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {_SECONDS:g} seconds"
    except OSError as error:
        return f"can't be started: {error.strerror}"
    return f"failed with exit code {done.returncode}" if done.returncode else ""
