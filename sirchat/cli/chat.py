"""Opening a chat: a new one, or a saved one with `--resume`."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sirchat.cli.launch import open_session, profile_of, quick_start
from sirchat.config.layers import changed
from sirchat.config.profile import FIXED, Profile
from sirchat.config.profile_files import trusted_policies
from sirchat.config.values import parse_value
from sirchat.errors import SirchatError, terminal_has_gone
from sirchat.memory.policies import import_typed
from sirchat.ui.interrupt import insistent
from sirchat.ui.text import displayable_line

if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.models.bars import Progress
    from sirchat.saved.store import SessionStore


def open_chat(
    flags: dict[str, Any],
    *,
    resume: str | None,
    rebuild: bool,
    trust: bool,
    debug: bool,
    quiet: bool = False,
) -> None:
    """Open a chat and talk until the user leaves.

    A saved chat (`resume`) opens under its own settings, then switches to those that flags name;
    with `rebuild`, its text is read again under the settings of the flags.
    """
    later: dict[str, Any] = {}
    if resume is None:
        profile, store = profile_of(flags), None
    else:
        profile, store, later = saved_settings(resume, flags, at_once=rebuild)
    from sirchat.ui.first_prompt import chat
    from sirchat.ui.screen import Screen

    def opened(report: "Progress | None") -> "Session":
        with quick_start():
            with insistent():
                import sirchat.ui.repl  # noqa: F401  # the prompt needs it as soon as it is ready
            return open_saved(profile, trust, report, store, later, rebuild=rebuild)

    with _closed_terminal_ends_chat():
        screen, trusted = Screen(theme=profile.theme, is_quiet=quiet), trusted_policies(flags)
        chat(opened, profile, screen, store=store, debug=debug, trusted=trusted)


def open_saved(
    profile: Profile,
    trust: bool,
    report: "Progress | None",
    store: "SessionStore | None",
    later: dict[str, Any],
    *,
    rebuild: bool = False,
) -> "Session":
    """A session that takes up the saved chat in `store`, if any, and then switches to `later`."""
    session = open_session(profile, trust, report)
    if store is not None:
        from sirchat.saved.autosave import take_up

        take_up(session, store, rebuild=rebuild)
    if later:
        session.switch("--resume", **later)
    return session


_AT_ONCE = (
    *("model", "device", "dtype", "quantize", "compile", "save", "save_kv"),
    *("panel", "theme", "markdown", "thinking"),
)
"""Settings that flags replace before a saved chat is resumed, not by a switch afterwards."""


def saved_settings(
    ident: str, flags: dict[str, Any], *, at_once: bool
) -> "tuple[Profile, SessionStore, dict[str, Any]]":
    """The settings to open a saved session with, its store, and those to switch to afterwards."""
    from sirchat.config.profile_files import load_profile
    from sirchat.paths import sessions_dir
    from sirchat.saved.saved_settings import saved_profile
    from sirchat.saved.session_list import open_session

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
    store, damaged = open_session(sessions_dir(), ident)
    for error in damaged:
        line = displayable_line(f"sirchat: {error}; going on with {store.name or store.id}")
        sys.stderr.write(f"{line}\n")
    try:
        return changed(saved_profile(store, trusted), "--resume", **first), store, rest
    except SirchatError:
        store.close()
        raise


@contextmanager
def meanwhile(what: str) -> Iterator[None]:
    """Show this on a terminal while libraries are imported, for seconds, and then remove it."""
    err = sys.stderr
    if not err.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield
        return
    try:  # around the writing, too: Ctrl-C may come as soon as it is seen
        err.write(displayable_line(what)[: shutil.get_terminal_size().columns - 1] + "\r")
        err.flush()
        yield
    finally:
        err.write("\x1b[2K")
        err.flush()


@contextmanager
def _closed_terminal_ends_chat() -> Iterator[None]:
    """End the chat without an error message where the terminal has gone."""
    try:
        yield
    except OSError as error:
        if not terminal_has_gone(error):
            raise
        raise BrokenPipeError from error
