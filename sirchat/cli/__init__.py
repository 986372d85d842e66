"""The command line: parses flags, runs commands, and turns errors into exit codes."""

import sys

from sirchat.cli.overview import overview

__all__ = ("main",)


def main() -> None:
    """Run the command line and leave with its exit code."""
    if sys.argv[1:] in (["--help"], ["-h"]):  # needs none of the commands
        sys.stdout.write(overview())
        return
    from sirchat.cli.app import main as run

    run()
