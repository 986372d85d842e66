"""The commands `sirchat doctor`, `paths` and `completion`."""

import os
from pathlib import Path
from typing import Literal

import typer

from sirchat import paths
from sirchat.cli.flags import with_flags, without_garbage_collection
from sirchat.config.profile_files import resolve
from sirchat.errors import UsageError
from sirchat.models.hub import require_available
from sirchat.paths import read_yaml
from sirchat.ui.text import displayable, pluralize

_FLAGS = read_yaml(__file__, "app")
_SHELLS = ("bash", "zsh", "fish")


@with_flags(_FLAGS["doctor"])
def doctor(
    model: str | None = None, device_map: Literal["off", "auto", "balanced"] = "off"
) -> None:
    """Check versions, machine and a model, and print the results for a bug report.

    The results contain nothing of your chats. The exit code is 1 if there is a problem.
    """
    profile = resolve(None, {}, os.environ)
    model = profile.model if model is None else model
    require_available(model)
    with without_garbage_collection():
        from sirchat.models.doctor import run_checks

    has_problem = False
    for result in run_checks(model, device_map, profile.compile):
        problem = f"  <- {result.problem}" if result.problem else ""
        typer.echo(displayable(f"{result.name:<17}{result.value}{problem}"))
        has_problem = has_problem or bool(problem)
    if has_problem:
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


def describe_size(path: Path) -> str:
    """The size and the number of files of a file or folder, such as `1.5 MB in 3 files`."""
    from sirchat.ui.lists import format_bytes  # not at each start of a command

    if not path.exists():
        return "nothing yet"
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return f"{format_bytes(size)} in {pluralize(len(files), 'file')}"
