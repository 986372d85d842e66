"""The question of `sirchat ask`: its words, the files that `-f` names, and standard input."""

import os
import select
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from sirchat.errors import UsageError
from sirchat.text.text_file import decode_text, is_missing, load_text_file
from sirchat.text.transcript import MOST_BYTES
from sirchat.ui.attaching import AttachedFile, mentioned_names

_PATIENCE = 2.0  # seconds without input after which a line says what is waited for
_NAME = "standard input"


def read_question(
    words: str, files: Sequence[str], *, has_input: bool, note: Callable[[str], None]
) -> tuple[str, int, bool]:
    """Join the files, the text from standard input and the words of a question.

    Also returns how many characters at its beginning are the text that the rest asks about, and
    whether there was more than words. Remarks go to `note`. UsageError if all are empty, or if one
    is no text or too long.
    """
    blocks = [AttachedFile(name, load_text_file(name)).block for name in files]
    given = _read_input(bool(words.strip() or files), note) if has_input else ""
    parts = [part for part in (*blocks, given, words) if part.strip()]
    if not parts:
        raise UsageError("there is no question", hint='sirchat ask "QUESTION"')
    for name in mentioned_names(words):
        if name not in files and not is_missing(name):
            note(f"@{name} is sent as plain text; to send the file, too: sirchat ask -f FILE")
    return "\n\n".join(parts), len("\n\n".join(parts[:-1])), len(parts) > bool(words.strip())


def _read_input(has_question: bool, note: Callable[[str], None]) -> str:
    """The text from standard input, "" if that is a terminal, or a file that a loop reads."""
    if sys.stdin.isatty():
        return ""
    if has_question and _is_begun():
        note(f"{_NAME} is a file that a loop or another command reads, so it is left alone")
        return ""
    says_more = has_question and _is_pipe()  # which a loop may read, too
    if has_question and not _comes_soon():
        note(f"waiting for {_NAME} to end; < /dev/null, or --no-input, asks without it")
        says_more = False
    data = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UsageError(f"{_NAME} is too long; allowed: up to {MOST_BYTES:,} bytes")
    text = decode_text(_NAME, data).strip("\n")
    if says_more and text:
        what = f"{_NAME} ({len(text):,} characters) is sent, too"
        note(f"{what}; < /dev/null, or --no-input, asks without it")
    return text


def _is_pipe() -> bool:
    with suppress(OSError, ValueError):
        return stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode)
    return False


def _is_begun() -> bool:
    """Whether standard input is a regular file of which a part was read before."""
    with suppress(OSError, ValueError):
        number = sys.stdin.fileno()
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
        return is_file and os.lseek(number, 0, os.SEEK_CUR) > 0
    return False


def _comes_soon() -> bool:
    """Whether standard input has text, or ends, within a short time; True if nobody can tell."""
    with suppress(OSError, ValueError):
        if sys.platform != "win32":
            return bool(select.select([sys.stdin.fileno()], [], [], _PATIENCE)[0])
    return True
