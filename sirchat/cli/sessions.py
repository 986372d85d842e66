"""The commands `sirchat sessions ...`, which list, search, print, delete and export saved chats."""

import os
import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sirchat import paths
from sirchat.cli.flags import with_flags
from sirchat.cli.registry import lab_module
from sirchat.errors import SessionError, UsageError, format_value
from sirchat.paths import open_private, read_yaml, sessions_dir, write_private
from sirchat.ui.text import displayable, displayable_line, pluralize

if TYPE_CHECKING:
    from sirchat.saved.session_list import SavedSession

_FLAGS = read_yaml(__file__, "sessions")
sessions_app = typer.Typer(add_completion=False, invoke_without_command=True)


@sessions_app.callback()
def sessions(context: typer.Context) -> None:
    """List saved chats; with a command, search, show, delete or export them."""
    if context.invoked_subcommand is None:
        sessions_list()


@sessions_app.command("list")
def sessions_list() -> None:
    """List the saved chats, newest first."""
    from sirchat.config.profile_files import resolve
    from sirchat.saved.session_list import key_value_bytes, list_sessions
    from sirchat.ui.lists import format_bytes, print_sessions
    from sirchat.ui.screen import make_console

    listing = list_sessions(sessions_dir())
    if listing.sessions:
        print_sessions(listing.sessions, make_console())
    else:
        typer.echo("there are no saved chats", err=True)
    if size := key_value_bytes(sessions_dir()):
        limit = resolve(None, {}, os.environ).save_kv_limit
        typer.echo(
            f"keys and values take {format_bytes(size)} of at most {limit}; when a chat ends, "
            "sirchat --save-kv-limit SIZE deletes the oldest above a size",
            err=True,
        )
    for refused in listing.errors:
        typer.echo(displayable_line(f"sirchat: {refused}"), err=True)


@sessions_app.command("search")
@with_flags(_FLAGS["sessions_search"])
def sessions_search(words: list[str]) -> None:
    """Find saved chats by what was said in them; the best match comes first."""
    from sirchat.saved.search import search_sessions
    from sirchat.ui.lists import MORE_HITS, print_sessions
    from sirchat.ui.screen import make_console

    text = " ".join(words)
    result = search_sessions(sessions_dir(), text)
    if not result.hits:
        raise SessionError(
            f"no saved chat has all of {format_value(text)}",
            hint="fewer words find more; sirchat sessions lists all chats",
        )
    lines = {hit.session.id: hit.snippet for hit in result.hits}
    print_sessions([hit.session for hit in result.hits], make_console(), lines)
    if result.more_count:
        typer.echo(MORE_HITS.format(result.more_count), err=True)


@sessions_app.command("show")
@with_flags(_FLAGS["sessions_show"])
def sessions_show(ident: str) -> None:
    """Print the text of a saved chat; of one that is open elsewhere, what was saved last."""
    from sirchat.saved.session_list import find_session
    from sirchat.saved.store import SessionStore

    with SessionStore.read(find_session(sessions_dir(), ident, may_be_open=True)) as store:
        follows_summary = False
        for turn in store.turns():
            role = "summary" if turn.is_summary or follows_summary else turn.role
            typer.echo(displayable(f"{role.upper()}: {turn.text}"))
            follows_summary = turn.is_summary  # the reply to a summary belongs to it


@sessions_app.command("rm")
@with_flags(_FLAGS["sessions_rm"])
def sessions_rm(ident: str, yes: bool = False) -> None:
    """Delete a saved chat and all its files, after asking."""
    from sirchat.saved.session_list import find_session, list_sessions, remove_session

    folder = sessions_dir()
    path = find_session(folder, ident)
    listed = list_sessions(folder).sessions
    chat = next((chat for chat in listed if chat.path == path), None)
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(
                f"{path.stem} is not deleted: deleting needs a confirmation", hint="add --yes"
            )
        typer.echo(_describe_chat(chat) if chat else f"{path.stem}, which can't be read", err=True)
        if not typer.confirm("delete this chat?", err=True):
            typer.echo("nothing is deleted", err=True)
            raise typer.Exit(1)
    remove_session(path)
    typer.echo(displayable_line(f"removed chat {path.stem}"), err=True)
    if paths.history_file().is_file():
        file = displayable_line(paths.with_tilde(paths.history_file()))
        typer.echo(
            f"lines typed in it stay in {file}; in a chat, /erase WORDS erases them", err=True
        )
    family = [other for other in listed if chat and other.family == chat.family and other != chat]
    if family:
        left = pluralize(len(family), "chat")
        typer.echo(
            f"other chats of its family stay ({left}): sirchat sessions lists all chats", err=True
        )


@sessions_app.command("export")
@with_flags(_FLAGS["sessions_export"])
def sessions_export(ident: str, file: Path | None = None, force: bool = False) -> None:
    """Write a saved chat as JSON Lines, which `sirchat replay` reads."""
    from sirchat.saved.session_list import export_session, find_session

    lines = BytesIO()
    export_session(find_session(sessions_dir(), ident, may_be_open=True), lines)
    if file is None or str(file) == "-":
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8")  # in any locale, for `sirchat replay`
        typer.echo(lines.getvalue().decode(), nl=False)
        return
    _refuse_existing(file, force)
    if file.exists() and not file.is_file():  # a device or a pipe is not replaced
        with open_private(file, "wb") as stream:
            stream.write(lines.getvalue())
    else:
        write_private(file, lines.getvalue().decode(), replaces=force)


@sessions_app.command("map")
@with_flags(_FLAGS["sessions_map"])
def sessions_map(ident: str, out: Path | None = None, force: bool = False) -> None:
    """Draw a saved chat's memory: which tokens were held, evicted and restored, by turn.

    It needs the extra plots, which brings matplotlib. The picture has no text of the chat.
    """
    from sirchat.saved.session_list import find_session
    from sirchat.saved.store import SessionStore

    path = find_session(sessions_dir(), ident, may_be_open=True)
    out = out or Path(f"{path.stem}.svg")
    if out.suffix not in (".svg", ".png"):
        raise UsageError(f"--out can't be {format_value(out.name)}: it must end in .svg or .png")
    _refuse_existing(out, force)
    with SessionStore.read(path) as store:
        image = lab_module("pictures").picture_of_memory(store, out.suffix[1:])
    write_private(out, image, replaces=force)
    typer.echo(displayable_line(f"wrote {out}"), err=True)


def _refuse_existing(file: Path, force: bool) -> None:
    if file.exists() and not force:
        raise UsageError(f"{file} exists", hint="--force replaces it")


def _describe_chat(chat: "SavedSession") -> str:
    name = f", called {format_value(chat.name)}" if chat.name else ""
    begins = f', begins "{chat.first_message}"' if chat.first_message else ""
    return displayable_line(f"{chat.id}{name}: {chat.turns:,} messages{begins}")
