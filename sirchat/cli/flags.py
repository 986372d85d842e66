"""Makes a command-line flag for each setting; and a profile, model or session from the flags."""

import gc
import inspect
import os
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sirchat.config.profile import Profile
from sirchat.config.profile_files import list_profiles, resolve
from sirchat.errors import UsageError
from sirchat.memory.policies import ALIASES, policy_class, policy_names
from sirchat.models.hub import require
from sirchat.paths import archives_dir, sessions_dir
from sirchat.ui.interrupt import interruptible_imports

_NOT_FLAGS = ("description", "policy_options")
_SHORT = {"model": ("-m",)}
_NUMBERS = {int: "INT", float: "FLOAT"}


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: add a flag for every setting to a command.

    The command gets its argument `flags`: a dictionary of the settings that the user gave, by name.
    """
    own = inspect.signature(command).parameters
    extra = _parameters()

    def run(**values: Any) -> Any:
        given = {name: values.pop(name) for name in extra}
        flags = {name: value for name, value in given.items() if value is not None}
        if options := flags.pop("option", None):
            flags["policy_options"] = ",".join(options)
        return command(flags=flags, **values)

    kept = [p for name, p in own.items() if name != "flags"]
    run.__signature__ = inspect.Signature([*kept, *extra.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*kept, *extra.values()]}
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def _parameters() -> dict[str, inspect.Parameter]:
    shared = {
        "profile": (
            str,
            _flag(
                "--profile",
                "-p",
                help="A profile's name, or a YAML file.",
                autocompletion=_complete_profile,
            ),
        ),
        "option": (
            list[str],
            _flag(
                "--option",
                "-o",
                metavar="KEY=VALUE",
                help="An option of the policy; can be repeated.",
            ),
        ),
        "trust_policy": (
            list[str],
            _flag(
                "--trust-policy",
                metavar="MODULE:CLASS",
                help="Let a profile or a saved chat use this policy, whose code then runs.",
            ),
        ),
    }
    for name, field in Profile.model_fields.items():
        if name not in _NOT_FLAGS:
            shared[name] = (_plain_type(field.annotation), _setting_flag(name, field))
    return {
        name: inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )
        for name, (kind, option) in shared.items()
    }


def _setting_flag(name: str, field: Any) -> Any:
    flag, short = f"--{name.replace('_', '-')}", _SHORT.get(name, ())
    if field.annotation is bool:
        flag += flag.replace("--", "/--no-")
    of_names = {"policy": _complete_policy, "model": complete_model}
    complete: Callable[[str], list[str]] | None = of_names.get(name)
    metavar = _metavar(field.annotation)
    if metavar and "|" in metavar:
        complete = _completer(word for word in metavar.split("|") if word.islower())
    help_text = f"{field.description} [default: {_shown(field.default)}]"
    return _flag(flag, *short, help=help_text, autocompletion=complete, metavar=metavar)


def _flag(*names: str, **options: Any) -> Any:
    return typer.Option(*names, show_default=False, rich_help_panel="Settings", **options)


def _plain_type(annotation: Any) -> Any:
    """The type of the flag for a setting with this annotation.

    It is bool for a boolean setting, and else str: the profile parses and checks the text later.
    """
    return bool if annotation is bool else str


def _metavar(annotation: Any) -> str | None:
    """The placeholder for a flag's value in the help, such as `INT` or `ram|disk|off`.

    None for a boolean setting, whose flag takes no value.
    """
    kinds = typing.get_args(annotation) or (annotation,)
    if all(isinstance(kind, str) for kind in kinds):
        return "|".join(kinds)
    if typing.get_origin(kinds[0]) is Annotated:  # a number with limits, or a word
        number, words = typing.get_args(kinds[0])[0], map(typing.get_args, kinds[1:])
        return "|".join([_NUMBERS[number], *(word for some in words for word in some)])
    return None if bool in kinds else _NUMBERS.get(kinds[0], "TEXT")


def _shown(default: Any) -> str:
    return "none" if default is None else str(default).lower()


def _completer(values: Iterable[str]) -> Callable[[str], list[str]]:
    values = list(values)

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def _complete_policy(incomplete: str) -> list[str]:
    return [n for n in [*policy_names(), *ALIASES] if n.startswith(incomplete)]


def _complete_profile(incomplete: str) -> list[str]:
    return [p.name for p in list_profiles() if p.name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """For the shell's completion: names of usable models that begin with the typed text."""
    from sirchat.models.listing import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def complete_session(incomplete: str) -> list[str]:
    """For the shell's completion: names and ids of saved chats that begin with the typed text."""
    from sirchat.saved.session_list import newest_sessions

    saved = newest_sessions(sessions_dir())[0].sessions
    names = ["last", *(one.name for one in saved if one.name), *(one.id for one in saved)]
    return [name for name in names if name.startswith(incomplete)]


if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.models.model import LoadedModel
    from sirchat.models.progress import Progress

Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def misplaced_flag(flag: str, command: str) -> UsageError:
    """The error for a flag that stands before a subcommand but must stand after it."""
    return UsageError(f"{flag} has no effect before {command}", hint=f"put {flag} after {command}")


def profile_of(flags: dict[str, Any], *, loads_model: bool = True) -> Profile:
    """Make a profile from flags, environment variables and profile files; flags take precedence.

    If `loads_model`, and a flag or variable names a model, the function first checks that this
    model exists. So a wrong name causes an error before any slow import.
    """
    model = flags.get("model") or os.environ.get("SIRCHAT_MODEL")
    if model and loads_model:
        require(model)
    named = flags.get("profile")
    settings = {key: value for key, value in flags.items() if key != "profile"}
    return resolve(named, settings, os.environ)


def open_session(
    profile: Profile, trust: bool, report: "Progress | None", *, rows_in_events: bool = False
) -> "Session":
    """Load the model of a profile, and open a session with it.

    Settings that the user did not set get the model's defaults. A wrong name of a policy causes an
    error before any slow import.
    """
    with quick_start():
        with interruptible_imports():
            policy_class(profile.policy)
            from sirchat.chat.model_defaults import with_model_defaults
            from sirchat.chat.session import Session

        model = load(profile, trust, report)
        own = with_model_defaults(profile, model)
        return Session(model, own, rows_in_events=rows_in_events)


@contextmanager
def quick_start() -> Iterator[None]:
    """Context manager: inside the `with` block, Python's garbage collection is off.

    While a model loads, garbage collection would take 1/6 of the time, and free nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load(
    profile: Profile,
    trust: bool,
    report: "Progress | None" = None,
    *,
    for_hub: bool = False,
) -> "LoadedModel":
    """Load the model of a profile; `report` is called with its progress.

    If `for_hub`, the module and the tokenizer are always classes of transformers; otherwise
    sirchat may use classes of its own.
    """
    with interruptible_imports():
        from sirchat.memory.archive_folder import sweep
        from sirchat.models.load import load_model_of

    sweep(archives_dir())
    gc.freeze()  # imported objects stay; searching them for garbage would delay typing
    return load_model_of(profile, trust_remote_code=trust, progress=report, for_hub=for_hub)
