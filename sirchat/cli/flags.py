"""The flags of commands, and one for each setting; a profile, a model or a session from flags.

A YAML file declares the flags and arguments of commands. An entry has the `help`, and may have a
`metavar`, `min`, `max`, `envvar`, other names (`option`), what completes it, and `argument`. Its
type and default are those of the command's parameter, or else `type` and `default`.
"""

import gc
import os
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sirchat.config.profile import Profile
from sirchat.config.profile_files import list_profiles, resolve
from sirchat.memory.policies import ALIASES, policy_class, policy_names
from sirchat.models.hub import require_available
from sirchat.paths import archives_dir, read_yaml, sessions_dir
from sirchat.text.json_schema import load_schema
from sirchat.ui.interrupt import interruptible_imports
from sirchat.ui.text import displayable_line

if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.models.model import LoadedModel
    from sirchat.models.progress import Progress

_SETTINGS_WITHOUT_FLAG = ("description", "policy_options")
_NUMBER_METAVARS = {int: "INT", float: "FLOAT"}

_TYPES: dict[str, Any] = {
    "text": str | None,
    "texts": list[str] | None,
    "switch": bool | None,
    "whole number": int | None,
    "number": float | None,
    "path": Path | None,
    "paths": list[Path] | None,
}

Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]


def with_flags(
    flags: Mapping[str, Mapping[str, Any]], help: str | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a command gets `flags` (attributes of each, by name) as keyword-only parameters.

    They take the place of its parameter `given`; `help`, if given, that of its docstring.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        own = {name: one for name, one in signature(command).parameters.items() if name != "given"}
        made = parameters_of(flags, own)
        parameters = {name: one for name, one in made.items() if name not in own} | own | made
        command.__signature__ = Signature(  # type: ignore[attr-defined]
            [one.replace(kind=Parameter.KEYWORD_ONLY) for one in parameters.values()]
        )
        command.__doc__ = help or command.__doc__
        return command

    return add


def parameters_of(
    flags: Mapping[str, Mapping[str, Any]], own: Mapping[str, Parameter] | None = None
) -> dict[str, Parameter]:
    """The parameters of a command for declared flags, by name; `own` are those that it has."""
    return {name: _parameter(name, flag, (own or {}).get(name)) for name, flag in flags.items()}


def _parameter(name: str, flag: Mapping[str, Any], own: Parameter | None) -> Parameter:
    default = flag.get("default", Parameter.empty if own is None else own.default)
    kind: Any = type(default) if "default" in flag else str if own is None else own.annotation
    names = flag.get("option", "").split()
    if default is False and not names:
        names = [f"--{name.replace('_', '-')}"]
    about = {key: flag.get(key) for key in ("help", "metavar", "min", "max", "envvar")}
    about |= {"rich_help_panel": flag.get("panel"), "show_default": "panel" not in flag}
    about["autocompletion"] = _completer(flag.get("complete", ""), flag.get("metavar") or "")
    make: Any = typer.Argument if flag.get("argument") else typer.Option
    annotation: Any = Annotated[_TYPES.get(flag.get("type", ""), kind), make(*names, **about)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_setting_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: add a flag for every setting; the command gets these, by name, as `flags`."""
    setting_parameters = _setting_flags()

    def run(**values: Any) -> Any:
        settings = {name: values.pop(name) for name in setting_parameters}
        flags = {name: value for name, value in settings.items() if value is not None}
        if options := flags.pop("option", None):
            flags["policy_options"] = ",".join(options)
        return command(flags=flags, **values)

    parameters = [*signature(command).parameters.values(), *setting_parameters.values()]
    parameters = [parameter for parameter in parameters if parameter.name != "flags"]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def profile_from_flags(flags: dict[str, Any], *, loads_model: bool = True) -> Profile:
    """A profile from flags, environment variables and profile files; flags have precedence.

    If `loads_model`, a missing model or file of `json_schema` is an error before any slow import.
    """
    model = flags.get("model") or os.environ.get("SIRCHAT_MODEL")
    if model and loads_model:
        require_available(model)
    settings = {key: value for key, value in flags.items() if key != "profile"}
    profile = resolve(flags.get("profile"), settings, os.environ)
    if loads_model:
        load_schema(profile.json_schema)
    return profile


def open_session(
    profile: Profile, trust: bool, report: "Progress | None", *, rows_in_events: bool = False
) -> "Session":
    """Load a profile's model, and open a session; the model's defaults fill unset settings."""
    with without_garbage_collection():
        with interruptible_imports():
            policy_class(profile.policy)  # a wrong name is an error before any slow import
            from sirchat.chat.model_defaults import with_model_defaults
            from sirchat.chat.session import Session
            from sirchat.models.learning import learn_in_background

        model = load_profile_model(profile, trust, report)
        # To quantize weights, all are loaded unpacked: more memory than a second process may take.
        may_learn = profile.device_map == "off" and profile.quantize not in ("int8", "int4")
        profile = with_model_defaults(profile, model)
        if profile.learn_encoder and may_learn and not model.encoder.size:
            notice = learn_in_background(model.name, model.module, trust_remote_code=trust)
            notices = [*getattr(model.tokenizer, "notices", []), notice]
            model.tokenizer.notices = [*filter(None, notices)]
        return Session(model, profile, rows_in_events=rows_in_events)


def print_remark(text: str) -> None:
    """Print a line to standard error, without control characters."""
    typer.echo(displayable_line(text), err=True)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context manager: no garbage collection, which takes 1/6 of a model's loading time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load_profile_model(
    profile: Profile, trust: bool, report: "Progress | None" = None, *, for_hub: bool = False
) -> "LoadedModel":
    """Load a profile's model; `for_hub` uses transformers' classes for all of it."""
    with interruptible_imports():
        from sirchat.memory.archive import remove_stale_folders
        from sirchat.models.load import load_model_of

    remove_stale_folders(archives_dir())
    gc.freeze()  # imported objects stay; searching them for garbage would delay typing
    return load_model_of(profile, trust_remote_code=trust, progress=report, for_hub=for_hub)


def _setting_flags() -> dict[str, Parameter]:
    flags = dict(read_yaml(__file__, "app")["settings"])
    for name, field in Profile.model_fields.items():
        if name not in _SETTINGS_WITHOUT_FLAG:  # the profile parses and checks a text later
            option = f"--{name.replace('_', '-')}"
            default = "none" if field.default is None else str(field.default).lower()
            flags[name] = {
                "type": "switch" if field.annotation is bool else "text",
                "option": f"{option}/--no-{option[2:]}" if field.annotation is bool else option,
                "metavar": _metavar(field.annotation),
                "complete": name,
                "help": f"{field.description} [default: {default}]",
            }
    flags["model"]["option"] += " -m"
    return parameters_of(
        {name: {"default": None, "panel": "Settings", **flags[name]} for name in flags}
    )


def _metavar(annotation: Any) -> str | None:
    """The placeholder for a flag's value in the help, such as `INT`; None for a boolean."""
    kinds = typing.get_args(annotation) or (annotation,)
    if all(isinstance(kind, str) for kind in kinds):
        return "|".join(kinds)
    if typing.get_origin(kinds[0]) is Annotated:  # a number with limits, or a word
        number = typing.get_args(kinds[0])[0]
        words = chain.from_iterable(map(typing.get_args, kinds[1:]))
        return "|".join([_NUMBER_METAVARS[number], *words])
    return None if bool in kinds else _NUMBER_METAVARS.get(kinds[0], "TEXT")


def _completer(name: str, metavar: str) -> Callable[[str], list[str]] | None:
    """For the shell's completion: what it completes by, or else the words of the metavar."""
    names: dict[str, Callable[[], list[str]]] = {
        "model": _model_names,
        "session": _session_names,
        "profile": lambda: [profile.name for profile in list_profiles()],
        "policy": lambda: [*policy_names(), *ALIASES],
    }
    words = [word for word in metavar.split("|") if word.islower() and "|" in metavar]
    if name not in names and not words:
        return None

    def complete(incomplete: str) -> list[str]:
        known = names[name]() if name in names else words
        return [word for word in known if word.startswith(incomplete)]

    return complete


def _model_names() -> list[str]:
    from sirchat.models.listing import model_names

    return model_names()


def _session_names() -> list[str]:
    from sirchat.saved.session_list import list_sessions

    saved = list_sessions(sessions_dir()).sessions
    return ["last", *(chat.name for chat in saved if chat.name), *(chat.id for chat in saved)]
