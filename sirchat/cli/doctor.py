"""The commands `sirchat doctor`, `paths`, `man` and `completion`."""

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import typer

from sirchat import __version__, paths
from sirchat.cli.flags import with_flags, without_garbage_collection
from sirchat.cli.registry import EXAMPLES, commands
from sirchat.config.profile import Profile
from sirchat.config.profile_files import resolve
from sirchat.errors import UsageError
from sirchat.models.hub import require_available
from sirchat.paths import read_yaml
from sirchat.ui.lists import format_bytes
from sirchat.ui.text import displayable, pluralize

_FLAGS = read_yaml(__file__, "app")
_SHELLS = ("bash", "zsh", "fish")

_SUMMARY = "endless chat with local language models, under a budget of memory"
_SYNOPSIS = ("sirchat [SETTINGS]", "sirchat [SETTINGS] < FILE", "sirchat COMMAND ...")
_DESCRIPTION = """\
A causal language model remembers by its key/value (KV) cache, which grows with every token. sirchat
holds the cache under a budget of tokens: a policy chooses which tokens the model still remembers.
Without a command, sirchat opens a chat, in which /help lists the commands. If standard input is a
file or a pipe, sirchat replays it as a transcript.
"""
_EXIT_CODES = (("0", "fine"), ("1", "failure"), ("2", "wrong usage"), ("130", "interrupted"))


@with_flags(_FLAGS["doctor"])
def doctor(model: str | None = None, device_map: str = "off", json: bool = False) -> None:
    """Check versions, machine, folders and a model, and print the results for a bug report.

    The results contain nothing of your chats. The exit code is 1 if there is a problem.
    """
    profile = resolve(None, {}, os.environ)
    model = profile.model if model is None else model
    require_available(model)
    with without_garbage_collection():
        from sirchat.models.doctor import run_checks

    results = []
    for result in run_checks(model, device_map, profile.compile):
        results.append(result)
        if not json:
            problem = f"  <- {result.problem}" if result.problem else ""
            typer.echo(displayable(f"{result.name:<17}{result.value}{problem}"))
    if json:
        from dataclasses import asdict
        from json import dumps

        typer.echo(dumps([asdict(result) for result in results], indent=2))
    if any(result.problem for result in results):
        raise typer.Exit(1)


def show_paths() -> None:
    """Show where sirchat keeps files, how large they are, and how to remove everything."""
    places = {
        "profiles": paths.user_profiles_dir(),
        "saved chats": paths.sessions_dir(),
        "served chats": paths.served_dir(),
        "models": paths.models_dir(),
        "archives": paths.archives_dir(),
        "input history": paths.history_file(),
        "compiled": paths.compiled_dir(),
        "prepared": paths.prepared_dir(),
    }
    rows = [(name, paths.with_tilde(path), describe_size(path)) for name, path in places.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, place, size in rows:
        typer.echo(displayable(f"{name:<{widths[0]}}  {place:<{widths[1]}}  {size}"))
    folders = dict.fromkeys([paths.config_dir(), paths.data_dir(), paths.state_dir()])
    listed = ", ".join(map(paths.with_tilde, folders))
    typer.echo(
        displayable(
            f"\nTo remove sirchat: delete {listed}; then pip uninstall sirchat. Models from the "
            "Hugging Face hub are in the hub's own cache, which other programs share."
        )
    )


@with_flags(_FLAGS["completion"])
def completion(shell: str, install: bool = False) -> None:
    """Print a script by which the shell completes commands, settings, models and saved chats."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]
    from typer.completion import install as install_script  # type: ignore[attr-defined]

    if shell not in _SHELLS:
        raise UsageError(f"there is no completion for {shell!r}; allowed: {', '.join(_SHELLS)}")
    if install:
        _, path = install_script(shell, "sirchat", "_SIRCHAT_COMPLETE")
        where = f"installed in {paths.with_tilde(path)}; it works in the next {shell}"
        typer.echo(displayable(where))
        return
    typer.echo(
        get_completion_script(prog_name="sirchat", complete_var="_SIRCHAT_COMPLETE", shell=shell)
    )


def man() -> None:
    """Print the manual page in the format roff, which man reads."""
    typer.echo("\n".join(_manual_lines()))


def describe_size(path: Path) -> str:
    """The size and the number of files of a file or folder, such as `1.5 MB in 3 files`."""
    if not path.exists():
        return "nothing yet"
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return f"{format_bytes(size)} in {pluralize(len(files), 'file')}"


def _manual_lines() -> Iterator[str]:
    yield f'.TH SIRCHAT 1 "" "sirchat {__version__}"'
    yield from (".SH NAME", f"sirchat \\- {_SUMMARY}", ".SH SYNOPSIS")
    for line in _SYNOPSIS:
        yield from (".nf", _escape_roff(line), ".fi")
    yield from (
        ".SH DESCRIPTION",
        *map(_escape_roff, textwrap.wrap(_DESCRIPTION, 78)),
        ".SH COMMANDS",
    )
    for name, meaning in commands().items():
        yield from (".TP", f".B {name}", _escape_roff(f"{meaning}; for example:"), ".br")
        yield _escape_roff(EXAMPLES[name])
    yield ".SH SETTINGS"
    yield "Set them by flags, lines of a profile, variables SIRCHAT_NAME, or /set in a chat."
    for name, field in Profile.model_fields.items():
        if name != "description":
            flag = "option KEY=VALUE" if name == "policy_options" else name.replace("_", "-")
            yield from (
                ".TP",
                f".B {_escape_roff('--' + flag)}",
                _escape_roff(field.description or ""),
            )
    yield ".SH EXIT STATUS"
    for code, meaning in _EXIT_CODES:
        yield from (".TP", f".B {code}", meaning)
    yield ".SH FILES"
    yield _escape_roff("sirchat paths lists all files of sirchat, and says how to remove them.")


def _escape_roff(text: str) -> str:
    """Escape a line for roff, which reads a dot or quote at its start as a command."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text)
