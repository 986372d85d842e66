"""The commands that open a conversation: a chat, `ask`, `replay` and `tutorial`."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sirchat.cli.flags import Debug, open_session, profile_of, quick_start
from sirchat.config.profile import FIXED, Profile
from sirchat.config.profile_files import changed, trusted_policies
from sirchat.config.values import parse_value
from sirchat.errors import SirchatError, TranscriptError, UsageError, terminal_has_gone
from sirchat.memory.policies import import_typed
from sirchat.text.transcript import MOST_BYTES
from sirchat.ui.interrupt import interruptible_imports
from sirchat.ui.text import displayable_line

if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.models.progress import Progress
    from sirchat.saved.store import SessionStore


def open_chat(
    flags: dict[str, Any],
    *,
    resume: str | None,
    branch: str | None,
    rebuild: bool,
    trust: bool,
    debug: bool,
    quiet: bool = False,
    server: str = "off",
) -> None:
    """Open a chat; returns when the user leaves the chat.

    Args:
        flags: settings that the user gave, by name.
        resume: id or name of a saved chat to continue; None for a new chat. The saved chat opens
            with its own settings, then switches to those in `flags`.
        branch: if given, the saved chat is copied; the copy gets this name and is opened.
        rebuild: whether the model reads the saved chat again, with the settings in `flags`.
        trust: whether code that comes with the model may run.
        debug: whether errors show a traceback.
        quiet: whether status notes are left out.
        server: URL of a server that runs the model, `auto` for a running server of this user, or
            `off`.
    """
    _check_server(server, resume, trust)
    later: dict[str, Any] = {}
    if resume is None:
        profile, store = profile_of(flags, loads_model=server in ("auto", "off")), None
    else:
        profile, store, later = saved_settings(resume, flags, at_once=rebuild, branch=branch)
    from sirchat.ui.screen import Screen
    from sirchat.ui.startup import chat, choose_model

    screen, trusted = Screen(theme=profile.theme, is_quiet=quiet), trusted_policies(flags)
    if server != "off" and resume is None and not trust:
        from sirchat.cli.server_chat import chat_over_server

        with _closed_terminal_ends_chat():
            if chat_over_server(server, profile, set(flags), screen):
                return
    if resume is None and "model" not in profile.model_fields_set:
        with _closed_terminal_ends_chat():
            name = choose_model(screen)
        if name is not None:
            profile = profile_of({**flags, "model": name})

    def opened(report: "Progress | None") -> "Session":
        with quick_start():
            with interruptible_imports():
                import sirchat.ui.repl  # noqa: F401  # the prompt needs it as soon as it is ready
            return open_saved(profile, trust, report, store, later, rebuild=rebuild)

    with _closed_terminal_ends_chat():
        chat(opened, profile, screen, store=store, debug=debug, trusted=trusted)


def _check_server(server: str, resume: str | None, trust: bool) -> None:
    """Raise UsageError if `server` is a URL, and an option is given that has no effect with it."""
    if server not in ("auto", "off") and (resume is not None or trust):
        what = "--resume" if resume is not None else "--trust-remote-code"
        raise UsageError(f"--server has no effect with {what}", hint="give one of the two")


def open_saved(
    profile: Profile,
    trust: bool,
    report: "Progress | None",
    store: "SessionStore | None",
    later: dict[str, Any],
    *,
    rebuild: bool = False,
) -> "Session":
    """Load the model, and open a session with the settings in `profile`.

    If `store` is given, the chat that is saved in this file is loaded; with `rebuild`, the model
    reads its text again. Then the session switches to the settings `later`, by name.
    """
    session = open_session(profile, trust, report)
    if store is not None:
        from sirchat.saved.autosave import resume_session

        resume_session(session, store, rebuild=rebuild)
    if later:
        session.switch("--resume", **later)
    return session


_AT_ONCE = (
    *("model", "device", "device_map", "dtype", "quantize", "unpack_dtype", "cache_dtype"),
    *("compile", "save", "save_kv", "panel", "theme", "markdown", "thinking"),
)
"""Settings that flags change before a saved chat is loaded; other settings change after that."""


def saved_settings(
    ident: str, flags: dict[str, Any], *, at_once: bool, branch: str | None = None
) -> "tuple[Profile, SessionStore, dict[str, Any]]":
    """Open the file of the saved chat `ident`, and combine the chat's settings with `flags`.

    Returns three things: the settings with which to open the chat; the open file; and the settings,
    by name, to switch to after the chat is loaded. If `at_once`, the chat is opened with all
    settings in `flags`; otherwise only those in `_AT_ONCE` apply at its opening. If `branch` is
    given, the chat is first copied, and the file of the copy, which gets this name, is opened.
    """
    from sirchat.config.profile_files import load_profile
    from sirchat.paths import sessions_dir
    from sirchat.saved.saved_state import saved_profile
    from sirchat.saved.session_list import copy_session, open_saved_file

    flags = dict(flags)
    trusted = trusted_policies(flags)
    flags.pop("trust_policy", None)
    named = load_profile(flags["profile"], trusted) if flags.get("profile") else {}
    given = {key: value for key, value in named.items() if key not in FIXED}
    for key, value in flags.items():
        if key != "profile":
            given[key] = parse_value(key, value) if isinstance(value, str) else value
    import_typed(str(flags.get("policy", "")))
    first = {key: value for key, value in given.items() if at_once or key in _AT_ONCE}
    rest = {key: value for key, value in given.items() if key not in first}
    if branch is None:
        store, damaged = open_saved_file(sessions_dir(), ident)
    else:
        store, damaged = copy_session(sessions_dir(), ident, branch), []
    for error in damaged:
        line = displayable_line(
            f"sirchat: {error}; continuing with session {store.name or store.id}"
        )
        sys.stderr.write(f"{line}\n")
    try:
        return changed(saved_profile(store, trusted), "--resume", **first), store, rest
    except SirchatError:
        store.close()
        raise


@contextmanager
def meanwhile(what: str) -> Iterator[None]:
    """Context manager: show the text `what` in the terminal while the `with` block runs.

    It tells the user that libraries are imported. The text is removed at the end.
    """
    err = sys.stderr
    if not err.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield
        return
    try:  # Ctrl-C may come as soon as the text is seen
        err.write(displayable_line(what)[: shutil.get_terminal_size().columns - 1] + "\r")
        err.flush()
        yield
    finally:
        err.write("\x1b[2K")
        err.flush()


@contextmanager
def _closed_terminal_ends_chat() -> Iterator[None]:
    """Context manager: if the terminal was closed, the command ends without an error message."""
    try:
        yield
    except OSError as error:
        if not terminal_has_gone(error):
            raise
        raise BrokenPipeError from error


if TYPE_CHECKING:
    from sirchat.saved.store import SessionStore


def ask_once(
    question: str,
    flags: dict[str, Any],
    *,
    resume: str | None,
    json: bool,
    trust: bool,
    server: str = "off",
) -> None:
    """Ask one question, and print only the reply on standard output.

    Text from a pipe or a file is put before the question; it may also be the question itself.
    `resume` is the id or name of a saved chat in which to ask; question and reply are saved there.
    `server` is the URL of a server that answers, `auto` for a running server of this user, or
    `off`.
    """
    text, is_piped = _message(question)
    _check_server(server, resume, trust)
    later: dict[str, Any] = {}
    store: SessionStore | None = None
    if resume is None:
        profile = profile_of(flags)
    else:
        profile, store, later = saved_settings(resume, flags, at_once=False)
    with quick_start(), interruptible_imports():
        from sirchat.ui.screen import Screen

    screen = Screen(theme=profile.theme)
    if resume is None and "model" not in profile.model_fields_set:
        from sirchat.ui.startup import say_toy

        say_toy(screen)
    if resume is None and not trust and server != "off":
        from sirchat.cli.asking import ask_server

        if ask_server(server, profile, text, screen, is_piped=is_piped, as_json=json):
            return
    with quick_start(), interruptible_imports():
        from sirchat.ui.progress import loading_bar
        from sirchat.ui.replay import print_reply

    with loading_bar(screen, profile.model) as report:
        session = open_saved(profile, trust, report, store, later)
    if store is None:
        if is_piped and "budget" not in profile.model_fields_set:
            hold_all(session, text)
        print_reply(session, text, screen, as_json=json)
        return
    from sirchat.ui.saved_chat import SavedChat

    saved_chat = SavedChat(session, screen, store)
    try:
        print_reply(session, text, screen, as_json=json)
    finally:
        saved_chat.close()


def hold_all(session: "Session", text: str) -> None:
    """Raise the session's budget so that the cache can hold the message `text` and its reply.

    The budget is at most the model's context length, and such that the KV cache takes at most half
    of the free memory. The budget is never lowered.
    """
    from sirchat.models.shape import free_memory

    _, turn = session.template.opening(text, session.profile.system)
    needed = len(turn.ids) + session.profile.max_new_tokens
    if needed <= session.limits.evictable():
        return
    budget = session.limits.enough_for(needed) or session.model.context_length
    if (free := free_memory()) is not None:
        budget = min(budget, free // 2 // session.model.row_bytes)
    if budget > session.budget:
        session.switch("ask", budget=budget)


def _message(question: str) -> tuple[str, bool]:
    """The message to ask, and whether it contains text from standard input.

    The message is the text from standard input, if any, followed by the question. Raises UsageError
    if both are empty, or if standard input is too long or not UTF-8.
    """
    given = ""
    if not sys.stdin.isatty():
        try:
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise UsageError(f"standard input is too long; allowed: up to {MOST_BYTES:,} bytes")
            given = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UsageError(
                "standard input is not UTF-8", hint="sirchat ask reads UTF-8 text"
            ) from None
    parts = [part for part in (given.strip("\n"), question) if part.strip()]
    if not parts:
        raise UsageError("there is no question", hint='sirchat ask "QUESTION"')
    return "\n\n".join(parts), bool(given.strip())


def replay_transcript(
    name: str,
    flags: dict[str, Any],
    *,
    feed: bool,
    format: str,
    json: bool,
    json_tokens: bool,
    trust: bool,
    quiet: bool,
) -> None:
    """Replay a transcript: the file `name`, or standard input if `name` is "-".

    "standard input" is another name for "-". Raises TranscriptError before the model is loaded if
    the file can't be opened.
    """
    from sirchat.text.transcript import iter_turns, one_conversation

    profile = profile_of(flags)
    from_stdin = name in ("-", "standard input")
    try:
        stream = sys.stdin.buffer if from_stdin else open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise TranscriptError(f"{name} cannot be read: {error.strerror}") from error
    with stream:
        shown = "standard input" if from_stdin else name
        turns = one_conversation(iter_turns(stream, shown, format), shown)
        from sirchat.ui.progress import loading_bar
        from sirchat.ui.replay import ReplayOptions, replay
        from sirchat.ui.screen import Screen

        screen = Screen(theme=profile.theme, is_quiet=quiet)
        with loading_bar(screen, profile.model) as report:
            session = open_session(profile, trust, report, rows_in_events=json_tokens)
        options = ReplayOptions(feed=feed, json=json or json_tokens, name=name)
        replay(session, turns, screen, options)


if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.models.progress import Progress


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
    own = profile_of({}, loads_model=False)
    with meanwhile("loading tiny"), quick_start(), interruptible_imports():
        from sirchat.chat.session import Session
        from sirchat.models.load import load_model
        from sirchat.ui.screen import Screen
        from sirchat.ui.tutorial import SETTINGS, run_tutorial

    def opened(report: "Progress | None") -> "Session":
        # Only those of the user's settings are used that do not change what is shown.
        model = load_model("tiny", device="cpu", threads=own.threads, progress=report)
        return Session(model, Profile(save=False, theme=own.theme, **SETTINGS))

    waits = not auto and sys.stdin.isatty() and sys.stdout.isatty()
    if not run_tutorial(opened, Screen(theme=own.theme), waits=waits) and not waits:
        raise typer.Exit(1)
