"""From flags to a profile, a model or a session; and the flags that several commands share."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sirchat.config.profile import Profile
from sirchat.config.profile_files import resolve
from sirchat.errors import UsageError
from sirchat.memory.policies import policy_class
from sirchat.models.hub import require
from sirchat.paths import archives_dir
from sirchat.ui.interrupt import interruptible_imports

if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.models.model import LoadedModel
    from sirchat.models.progress import Progress

Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def misplaced_flag(flag: str, command: str) -> UsageError:
    """The error for a flag that was given before its subcommand, where it has no effect."""
    return UsageError(f"{flag} stands before {command}", hint=f"put it after {command}")


def profile_of(flags: dict[str, Any], *, loads_model: bool = True) -> Profile:
    """The settings from flags, environment and profile files together, by their precedence.

    If the model will be loaded, and a flag or the environment names it, it is looked for first,
    before anything heavy is imported.
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
    """Load the model and open a session; the policy is checked before anything heavy loads."""
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
    """Without the garbage collector, which finds nothing in loading and takes a sixth of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load(profile: Profile, trust: bool, report: "Progress | None" = None) -> "LoadedModel":
    """Load the model of a profile; `report` is called with its progress."""
    with interruptible_imports():
        from sirchat.memory.segments import sweep
        from sirchat.models.compiling import load_model_of

    sweep(archives_dir())
    gc.freeze()  # what was imported stays: searching it would hold up the keys that are typed
    return load_model_of(profile, trust_remote_code=trust, progress=report)
