"""What a chat imports, at its start and later: for the process that chats are forked from."""

import gc
import weakref
from functools import cache
from importlib import import_module
from typing import Any

import typer.main

for name in (
    "prompt_toolkit.patch_stdout",
    "transformers.models.llama.modeling_llama",
    "sirchat.chat.session",
    "sirchat.cli.app",
    "sirchat.memory.policies.by_surprisal",
    "sirchat.ui.markdown",
    "sirchat.ui.growing_reply",
    "sirchat.ui.repl",
    "sirchat.ui.replay",
    "sirchat.ui.startup",
    "sirchat.ui.tutorial",
    "forked_chat",
):
    import_module(name)

app = import_module("sirchat.cli.app")
# Each process would make the commands, and readers of their parameters, anew.
made = cache(typer.main.get_command)
vars(typer.main)["get_command"] = vars(app)["get_command"] = made
group: Any = made(app.app)
for command in (group, *group.commands.values()):
    for parameter in command.params:
        getattr(parameter, "get_runtime_param", bool)()

for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False  # an ending process would take as long as for its start
gc.collect()
gc.freeze()  # a search for garbage would copy it all into each process
