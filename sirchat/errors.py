"""Every error that sirchat raises on purpose.

    SirchatError            exit code 1
    ├── UsageError          exit code 2: the request itself is not valid
    │   ├── SettingError    a setting has a name or a value that is not allowed
    │   └── TranscriptError a transcript can't be read; the message names file, line and problem
    ├── SessionError        a saved session can't be found, opened, read or written
    │   └── DamagedSessionError  the session's file is damaged
    ├── UndoError           a turn can't be undone
    ├── ModelError          the model can't be loaded, or no tokens can be evicted from its cache
    └── ContextFullError    no more tokens fit in the model's context, and none may be evicted

An error's message is one line. It names the bad value and the allowed values; the attribute `hint`
says what the user can do next.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")

_CONTROL_CHARS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # surrogates: bytes not in UTF-8
_MAX_MESSAGE_CHARS = 1000  # a longer error message is cut


class SirchatError(Exception):
    """Base class; `str(error)` is one line: the message, then what the user can do next."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(on_one_line(message))
        self.hint = on_one_line(hint)

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class UsageError(SirchatError):
    """The command, or a value given to it, is not valid; sirchat exits with code 2."""

    exit_code = 2


class SettingError(UsageError):
    """A setting has a name or a value that is not allowed."""


class TranscriptError(UsageError):
    """A transcript can't be read."""


class SessionError(SirchatError):
    """A saved session can't be found, opened, read or written."""


class DamagedSessionError(SessionError):
    """The contents of a saved session's file are not what sirchat wrote."""

    def __init__(self, path: Path) -> None:
        hint = f"restore it from a backup, or remove it: sirchat sessions rm {path.stem}"
        super().__init__(f"{path} is damaged", hint=hint)
        self.path = path


class SessionInUseError(SessionError):
    """A saved session is open in another process."""


class UndoError(SirchatError):
    """There is no turn to undo, or a token that was in the cache before it is not archived."""


class ModelError(SirchatError):
    """A model can't be loaded, or it has no KV cache from which single tokens can be evicted."""


class ContextFullError(SirchatError):
    """No more tokens fit in the model's context, and the settings do not allow to evict any."""


def is_output_closed(error: BaseException) -> bool:
    """Whether the error means that the output, a terminal or a pipe, was closed."""
    return isinstance(error, OSError) and error.errno in (errno.EIO, errno.EPIPE, errno.EBADF)


def did_you_mean(
    name: str, allowed: Iterable[str], prefix: str = "", *, cutoff: float = 0.6
) -> str:
    """The hint `did you mean X?` for a misspelt `name`; "" if no allowed name is similar.

    `cutoff` is the least similarity (0 to 1); `prefix`, such as a slash, stands before X.
    """
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return f"did you mean {prefix}{close[0]}?" if close else ""


def format_value(value: object) -> str:
    """A value as text for an error message: one line of at most 60 characters."""
    scalar = isinstance(value, str | int | float | None)
    text = json.dumps(value, ensure_ascii=False) if scalar else reprlib.repr(value)
    text = text.encode(errors="backslashreplace").decode()
    text = _CONTROL_CHARS.sub(_escape, text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def shows_tracebacks() -> bool:
    """Whether `--debug` or SIRCHAT_DEBUG asks for the traceback of an unexpected error."""
    return "--debug" in (sys.argv or ()) or bool(os.environ.get("SIRCHAT_DEBUG"))


def on_one_line(text: str) -> str:
    """A text on one line, without control characters, cut if it is too long."""
    line = _CONTROL_CHARS.sub(_escape, " ".join(text.split()))
    return line if len(line) <= _MAX_MESSAGE_CHARS else f"{line[: _MAX_MESSAGE_CHARS - 1]}…"


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def panic_as_model_error(what: str) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Decorator: a panic of the Rust library `tokenizers` becomes a ModelError about `what`."""

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except BaseException as error:  # a panic is no Exception
                if type(error).__name__ != "PanicException":
                    raise
                problem = str(error).split("\n", 1)[0]
            raise ModelError(f"{what}: {problem}")

        return call

    return decorate
