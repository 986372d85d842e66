"""`sirchat doctor`: what a bug report needs."""

from typing import Annotated

import typer

from sirchat.cli.launch import quick_start
from sirchat.models.hub import require
from sirchat.ui.text import displayable


def doctor(
    model: Annotated[str, typer.Option("--model", "-m", help="The model to check.")] = "tiny",
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Check versions, machine, files and a model; for bug reports.

    Nothing of your chats is in it. The exit code is 1 if there is a problem.
    """
    require(model)
    with quick_start():
        from sirchat.models.doctor import examine

    found = []
    for one in examine(model):
        found.append(one)
        if not json:
            problem = f"  <- {one.problem}" if one.problem else ""
            typer.echo(displayable(f"{one.name:<14}{one.value}{problem}"))
    if json:
        from dataclasses import asdict
        from json import dumps

        typer.echo(dumps([asdict(one) for one in found], indent=2))
    if any(one.problem for one in found):
        raise typer.Exit(1)
