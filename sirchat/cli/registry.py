"""The list of sirchat's commands: each one's module, its line in the overview, and an example.

A command's module is imported only when it is used; this module imports nothing slow. Without
`sirchat.lab`, its commands are left out.
"""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from sirchat.errors import UsageError

_LAB_COMMANDS = ("compare", "eval", "bench", "train")
_COMMAND_LINE = re.compile(r"^  (?!sirchat)([a-z]+) {2,}(.*)\n", re.MULTILINE)  # of the overview
_TEXTS = Path(__file__).parent

# By the full name of each command.
EXAMPLES: dict[str, str] = dict(
    line.split(": ", 1) for line in (_TEXTS / "examples.txt").read_text("utf-8").splitlines()
)


def overview() -> str:
    """The text of `sirchat --help`, at most 79 columns wide, with the installed commands."""
    text, has_lab = (_TEXTS / "overview.txt").read_text("utf-8"), find_spec("sirchat.lab")
    return _COMMAND_LINE.sub(
        lambda line: line[0] if has_lab or line[1] not in _LAB_COMMANDS else "", text
    )


def commands() -> dict[str, str]:
    """The description of each installed command, by name."""
    return dict(_COMMAND_LINE.findall(overview()))


def lab_module(name: str) -> ModuleType:
    """Import a module of `sirchat.lab`; raises UsageError if that is not installed."""
    if find_spec("sirchat.lab") is None:
        raise UsageError("this command needs sirchat.lab, which is not installed")
    return import_module(f"sirchat.lab.{name}")


def command_modules() -> dict[str, str]:
    """The module of each lazily imported command, by name; it has a variable `NAME_app`."""
    modules = {
        "serve": "sirchat.cli.serve",
        "sessions": "sirchat.cli.sessions",
        "models": "sirchat.cli.models",
        "policies": "sirchat.cli.profiles",
        "profiles": "sirchat.cli.profiles",
        **{name: f"sirchat.lab.commands.{name}" for name in _LAB_COMMANDS},
    }
    installed = commands()
    return {name: module for name, module in modules.items() if name in installed}


def add_example(command: Any, name: str) -> Any:
    """Put the command's example at the beginning of its help; returns the command."""
    example = f"Example: {EXAMPLES.get(name, '')}"
    if name in EXAMPLES and not (command.help or "").startswith(example):
        command.short_help = command.short_help or (command.help or "").split("\n\n")[0]
        command.help = f"{example}\n\n{command.help or ''}"
    return command
