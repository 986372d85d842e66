"""The flags that every study has: what is compared, how long, where the results go."""

import inspect
import shlex
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from sirchat.errors import SettingError, shown
from sirchat.flags import with_settings
from sirchat.launch import Debug, Trust, load, profile_of
from sirchat.memory.policies import policy_class
from sirchat.profile import Profile, changed, parse_value

if TYPE_CHECKING:
    from sirchat.tasks.study import Study

Policies = Annotated[str, typer.Option(help="Policies to compare, with commas.", metavar="A,B,...")]
Budgets = Annotated[str, typer.Option(help="Budgets to compare, with commas.", metavar="N,M,...")]
Decays = Annotated[str, typer.Option(help="Decays to compare, with commas.", metavar="X,Y,...")]
Repeats = Annotated[
    int, typer.Option(help="How often a policy that draws lots is run, with other lots.", min=1)
]
Out = Annotated[
    Path | None,
    typer.Option(help="A folder for results as they come, and for the report.", metavar="DIR"),
]
Json = Annotated[bool, typer.Option("--json", help="Print the whole record as JSON.")]


class Compared(NamedTuple):
    """The first four fields of every grid."""

    settings: tuple[Profile, ...]
    limit: int
    seed: int
    repeats: int


class Defaults(NamedTuple):
    """What a grid compares unless told otherwise."""

    policies: str = "entropy,sink"
    budgets: str = "256"
    decays: str = "1"
    limit: int = 200
    of: str = "Conversations for each setting."


def study(
    app: typer.Typer, name: str, compares: Defaults | None
) -> Callable[[Callable[..., "Study"]], None]:
    """Make a command of a function that makes a study.

    The function's own options come after its first parameter: the settings that the flags of a
    grid mean, where it `compares` any, else the profile.
    """

    def register(build: Callable[..., "Study"]) -> None:
        own = list(inspect.signature(build).parameters.values())[1:]
        grid = _grid_parameters(compares) if compares is not None else {}

        def command(flags: dict[str, Any], **values: Any) -> None:
            common = {key: values.pop(key) for key in _COMMON}
            cells = {key: values.pop(key) for key in grid}
            profile = profile_of(flags)
            made = build(_compared(profile, **cells) if grid else profile, **values)
            _run(made, profile, **common)

        parameters = [_keyword("flags", dict[str, Any]), *grid.values(), *own, *_COMMON.values()]
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__doc__ = build.__doc__
        app.command(name)(with_settings(command))

    return register


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them; raises SettingError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SettingError(f"{option} is {shown(text)}, must be numbers of 0 or more, with commas")
    return tuple(map(int, parts))


def command_line() -> str:
    """The command line, as it could be given again."""
    return shlex.join(["sirchat", *sys.argv[1:]])


def _run(
    made: "Study",
    profile: Profile,
    out: Path | None,
    trust_remote_code: bool,
    json: bool,
    debug: bool,
) -> None:
    model = load(profile, trust_remote_code)
    from sirchat.tasks.run import run

    run(made, model, command=command_line(), out=out, as_json=json)


def _keyword(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


_COMMON = {
    name: _keyword(name, annotation, default)
    for name, annotation, default in (
        ("out", Out, None),
        ("trust_remote_code", Trust, False),
        ("json", Json, False),
        ("debug", Debug, False),
    )
}


def _grid_parameters(defaults: Defaults) -> dict[str, inspect.Parameter]:
    limit = Annotated[int, typer.Option(help=defaults.of, min=1)]
    return {
        name: _keyword(name, annotation, default)
        for name, annotation, default in (
            ("policies", Policies, defaults.policies),
            ("budgets", Budgets, defaults.budgets),
            ("decays", Decays, defaults.decays),
            ("limit", limit, defaults.limit),
            ("repeats", Repeats, 3),
        )
    }


def _compared(
    profile: Profile, policies: str, budgets: str, decays: str, limit: int, repeats: int
) -> Compared:
    """A profile for each row of a comparison, without what its policy makes no use of."""
    settings: list[Profile] = []
    for policy, budget, decay in product(
        policies.split(","), budgets.split(","), decays.split(",")
    ):
        own: dict[str, object] = {"policy": policy, "decay": 1.0}
        if policy_class(policy).bounded:
            own["budget"] = parse_value("budget", budget)
        if "decay" in policy_class(policy).uses:
            own["decay"] = parse_value("decay", decay)
        setting = changed(profile, "eval", **own)
        if setting not in settings:
            settings.append(setting)
    return Compared(tuple(settings), limit, profile.seed, repeats)
