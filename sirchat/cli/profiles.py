"""The commands `sirchat profiles ...` and `sirchat policies ...`: profiles, eviction policies."""

from dataclasses import fields
from typing import Annotated, Any

import typer

from sirchat.cli.flags import profile_from_flags, with_setting_flags
from sirchat.config.profile_files import init_profile, list_profiles, profile_as_yaml
from sirchat.config.values import format_setting
from sirchat.memory.policies import import_typed, policy_class
from sirchat.ui.text import displayable, displayable_line

profiles_app = typer.Typer(add_completion=False, invoke_without_command=True)
policies_app = typer.Typer(add_completion=False, invoke_without_command=True)


@profiles_app.callback()
def profiles(context: typer.Context) -> None:
    """List profiles (named settings); with a command, show or create a profile."""
    if context.invoked_subcommand is None:
        profiles_list()


@profiles_app.command("list")
def profiles_list() -> None:
    """List all profiles, by name."""
    from rich.table import Table
    from rich.text import Text

    from sirchat.ui.screen import make_console

    table = Table("name", "description", "from", box=None)
    for profile in list_profiles():
        cells = (profile.name, profile.description, "sirchat" if profile.is_shipped else "you")
        table.add_row(*(Text(displayable_line(cell)) for cell in cells))
    make_console().print(table)


@profiles_app.command("show")
@with_setting_flags
def profiles_show(
    name: Annotated[str, typer.Argument(help="A profile's name, or a YAML file.")],
    flags: dict[str, Any],
) -> None:
    """Show every setting of a profile, as YAML."""
    profile = profile_from_flags({**flags, "profile": name}, loads_model=False)
    typer.echo(displayable(profile_as_yaml(profile)), nl=False)


@profiles_app.command("init")
def profiles_init(name: Annotated[str, typer.Argument(help="The new profile's name.")]) -> None:
    """Create a profile of your own to edit, with a comment on every setting."""
    typer.echo(displayable_line(str(init_profile(name))))


@policies_app.callback()
def policies_list(context: typer.Context) -> None:
    """List the eviction policies, and what each keeps; with a command, show or check one."""
    if context.invoked_subcommand is not None:
        return
    from sirchat.ui.lists import ALSO_KEPT, draw_policies
    from sirchat.ui.screen import Screen

    profile = profile_from_flags({}, loads_model=False)
    screen = Screen(theme=profile.theme)
    screen.show(draw_policies(profile.policy, screen.theme))
    screen.note(f"*: your default; {ALSO_KEPT}; sirchat policies show NAME tells more")


@policies_app.command("show")
def policies_show(
    name: Annotated[str, typer.Argument(help="A policy's name, or package.module:Class.")],
) -> None:
    """Show what a policy keeps, its options and their defaults, and its source."""
    from rich.text import Text

    from sirchat.ui.screen import make_console

    import_typed(name)
    policy, console = policy_class(name), make_console()
    lines = (policy.__doc__ or "").strip().split("\n\n")
    for field in fields(policy):
        option = f"--option {field.name}={format_setting(field.default)}"
        option = (
            f"--recent {field.default}" if field.name == "recent" else option
        )  # which is a setting
        lines.append(f"{option}: {field.metadata.get('help', '')}")
    uses = ", ".join(f"--{setting}" for setting in policy.uses) or "none"
    for line in [*lines, f"other settings that it uses: {uses}", f"source: {policy.source}"]:
        console.print(Text(displayable_line(line)))


@policies_app.command("check")
def policies_check(
    name: Annotated[str, typer.Argument(help="A policy's name, or package.module:Class.")],
) -> None:
    """Check that a policy obeys the rules for all policies; tests it on random tables of tokens."""
    from sirchat.memory.policies.check import contract_violations

    import_typed(name)
    broken = contract_violations(policy_class(name)())
    verb = "breaks" if broken else "keeps"
    for line in [*broken, f"{verb} the contract of policies"]:
        typer.echo(displayable_line(f"{name}: {line}"))
    if broken:
        raise typer.Exit(1)
