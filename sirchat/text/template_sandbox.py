"""Renders a model's chat template with limits on time, memory and the length of the result.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and Python's
objects. Here, text that an operator, filter, method or macro makes is measured before, and each
value after it is made, so that nothing compiled (a comparison, `in`, a sum) takes long.
"""

from __future__ import annotations

import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
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
from jinja2.visitor import NodeTransformer

_SECONDS = 0.5  # of processor time; templates of real models take some milliseconds
_MOST_SOURCE = 2**17  # characters of a template; compiling them takes 2 seconds at most
_MOST_ADDED = 200_000  # characters that a template may add to the texts
_MOST_COPIES = 8  # copies of the texts that one rendering may contain
_MOST_MADE = 2**26  # characters and list items that are made in one rendering, in total
_MOST_ITEMS = 2**19  # of a list, including those of its inner lists
_MOST_BITS = 2**10  # of a whole number
# Compiled code, in which no time is measured, whose time can grow with the square of the text.
_COSTLY_FILTERS = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}
_PADDING = {"batch", "center", "indent", "ljust", "rjust", "round", "slice", "tojson", "zfill"}
# The code that has loops: to follow all that jinja does would take most of the time.
_TIMED = ("<template>", jinja2.filters.__file__)
# A format whose result may be very long: its width has five digits, or is itself a value.
_WIDE = re.compile(r"\d{5}|\*|\{[^{}]*\{")


def render(source: str, size: int, /, **variables: Any) -> str:
    """Render the template `source`; `size` is the number of all characters in `variables`.

    Raises TemplateError for a template that takes too much time or memory.
    """
    try:
        environment, template = _compiled(source)
        return environment.render_within(template, _MOST_ADDED + _MOST_COPIES * size, variables)
    except (MemoryError, RecursionError):
        raise TemplateError("rendering takes too much memory") from None


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
    """Adds to jinja the block `{% generation %}`, in which chat templates put replies.

    The content of the block is rendered without a change.
    """

    tags = {"generation"}  # noqa: RUF012  # of jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateNamespace(Namespace):
    """The function `namespace` for chat templates; it refuses names that begin with an underscore.

    By names such as `__class__`, a template could reach into Python.
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
    """The function `dict` for chat templates, without the attributes of Python's class `dict`.

    Of these attributes, it has only `fromkeys`.
    """

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
    if len(source) > _MOST_SOURCE:
        raise TemplateError(f"the template has more than {_MOST_SOURCE:,} characters")
    environment = _LimitedEnvironment()
    with warnings.catch_warnings(action="ignore"):  # Python's, of the template's code
        return environment, environment.from_string(source)


class _Rendering(local):
    """The rendering that runs in this thread."""

    most = 0  # maximum length of one text, in characters
    made = 0  # characters and list items that the template has made
    start = 0.0
    share = 1.0  # of the time that a rendering may take


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, with the limits of this module."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        self._rendering = _Rendering()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
            optimized=False,  # a template's constants are not computed while it is compiled
            finalize=self._count_output,
        )
        del self.globals["lipsum"]  # it has loops, too
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _now,
            "dict": _TemplateDict(),
            "namespace": _TemplateNamespace,
        }
        filters = {**self.filters, "tojson": _to_json}
        self.filters = {
            name: self._limited(name, function)
            for name, function in filters.items()
            if name not in _COSTLY_FILTERS
        }

    def render_within(self, template: jinja2.Template, most: int, variables: Any) -> str:
        """Render `template`, in which no text may have more than `most` characters."""
        rendering = self._rendering
        rendering.most, rendering.made, rendering.start = most, 0, time.thread_time()
        before = sys.gettrace()
        sys.settrace(self._trace_call)  # of this thread alone
        try:
            text = template.render(variables)
        finally:
            sys.settrace(before)
        rendering.share = 1.0
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`; a power, which may take for ever, is refused."""
        if operator == "**":
            raise TemplateError("the template computes a power, which may take for ever")
        self._count(_most_made(operator, left, [right]))
        return self.measured(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method; the size of what a text's method returns is counted first."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes):
            self._count(_most_made(obj.__name__, owner, [*args, *kwargs.values()]))
        return self.measured(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's safe version of a text's method `format`; None for any other value."""
        wrapped = super().wrap_str_format(value)
        return wrapped and self._limited("format", wrapped, str(value.__self__))

    def measured(self, value: Any) -> Any:
        """A value that was just made; raises TemplateError if it is too large to compare."""
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise TemplateError(f"the template computes a number of more than {_MOST_BITS} bits")
        if isinstance(value, list | tuple | set | frozenset | Mapping):
            _length(value)
        return value

    def concatenated(self, *parts: Any) -> str:
        """The operator `~`."""
        self._count(sum(map(_length, parts)))
        return "".join(map(str, parts))

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a template, macro or block outputs."""
        texts = list(parts)
        self._count(sum(map(len, texts)))
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _Measured().visit(super()._parse(source, name, filename))
        return parsed

    def _trace_call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return self._check_time if frame.f_code.co_filename in _TIMED else None

    def _check_time(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        # Python would ignore an error while a generator is dropped, and call this no more.
        rendering = self._rendering
        if event == "line" and time.thread_time() - rendering.start > _SECONDS * rendering.share:
            rendering.share = 0.1  # until one ends: a turn is rendered several times
            raise TemplateError(f"rendering takes more than {_SECONDS:g} seconds")
        return self._check_time

    def _count(self, size: int) -> None:
        """Count the size, in characters or items, of a text or list that is about to be made."""
        self._rendering.made += size
        if size > self._rendering.most or self._rendering.made > _MOST_MADE:
            raise TemplateError("rendering takes too much memory")

    def _limited(self, name: str, function: Callable[..., Any], *owner: str) -> Callable[..., Any]:
        """A filter, or a method of the text `owner`, that first counts the size of its result."""
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja's own first argument

        @wraps(function)
        def limited(*args: Any, **named: Any) -> Any:
            # The added "" keeps a value that is given by its name from being the first argument.
            given = [*owner, *args[passed:], "", *named.values()]
            self._count(_most_made(name, given[0], given[1:]))
            return self.measured(function(*args, **named))

        return limited

    def _count_output(self, value: Any) -> Any:
        """Count the size of a value that the template outputs; returns the value."""
        if not isinstance(value, str):
            self._count(_length(value))
        return value


class _Measured(NodeTransformer):
    """Makes calls of what jinja's sandbox does not intercept: `a ~ b`, lists, tuples, dicts."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenated", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        is_constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if is_target or is_constant else _call("measured", [node], node.lineno)

    visit_Tuple = visit_Dict = visit_List

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int) and node.value.bit_length() > _MOST_BITS:
            raise TemplateError(f"the template has a number of more than {_MOST_BITS} bits")
        return node


def _call(method: str, arguments: list[Any], line: int) -> nodes.Call:
    """A call of the environment's `method` in a template."""
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None, lineno=line)


def _most_made(name: str, value: Any, others: Sequence[Any]) -> int:
    """Upper bound for the size of what an operator, a filter or a text's method makes of `value`.

    The size is in characters or list items; `others` are the further arguments.
    """
    size, lengths = _length(value), [_length(other) for other in others]
    width = max((abs(other) for other in others if isinstance(other, int)), default=0)
    match name, value:
        case "*", str() | bytes() | list() | tuple():
            return len(value) * width
        case "*", int() if not isinstance(others[0], int | float):
            return abs(value) * len(others[0])
        case "%" | "format" | "format_map", str() | bytes():
            text = str(value)
            if _WIDE.search(text):
                return _MOST_MADE + 1
            marks = text.count("%") + text.count("{")
            return len(text) + marks * (max(lengths, default=0) + 10_000)
        case "join", str() if isinstance(others[0], list | tuple):  # the method of a text
            return lengths[0] + size * len(others[0])
        case "replace", _:
            return size + (size + 1) * max(lengths[1:], default=0)
        case "translate" | "expandtabs", _:
            return size * max([8, width, *lengths])
    lines = 1 + (len(value.splitlines()) if isinstance(value, str) else size)
    widest = max([width, *lengths]) if name in {*_PADDING, "join"} else 0
    return size + sum(lengths) + lines * widest


def _length(value: Any) -> int:
    """Upper bound for the number of characters of a value written as text.

    Raises TemplateError for too many items; a list that contains itself would never end.
    """
    size, left, seen = 0, [value], 0
    while left:
        item, seen = left.pop(), seen + 1
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length() // 3 + 2
        elif isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
            size += 2
        elif isinstance(item, list | tuple | set | frozenset):
            left += item
            size += 2
        else:
            size += 32
        if size > _MOST_MADE or seen + len(left) > _MOST_ITEMS:
            raise TemplateError("rendering takes too much memory")
    return size


def _refuse_private_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template can't store the name {name!r} in a namespace")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
