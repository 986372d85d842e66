"""The question of `sirchat ask`: its words, the files that `-f` names, and standard input."""

import os
import select
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from sirchat.cli.flags import print_remark
from sirchat.errors import UsageError
from sirchat.text.text_file import decode_text, is_missing
from sirchat.text.transcript import MAX_LINE_BYTES
from sirchat.ui.attaching import load_blocks, mentioned_names
from sirchat.ui.text import pluralize, shorten

_QUIET_SECONDS = 2.0  # seconds without input after which a line says what is waited for
_STDIN_NAME = "standard input"
_MAX_LIST_CHARS = 1000  # most characters of a list of files


class AskedText(NamedTuple):
    text: str
    source_chars: int  # length of its beginning, the text that the rest asks about
    has_files: bool  # whether there is more than words: files, or text from standard input


def read_question(question: Sequence[str], files: Sequence[str], *, has_input: bool) -> AskedText:
    """Join the files, the text from standard input and the words of a question.

    A first word or a file `-` is standard input, even from a terminal; otherwise it is read only if
    `has_input`. Raises UsageError if all are empty, or one is too long or no text.
    """
    names_input = "-" in (*question[:1], *files)
    if names_input and sys.stdin is None:
        raise UsageError("- is standard input, which is closed")
    words = " ".join(question[1:] if "-" in question[:1] else question)
    sources = _load_files(files)
    if names_input or (has_input and sys.stdin is not None and not sys.stdin.isatty()):
        has_question = bool(words.strip() or files) and not names_input
        sources.append(_read_input(has_question))
    sources = [source for source in sources if source.strip()]
    parts = [*sources, words] if words.strip() else sources
    if not parts:
        raise UsageError("there is no question", hint='sirchat ask "QUESTION"')
    for name in mentioned_names(words):
        if name not in files and not is_missing(name):
            print_remark(
                f"@{name} is sent as plain text; to send the file, too: sirchat ask -f FILE"
            )
    return AskedText("\n\n".join(parts), len("\n\n".join(parts[:-1])), bool(sources))


def _load_files(names: Sequence[str]) -> list[str]:
    """The texts of the files, folders and patterns of `-f`; a line lists what each contains."""
    blocks = list[str]()
    for name in dict.fromkeys(name for name in names if name != "-"):
        found = load_blocks(name)
        blocks += found.values()
        if [*found] != [name]:
            listed = f"{name}: {pluralize(len(found), 'file')}, {', '.join(found)}"
            print_remark(shorten(listed, _MAX_LIST_CHARS))
    return blocks


def _read_input(has_question: bool) -> str:
    """The text from standard input; "" if it is a file that a shell loop reads."""
    if has_question and _is_partly_read():
        print_remark(
            f"{_STDIN_NAME} is a file that a loop or another command reads, so it is left alone"
        )
        return ""
    if not (sys.stdin.isatty() or _has_input_soon()):
        without = "; < /dev/null, or --no-input, asks without it" if has_question else ""
        print_remark(f"waiting for {_STDIN_NAME} to end{without}")
    data = sys.stdin.buffer.read(MAX_LINE_BYTES + 1)
    if len(data) > MAX_LINE_BYTES:
        raise UsageError(f"{_STDIN_NAME} is too long; allowed: up to {MAX_LINE_BYTES:,} bytes")
    return decode_text(_STDIN_NAME, data).strip("\n")


def _is_partly_read() -> bool:
    """Whether standard input is a regular file, part of which was read before."""
    with suppress(OSError, ValueError):
        number = sys.stdin.fileno()
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
        return is_file and os.lseek(number, 0, os.SEEK_CUR) > 0
    return False


def _has_input_soon() -> bool:
    """Whether standard input soon has text, or ends; True if that is unknown."""
    with suppress(OSError, ValueError):
        if sys.platform != "win32":
            return bool(select.select([sys.stdin.fileno()], [], [], _QUIET_SECONDS)[0])
    return True
