"""`/export` writes the chat to a private file; `/copy` puts a reply on the clipboard."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
from contextlib import suppress
from textwrap import indent

from sirchat.chat.session import Session
from sirchat.chat.state import Turn
from sirchat.errors import UsageError, did_you_mean, format_value
from sirchat.paths import write_private
from sirchat.text.text_file import expand_path, without_surrogates
from sirchat.text.transcript import message_record, terminal_safe_json
from sirchat.ui.attaching import split_leading_path
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable, pluralize
from sirchat.ui.theme import ROLE_NAMES

EXPORT_FORMATS = {
    "md": "the chat as Markdown",
    "json": "the chat as JSON, which sirchat replay reads",
}
_FORCE_FLAG = re.compile(r"(?:^|\s)--force(?=\s|$)")
_TOOL_SECONDS = 3.0  # a clipboard tool that takes longer has failed
# The variable that names the display of each; "": it uses this machine's clipboard.
_CLIPBOARD_TOOLS = {
    "wl-copy": "WAYLAND_DISPLAY",
    **dict.fromkeys(("xclip -selection clipboard", "xsel --clipboard --input"), "DISPLAY"),
    **dict.fromkeys(("pbcopy", "clip.exe", "termux-clipboard-set"), ""),
}


def export_chat(session: Session, screen: Screen, rest: str) -> None:
    """Run `/export FORMAT FILE [--force]`: write the chat to a file.

    Raises UsageError, and writes nothing, for an unknown format, or a file that can't be written.
    """
    words = _FORCE_FLAG.sub("", rest)
    format, file = split_leading_path(words)
    if format not in EXPORT_FORMATS:
        raise UsageError(
            f"/export: {format_value(format)} is not allowed; allowed: {', '.join(EXPORT_FORMATS)}",
            hint=did_you_mean(format, EXPORT_FORMATS) or "/export md FILE",
        )
    name, extra = split_leading_path(file)
    if name in ("", '""', "''") or extra:
        raise UsageError(
            "/export: expected the name of one file",
            hint=f'type /export {format} FILE; a name with spaces goes in quotes: "a b.{format}"',
        )
    if not _turns_with_text(session):
        raise UsageError("there is nothing to export: the chat has no messages yet")
    text = _markdown(session) if format == "md" else _json(session)
    _write(name, without_surrogates(text), force=words != rest)
    screen.note(f"{EXPORT_FORMATS[format]} was written to {name}")


def copy_reply(session: Session, screen: Screen, rest: str) -> None:
    """Run `/copy [code]`: put the last reply, or its last code, on the clipboard.

    Raises UsageError if nothing is copied.
    """
    text = displayable(_text_to_copy(session, rest.strip())).strip("\n")
    if not text.strip():
        raise UsageError("nothing is copied: the reply is empty")
    text, count = without_surrogates(text), pluralize(len(text), "character")
    if tool := _copy_with_tool(text):
        screen.note(f"copied {count} with {tool}")
    elif (terminal := screen.terminal) is not None:  # OSC 52 asks it
        terminal.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")
        terminal.flush()
        sent = f"sent {count} to the terminal for its clipboard"
        screen.note(f"{sent}, as no program here can copy; terminals don't confirm copying")
    else:
        raise UsageError("nothing is copied: no program for the clipboard works here")


def _copy_with_tool(text: str) -> str:
    """Put a text on the clipboard; return by which program, or "" if none is usable or works."""
    is_remote = bool(os.environ.get("SSH_CONNECTION") or os.environ.get("SSH_TTY"))
    for command, display in _CLIPBOARD_TOOLS.items():
        name, *arguments = command.split()
        is_usable = bool(os.environ.get(display)) if display else not is_remote
        if not is_usable or (program := shutil.which(name)) is None:
            continue
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [program, *arguments],
                input=text.encode("utf-16-le" if name == "clip.exe" else "utf-8"),
                stdout=subprocess.DEVNULL,  # no pipe: a tool that stays to serve the text keeps it
                stderr=subprocess.DEVNULL,
                timeout=_TOOL_SECONDS,
                check=True,
                start_new_session=True,  # Ctrl-C does not reach it
            )
            return name
    return ""


def _text_to_copy(session: Session, target: str) -> str:
    """The last reply; for "code" its last code block."""
    if target not in ("", "code"):
        raise UsageError(f"/copy: {format_value(target)} is not allowed; allowed: code")
    reply = next((one.text for one in session.turns[::-1] if one.role == "assistant"), None)
    if reply is None:
        raise UsageError("nothing is copied: there is no reply yet")
    if not target:
        return reply
    from sirchat.ui.markdown import code_blocks  # loads a parser

    blocks = code_blocks(displayable(reply))
    if not blocks:
        raise UsageError("nothing is copied: the last reply has no code block")
    return blocks[-1]


def _markdown(session: Session) -> str:
    texts = [(role, displayable(turn.text).strip()) for role, turn in _turns_with_text(session)]
    sections = list[str]()
    for role, text in texts:  # what a tool returned is code: no picture in it is loaded
        is_code = role == "tool" or _is_left_open(text)
        shown = indent(text, "    ") if is_code else text
        sections.append(f"## {ROLE_NAMES[role].capitalize()}\n\n{shown}")
    return "\n\n".join(sections)


def _is_left_open(text: str) -> bool:
    """Whether code or HTML at the end of a Markdown text would hide what follows it."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").parse(f"{text}\n\n# end")[-1].type != "heading_close"


def _json(session: Session) -> str:
    turns = [turn for _, turn in _turns_with_text(session)]
    messages = [message_record(turn.role, turn.text, turn.thinking) for turn in turns]
    record = {"model": session.model.name, "messages": messages}
    return terminal_safe_json(record, indent=1)


def _turns_with_text(session: Session) -> list[tuple[str, Turn]]:
    """Roles and turns that have text, since they were not erased, nor interrupted at once."""
    turns = zip(session.state.roles, session.turns, strict=True)
    return [(role, turn) for role, turn in turns if turn.text.strip()]


def _write(name: str, text: str, *, force: bool) -> None:
    """Write a private file, completely or not at all; raises UsageError if it may not exist."""
    path = expand_path(name)
    try:
        if path.is_dir():
            raise UsageError(f"{name} is a folder", hint="give the name of a file in it")
        if os.path.lexists(path) and not path.is_file():
            raise UsageError(f"{name} is not a regular file and can't be replaced")
        write_private(path, text.rstrip("\n") + "\n", replaces=force)
    except FileExistsError:
        raise UsageError(f"{name} exists", hint="--force replaces it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "the name is not allowed"
        raise UsageError(f"{name} can't be written: {reason}") from None
