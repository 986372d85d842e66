"""A command-line flag for each setting; makes a profile, a model or a session from flags."""

import gc
import inspect
import os
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sirchat.config.profile import Profile
from sirchat.config.profile_files import list_profiles, resolve
from sirchat.memory.policies import ALIASES, policy_class, policy_names
from sirchat.memory.registry import BEST_RETRIEVER
from sirchat.models.hub import require_available
from sirchat.paths import archives_dir, sessions_dir
from sirchat.text.json_schema import load_schema
from sirchat.ui.interrupt import interruptible_imports

if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.models.model import LoadedModel
    from sirchat.models.progress import Progress

_SETTINGS_WITHOUT_FLAG = ("description", "policy_options")
_NUMBER_METAVARS = {int: "INT", float: "FLOAT"}

Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def with_setting_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: add a flag for every setting; the command gets these, by name, as `flags`."""
    setting_parameters = _flag_parameters()

    def run(**values: Any) -> Any:
        settings = {name: values.pop(name) for name in setting_parameters}
        flags = {name: value for name, value in settings.items() if value is not None}
        if options := flags.pop("option", None):
            flags["policy_options"] = ",".join(options)
        return command(flags=flags, **values)

    parameters = [*inspect.signature(command).parameters.values(), *setting_parameters.values()]
    parameters = [parameter for parameter in parameters if parameter.name != "flags"]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def complete_model(incomplete: str) -> list[str]:
    """For the shell's completion: names of usable models that begin with the typed text."""
    from sirchat.models.listing import model_names

    return _completer(model_names)(incomplete)


def complete_session(incomplete: str) -> list[str]:
    """For the shell's completion: names and ids of saved chats that begin with the typed text."""
    from sirchat.saved.session_list import MAX_LISTED, list_sessions

    saved = list_sessions(sessions_dir(), MAX_LISTED).sessions
    names = ["last", *(chat.name for chat in saved if chat.name), *(chat.id for chat in saved)]
    return _completer(lambda: names)(incomplete)


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
            from sirchat.models.learning import announce_learned, learn_in_background

        model = load_profile_model(profile, trust, report)
        # To quantize weights, all are loaded unpacked: more memory than a second process may take.
        may_learn = profile.device_map == "off" and profile.quantize not in ("int8", "int4")
        profile, notice = with_model_defaults(profile, model), ""
        if model.encoder.size and profile.recall == BEST_RETRIEVER:
            notice = announce_learned(model.name)
        if profile.learn_encoder and may_learn and not model.encoder.size:
            notice = learn_in_background(model.name, model.module, trust_remote_code=trust)
        if notice:
            model.tokenizer.notices = [*getattr(model.tokenizer, "notices", []), notice]
        return Session(model, profile, rows_in_events=rows_in_events)


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
        from sirchat.memory.archive_folder import remove_stale_folders
        from sirchat.models.load import load_model_of

    remove_stale_folders(archives_dir())
    gc.freeze()  # imported objects stay; searching them for garbage would delay typing
    return load_model_of(profile, trust_remote_code=trust, progress=report, for_hub=for_hub)


def _flag_parameters() -> dict[str, inspect.Parameter]:
    flags: dict[str, tuple[type, Any]] = {
        "profile": (
            str,
            _settings_option(
                "--profile",
                "-p",
                help="A profile's name, or a YAML file.",
                autocompletion=_completer(lambda: [profile.name for profile in list_profiles()]),
            ),
        ),
        "option": (
            list[str],
            _settings_option(
                "--option",
                "-o",
                metavar="KEY=VALUE",
                help="An option of the policy; can be repeated.",
            ),
        ),
        "trust_policy": (
            list[str],
            _settings_option(
                "--trust-policy",
                metavar="MODULE:CLASS",
                help="Let a profile or a saved chat use this policy, whose code then runs.",
            ),
        ),
    }
    for name, field in Profile.model_fields.items():
        if name not in _SETTINGS_WITHOUT_FLAG:  # the profile parses and checks a text later
            flags[name] = (bool if field.annotation is bool else str, _setting_option(name, field))
    return {
        name: inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )
        for name, (kind, option) in flags.items()
    }


def _setting_option(name: str, field: Any) -> Any:
    names = [f"--{name.replace('_', '-')}"]
    if field.annotation is bool:
        names[0] += names[0].replace("--", "/--no-")
    if name == "model":
        names.append("-m")
    metavar = _metavar(field.annotation)
    complete: Callable[[str], list[str]] | None = None
    if metavar and "|" in metavar:
        words = [word for word in metavar.split("|") if word.islower()]
        complete = _completer(lambda: words)
    elif name == "policy":
        complete = _completer(lambda: [*policy_names(), *ALIASES])
    elif name == "model":
        complete = complete_model
    default = "none" if field.default is None else str(field.default).lower()
    help_text = f"{field.description} [default: {default}]"
    return _settings_option(*names, help=help_text, autocompletion=complete, metavar=metavar)


def _settings_option(*names: str, **options: Any) -> Any:
    return typer.Option(*names, show_default=False, rich_help_panel="Settings", **options)


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


def _completer(names: Callable[[], list[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete
