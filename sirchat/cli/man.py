"""The manual page, made from the same texts as `--help`."""

import re
import textwrap
from collections.abc import Iterator

import typer

from sirchat import __version__
from sirchat.cli.registry import EXAMPLES, groups
from sirchat.config.profile import Profile

_NAME = "endless chat with local language models, under a budget of memory"

_ABOUT = """\
A causal language model remembers by its key/value (KV) cache, which grows with every token. sirchat
holds the cache under a budget of tokens: a policy chooses which tokens the model still remembers.
Alone, it opens a chat, in which /help lists the commands. Where standard input is a file or a pipe,
it replays that as a transcript.
"""

_STATUS = (("0", "fine"), ("1", "failure"), ("2", "wrong usage"), ("130", "interrupted"))


def man() -> None:
    """Print the manual page, in roff."""
    typer.echo("\n".join(_page()))


def _page() -> Iterator[str]:
    yield f'.TH SIRCHAT 1 "" "sirchat {__version__}"'
    yield from (".SH NAME", f"sirchat \\- {_NAME}", ".SH SYNOPSIS")
    for line in ("sirchat [SETTINGS]", "sirchat [SETTINGS] < FILE", "sirchat COMMAND ..."):
        yield from (".nf", _escaped(line), ".fi")
    yield from (".SH DESCRIPTION", *map(_escaped, textwrap.wrap(_ABOUT, 78)), ".SH COMMANDS")
    for commands in groups().values():
        for name, meaning in commands.items():
            yield from (".TP", f".B {name}", _escaped(f"{meaning}; for example:"), ".br")
            yield _escaped(EXAMPLES[name])
    yield ".SH SETTINGS"
    yield "Flags, which are also lines of a profile, variables SIRCHAT_NAME, and /set in a chat."
    for name, field in Profile.model_fields.items():
        if name != "description":
            flag = "option KEY=VALUE" if name == "policy_options" else name.replace("_", "-")
            yield from (".TP", f".B {_escaped('--' + flag)}", _escaped(field.description or ""))
    yield ".SH EXIT STATUS"
    for code, meaning in _STATUS:
        yield from (".TP", f".B {code}", meaning)
    yield from (".SH FILES", _escaped("sirchat paths lists them, and says how to remove them."))


def _escaped(text: str) -> str:
    """A line of text as roff, in which a dot or a quote in front would be a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text)
