"""Makes the commands of `sirchat eval` from functions, with the flags that all studies have.

These flags are the settings to compare, the number of repeats, the folder for results, and the
workers.
"""

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
        help="Run on the Ray cluster at this address; auto finds a cluster; local means "
        "processes of this machine, without Ray, as --workers alone does.",
        metavar="ADDRESS",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Run in this number of processes, or with --ray on this number of workers; each has "
        "its own model. Without --workers and --ray, one process runs all.",
        min=1,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")]


_WORKERS = 2
"""Number of workers if only --ray is given."""

_POLICY_SETTINGS = ("budget", "decay", "recent", "sinks")
"""Those settings of a profile that some policies use and others ignore."""


class Compared(TypedDict):
    """The keyword arguments of every study that compares several settings.

    Attributes:
        settings: the settings to compare, one profile each.
        limit: the amount of the study, for example its number of conversations.
        seed: seed of the random numbers.
        repeats: number of runs of a policy that chooses at random.
    """

    settings: tuple[Profile, ...]
    limit: int
    seed: int
    repeats: int


class Defaults(NamedTuple):
    """The default values of a study's flags `--policies`, `--budgets`, `--decays` and `--limit`.

    `of` is the help text of the flag `--limit`, which says what it limits.
    """

    policies: str = "entropy,sink"
    budgets: str = "256"
    decays: str = "1"
    limit: int = 200
    of: str = "Number of conversations for each setting."


def study(
    app: typer.Typer, name: str, compares: Defaults | None, *, former: str = ""
) -> Callable[[Callable[..., "Study"]], None]:
    """Decorator: registers a function that builds a study as the command `name` of `app`.

    The function's first argument is a `Compared`, the settings to compare, which are made from
    flags. `compares` has the default values of these flags. If `compares` is None, the command has
    no such flags, and the first argument is the profile. All other parameters of the function
    become options of the command. If a `former` name is given, the command also runs under this
    name, and prints a note about its new name.
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
    """Raise SettingError if the user gave a setting that has no effect in the study `made`.

    `given` has the names of the settings that the user gave, and `name` is the study's command.
    """
    for setting in given:
        if setting in getattr(made, "without_effect", ()):
            raise SettingError(
                f"{setting} has no effect in `sirchat eval {name}`", hint=f"leave {setting} out"
            )


def repeatable(profile: Profile) -> Profile:
    """Change a profile so that the results of a study can be repeated; returns the new profile.

    The setting `compile` is switched off, unless the user has set it. Its default compiles the
    decode step or not, depending on earlier chats, and a compiled step rounds differently.
    """
    if "compile" in profile.model_fields_set:
        return profile
    return profile.model_copy(update={"compile": "off"})


def settings_of(
    profile: Profile, policies: str, budgets: str, decays: str, sweep: Sequence[str] = ()
) -> tuple[Profile, ...]:
    """Make one profile for each combination of a policy, a budget, a decay and swept values.

    `policies`, `budgets` and `decays` are comma-separated lists. Each text in `sweep` names a
    setting or a policy option and the values to compare, such as `recent=16,32`. A profile gets
    only the settings that its policy uses; of equal profiles, one is returned. The policy options
    of `profile` go to every policy that has them. Raises SettingError for a value that is not
    allowed, and for a swept setting or an option that none of the policies has.
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
    """Split a value of the flag `--sweep`, such as `recent=16,32`.

    Returns the name of the setting or option, and the list of its values as texts. Raises
    SettingError for any other text.
    """
    key, equals, values = text.partition("=")
    if not equals or not key or not all(values.split(",")):
        raise SettingError(
            f"--sweep is {format_value(text)}, must be a setting and its values, "
            "such as recent=16,32"
        )
    return key.replace("-", "_"), values.split(",")


def _settings_used(given: dict[str, str], shared: Mapping[str, object]) -> dict[str, object]:
    """Choose the settings in `given` that its policy uses, and parse their texts into values.

    `given` maps names of settings and policy options to texts; the key `policy` names the policy.
    Returns the settings by name. Policy options are in the entry `policy_options`, with those
    options in `shared` that the policy has.
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
    """Whether the policy `policy` has no use for `key`, the name of a setting or policy option.

    False for a setting that does not belong to policies, such as `temperature`.
    """
    kind = policy_class(policy)
    known = {*kind.uses, *(field.name for field in fields(kind))}
    return key not in known and (key in _POLICY_SETTINGS or key not in Profile.model_fields)


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of whole numbers, the value of the flag `option`.

    Returns the numbers. Raises SettingError for any other text.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SettingError(
            f"{option} is {format_value(text)}, must be whole numbers, separated by commas"
        )
    return tuple(map(int, parts))


def command_line() -> str:
    """The command line of this process, which begins with `sirchat`, quoted for a shell."""
    return shlex.join(["sirchat", *sys.argv[1:]])


def _run(
    made: "Study",
    profile: Profile,
    out: Path | None,
    ray: str | None,
    workers: int | None,
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
    count = workers or _WORKERS
    if ray not in (None, "local"):
        cluster = Cluster(address=ray, workers=count, gpus=float(model.device.type == "cuda"))
        remote = partial(run_on_ray, load=again, cluster=cluster)
    elif ray == "local" or workers is not None:
        remote = partial(run_in_processes, load=again, workers=count)
    run(made, model, command=command_line(), out=out, as_json=json, remote=remote)


def _load_again(typed: list[str], profile: Profile, trust: bool, for_hub: bool) -> "LoadedModel":
    """Load the profile's model in a worker process of a study, and return it.

    `typed` has the policies as the user typed them, such as `mine:Loud`. Their modules are imported
    first. `trust` says whether the model may bring its own code, and `for_hub` whether it must be a
    module of transformers.
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
        ("workers", Workers, None),
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
