"""Runs the command line inside the test's process."""

from __future__ import annotations

import io
import os
import signal
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer.main

from native_library import read_in_native_code
from sirchat.cli import app, main
from sirchat.models import compiling, load
from sirchat.models.model import LoadedModel

_get_command = cache(typer.main.get_command)  # it takes a tenth of a second each time


@dataclass(frozen=True)
class Done:
    """Exit code and output of a finished command."""

    returncode: int
    stdout: str
    stderr: str


def _use_compiled(model: LoadedModel, how: str, *more: Any) -> None:
    """As chats do; where the tests say that nothing is compiled, with their own library."""
    if how == "off":
        read_in_native_code(model)
    else:
        compiling.use_compiled(model, how, *more)  # type: ignore[arg-type]


def run(*arguments: str, text: str = "", **variables: str) -> Done:
    """Run `sirchat ARGUMENTS` with `text` as standard input and these environment variables."""
    out, err = io.StringIO(), io.StringIO()
    pressed = signal.getsignal(signal.SIGINT)
    stdin = io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape")), "utf-8")
    with (
        patch.object(typer.main, "get_command", _get_command),
        patch.object(app, "get_command", _get_command),
        patch.object(load, "use_compiled", _use_compiled),
        patch.object(sys, "argv", ["sirchat", *arguments]),
        patch.object(sys, "stdin", stdin),
        patch.object(sys, "stdout", out),
        patch.object(sys, "stderr", err),
        patch.dict(os.environ, {"COLUMNS": "200", **variables}),
    ):
        try:
            main()
            code = 0
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 1
        finally:
            signal.signal(signal.SIGINT, pressed)  # a command changes it as it ends
    return Done(code, out.getvalue(), err.getvalue())


def hostile_modules(folder: Path) -> None:
    """Modules in `folder` that write the file `ran` there when they are imported."""
    for name in ("pickle", "socket", "statistics"):
        (folder / f"{name}.py").write_text("open('ran', 'w').close()\n", encoding="utf-8")


def refused(*arguments: str, text: str = "", **variables: str) -> tuple[int, str]:
    """The exit code and the error of a command that must print one line of error, and no more."""
    done = run(*arguments, text=text, **variables)
    assert done.stdout == ""
    assert done.stderr.startswith("sirchat: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr
