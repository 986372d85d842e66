"""`sirchat tutorial`: what a budget does to a chat's memory, shown and explained."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from sirchat.cli.chat import meanwhile
from sirchat.cli.launch import Debug, profile_of, quick_start
from sirchat.config.profile import Profile
from sirchat.ui.interrupt import insistent

if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.models.bars import Progress


def tutorial(
    auto: Annotated[
        bool, typer.Option("--auto", help="Run through without waiting for Enter.")
    ] = False,
    debug: Debug = False,
) -> None:
    """See a chat forget and remember, in three minutes, with the bundled model.

    Nothing is saved. Where input or output is no terminal, it does not wait.
    The exit code is then 1 if something does not go as it should.
    """
    own = profile_of({}, loads_model=False)
    with meanwhile("loading tiny"), quick_start(), insistent():
        from sirchat.chat.session import Session
        from sirchat.models.model import load_model
        from sirchat.ui.screen import Screen
        from sirchat.ui.tutorial import run_tutorial
        from sirchat.ui.tutorial_steps import SETTINGS

    def opened(report: "Progress | None") -> "Session":
        # Of the user's settings only those that change nothing of what is shown.
        model = load_model("tiny", device="cpu", threads=own.threads, progress=report)
        return Session(model, Profile(save=False, theme=own.theme, **SETTINGS))

    waits = not auto and sys.stdin.isatty() and sys.stdout.isatty()
    if not run_tutorial(opened, Screen(theme=own.theme), waits=waits) and not waits:
        raise typer.Exit(1)
