"""The standard streams, made usable before anything is printed."""

import os
import sys
from typing import Any


def prepare_streams() -> str:
    """Replace closed streams, and print in any locale; returns what is wrong, or nothing.

    Where standard input or error is closed, there is nothing to read, and errors are not seen.
    Characters that the locale lacks become question marks. Only a closed standard output is a
    problem.
    """
    closed = sys.stdout is None
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, _nothing(number, mode))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    return "standard output is closed" if closed else ""


def _nothing(number: int, mode: str) -> Any:
    """The null device under a standard number, lest a file of ours gets that number."""
    opened = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    return open(number, mode, encoding="utf-8", closefd=False)
