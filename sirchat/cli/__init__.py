"""The command line: parses flags, runs commands, and turns errors into exit codes."""

import os
import sys
from contextlib import suppress

from sirchat.cli.registry import overview
from sirchat.cli.signals import prepare_streams
from sirchat.models.torch_imports import defer_parts_of_torch

__all__ = ("main",)


def main() -> None:
    """Run the command that the user typed, and exit with its exit code."""
    try:
        _run()
    except KeyboardInterrupt:  # before the commands, which handle it themselves, are imported
        with suppress(OSError):
            sys.stderr.write("sirchat: interrupted\n")
            sys.stderr.flush()
        sys.exit(130)


def _run() -> None:
    if problem := prepare_streams():
        sys.exit(f"sirchat: {problem}")
    if sys.argv[1:] in (["--help"], ["-h"]):  # the commands are not needed
        try:
            sys.stdout.write(overview())
            sys.stdout.flush()
        except BrokenPipeError:  # as of `sirchat --help | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except OSError as error:
            sys.exit(f"sirchat: {error.strerror}")
        return
    try:
        os.getcwd()
    except OSError:  # torch could not be loaded
        sys.exit("sirchat: the working folder was deleted (cd to another one)")
    defer_parts_of_torch()
    from sirchat.cli.app import main as run

    run()
