"""The commands that open a conversation: a chat, `ask`, `replay` and `tutorial`."""

import os
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import typer

from sirchat.cli.flags import (
    Trust,
    open_session,
    profile_from_flags,
    with_flags,
    with_setting_flags,
    without_garbage_collection,
)
from sirchat.cli.question import read_question
from sirchat.config.profile import FIXED_SETTINGS, Profile
from sirchat.config.profile_files import changed_profile, load_profile, resolve, trust_named
from sirchat.config.values import parse_value
from sirchat.errors import SirchatError, TranscriptError, is_output_closed
from sirchat.paths import name_or_absolute_path, read_yaml, sessions_dir
from sirchat.text.json_schema import load_schema
from sirchat.ui.interrupt import interruptible_imports

if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.models.progress import Progress
    from sirchat.saved.store import SessionStore
    from sirchat.text.transcript import TranscriptItem
    from sirchat.tools.config import ToolFlags
    from sirchat.ui.screen import Screen

_FLAGS = read_yaml(__file__, "app")
# Settings that flags change before a saved chat is loaded; others change after that.
_SETTINGS_BEFORE_LOADING = {
    *("model", "device", "device_map", "dtype", "quantize", "unpack_dtype", "cache_dtype"),
    *("compile", "learn_encoder", "save", "save_kv"),
}
_DISPLAY_SETTINGS = {"panel", "theme", "markdown", "thinking"}  # those of a chat, likewise


class _Opening(NamedTuple):
    """The settings with which a chat is opened, and the saved chat that it continues, if any."""

    profile: Profile
    store: "SessionStore | None" = None
    later: Mapping[str, Any] = MappingProxyType({})  # settings to switch to once it is loaded


def open_chat(
    flags: dict[str, Any],
    *,
    resume: str | None,
    branch: str | None,
    rebuild: bool,
    trust: bool,
    quiet: bool,
    tools: str | None = None,
    tools_allow: list[str] | None = None,
) -> None:
    """Open a chat; returns when the user leaves it.

    `resume` is a saved chat to continue, by id or name. `branch` names a copy to continue instead.
    With `rebuild`, the model reads the chat again, under the settings in `flags`.
    """
    from sirchat.tools.config import ToolFlags

    tool_flags = ToolFlags.of(tools, tools_allow)
    opening = _open_for_chat(resume, flags, branch=branch, rebuild=rebuild)
    from sirchat.ui.screen import Screen
    from sirchat.ui.startup import chat, explain_toy_model

    screen = Screen(theme=opening.profile.theme, is_quiet=quiet)

    def open_session_of_chat(report: "Progress | None") -> "Session":
        with without_garbage_collection():
            with interruptible_imports():
                import sirchat.ui.repl  # noqa: F401  # the prompt needs it as soon as it is ready
            return _load_session(opening, trust, report, rebuild=rebuild)

    try:
        if resume is None and "model" not in opening.profile.model_fields_set:
            explain_toy_model(screen)
        chat(
            open_session_of_chat,
            opening.profile,
            screen,
            store=opening.store,
            tools=tool_flags,
        )
    except OSError as error:
        if not is_output_closed(error):
            raise
        raise BrokenPipeError from error  # ends the command without an error message


def _open_for_chat(
    resume: str | None, flags: dict[str, Any], *, branch: str | None, rebuild: bool
) -> _Opening:
    """The settings for a chat, and its saved chat."""
    if resume is None:
        return _Opening(profile_from_flags(flags))
    at_opening = None if rebuild else _SETTINGS_BEFORE_LOADING | _DISPLAY_SETTINGS
    return _open_saved_file(resume, flags, at_opening, branch=branch)


@with_setting_flags
@with_flags(_FLAGS["ask"])
def ask(
    flags: dict[str, Any],
    question: list[str] | None = None,
    file: list[str] | None = None,
    no_input: bool = False,
    resume: str | None = None,
    is_last: bool = False,
    json: bool = False,
    tools: str | None = None,
    tools_allow: list[str] | None = None,
    trust_remote_code: Trust = False,
) -> None:
    """Ask one question and print only the reply; text from a pipe is put before the question.

    All of the text is held, if the model's context and the memory allow; if not all of it is, a
    line on standard error says how much was read, and how much is held.
    """
    from sirchat.tools.config import ToolFlags

    resume = "last" if is_last and resume is None else resume
    asked = read_question(question or [], file or [], has_input=not no_input)
    tool_flags = ToolFlags.of(tools, tools_allow)
    opening = _open_for_question(resume, flags, about_text=asked.source_chars > 0)
    profile = opening.profile
    with without_garbage_collection(), interruptible_imports():
        from sirchat.ui.screen import Screen

    screen, is_set = Screen(theme=profile.theme), profile.model_fields_set
    if resume is None and "model" not in is_set:
        from sirchat.ui.startup import explain_toy_model

        explain_toy_model(screen)
    needs_room = asked.has_files or bool(tool_flags.allow)
    with _session_for_question(opening, tool_flags, screen, trust_remote_code) as session:
        from sirchat.ui.replay import print_reply

        print_reply(
            session,
            asked.text,
            screen,
            as_json=json,
            holds_all=resume is None and needs_room and "budget" not in is_set,
            source=asked.source_chars if profile.json_schema == "off" else 0,  # JSON has no quotes
        )


@contextmanager
def _session_for_question(
    opening: _Opening, tools: "ToolFlags", screen: "Screen", trust: bool
) -> "Iterator[Session]":
    """Context manager: a session with its tools, whose question is added to the saved chat."""
    with without_garbage_collection():  # till loading has frozen what was imported: 0.1 s
        with interruptible_imports():
            import sirchat.ui.replay  # noqa: F401  # not at the first token
            from sirchat.ui.status import loading_bar
            from sirchat.ui.tool_use import use_tools

        with loading_bar(screen, opening.profile.model) as report:
            session = _load_session(opening._replace(later={}), trust, report)
    with use_tools(tools, session, screen), ExitStack() as ending:
        if opening.store is not None:
            from sirchat.chat.retry import temporary_settings
            from sirchat.ui.saved_chat import SavedChat

            ending.callback(SavedChat(session, screen, opening.store).close)
            ending.enter_context(temporary_settings(session, "ask", opening.later))
        yield session


def _open_for_question(resume: str | None, flags: dict[str, Any], *, about_text: bool) -> _Opening:
    """The settings for a question, and its saved chat."""
    if resume is not None:
        return _open_saved_file(resume, flags, _SETTINGS_BEFORE_LOADING)
    profile = profile_from_flags(flags)
    if about_text and "temperature" not in profile.model_fields_set:
        profile = profile.model_copy(update={"temperature": 0.0})  # a fact is there, or not
    return _Opening(profile)


@with_flags(_FLAGS["replay"])
def replay(
    file: Path,
    flags: dict[str, Any],
    feed: bool = False,
    format: str = "auto",
    json: bool = False,
    json_tokens: bool = False,
    quiet: bool = False,
    tools: str | None = None,
    tools_allow: list[str] | None = None,
    trust_remote_code: Trust = False,
) -> None:
    """Replay a transcript: JSONL, USER:/ASSISTANT: text, or plain lines.

    A line of JSONL may switch settings: {"switch": {"policy": "sink", "budget": 256}}.
    """
    from sirchat.text.transcript import iter_turns
    from sirchat.tools.config import ToolFlags

    tool_flags = ToolFlags.of(tools, tools_allow)
    profile = profile_from_flags(flags)
    is_input = str(file) == "-"
    name = "standard input" if is_input else str(file)
    try:
        stream = sys.stdin.buffer if is_input else file.open("rb")
    except OSError as error:
        raise TranscriptError(f"{name} cannot be read: {error.strerror}") from error
    with stream:
        items = iter_turns(stream, name, format)
        if _is_regular_file(stream):
            items = iter(_check_switches([*items], name, profile))
        with without_garbage_collection():
            from sirchat.chat.settings import checked_switches
            from sirchat.ui import replay
            from sirchat.ui.screen import Screen
            from sirchat.ui.status import loading_bar
            from sirchat.ui.tool_use import use_tools

            screen = Screen(theme=profile.theme, is_quiet=quiet)
            with loading_bar(screen, profile.model) as report:
                session = open_session(
                    profile, trust_remote_code, report, rows_in_events=json_tokens
                )
        options = replay.ReplayOptions(feed=feed, json=json or json_tokens, name=name)
        with use_tools(tool_flags, session, screen):
            turns = checked_switches(items, name, session.profile)
            replay.replay(session, turns, screen, options)
        if is_input and not session.turns:
            screen.note(
                "standard input is empty: at a terminal, sirchat opens a chat; sirchat < FILE "
                "answers a transcript"
            )


def _check_switches(
    items: "list[TranscriptItem]", name: str, profile: Profile
) -> "list[TranscriptItem]":
    """Refuse forbidden settings in a transcript before the model is loaded."""
    from sirchat.text.transcript import SettingsSwitch

    if switches := [item for item in items if isinstance(item, SettingsSwitch)]:
        from sirchat.chat.settings import checked_switches

        list(checked_switches(switches, name, profile))
    return items


def _is_regular_file(stream: BinaryIO) -> bool:
    with suppress(OSError):
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    return False


@with_flags(_FLAGS["tutorial"])
def tutorial(auto: bool = False) -> None:
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

    def open_tutorial(report: "Progress | None") -> "Session":
        # Only those of the user's settings are used that do not change what is shown.
        threads = profile.threads
        model = load_model("tiny", device="cpu", threads=threads, progress=report, compile="off")
        return Session(model, Profile(save=False, theme=profile.theme, **TUTORIAL_SETTINGS))

    waits = not auto and sys.stdin.isatty() and sys.stdout.isatty()
    if not run_tutorial(open_tutorial, screen, waits=waits) and not waits:
        raise typer.Exit(1)


def _load_session(
    opening: _Opening, trust: bool, report: "Progress | None", *, rebuild: bool = False
) -> "Session":
    """Load the model and the saved chat, if any; then switch to the settings for later."""
    session = open_session(opening.profile, trust, report)
    if opening.store is not None:
        from sirchat.saved.resume import resume_session

        resume_session(session, opening.store, rebuild=rebuild)
    if opening.later:
        session.opening_switch = session.switch("--resume", **opening.later)
    return session


def _open_saved_file(
    ident: str,
    flags: dict[str, Any],
    at_opening: Collection[str] | None,
    *,
    branch: str | None = None,
) -> _Opening:
    """Open the file of a saved chat, or of a copy of it that gets the name `branch`.

    The settings in `flags` apply at opening if `at_opening` names them, or all if that is None.
    """
    from sirchat.saved.saved_state import saved_profile
    from sirchat.saved.session_list import copy_session, find_session
    from sirchat.saved.store import SessionStore

    trust_named(flags)
    settings: dict[str, object] = {}
    if name := flags.get("profile"):
        values = load_profile(name).items()
        settings = {key: value for key, value in values if key not in FIXED_SETTINGS}
    for key, value in flags.items():
        if key not in ("profile", "trust_policy"):
            settings[key] = parse_value(key, value) if isinstance(value, str) else value
    load_schema(str(settings.get("json_schema", "off")))
    names = [key for key in settings if at_opening is None or key in at_opening]
    first = {key: settings.pop(key) for key in names}
    with suppress(SirchatError):  # a choice about the machine, not about the chat
        default = resolve(None, {}, os.environ)
        first.setdefault("learn_encoder", default.learn_encoder)
    if branch is None:
        store = SessionStore.open(find_session(sessions_dir(), ident))
    else:
        store = copy_session(sessions_dir(), ident, branch)
    try:
        profile = changed_profile(saved_profile(store), "--resume", **first)
    except SirchatError:
        store.close()
        raise
    encoders = settings.get("recall_encoder", "auto"), profile.recall_encoder
    if len({name_or_absolute_path(str(one)) for one in encoders}) == 1:
        settings.pop("recall_encoder", None)  # the chat's own, which was typed as another path
    return _Opening(profile, store, settings)
