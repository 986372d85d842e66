"""The command line: parses, dispatches, and turns errors into exit codes."""

from sirchat.cli.app import main

__all__ = ("main",)
