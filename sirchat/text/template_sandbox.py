"""Renders a model's chat template as transformers does.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and from
Python's objects; nothing limits its time and memory.
"""

from __future__ import annotations

import json
import warnings
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def render(source: str, /, **variables: Any) -> str:
    """Render the template `source`; raises TemplateError if it refuses, and errors of its code."""
    return _compiled(source).render(variables)


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
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    with warnings.catch_warnings(action="ignore"):  # Python's, of the template's code
        return environment.from_string(source)


def _refuse_private_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template can't store the name {name!r} in a namespace")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
