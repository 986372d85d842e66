"""Limits for a model's chat template while it is rendered: steps, time, output and memory.

A template is a program that comes with a model. It runs in jinja's sandbox, which keeps it from the
rest of the program, but not from loops without end, nor from texts of gigabytes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

_SECONDS = 0.5  # of the processor; templates of real models take some milliseconds
_STEPS = 500_000  # lines of a template and of jinja that are run
_MOST_SOURCE = 2**20  # characters of a template
_MOST_ADDED = 200_000  # characters that a template may put around the texts
_MOST_COPIES = 8  # of the texts in one rendering
_GROWTH = 256 * 2**20  # bytes of address space, where the system can limit it

_COSTLY_FILTERS = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}
"""Filters whose time can grow with the square of a text's length, where no step is counted."""

_RUN_BY_STEPS = ("<template>", os.path.dirname(jinja2.__file__))

_ONE_AT_A_TIME = Lock()  # the limit of memory is that of the process


@contextmanager
def limits(source: str, size: int) -> Iterator[None]:
    """Within this, transformers renders the template `source` under limits.

    `size` is the number of characters of the texts. Raises TemplateError for what takes more.
    """
    with _ONE_AT_A_TIME:
        environment = _compiled(source).environment
        environment.concat = _Rendering(_MOST_ADDED + _MOST_COPIES * size).join
        try:
            yield
        finally:
            environment.concat = "".join


def _compiled(source: str) -> Any:
    """The template as transformers has compiled it, and will render it."""
    with _limited_memory():  # constants are computed when it is compiled
        _refuse_costly(source)
        return _compile_jinja_template(source)


@lru_cache(maxsize=8)
def _refuse_costly(source: str) -> None:
    """Raise TemplateError for single operations that may take for ever."""
    if len(source) > _MOST_SOURCE:
        raise TemplateError(f"it has more than {_MOST_SOURCE:,} characters")
    parsed = _compile_jinja_template("").environment.parse(source)
    if parsed.find(nodes.Pow) is not None:
        raise TemplateError("it computes a power, which may take for ever")
    for one in parsed.find_all(nodes.Filter):
        if one.name in _COSTLY_FILTERS:
            raise TemplateError(f"it uses the filter {one.name}, which may take for ever")


class _Rendering:
    """Joins the parts of one rendering, and stops it where it takes too much.

    `most` is the most characters of the result.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._steps = 0
        self._start = 0.0
        self._is_running = False

    def join(self, parts: Iterable[str]) -> str:
        """The parts as one text; jinja calls this for the whole template and for each macro."""
        if self._is_running:
            return self._joined(parts)
        self._is_running, self._steps, self._start = True, 0, time.thread_time()
        before = sys.gettrace()
        try:
            with _limited_memory():
                sys.settrace(self._enter)
                try:
                    return self._joined(parts)
                finally:
                    sys.settrace(before)
        finally:
            self._is_running = False

    def _joined(self, parts: Iterable[str]) -> str:
        found, size = [], 0
        for part in parts:
            found.append(part)
            size += len(part)
            if size > self._most:
                raise TemplateError(f"it makes more than {self._most:,} characters")
        return "".join(found)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        """Trace functions of templates and of jinja, and no others."""
        return self._step if frame.f_code.co_filename.startswith(_RUN_BY_STEPS) else None

    def _step(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        self._steps += 1
        if self._steps > _STEPS:
            raise TemplateError(f"it takes more than {_STEPS:,} steps")
        if time.thread_time() - self._start > _SECONDS:  # at each: one can square a huge number
            raise TemplateError(f"it takes more than {_SECONDS:g} seconds")
        return self._step


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Raise TemplateError where the process would grow by more than `_GROWTH`, on Linux."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + _GROWTH
    limited = most if soft == resource.RLIM_INFINITY else min(soft, most)
    resource.setrlimit(resource.RLIMIT_AS, (limited, hard))
    try:
        yield
    except (MemoryError, RecursionError):
        raise TemplateError("it takes too much memory") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
