"""The `sirchat policies` commands."""

from dataclasses import fields
from typing import Annotated

import typer

from sirchat.memory.policies import import_typed, policy_class, policy_names
from sirchat.ui.text import displayable, displayable_line

policies_app = typer.Typer(
    help="The eviction policies, with their options.", invoke_without_command=True
)


@policies_app.callback()
def policies_list(context: typer.Context) -> None:
    """The eviction policies: what they keep, their options and defaults, and their source."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("policy", "keeps", "options", "source", box=None, padding=(0, 2, 1, 0))
    for name in policy_names():
        made = policy_class(name)
        what = (made.__doc__ or "").strip().split("\n\n")[0]
        options = [f"{setting} (setting)" for setting in made.uses]
        for field in fields(made):
            options.append(f"{field.name} = {field.default}: {field.metadata.get('help', '')}")
        cells = (name, " ".join(what.split()), "\n".join(options), made.source)
        table.add_row(*(Text(displayable(cell)) for cell in cells))
    Console().print(table)


@policies_app.command("check")
def policies_check(
    name: Annotated[str, typer.Argument(help="A policy's name, or package.module:Class.")],
) -> None:
    """Check that a policy keeps the contract, on random ledgers."""
    from sirchat.memory.contract import contract_violations

    import_typed(name)
    broken = contract_violations(policy_class(name)())
    for promise in broken:
        typer.echo(displayable_line(f"{name}: {promise}"))
    typer.echo(displayable_line(f"{name}: {'breaks' if broken else 'keeps'} the contract"))
    if broken:
        raise typer.Exit(1)
