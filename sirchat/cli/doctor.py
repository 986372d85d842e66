"""The commands `sirchat doctor`, `paths`, `man` and `completion`."""

import os
import re
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
from sirchat.ui.text import displayable, pluralize

_FLAGS = read_yaml(__file__, "app")
_SHELLS = ("bash", "zsh", "fish")


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
    listed = (
        f".TP\n.B {name}\n{_escape_roff(f'{meaning}; for example:')}\n.br\n"
        + _escape_roff(EXAMPLES[name])
        for name, meaning in commands().items()
    )
    flags = {name: name.replace("_", "-") for name in Profile.model_fields if name != "description"}
    flags["policy_options"] = "option KEY=VALUE"
    settings = (
        f".TP\n.B {_escape_roff(f'--{flag}')}\n"
        + _escape_roff(Profile.model_fields[name].description or "")
        for name, flag in flags.items()
    )
    page = Path(__file__).with_name("manual.roff").read_text("utf-8")
    parts = {"commands": "\n".join(listed), "settings": "\n".join(settings)}
    typer.echo(page.format(version=__version__, **parts), nl=False)


def describe_size(path: Path) -> str:
    """The size and the number of files of a file or folder, such as `1.5 MB in 3 files`."""
    from sirchat.ui.lists import format_bytes  # not at each start of a command

    if not path.exists():
        return "nothing yet"
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return f"{format_bytes(size)} in {pluralize(len(files), 'file')}"


def _escape_roff(text: str) -> str:
    """Escape a line for roff, which reads a dot or quote at its start as a command."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text)
