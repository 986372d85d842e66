"""Lets the user change a text in `$VISUAL` or `$EDITOR`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from sirchat.errors import UsageError
from sirchat.paths import memory_dir
from sirchat.text.text_file import decode_text
from sirchat.ui.interrupt import leave_ctrl_c_to_child

_COMMON_EDITORS = ("editor", "nano", "pico", "vi", "emacs")


def editor_command() -> list[str]:
    """The user's editor as a command, or else the usual one."""
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
    if not command:
        return [next(filter(shutil.which, _COMMON_EDITORS), _COMMON_EDITORS[-1])]
    try:
        return shlex.split(command)
    except ValueError:  # an open quote
        return [command]


def edit_in_editor(command: list[str], text: str) -> str:
    """Open `text` in an editor; return what the user saved. Raises UsageError if that fails."""
    descriptor, name = tempfile.mkstemp(prefix="sirchat-", suffix=".md", dir=memory_dir())  # 0600
    path = Path(name)
    try:
        with leave_ctrl_c_to_child():
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            code = subprocess.run([*command, name], check=False).returncode
        if code:
            raise UsageError(
                f"the editor {command[0]!r} failed with exit code {code}: the message is unchanged"
            )
        data = path.read_bytes()
        try:
            edited = decode_text("the edited file", data)
        except UsageError:  # what was typed there must not be lost
            edited = data.decode("utf-8", "replace")
        return edited.removesuffix("\n")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(
            f"the editor {command[0]!r} can't be started: {reason}",
            hint="set EDITOR to another editor",
        ) from error
    finally:
        path.unlink(missing_ok=True)
