"""Groups of commands that are imported and built only when one of them is used."""

from functools import cached_property
from importlib import import_module
from typing import Any

from typer.core import TyperGroup
from typer.main import get_group

from sirchat.cli.examples import with_example


class LazyGroup(TyperGroup):
    """Stands for the Typer application `attribute` of `module`, and shows `help` in a list."""

    def __init__(self, name: str, module: str, attribute: str, help: str) -> None:
        super().__init__(name=name, help=help)
        self._where = module, attribute

    @cached_property
    def _group(self) -> Any:
        module, attribute = self._where
        group = get_group(getattr(import_module(module), attribute))
        group.name = self.name
        for name, command in group.commands.items():
            with_example(command, f"{self.name} {name}")
        return with_example(group, str(self.name))

    def make_context(self, *args: Any, **options: Any) -> Any:
        """The context of the group itself, which then runs."""
        return self._group.make_context(*args, **options)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the group's commands."""
        names: list[str] = self._group.list_commands(ctx)
        return names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The group's command of that name."""
        return self._group.get_command(ctx, cmd_name)
