"""The `sirchat compare` command, which replays one transcript under several settings."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sirchat.cli.flags import (
    Trust,
    load_profile_model,
    profile_from_flags,
    with_flags,
    with_setting_flags,
)
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.config.values import format_setting, parse_value
from sirchat.errors import TranscriptError, UsageError
from sirchat.lab.commands.study_flags import command_line, settings_of
from sirchat.paths import make_private_dir, open_private, read_yaml
from sirchat.ui.text import displayable, displayable_line

if TYPE_CHECKING:
    from sirchat.lab.studies.side_by_side.compare import Comparison, Rounds
    from sirchat.models.model import LoadedModel


compare_app = typer.Typer(add_completion=False)


_HELP = """Replay a transcript under several settings, and show how the model's answers differ.

For each setting, the number of held tokens and the agreement with policy full are shown, then the
beginnings of the answers. Ctrl-C ends the comparison after the current round; the rounds compared
until then are shown.
"""


@compare_app.command()
@with_setting_flags
@with_flags(read_yaml(__file__, "common")["compare"], _HELP)
def compare(
    file: Annotated[Path, typer.Argument(help="The transcript; - is standard input.")],
    flags: dict[str, Any],
    policies: str,
    budgets: str | None,
    decays: str | None,
    sweep: list[str] | None,
    own: bool,
    format: str,
    whole: bool,
    json: bool,
    html: Path | None,
    out: Path | None,
    trust_remote_code: Trust = False,
) -> None:
    profile = profile_from_flags(flags)
    settings = _settings(profile, policies, budgets, decays, sweep or [])
    transcript, name = _transcript(file, format, settings)
    with _tried("--html", html), _tried("--out", out and out / "compare.json"):
        model = load_profile_model(profile, trust_remote_code)
        found, interrupted = _run(model, settings, transcript, name, own)
        if not found.transcript.rounds:
            raise KeyboardInterrupt
        found = with_notes(found)
        from sirchat.lab.studies.report import provenance
        from sirchat.lab.studies.side_by_side.report import page_of, record_of, write_files

        record = record_of(found, provenance(model, "compare", command_line()))
        if json:
            from json import dumps

            typer.echo(dumps(record))
        else:
            _print(found, whole)
        for note in found.notes:
            typer.echo(displayable_line(f"sirchat: {note}"), err=True)
        if html is not None:
            with _in_one_line("--html", html), open_private(html, "w") as page:
                page.write(page_of(record))
        if out is not None:
            with _in_one_line("--out", out):
                try:
                    write_files(found, record, out)
                except UsageError as error:
                    typer.echo(f"sirchat: no plots: {error}", err=True)
        if interrupted:
            raise KeyboardInterrupt


_NOTHING_EVICTED = (
    "nothing was evicted under any of these settings, so they could not differ; "
    "compare smaller budgets (--budgets) or a longer transcript"
)


def with_notes(found: "Comparison") -> "Comparison":
    """The comparison, with a note if none of several settings has evicted tokens."""
    has_evicted = any(one.held < one.seen for setting in found.settings for one in setting.rounds)
    if len(found.settings) < 2 or has_evicted:
        return found
    return replace(found, notes=(*found.notes, _NOTHING_EVICTED))


def _settings(
    profile: Profile, policies: str, budgets: str | None, decays: str | None, sweep: list[str]
) -> tuple[Profile, ...]:
    """Make the settings to compare from the command's flags; returns one profile for each."""
    budgets = str(profile.budget) if budgets is None else budgets
    decays = format_setting(profile.decay) if decays is None else decays
    for flag, key, values in (("--budgets", "budget", budgets), ("--decays", "decay", decays)):
        for value in values.split(","):  # checked one by one, so that the error names the flag
            changed_profile(profile, flag, **{key: parse_value(key, value)})
    return settings_of(profile, f"full,{policies}", budgets, decays, sweep)


def _transcript(file: Path, format: str, settings: tuple[Profile, ...]) -> "tuple[Rounds, str]":
    """Read the transcript in `file`, `-` for standard input; its name can be displayed."""
    from sirchat.chat.settings import checked_switches
    from sirchat.lab.studies.side_by_side.compare import rounds_of
    from sirchat.text.text_file import read_regular, without_surrogates
    from sirchat.text.transcript import iter_turns

    path = displayable_line(without_surrogates(str(file)))
    name = "standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else read_regular(file)
    except OSError as error:
        raise TranscriptError(f"{name} cannot be read: {error.strerror}") from error
    turns = list(iter_turns(BytesIO(data), name, format))
    for profile in settings:  # the values that are parsed are the same for each
        checked = list(checked_switches(turns, name, profile))
    return rounds_of(checked, name), name


def _run(
    model: "LoadedModel", settings: tuple[Profile, ...], rounds: "Rounds", name: str, own: bool
) -> "tuple[Comparison, bool]":
    """Replay the transcript's rounds under each setting, and show a progress bar meanwhile."""
    from rich.progress import Progress

    from sirchat.lab.studies.side_by_side.compare import compare
    from sirchat.ui.interrupt import InterruptFlag
    from sirchat.ui.screen import make_notes_console

    console = make_notes_console()
    with (
        InterruptFlag() as stopped,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("comparing", total=len(rounds.rounds) * len(settings))

        def advance() -> None:
            bar.update(task, advance=1, description="finishing this round" if stopped() else None)

        found = compare(
            model, settings, rounds, file=name, own=own, advance=advance, stopped=stopped
        )
    return found, stopped()


def _print(found: "Comparison", is_whole: bool) -> None:
    from rich.console import Console

    from sirchat.lab.studies.side_by_side.report import draw

    console = Console(highlight=False, markup=False)
    for part in draw(found, displayable, is_whole=is_whole):
        console.print(part)


@contextmanager
def _tried(flag: str, path: Path | None) -> Iterator[None]:
    """Fail before a run whose result can't be written; one that fails leaves no empty file."""
    if path is None:
        yield
        return
    with _in_one_line(flag, path):
        if flag == "--out":
            make_private_dir(path.parent)
        is_new = not path.exists()
        open_private(path, "a").close()
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if is_new and not path.stat().st_size:
                path.unlink()
        raise


@contextmanager
def _in_one_line(flag: str, path: Path) -> Iterator[None]:
    """Errors while a file is written that the value of a flag names, or files in that folder."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{flag} {path} cannot be written: {error.strerror}",
            hint="give the path of a file that can be written",
        ) from error
