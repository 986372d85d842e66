"""Renders a model's chat template as transformers does, within a limited time.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and from
Python's objects. Here, loops stop after a time, and repeated texts and powers are measured before
they are computed. A hostile template can still use much memory, or much time in a single operation.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from threading import local
from types import FrameType
from typing import Any, NoReturn

import jinja2.filters
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_SECONDS = 0.5  # of processor time; templates of real models take some milliseconds
_MAX_SOURCE_CHARS = 2**17  # characters of a template; compiling them takes 2 seconds at most
_MAX_ADDED_CHARS = 200_000  # characters that a template may add to the texts
_MAX_COPIES = 8  # copies of the texts that one rendering may contain
_MAX_REPEATED_ITEMS = 2**20  # characters or items of a repeated text or list
_MAX_BITS = 2**10  # of a factor
# Compiled code, in which no time is measured, whose time can grow with the square of the text, or
# whose result can be of any size.
_COSTLY_FILTERS = {"center", "pprint", "striptags", "urlize", "wordwrap", "xmlattr"}
# The code that has loops: to follow all that jinja does would take most of the time.
_TIMED = ("<template>", jinja2.filters.__file__)


def render(source: str, size: int, /, **variables: Any) -> str:
    """Render the template `source`; `size` is the number of all characters in `variables`.

    Raises TemplateError for a template that takes too much time, or makes too long a text.
    """
    try:
        environment, template = _compiled(source)
        text = environment.render_in_time(template, variables)
    except (MemoryError, RecursionError):
        raise TemplateError("rendering takes too much memory") from None
    if len(text) > _MAX_ADDED_CHARS + _MAX_COPIES * size:
        raise TemplateError(f"it makes a text of {len(text):,} characters")
    return text


def syntax_error(source: str) -> str:
    """Why a template can't be compiled, and in which line; empty if it can."""
    try:
        _compiled(source)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except (TemplateError, MemoryError, RecursionError) as error:
        return str(error) or type(error).__name__
    return ""


class _GenerationBlocks(Extension):
    """Adds to Jinja the block `{% generation %}`, whose content is rendered without a change."""

    tags = {"generation"}  # noqa: RUF012  # of jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateNamespace(Namespace):
    """The function `namespace` for chat templates; refuses names that begin with an underscore.

    By names such as `__class__`, a template could reach Python's objects.
    """

    def __init__(*args: Any, **given: Any) -> None:  # so that one of the names can be `self`
        self, *others = args
        values = dict(*others, **given)
        for name in values:
            _refuse_private_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private_name(name)
        super().__setitem__(name, value)


class _TemplateDict:
    """The function `dict` for chat templates; of Python's `dict`, it has only `fromkeys`."""

    def __call__(self, *args: Any, **given: Any) -> dict[Any, Any]:
        return dict(*args, **given)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of chat templates; unlike jinja's own, it does not escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[_LimitedEnvironment, jinja2.Template]:
    if len(source) > _MAX_SOURCE_CHARS:
        raise TemplateError(f"the template has more than {_MAX_SOURCE_CHARS:,} characters")
    environment = _LimitedEnvironment()
    with warnings.catch_warnings(action="ignore"):  # Python's, of the template's code
        return environment, environment.from_string(source)


class _Rendering(local):
    start = 0.0
    share = 1.0  # of the time that a rendering may take


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, with the limits of this module."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        self._rendering = _Rendering()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
            optimized=False,  # a template's constants are not computed while it is compiled
        )
        del self.globals["lipsum"]  # it has loops, too
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _now,
            "dict": _TemplateDict(),
            "namespace": _TemplateNamespace,
        }
        self.filters["tojson"] = _to_json
        for name in _COSTLY_FILTERS:
            del self.filters[name]

    def render_in_time(self, template: jinja2.Template, variables: Any) -> str:
        """Render `template`; raises TemplateError if that takes too long."""
        self._rendering.start = time.thread_time()
        before = sys.gettrace()
        sys.settrace(self._trace_call)  # of this thread alone
        try:
            text = template.render(variables)
        finally:
            sys.settrace(before)
        self._rendering.share = 1.0
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left * right` or a power; refuses powers and repetitions that are too large."""
        if operator == "**":
            raise TemplateError("the template computes a power, which may take for ever")
        for one, other in ((left, right), (right, left)):
            if isinstance(one, int) and one.bit_length() > _MAX_BITS:
                raise TemplateError(f"the template has a number of more than {_MAX_BITS} bits")
            is_repeated = isinstance(one, int) and isinstance(other, str | bytes | list | tuple)
            if is_repeated and one * len(other) > _MAX_REPEATED_ITEMS:
                raise TemplateError("rendering takes too much memory")
        return super().call_binop(context, operator, left, right)

    def _trace_call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return self._check_time if frame.f_code.co_filename in _TIMED else None

    def _check_time(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        # Python would ignore an error while a generator is dropped, and call this no more.
        rendering = self._rendering
        if event == "line" and time.thread_time() - rendering.start > _SECONDS * rendering.share:
            rendering.share = 0.1  # until one ends: a turn is rendered several times
            raise TemplateError(f"rendering takes more than {_SECONDS:g} seconds")
        return self._check_time


def _refuse_private_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template can't store the name {name!r} in a namespace")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
