"""What a chat imports, at its start and later: for the process that chats are forked from."""

import gc
from importlib import import_module

for name in (
    "transformers.models.llama.modeling_llama",
    "sirchat.chat.session",
    "sirchat.cli.app",
    "sirchat.memory.policies.salience",
    "sirchat.ui.markdown_reply",
    "sirchat.ui.repl",
    "sirchat.ui.startup",
):
    import_module(name)
gc.collect()
gc.freeze()  # a search for garbage would copy it all into each process
