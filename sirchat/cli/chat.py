"""The commands that open a conversation: a chat, `ask`, `replay` and `tutorial`."""

import os
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from sirchat.cli.flags import (
    Debug,
    Trust,
    complete_session,
    open_session,
    profile_from_flags,
    with_setting_flags,
    without_garbage_collection,
)
from sirchat.cli.question import read_question
from sirchat.config.profile import FIXED_SETTINGS, Profile
from sirchat.config.profile_files import changed_profile, load_profile, resolve, trusted_policies
from sirchat.config.values import parse_value
from sirchat.errors import (
    SessionError,
    SirchatError,
    TranscriptError,
    UsageError,
    is_output_closed,
)
from sirchat.memory.policies import import_typed
from sirchat.paths import sessions_dir
from sirchat.text.json_schema import load_schema
from sirchat.ui.interrupt import interruptible_imports
from sirchat.ui.text import displayable_line

if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.models.progress import Progress
    from sirchat.saved.store import SessionStore
    from sirchat.ui.screen import Screen

# Settings that flags change before a saved chat is loaded; others change after that.
_SETTINGS_BEFORE_LOADING = (
    *("model", "device", "device_map", "dtype", "quantize", "unpack_dtype", "cache_dtype"),
    *("compile", "learn_encoder", "save", "save_kv"),
)
_DISPLAY_SETTINGS = ("panel", "theme", "markdown", "thinking")  # those of a chat, likewise

Json = Annotated[bool, typer.Option("--json", help="Print events as JSON, one object per line.")]
Feed = Annotated[
    bool, typer.Option("--feed", help="Read the transcript's replies instead of generating them.")
]
Format = Annotated[
    str, typer.Option(help="Format of the transcript.", metavar="auto|jsonl|sharegpt|text|lines")
]
JsonTokens = Annotated[
    bool,
    typer.Option(
        "--json-tokens",
        help="Like --json; also list the tokens evicted, restored, and held after each turn.",
    ),
]
Continue = Annotated[
    bool,
    typer.Option("--continue", "-c", help="Go on in the last chat: as --resume last."),
]
ToolsFile = Annotated[
    str | None,
    typer.Option(
        "--tools",
        help="Tools for the model: a JSON file of MCP servers, as other programs have.",
        metavar="FILE",
    ),
]
ToolsAllow = Annotated[
    list[str] | None,
    typer.Option(
        "--tools-allow",
        help="Turn on these tools, and call them without asking, such as time__*; can be repeated.",
        metavar="PATTERN",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only replies and errors.")]


def open_chat(
    flags: dict[str, Any],
    *,
    resume: str | None,
    branch: str | None,
    rebuild: bool,
    trust: bool,
    debug: bool,
    quiet: bool,
    tools: str | None = None,
    tools_allow: list[str] | None = None,
) -> None:
    """Open a chat; returns when the user leaves it.

    `resume` is a saved chat to continue, by id or name; `branch` names a copy of it to continue
    instead; with `rebuild`, the model reads it again, under the settings in `flags`.
    """
    from sirchat.tools.config import ToolFlags

    servers = ToolFlags.of(tools, tools_allow)
    later: dict[str, Any] = {}
    if resume is None:
        profile, store = profile_from_flags(flags), None
    else:
        first = () if rebuild else (*_SETTINGS_BEFORE_LOADING, *_DISPLAY_SETTINGS)
        profile, store, later, skipped = _saved_settings(resume, flags, first, branch=branch)
        for error in skipped:
            went_on = f"continuing with session {store.name or store.id}"
            sys.stderr.write(f"{displayable_line(f'sirchat: {error}; {went_on}')}\n")
    from sirchat.ui.screen import Screen
    from sirchat.ui.startup import chat, choose_model

    screen, trusted = Screen(theme=profile.theme, is_quiet=quiet), trusted_policies(flags)
    if resume is None and "model" not in profile.model_fields_set:
        with _closed_terminal_ends_chat():
            name = choose_model(screen)
        if name is not None:
            profile = profile_from_flags({**flags, "model": name})

    def opened(report: "Progress | None") -> "Session":
        with without_garbage_collection():
            with interruptible_imports():
                import sirchat.ui.repl  # noqa: F401  # the prompt needs it as soon as it is ready
            return _open_chat_session(profile, trust, report, store, later, rebuild=rebuild)

    with _closed_terminal_ends_chat():
        chat(
            opened,
            profile,
            screen,
            store=store,
            debug=debug,
            trusted_policies=trusted,
            tools=servers,
        )


@with_setting_flags
def ask(
    flags: dict[str, Any],
    question: Annotated[
        list[str] | None,
        typer.Argument(help="The question; text from a pipe is put before it. - is that alone."),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", "-f", help="Put this file, or a folder's, first; can be repeated."),
    ] = None,
    no_input: Annotated[
        bool, typer.Option("--no-input", help="Do not read standard input.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Ask the question in this saved chat, and add the reply to the chat.",
            autocompletion=complete_session,
            metavar="ID|NAME|last",
        ),
    ] = None,
    is_last: Continue = False,
    json: Json = False,
    server: Annotated[
        str,
        typer.Option(
            help="auto: a running sirchat serve answers, if it has this model; off; or its URL.",
            metavar="auto|off|URL",
        ),
    ] = "auto",
    tools: ToolsFile = None,
    tools_allow: ToolsAllow = None,
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Ask one question and print only the reply; text from a pipe is put before the question.

    All of the text is held, if the model's context and the memory allow; if not all of it is, a
    line on standard error says how much was read, and how much is held.
    """
    resume = "last" if is_last and resume is None else resume
    text, source, has_files = read_question(
        question or [], file or [], has_input=not no_input, note=_print_remark
    )
    from sirchat.tools.config import ToolFlags

    servers = ToolFlags.of(tools, tools_allow)
    needs_own = {"--resume": resume is not None, "--json": json}
    needs_own |= {"--trust-remote-code": trust_remote_code, "--tools": bool(servers.servers)}
    for flag in (flag for flag, is_given in needs_own.items() if is_given):
        if server not in ("auto", "off"):
            raise UsageError(f"--server has no effect with {flag}", hint="give one of the two")
    later: dict[str, Any] = {}
    store: SessionStore | None = None
    if resume is None:
        profile = profile_from_flags(flags)
        if source and "temperature" not in profile.model_fields_set:
            profile = profile.model_copy(update={"temperature": 0.0})  # a fact is there, or not
    else:
        profile, store, later, skipped = _saved_settings(resume, flags, _SETTINGS_BEFORE_LOADING)
        if skipped:
            store.close()
            raise skipped[0]
    with without_garbage_collection(), interruptible_imports():
        from sirchat.ui.screen import Screen

    screen = Screen(theme=profile.theme)
    if resume is None and "model" not in profile.model_fields_set:
        from sirchat.ui.startup import explain_toy_model

        explain_toy_model(screen)
    source = 0 if profile.json_schema != "off" else source  # its reply is for a program
    needs_room = has_files or bool(servers.allow)
    holds_all = store is None and needs_room and "budget" not in profile.model_fields_set
    if server != "off" and not any(needs_own.values()):
        from sirchat.cli.ask_client import ask_server

        if ask_server(server, profile, text, screen, holds_all=holds_all, source=source):
            return
    with without_garbage_collection(), interruptible_imports():
        from sirchat.ui.replay import print_reply
        from sirchat.ui.status import loading_bar
        from sirchat.ui.tool_use import use_tools

    with loading_bar(screen, profile.model) as report:
        session = _open_chat_session(profile, trust_remote_code, report, store, {})
    with use_tools(servers, session, screen), _within_saved_chat(session, screen, store, later):
        print_reply(session, text, screen, as_json=json, holds_all=holds_all, source=source)


@contextmanager
def _within_saved_chat(
    session: "Session", screen: "Screen", store: "SessionStore | None", later: dict[str, Any]
) -> Iterator[None]:
    """Context manager: what is asked belongs to the chat in `store`, if any, under `later`."""
    if store is None:
        yield
        return
    from sirchat.chat.retry import temporary_settings
    from sirchat.ui.saved_chat import SavedChat

    saved_chat = SavedChat(session, screen, store)
    try:
        with temporary_settings(
            session, "ask", later
        ):  # they are for this question, not for the chat
            yield
    finally:
        saved_chat.close()


def replay(
    file: Annotated[Path, typer.Argument(help="The transcript; - is standard input.")],
    flags: dict[str, Any],
    feed: Feed = False,
    format: Format = "auto",
    json: Json = False,
    json_tokens: JsonTokens = False,
    quiet: Quiet = False,
    tools: ToolsFile = None,
    tools_allow: ToolsAllow = None,
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Replay a transcript: JSONL, ShareGPT, USER:/ASSISTANT: text, or plain lines.

    A line of JSONL may switch settings: {"switch": {"policy": "sink", "budget": 256}}.
    """
    from sirchat.text.transcript import SettingsSwitch, iter_turns, one_conversation
    from sirchat.tools.config import ToolFlags

    servers = ToolFlags.of(tools, tools_allow)
    profile = profile_from_flags(flags)
    is_input = str(file) == "-"
    name = "standard input" if is_input else str(file)
    try:
        stream = sys.stdin.buffer if is_input else file.open("rb")
    except OSError as error:
        raise TranscriptError(f"{name} cannot be read: {error.strerror}") from error
    trusted = trusted_policies(flags)
    with stream:
        items = iter_turns(stream, name, format)
        if _is_regular_file(stream):  # it can be checked before loading
            items = iter(read := list(items))
            if switches := [item for item in read if isinstance(item, SettingsSwitch)]:
                from sirchat.chat.settings import checked_switches

                list(checked_switches(switches, name, profile, trusted))
        turns = one_conversation(items, name)
        from sirchat.chat.settings import checked_switches
        from sirchat.ui import replay
        from sirchat.ui.screen import Screen
        from sirchat.ui.status import loading_bar
        from sirchat.ui.tool_use import use_tools

        screen = Screen(theme=profile.theme, is_quiet=quiet)
        with loading_bar(screen, profile.model) as report:
            session = open_session(profile, trust_remote_code, report, rows_in_events=json_tokens)
        options = replay.ReplayOptions(feed=feed, json=json or json_tokens, name=name)
        with use_tools(servers, session, screen):
            turns = checked_switches(turns, name, session.profile, trusted)
            replay.replay(session, turns, screen, options)
        if is_input and not session.turns:
            screen.note(
                "standard input is empty: at a terminal, sirchat opens a chat; sirchat < FILE "
                "answers a transcript"
            )


def _is_regular_file(stream: BinaryIO) -> bool:
    with suppress(OSError):
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    return False


def tutorial(
    auto: Annotated[
        bool, typer.Option("--auto", help="Run all steps without waiting for Enter.")
    ] = False,
    debug: Debug = False,
) -> None:
    """See what a chat evicts and restores, in three minutes, with the bundled model.

    Nothing is saved. If input or output is no terminal, the tutorial does not wait for Enter.
    The exit code is then 1 if a step has an unexpected result.
    """
    profile = profile_from_flags({}, loads_model=False)
    from sirchat.ui.screen import Screen
    from sirchat.ui.status import loading_bar

    screen = Screen(theme=profile.theme)
    with loading_bar(screen, "tiny"), without_garbage_collection(), interruptible_imports():
        from sirchat.chat.session import Session
        from sirchat.models.load import load_model
        from sirchat.ui.tutorial import TUTORIAL_SETTINGS, run_tutorial

    def opened(report: "Progress | None") -> "Session":
        # Only those of the user's settings are used that do not change what is shown.
        model = load_model("tiny", device="cpu", threads=profile.threads, progress=report)
        return Session(model, Profile(save=False, theme=profile.theme, **TUTORIAL_SETTINGS))

    waits = not auto and sys.stdin.isatty() and sys.stdout.isatty()
    if not run_tutorial(opened, screen, waits=waits) and not waits:
        raise typer.Exit(1)


@contextmanager
def _closed_terminal_ends_chat() -> Iterator[None]:
    """Context manager: if the terminal was closed, the command ends without an error message."""
    try:
        yield
    except OSError as error:
        if not is_output_closed(error):
            raise
        raise BrokenPipeError from error


def _print_remark(text: str) -> None:
    """Print a remark while no screen is there yet."""
    sys.stderr.write(f"{displayable_line(text)}\n")
    sys.stderr.flush()


def _open_chat_session(
    profile: Profile,
    trust: bool,
    report: "Progress | None",
    store: "SessionStore | None",
    later: dict[str, Any],
    *,
    rebuild: bool = False,
) -> "Session":
    """Open a session; load the chat saved in `store`, if any; switch to the settings `later`."""
    session = open_session(profile, trust, report)
    if store is not None:
        from sirchat.saved.resume import resume_session

        resume_session(session, store, rebuild=rebuild)
    if later:
        session.switch("--resume", **later)
    return session


def _saved_settings(
    ident: str, flags: dict[str, Any], at_once: Collection[str], *, branch: str | None = None
) -> "tuple[Profile, SessionStore, dict[str, Any], list[SessionError]]":
    """Open the file of a saved chat, or of a copy of it that gets the name `branch`.

    Returns the settings with which to open the chat, the open file, the settings to switch to after
    that, and why newer chats were passed over. The settings named `at_once`, or else all, apply at
    its opening.
    """
    from sirchat.saved.saved_state import saved_profile
    from sirchat.saved.session_list import copy_session, open_saved_file

    trusted = trusted_policies(flags)
    named = load_profile(flags["profile"], trusted) if flags.get("profile") else {}
    given = {key: value for key, value in named.items() if key not in FIXED_SETTINGS}
    for key, value in flags.items():
        if key not in ("profile", "trust_policy"):
            given[key] = parse_value(key, value) if isinstance(value, str) else value
    import_typed(str(flags.get("policy", "")))
    load_schema(str(given.get("json_schema", "off")))
    first = {key: value for key, value in given.items() if not at_once or key in at_once}
    rest = {key: value for key, value in given.items() if key not in first}
    with suppress(SirchatError):  # a choice about the machine, not about the chat
        now = resolve(None, {"trust_policy": [*trusted]}, os.environ)
        first.setdefault("learn_encoder", now.learn_encoder)
    if branch is None:
        store, skipped = open_saved_file(sessions_dir(), ident)
    else:
        store, skipped = copy_session(sessions_dir(), ident, branch), []
    try:
        profile = changed_profile(saved_profile(store, trusted), "--resume", **first)
        return profile, store, rest, skipped
    except SirchatError:
        store.close()
        raise
