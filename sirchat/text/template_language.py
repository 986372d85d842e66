"""The functions, the filter and the block that transformers adds to jinja for chat templates.

Chat templates are written for transformers, so what this module adds works as in transformers.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace


class GenerationBlocks(Extension):
    """Adds to jinja the block `{% generation %}`, in which chat templates put replies.

    The content of the block is rendered without a change.
    """

    tags = {"generation"}  # noqa: RUF012  # of jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_shown")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _shown(self, caller: Any) -> str:
        return str(caller())


class TemplateNamespace(Namespace):
    """The function `namespace` for chat templates; it refuses names that begin with an underscore.

    By names such as `__class__`, a template could reach into Python.
    """

    def __init__(*args: Any, **given: Any) -> None:  # so that one of the names can be `self`
        self, *others = args
        values = dict(*others, **given)
        for name in values:
            _check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template can't store the name {name!r} in a namespace")


class TemplateDict:
    """The function `dict` for chat templates, without the attributes of Python's class `dict`.

    Of these attributes, it has only `fromkeys`.
    """

    def __call__(self, *args: Any, **given: Any) -> dict[Any, Any]:
        return dict(*args, **given)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """A dictionary with the given keys, as Python's `dict.fromkeys` makes it."""
        return dict.fromkeys(*args)


def own_names() -> dict[str, Any]:
    """By name, the functions that a chat template can call in addition to those of jinja."""
    return {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": TemplateDict(),
        "namespace": TemplateNamespace,
    }


def to_json(
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


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
