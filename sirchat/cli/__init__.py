"""The command line: parses flags, runs commands, and turns errors into exit codes."""

from sirchat.cli.app import main

__all__ = ("main",)
