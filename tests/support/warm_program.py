"""Programs that stand in for a `python`, and pass on to one whose imports are done."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from warm_python import warm_python


def warm_program(path: Path) -> str:
    """A program at `path` that runs what `python [-P] ARGUMENTS` would; returns the path.

    A script is run with the folder of `path` on its path, too.
    """
    begin = path.with_name(f"{path.name}_begin.py")
    begin.write_text(
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n",
        encoding="utf-8",
    )
    warm = shlex.join(warm_python())
    lines = [
        '[ "$1" = -P ] && shift',
        f'[ "$1" = -m ] && exec {warm} "$@"',
        f'exec {warm} {shlex.quote(str(begin))} "$@"',
    ]
    return _written(path, lines)


def fresh_once(path: Path) -> str:
    """A program at `path` that is this Python when it runs first, and later a warm one.

    It fails if `-P` is not its first argument, or if an entry of PYTHONPATH is the current folder.
    """
    warm = warm_program(path.with_name(f"{path.name}_warm"))
    lines = [
        'case "$1:$PYTHONPATH:" in -P:*::*) exit 9;; -P:*) ;; *) exit 9;; esac',
        f"if mkdir {shlex.quote(str(path))}_ran 2>/dev/null",
        f'then exec {shlex.quote(sys.executable)} "$@"',
        f'else exec {shlex.quote(warm)} "$@"',
        "fi",
    ]
    return _written(path, lines)


def _written(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n", encoding="utf-8")
    path.chmod(0o700)
    return str(path)
