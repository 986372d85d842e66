"""Makes the flags of commands that a YAML file beside this one declares, with their help.

An entry has the flag's `help` and may have a `default` (none: the flag must be given), `metavar`,
`min`, another name (`option`), and a `type`, where the default does not tell it.
"""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

_TYPES: dict[str, Any] = {
    "text": str | None,
    "texts": list[str] | None,
    "whole number": int | None,
    "number": float | None,
    "path": Path | None,
    "paths": list[Path] | None,
}


def declared(name: str) -> dict[str, dict[str, Any]]:
    """The declarations in the file `NAME.yaml`, by command."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text("utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found


def parameters_of(flags: Mapping[str, Mapping[str, Any]]) -> dict[str, Parameter]:
    """The parameters of a command for the flags that are declared, by name."""
    return {name: _parameter(name, flag) for name, flag in flags.items()}


def with_flags(declaration: Mapping[str, Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: gives a command the declared help and flags, before those of its own."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        own = {name: one for name, one in signature(command).parameters.items() if name != "given"}
        flags = parameters_of(declaration["flags"])
        parameters = [*flags.values(), *(one for name, one in own.items() if name not in flags)]
        command.__signature__ = Signature(  # type: ignore[attr-defined]
            [one.replace(kind=Parameter.KEYWORD_ONLY) for one in parameters]
        )
        command.__doc__ = declaration["help"]
        return command

    return add


def _parameter(name: str, flag: Mapping[str, Any]) -> Parameter:
    default = flag.get("default", Parameter.empty)
    kind = type(default) if "default" in flag else str
    names, shown = [flag["option"]] if "option" in flag else [], flag.get("metavar")
    option = typer.Option(*names, help=flag["help"], metavar=shown, min=flag.get("min"))
    annotation: Any = Annotated[_TYPES.get(flag.get("type", ""), kind), option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
