"""The flags that every study has: settings to compare, repeats, results folder, workers."""

import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

import typer

from sirchat.cli.flags import Debug, Trust, load, profile_of, with_settings
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed
from sirchat.config.values import is_option, parse_option, parse_value
from sirchat.errors import SettingError, format_value
from sirchat.memory.policies import import_typed, policy_class

if TYPE_CHECKING:
    from sirchat.lab.studies.study import Study
    from sirchat.models.model import LoadedModel

Policies = Annotated[
    str, typer.Option(help="Policies to compare, separated by commas.", metavar="A,B,...")
]
Budgets = Annotated[
    str, typer.Option(help="Budgets to compare, separated by commas.", metavar="N,M,...")
]
Decays = Annotated[
    str, typer.Option(help="Decays to compare, separated by commas.", metavar="X,Y,...")
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        help="A setting or policy option, and the values to compare; can be repeated.",
        metavar="KEY=A,B,...",
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        help="Number of runs of a policy that chooses at random, each with another seed.", min=1
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the report, and for results during the run.", metavar="DIR"),
]
Ray = Annotated[
    str | None,
    typer.Option(
        help="Run on the Ray cluster at this address; auto finds a cluster; local uses "
        "processes of this machine, without Ray.",
        metavar="ADDRESS",
    ),
]
Workers = Annotated[
    int, typer.Option(help="Number of workers (on the Ray cluster) or processes.", min=1)
]
Json = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")]


_POLICY_SETTINGS = ("budget", "decay", "recent", "sinks")
"""Settings of policies that only some policies use."""


class Compared(TypedDict):
    """The keyword arguments of every study that compares several settings."""

    settings: tuple[Profile, ...]
    limit: int
    seed: int
    repeats: int


class Defaults(NamedTuple):
    """Default values of the flags that choose the settings and the amount of a study.

    `of` is the help text of `--limit`.
    """

    policies: str = "entropy,sink"
    budgets: str = "256"
    decays: str = "1"
    limit: int = 200
    of: str = "Number of conversations for each setting."


def study(
    app: typer.Typer, name: str, compares: Defaults | None, *, former: str = ""
) -> Callable[[Callable[..., "Study"]], None]:
    """Register a function that builds a study as the command `name` of `app`.

    The function's first argument is a `Compared`, made from flags whose default values are
    `compares`. If `compares` is None, the first argument is the profile instead. The function's
    other parameters become the command's options. If a `former` name is given, the command also
    runs under that name, and prints a note about the new name.
    """

    def register(build: Callable[..., "Study"]) -> None:
        own = list(inspect.signature(build).parameters.values())[1:]
        grid = _grid_parameters(compares) if compares is not None else {}

        def command(flags: dict[str, Any], **values: Any) -> None:
            common = {key: values.pop(key) for key in _COMMON}
            cells = {key: values.pop(key) for key in grid}
            profile = repeatable(profile_of(flags))
            made = build(_compared(profile, **cells) if grid else profile, **values)
            swept = [_swept(one)[0] for one in cells.get("sweep") or ()]
            _refuse_without_effect(made, [*flags, *swept], name)
            _run(made, profile, **common)

        parameters = [_keyword("flags", dict[str, Any]), *grid.values(), *own, *_COMMON.values()]
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__doc__ = build.__doc__
        app.command(name)(with_settings(command))
        if former:

            def renamed(**values: Any) -> None:
                typer.echo(f"note: {former} is now called {name}", err=True)
                command(**values)

            renamed.__signature__ = command.__signature__  # type: ignore[attr-defined]
            renamed.__doc__ = command.__doc__
            app.command(former, hidden=True)(with_settings(renamed))

    return register


def _refuse_without_effect(made: "Study", given: Sequence[str], name: str) -> None:
    """Raise SettingError if any setting in `given` changes nothing in this study."""
    for setting in given:
        if setting in getattr(made, "without_effect", ()):
            raise SettingError(
                f"{setting} has no effect in `sirchat eval {name}`", hint=f"leave {setting} out"
            )


def repeatable(profile: Profile) -> Profile:
    """The profile with `compile` off, unless the user set `compile`.

    So results can be repeated: a compiled step rounds differently, and whether the default setting
    compiles a step depends on earlier chats.
    """
    if "compile" in profile.model_fields_set:
        return profile
    return profile.model_copy(update={"compile": "off"})


def settings_of(
    profile: Profile, policies: str, budgets: str, decays: str, sweep: Sequence[str] = ()
) -> tuple[Profile, ...]:
    """A profile for each combination of a policy, a budget, a decay and the values of a sweep.

    Settings that a row's policy does not use are left out, so that there are no equal rows. The
    profile's policy options go to every policy that has them. Raises SettingError for a value
    that is not allowed, and for a sweep or an option with an unknown name.
    """
    swept = dict(_swept(one) for one in sweep)
    axes = {"policy": policies.split(","), "budget": budgets.split(","), "decay": decays.split(",")}
    settings: list[Profile] = []
    for values in product(*(axes | swept).values()):
        given = dict(zip(axes | swept, values, strict=True))
        own = _settings_used(given, profile.policy_options)
        setting = changed(profile, "eval", **own)
        if setting not in settings:
            settings.append(setting)
    if unused := [key for key in swept if all(_lacks(key, one.policy) for one in settings)]:
        raise SettingError(
            f"--sweep: none of the policies {policies} has a setting or option {unused[0]}"
        )
    given_names = {name for one in settings for name in one.policy_options}
    if unused := [key for key in profile.policy_options if key not in given_names]:
        raise SettingError(f"--option: none of the policies {policies} has an option {unused[0]}")
    return tuple(settings)


def _swept(text: str) -> tuple[str, list[str]]:
    """Split text such as `recent=16,32` into the name of a setting or option, and its values."""
    key, equals, values = text.partition("=")
    if not equals or not key or not all(values.split(",")):
        raise SettingError(
            f"--sweep is {format_value(text)}, must be a setting and its values, "
            "such as recent=16,32"
        )
    return key.replace("-", "_"), values.split(",")


def _settings_used(given: dict[str, str], shared: Mapping[str, object]) -> dict[str, object]:
    """The settings in `given` that the policy in `given` uses, as values.

    The options in `shared` that this policy has are added.
    """
    policy = given["policy"]
    import_typed(policy)
    own: dict[str, object] = {"policy": policy, "decay": 1.0}
    known = {field.name for field in fields(policy_class(policy))}
    options = {name: value for name, value in shared.items() if name in known}
    for key, text in given.items():
        if key != "policy" and not _lacks(key, policy):
            if is_option(key, text, policy):
                options[key] = parse_option(text)
            else:
                own[key] = parse_value(key, text)
    return own | {"policy_options": options}


def _lacks(key: str, policy: str) -> bool:
    """Whether `key` is a setting or an option of other policies, but not of `policy`."""
    kind = policy_class(policy)
    known = {*kind.uses, *(field.name for field in fields(kind))}
    return key not in known and (key in _POLICY_SETTINGS or key not in Profile.model_fields)


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """The whole numbers in a comma-separated list; raises SettingError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SettingError(
            f"{option} is {format_value(text)}, must be whole numbers, separated by commas"
        )
    return tuple(map(int, parts))


def command_line() -> str:
    """The command line of this process, quoted for a shell."""
    return shlex.join(["sirchat", *sys.argv[1:]])


def _run(
    made: "Study",
    profile: Profile,
    out: Path | None,
    ray: str | None,
    workers: int,
    trust_remote_code: bool,
    json: bool,
    debug: bool,
) -> None:
    for_hub = getattr(made, "needs_hub", False)
    model = load(profile, trust_remote_code, for_hub=for_hub)
    from sirchat.lab.studies.run import run
    from sirchat.lab.studies.workers import Cluster, run_in_processes, run_on_ray

    typed = sorted({one.policy for one in (profile, *getattr(made, "settings", ()))})
    remote, again = None, partial(_load_again, typed, profile, trust_remote_code, for_hub)
    if ray == "local":
        remote = partial(run_in_processes, load=again, workers=workers)
    elif ray is not None:
        cluster = Cluster(address=ray, workers=workers, gpus=float(model.device.type == "cuda"))
        remote = partial(run_on_ray, load=again, cluster=cluster)
    run(made, model, command=command_line(), out=out, as_json=json, remote=remote)


def _load_again(typed: list[str], profile: Profile, trust: bool, for_hub: bool) -> "LoadedModel":
    """Load the model in a worker process, after importing the policies in `typed`.

    `typed` has policies as the user typed them, such as `mine:Loud`.
    """
    for name in typed:
        import_typed(name)
    return load(profile, trust, for_hub=for_hub)


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
        ("ray", Ray, None),
        ("workers", Workers, 2),
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
            ("sweep", Sweep, None),
            ("limit", limit, defaults.limit),
            ("repeats", Repeats, 3),
        )
    }


def _compared(
    profile: Profile,
    policies: str,
    budgets: str,
    decays: str,
    sweep: list[str] | None,
    limit: int,
    repeats: int,
) -> Compared:
    settings = settings_of(profile, policies, budgets, decays, sweep or ())
    return Compared(settings=settings, limit=limit, seed=profile.seed, repeats=repeats)
