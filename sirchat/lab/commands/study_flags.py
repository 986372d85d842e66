"""Makes the commands of `sirchat eval`, with the flags that all studies have."""

import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sirchat.cli.flags import (
    Trust,
    load_profile_model,
    parameters_of,
    profile_from_flags,
    with_setting_flags,
)
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.config.values import parse_option, parse_value
from sirchat.errors import SettingError, format_value
from sirchat.memory.policies import import_typed, policy_class
from sirchat.paths import read_yaml

if TYPE_CHECKING:
    from sirchat.lab.studies.study import Study
    from sirchat.models.model import LoadedModel


_FLAGS = read_yaml(__file__, "common")
_COMPARED = {"policy": "--policies", "budget": "--budgets", "decay": "--decays"}
_POLICY_SETTINGS = ("budget", "decay", "recent", "sinks")  # which some policies ignore


def add_study(
    app: typer.Typer,
    name: str,
    *,
    makes: str,
    help: str,
    flags: Mapping[str, Mapping[str, Any]],
    compares: Mapping[str, Any] | None = None,
    fixed: Mapping[str, object] | None = None,
) -> None:
    """Register the study that `makes` names as the command `name` of `app`.

    `compares` has the defaults of `--policies`, `--budgets`, `--decays` and `--limit`, and in `of`
    the help of `--limit`; a study without it compares no settings.
    """
    own, common = parameters_of(flags), parameters_of(_FLAGS["all"])
    grid = _grid_parameters(**compares) if compares is not None else {}
    trusted = inspect.signature(_trust).parameters

    def command(flags: dict[str, Any], **values: Any) -> None:
        how = {key: values.pop(key) for key in (*common, *trusted)}
        cells = {key: values.pop(key) for key in grid}
        profile = profile_from_flags(flags)
        compared = _compared(profile, **cells) if grid else {"profile": profile}
        options = {key: _parsed(one, values[key]) for key, one in own.items()}
        module, _, kind = makes.partition(":")
        make = getattr(import_module(f"sirchat.lab.studies.{module}"), kind)
        made: Study = make(**compared, **options, **(fixed or {}))
        swept = [_swept(one)[0] for one in cells.get("sweep") or ()]
        repeats = ["repeats"] if grid and cells["repeats"] != grid["repeats"].default else []
        for setting in (*flags, *swept, *repeats):
            plural = _COMPARED.get(setting, "") if grid and setting in flags else ""
            if plural or setting in made.without_effect:
                why = f"{setting} has no effect in `sirchat eval {name}`"
                raise SettingError(why, hint=f"give {plural}" if plural else f"leave {setting} out")
        _run(made, profile, **how)

    given = inspect.Parameter("flags", inspect.Parameter.KEYWORD_ONLY, annotation=dict[str, Any])
    every = (grid, own, common, trusted)
    parameters = [given, *(one for some in every for one in some.values())]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = help
    app.command(name)(with_setting_flags(command))


def settings_of(
    profile: Profile, policies: str, budgets: str, decays: str, sweep: Sequence[str] = ()
) -> tuple[Profile, ...]:
    """One profile for each combination of a policy, a budget, a decay and swept values.

    Raises SettingError for what is not allowed, and for what none of the policies has.
    """
    swept = dict(_swept(one) for one in sweep)
    axes = {"policy": policies.split(","), "budget": budgets.split(","), "decay": decays.split(",")}
    settings: list[Profile] = []
    for values in product(*(axes | swept).values()):
        given = dict(zip(axes | swept, values, strict=True))
        setting = changed_profile(profile, "eval", **_settings_used(given, profile.policy_options))
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


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of whole numbers; raises SettingError for any other text."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise SettingError(
            f"{option} is {format_value(text)}, must be whole numbers, separated by commas"
        )
    return tuple(map(int, parts))


def command_line() -> str:
    """The command line of this process, which begins with `sirchat`, quoted for a shell."""
    return shlex.join(["sirchat", *sys.argv[1:]])


def _names(option: str, text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


# How the value of a flag is parsed, by the metavar that its help shows.
_PARSERS: dict[str, Callable[[str, str], tuple[Any, ...]]] = {
    **dict.fromkeys(("N,M,...", "1,2,3"), whole_numbers),
    **dict.fromkeys(("A,B,...", "WAY,...", "none,surprisal"), _names),
}


def _parsed(parameter: inspect.Parameter, value: Any) -> Any:
    (option, *_) = getattr(parameter.annotation, "__metadata__", (None,))
    parse = _PARSERS.get(getattr(option, "metavar", None) or "")
    return value if parse is None else tuple(dict.fromkeys(parse(parameter.name, value)))


def _swept(text: str) -> tuple[str, list[str]]:
    """Split a value of the flag `--sweep`, such as `recent=16,32`, into a name and its values."""
    key, equals, values = text.partition("=")
    if not equals or not key or not all(values.split(",")):
        raise SettingError(
            f"--sweep is {format_value(text)}, must be a setting and its values, "
            "such as recent=16,32"
        )
    return key.replace("-", "_"), values.split(",")


def _settings_used(given: dict[str, str], shared: Mapping[str, object]) -> dict[str, object]:
    """Those settings in `given` that its policy uses, parsed; `shared` are options for all."""
    policy = given["policy"]
    import_typed(policy)
    settings: dict[str, object] = {"policy": policy, "decay": 1.0}
    known = {field.name for field in fields(policy_class(policy))}
    options = {name: value for name, value in shared.items() if name in known}
    for key, text in given.items():
        if key != "policy" and not _lacks(key, policy):
            if key not in Profile.model_fields:
                options[key] = parse_option(text)
            else:
                settings[key] = parse_value(key, text)
    return settings | {"policy_options": options}


def _lacks(key: str, policy: str) -> bool:
    """Whether the policy has no use for a setting of policies, or for a policy option."""
    kind = policy_class(policy)
    known = {*kind.uses, *(field.name for field in fields(kind))}
    return key not in known and (key in _POLICY_SETTINGS or key not in Profile.model_fields)


def _run(
    made: "Study",
    profile: Profile,
    out: Path | None,
    workers: int | None,
    trust_remote_code: bool,
    json: bool,
) -> None:
    model = load_profile_model(profile, trust_remote_code)
    import torch

    from sirchat.lab.studies.run import run
    from sirchat.lab.studies.workers import run_in_processes

    typed = sorted({one.policy for one in (profile, *getattr(made, "settings", ()))})
    remote = None
    if workers is not None:
        torch.set_num_threads(1)  # as each process has, which the report says
        again = partial(_load_again, typed, profile, trust_remote_code)
        remote = partial(run_in_processes, load=again, workers=workers)
    run(made, model, command=command_line(), out=out, as_json=json, remote=remote)


def _load_again(typed: list[str], profile: Profile, trust: bool) -> "LoadedModel":
    """Load the model in a worker process, after the modules of policies such as `mine:Loud`."""
    for name in typed:
        import_typed(name)
    return load_profile_model(profile, trust)


def _trust(*, trust_remote_code: Trust = False) -> None: ...


def _grid_parameters(of: str, **defaults: object) -> dict[str, inspect.Parameter]:
    flags = {
        name: {"help": of, **flag} | ({"default": defaults[name]} if name in defaults else {})
        for name, flag in _FLAGS["grid"].items()
    }
    return parameters_of(flags)


def _compared(
    profile: Profile,
    policies: str,
    budgets: str,
    decays: str,
    sweep: list[str] | None,
    **counts: int,
) -> dict[str, Any]:
    settings = settings_of(profile, policies, budgets, decays, sweep or ())
    return {"settings": settings, "seed": profile.seed, **counts}
