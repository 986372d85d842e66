"""Reads text files that the user names; makes code blocks; replaces lone surrogates."""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from glob import has_magic, iglob
from itertools import chain, islice
from pathlib import Path
from typing import IO

from sirchat.errors import UsageError, did_you_mean

MAX_FILE_BYTES = 2**20  # of a file that can be put into a message
MAX_FILES = 100  # of a folder or a pattern that can be put into a message
_MAX_NAMES = 20_000  # that are looked at for a pattern with `**`
MAX_DATA_BYTES = 2**31  # of a file with the data of a study or a training

# How files that are no text begin, what they are, and what helps.
_NON_TEXT_FORMATS = (
    (rb"%PDF-", "a PDF", "pdftotext writes its text"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|BM....\0{4}|II\*\0|MM\0\*", "an image", ""),
    (rb"PK\x03\x04", "an archive or an office document", "take a file out, or save it as text"),
)
_ANY_DEPTH = re.compile(r"(?<![^/\\])\*\*(?![^/\\])")  # `**` between slashes; else it is `*`
_BACKTICKS = re.compile(r"^[ \t]*(`{3,})", re.MULTILINE)


def is_missing(name: str) -> bool:
    """Whether there is no file or folder with this name; False if access is denied."""
    try:
        expand_path(name).stat()
    except PermissionError:
        return False
    except (OSError, ValueError):  # such as a name that is too long, or has a NUL
        return True
    return False


def expand_path(name: str) -> Path:
    return Path(os.path.expanduser(name))


def read_regular(path: Path) -> bytes:
    """The contents of a data file of at most `MAX_DATA_BYTES`.

    Raises OSError if it is larger, unreadable, or a device or pipe, which may never end.
    """
    with _open_without_waiting(path) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "a device or a pipe, not a regular file")
        data = file.read(MAX_DATA_BYTES + 1) if status.st_size <= MAX_DATA_BYTES else b""
        if max(status.st_size, len(data)) > MAX_DATA_BYTES:
            raise OSError(errno.EFBIG, f"too large; allowed: up to {MAX_DATA_BYTES:,} bytes")
        return data


def load_text_file(name: str) -> str:
    """Read a text file; returns its text with `\\n` as line ends, without a byte order mark.

    Raises UsageError if it is missing, unreadable, empty, no text, too large, or no regular file.
    """
    if text := _read_text(name):
        return text
    raise UsageError(f"{name} is empty")


def load_text_files(name: str) -> dict[str, str]:
    """Read a text file, or all text files of a folder or pattern; returns texts by path.

    Raises UsageError if no file has text, or if the files are too many or too large.
    """
    if not (os.path.isdir(expand_path(name)) or (is_missing(name) and has_magic(name))):
        return {name: load_text_file(name)}
    found = sorted(islice(matching_files(name), MAX_FILES + 1))
    size, hint = 0, "name a part, such as 'src/*.py'"
    for path in found:
        with suppress(OSError):  # it is gone meanwhile
            size += os.path.getsize(path)
    if len(found) > MAX_FILES:
        raise UsageError(f"{name} has more than {MAX_FILES} files", hint=hint)
    if size > MAX_FILE_BYTES:
        told = f"{name} has {size:,} bytes; allowed: up to {MAX_FILE_BYTES:,}"
        raise UsageError(told, hint=hint)
    texts = dict[str, str]()
    for path in found:
        with suppress(UsageError):  # such as an image beside the texts
            texts |= {path: text} if (text := _read_text(path)) else {}
    if not texts:
        raise UsageError(f"there is no file with text in {name}")
    return texts


def matching_files(name: str) -> Iterator[str]:
    """Yield the files that match a pattern, or are at any depth of a folder, except hidden ones.

    Below `**`, links are not followed, and at most 20,000 names are looked at.
    """
    pattern = os.path.expanduser(name)
    folder, *rest = [pattern, ""] if os.path.isdir(pattern) else _ANY_DEPTH.split(pattern, 1)
    if not rest:
        yield from filter(os.path.isfile, iglob(pattern))
        return
    tops = [folder or "."] if not folder or os.path.isdir(folder) else iglob(folder)
    last, left = rest[0].strip("/") or "*", _MAX_NAMES
    for path, folders, files in chain.from_iterable(map(os.walk, tops)):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        for file in sorted(files):
            whole = os.path.join(path, file)
            # A link may be broken, or lead to a file that nobody means to send.
            is_ours = not file.startswith(".") and not os.path.islink(whole)
            if is_ours and fnmatch(f"/{whole}", f"*/{last}"):
                yield whole if folder else os.path.relpath(whole)
        left -= len(files) + len(folders)
        if left < 0:
            return


def _read_text(name: str) -> str:
    """The text of a file, as for `load_text_file`; "" if the file is blank."""
    path = expand_path(name)
    try:
        _refuse_special(name, path.stat())  # before it is opened: opening can act on a device
        with _open_without_waiting(path) as file:  # a pipe may have taken its place meanwhile
            status = os.fstat(file.fileno())
            _refuse_special(name, status)
            data = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise UsageError(f"there is no file {name}", hint=_hint_for_missing(name)) from None
    except OSError as error:
        raise UsageError(f"{name} can't be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        size = max(status.st_size, len(data))
        raise UsageError(
            f"{name} has {size:,} bytes; allowed: up to {MAX_FILE_BYTES:,}",
            hint="put the important part into a smaller file",
        )
    text = decode_text(name, data)
    return text if text.strip() else ""


def decode_text(name: str, data: bytes) -> str:
    """Decode the contents of the file `name`: UTF-8, or UTF-16 if it has a byte order mark.

    Line ends become `\\n`; the mark is removed. Raises UsageError if the data is not text.
    """
    for form, what, hint in _NON_TEXT_FORMATS:
        if re.match(form, data, re.DOTALL):
            raise UsageError(f"{name} is {what}, not text", hint=hint)
    has_mark = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    has_mark = has_mark and not data.startswith(codecs.BOM_UTF32_LE)  # it begins in the same way
    kind, encoding = ("UTF-16", "utf-16") if has_mark else ("UTF-8", "utf-8-sig")
    if b"\0" in data and not has_mark:
        raise UsageError(f"{name} is not text: it contains NUL bytes")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not {kind} text: see byte {error.start:,}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def make_code_block(name: str, text: str) -> str:
    """Make a Markdown code block of a text; no line of the text can close its fence."""
    longest = max((len(run) for run in _BACKTICKS.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{name.replace('`', chr(39))}\n{text.rstrip()}\n{fence}"


def without_surrogates(text: str) -> str:
    """Replace lone surrogates (bytes not in UTF-8), which tokenizers refuse, by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _open_without_waiting(path: Path) -> IO[bytes]:
    """Open a file without waiting, even if it is a pipe to which nobody writes."""
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    return open(path, "rb", opener=lambda file, usual: os.open(file, usual | flags))


def _hint_for_missing(name: str) -> str:
    """A hint for a missing file: a file of similar name, or how to type a name with spaces."""
    if "://" in name:
        return "nothing is fetched; save the page as text"
    path = expand_path(name)
    with suppress(OSError, ValueError):
        if close := did_you_mean(path.name, os.listdir(path.parent), cutoff=0.7):
            return close
    return 'a name with spaces goes in quotes: "a b.txt"'


def _refuse_special(name: str, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{name} is a folder", hint=f"give the name of a file in {name}")
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{name} is a device or a pipe, not a regular file")
