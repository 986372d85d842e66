"""The command line: parse, dispatch, exit codes. Nothing heavy is imported at the top.

Exit codes: 0 fine, 1 failure, 2 usage, 130 interrupt.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sirchat import __version__
from sirchat.cli import study_flags
from sirchat.cli.compare import compare
from sirchat.cli.eval import eval_app
from sirchat.cli.flags import with_settings
from sirchat.cli.launch import Debug, Trust, open_session, profile_of, quick_start
from sirchat.cli.lm_eval import add_lm_eval
from sirchat.cli.sessions import sessions_app
from sirchat.cli.train import train_app
from sirchat.config.layers import changed
from sirchat.config.profile import Profile, parse_size
from sirchat.config.profile_files import init_profile, list_profiles, resolve, show
from sirchat.config.values import parse_value
from sirchat.errors import (
    SirchatError,
    TranscriptError,
    UsageError,
    terminal_has_gone,
)
from sirchat.memory.policies import policy_class, policy_names
from sirchat.ui.text import displayable, displayable_line

if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.models.progress import Progress
    from sirchat.saved.store import SessionStore

app = typer.Typer(
    name="sirchat",
    help="Endless chat with local language models, under a KV-cache budget you can see and choose.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
profiles_app = typer.Typer(help="Named settings: list, show, find, and start your own.")
policies_app = typer.Typer(
    help="The eviction policies, with their options.", invoke_without_command=True
)
app.add_typer(profiles_app, name="profiles", no_args_is_help=True)
app.add_typer(policies_app, name="policies")
app.add_typer(train_app, name="train", no_args_is_help=True)
app.add_typer(eval_app, name="eval", no_args_is_help=True)
add_lm_eval(eval_app)
app.add_typer(sessions_app, name="sessions", no_args_is_help=True)
app.command()(compare)

Json = Annotated[
    bool, typer.Option("--json", help="Print the event stream, one JSON object a line.")
]
Feed = Annotated[
    bool, typer.Option("--feed", help="Read the transcript's replies instead of generating them.")
]
Format = Annotated[
    str,
    typer.Option(help="Format of the transcript.", metavar="auto|jsonl|sharegpt|text|lines"),
]
JsonTokens = Annotated[
    bool, typer.Option("--json-tokens", help="As --json, with the held tokens of every turn.")
]


def main() -> None:
    """Run the command line and leave with its exit code."""
    debug = "--debug" in sys.argv or bool(os.environ.get("SIRCHAT_DEBUG"))
    try:
        code = app(args=_with_defaults(sys.argv[1:]), standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except SirchatError as error:
        if debug:
            raise
        _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        _fail(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except BrokenPipeError:
        # Whoever read the output has left; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        _fail(f"{type(error).__name__}: {error} (--debug shows where)", 1)


def _with_defaults(arguments: list[str]) -> list[str]:
    """`--resume` alone, in front of any command, means the last session."""
    commands = [group.name for group in app.registered_groups] + ["replay", "bench", "compare"]
    own = next((n for n, one in enumerate(arguments) if one in commands), len(arguments))
    front = arguments[:own]
    for n, (one, then) in enumerate(zip(front, [*front[1:], "-"], strict=False)):
        if one == "--resume" and then.startswith("-"):
            front[n] = "--resume=last"
    return front + arguments[own:]


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"sirchat: {displayable_line(message)}\n")
    sys.exit(code)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"sirchat {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
@with_settings
def start(
    context: typer.Context,
    flags: dict[str, Any],
    feed: Feed = False,
    format: Format = "auto",
    json: Json = False,
    json_tokens: JsonTokens = False,
    trust_remote_code: Trust = False,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Take up a saved chat: the last one, or that of an id or a name.",
            metavar="[ID|NAME|last]",
        ),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="With --resume: read the whole text anew.")
    ] = False,
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Chat; or, when input comes from a pipe or a file, replay it as a transcript."""
    given = {"feed": feed, "format": format != "auto", "json": json, "json_tokens": json_tokens}
    about_transcripts = [name for name, used in given.items() if used]
    if context.invoked_subcommand is not None:
        misplaced = [*flags, *about_transcripts, *["trust_remote_code"] * trust_remote_code]
        misplaced += ["resume"] * (resume is not None) + ["rebuild"] * rebuild
        if misplaced:
            flag, command = _flag(misplaced[0]), context.invoked_subcommand
            raise UsageError(f"{flag} stands before {command}", hint=f"put it after {command}")
        return
    if rebuild and resume is None:
        raise UsageError("--rebuild goes with --resume")
    if not sys.stdin.isatty():
        if resume is not None:
            raise UsageError("--resume is for chats, and standard input is no terminal")
        _replay("standard input", flags, feed, format, json, json_tokens, trust_remote_code)
        return
    if about_transcripts:
        flag = _flag(about_transcripts[0])
        raise UsageError(f"{flag} is for transcripts, and standard input is a terminal")
    _chat(flags, resume, rebuild, trust_remote_code, debug)


@app.command()
@with_settings
def replay(
    file: Annotated[Path, typer.Argument(help="The transcript; - is standard input.")],
    flags: dict[str, Any],
    feed: Feed = False,
    format: Format = "auto",
    json: Json = False,
    json_tokens: JsonTokens = False,
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Replay a transcript: JSONL, ShareGPT, USER:/ASSISTANT: text, or plain lines."""
    _replay(str(file), flags, feed, format, json, json_tokens, trust_remote_code)


@app.command()
def bench(
    model: Annotated[
        str, typer.Option(help="A model, or a shape with random weights: 135m, 1b, 8b.")
    ] = "tiny",
    cache: Annotated[int, typer.Option(help="Tokens held while decoding.")] = 1024,
    rounds: Annotated[int, typer.Option(help="Pairs of blocks that are timed.")] = 15,
    seen: Annotated[
        str, typer.Option(metavar="EARLY,LATE", help="Tokens seen before the last comparison.")
    ] = "2000,100000",
    device: Annotated[
        str, typer.Option(metavar="auto|cuda|mps|cpu", help="Where it runs.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(metavar="auto|float32|bfloat16|float16")] = "auto",
    panel: Annotated[
        bool, typer.Option("--panel", help="Measure the live panel instead, on against off.")
    ] = False,
    attention: Annotated[
        bool, typer.Option("--attention", help="Measure what counting attention costs instead.")
    ] = False,
    index: Annotated[
        bool, typer.Option("--index", help="Measure searches by index instead, against exact ones.")
    ] = False,
    archived: Annotated[
        int, typer.Option(min=10_000, help="With --index: archived tokens to search.")
    ] = 1_000_000,
    limits: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Measure what the archive takes over so many instead."),
    ] = None,
    archive_limit: Annotated[str, typer.Option(help="Limit of that archive.")] = "256MiB",
    training: Annotated[
        int,
        typer.Option(metavar="TOKENS", help="Measure a training step with anchors instead.", min=0),
    ] = 0,
    json: study_flags.Json = False,
    debug: Debug = False,
) -> None:
    """Speed against a bare transformers loop, as ratios (below 1: sirchat is faster)."""
    profile = resolve(None, {"model": model, "device": device, "dtype": dtype}, {})
    early, comma, late = seen.partition(",")
    if not (comma and early.isdigit() and late.isdigit()):
        raise UsageError(f"--seen {seen!r} is not EARLY,LATE", hint="for example 2000,100000")
    if training == 1:
        raise UsageError("--training 1 leaves nothing to foretell; it must be at least 2")
    if cache < 64 or rounds < 2 or int(early) < cache:
        raise UsageError("--cache must be at least 64, EARLY at least that, --rounds at least 2")
    from sirchat.bench.report import print_bench
    from sirchat.bench.shapes import bench_model
    from sirchat.bench.speed import BenchOptions

    options = BenchOptions(cache=cache, rounds=rounds, seen=(int(early), int(late)))
    loaded = bench_model(model, profile.device, profile.dtype)
    if limits is not None:
        from sirchat.bench.limits import print_limits

        limit = parse_size(
            changed(profile, "--archive-limit", archive_limit=archive_limit).archive_limit
        )
        print_limits(loaded, limits, limit or 0, as_json=json)
        return
    print_bench(
        loaded,
        options,
        panel=panel,
        attention=attention,
        archived=archived * index,
        training=training,
        as_json=json,
    )


@profiles_app.command("list")
def profiles_list() -> None:
    """The profiles there are, by name."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "description", "from", box=None)
    for profile in list_profiles():
        origin = "sirchat" if profile.shipped else "you"
        table.add_row(
            *map(Text, map(displayable_line, (profile.name, profile.description, origin)))
        )
    Console().print(table)


@profiles_app.command("show")
@with_settings
def profiles_show(
    name: Annotated[str, typer.Argument(help="A profile's name, or a YAML file.")],
    flags: dict[str, Any],
) -> None:
    """Every setting of a profile, as YAML."""
    typer.echo(displayable(show(profile_of({**flags, "profile": name}))), nl=False)


@profiles_app.command("path")
def profiles_path(
    name: Annotated[str | None, typer.Argument(help="A profile's name.")] = None,
) -> None:
    """Where a profile is, or where your own go."""
    from sirchat.config.profile_files import profile_path
    from sirchat.paths import user_profiles_dir

    typer.echo(displayable_line(str(profile_path(name) if name else user_profiles_dir())))


@profiles_app.command("init")
def profiles_init(name: Annotated[str, typer.Argument(help="The new profile's name.")]) -> None:
    """Write a commented profile of your own, to edit."""
    typer.echo(displayable_line(str(init_profile(name))))


@policies_app.callback()
def policies_list(context: typer.Context) -> None:
    """The eviction policies: what they keep, their options and defaults, and their source."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("policy", "keeps", "options", "source", box=None, padding=(0, 2, 1, 0))
    for name in policy_names():
        made = policy_class(name)
        what = (made.__doc__ or "").strip().split("\n\n")[0]
        options = [f"{setting} (setting)" for setting in made.uses]
        for field in fields(made):
            options.append(f"{field.name} = {field.default}: {field.metadata.get('help', '')}")
        cells = (name, " ".join(what.split()), "\n".join(options), made.source)
        table.add_row(*(Text(displayable(cell)) for cell in cells))
    Console().print(table)


@policies_app.command("check")
def policies_check(
    name: Annotated[str, typer.Argument(help="A policy's name, or package.module:Class.")],
) -> None:
    """Check that a policy keeps the contract, on random ledgers."""
    from sirchat.memory.contract import broken_promises

    broken = broken_promises(policy_class(name)())
    for promise in broken:
        typer.echo(displayable_line(f"{name}: {promise}"))
    typer.echo(displayable_line(f"{name}: {'breaks' if broken else 'keeps'} the contract"))
    if broken:
        raise typer.Exit(1)


def _chat(
    flags: dict[str, Any], resume: str | None, rebuild: bool, trust: bool, debug: bool
) -> None:
    """Open the chat; a saved one under its own settings, and then those that flags name."""
    later: dict[str, Any] = {}
    if resume is None:
        profile, store = profile_of(flags), None
    else:
        profile, store, later = _saved(resume, flags, at_once=rebuild)
    with quick_start():
        from sirchat.ui.repl import chat
        from sirchat.ui.screen import Screen

    def opened(report: "Progress | None") -> "Session":
        session = open_session(profile, trust, report)
        if store is not None:
            from sirchat.saved.autosave import take_up

            take_up(session, store, rebuild=rebuild)
        if later:
            list(session.switch("--resume", **later))
        return session

    with _torn_terminal_is_fine():
        chat(opened, profile.model, Screen(theme=profile.theme), store=store, debug=debug)


_AT_ONCE = ("model", "device", "dtype", "panel", "theme", "save", "save_kv")
"""Settings of a saved chat that other ones replace before it is taken up."""


def _saved(
    ident: str, flags: dict[str, Any], *, at_once: bool
) -> "tuple[Profile, SessionStore, dict[str, Any]]":
    """A saved session, the settings to open it with, and those to switch to afterwards."""
    from sirchat.chat.settings import FIXED
    from sirchat.config.profile_files import load_profile
    from sirchat.paths import sessions_dir
    from sirchat.saved.autosave import saved_profile
    from sirchat.saved.session_list import find_session
    from sirchat.saved.store import SessionStore

    store = SessionStore.open(find_session(sessions_dir(), ident))
    named = load_profile(flags["profile"]) if flags.get("profile") else {}
    given = {key: value for key, value in named.items() if key not in FIXED}
    for key, value in flags.items():
        if key != "profile":
            given[key] = parse_value(key, value) if isinstance(value, str) else value
    first = {key: value for key, value in given.items() if at_once or key in _AT_ONCE}
    rest = {key: value for key, value in given.items() if key not in first}
    return changed(saved_profile(store), "--resume", **first), store, rest


def _flag(name: str) -> str:
    return "--option" if name == "policy_options" else f"--{name.replace('_', '-')}"


def _replay(
    name: str,
    flags: dict[str, Any],
    feed: bool,
    format: str,
    json: bool,
    json_tokens: bool,
    trust: bool,
) -> None:
    """Replay a file or standard input; a file that is missing costs no loading of the model."""
    from sirchat.text.transcript import read_turns

    profile = profile_of(flags)
    from_stdin = name in ("-", "standard input")
    try:
        stream = sys.stdin.buffer if from_stdin else open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise TranscriptError(f"{name} cannot be read: {error.strerror}") from error
    with stream:
        turns = read_turns(stream, "standard input" if from_stdin else name, format)
        from sirchat.ui.loading import loading_bar
        from sirchat.ui.replay import ReplayOptions, replay
        from sirchat.ui.screen import Screen

        screen = Screen(theme=profile.theme)
        with loading_bar(screen, profile.model) as report:
            session = open_session(profile, trust, report, rows_in_events=json_tokens)
        options = ReplayOptions(feed=feed, json=json or json_tokens, name=name)
        replay(session, turns, screen, options)


@contextmanager
def _torn_terminal_is_fine() -> Iterator[None]:
    """A terminal that goes away ends the chat without complaint."""
    try:
        yield
    except OSError as error:
        if not terminal_has_gone(error):
            raise
        raise BrokenPipeError from error
