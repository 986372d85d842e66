"""Renders a model's chat template with limits on steps, time, memory and the length of the result.

A template is a program that comes with a model. It runs in jinja's sandbox, which protects files
and Python objects, but does not prevent endless loops or texts of gigabytes. So before a template
builds a text or a list (by an operator, filter, method or macro), its size is computed and counted.
If a limit is exceeded, rendering ends with an error. Other threads are not affected.
"""

from __future__ import annotations

import operator
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from threading import local
from types import FrameType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from sirchat.text.template_language import GenerationBlocks, own_names, to_json

_SECONDS = 0.5  # of processor time; templates of real models take some milliseconds
_STEPS = 500_000  # lines of a template and of jinja that are run
_MOST_SOURCE = 2**20  # characters of a template
_MOST_ADDED = 200_000  # characters that a template may add to the texts
_MOST_COPIES = 8  # copies of the texts that one rendering may contain
_MOST_MADE = 2**26  # characters and list items that are made in one rendering, in total
_MOST_ITEMS = 2**19  # of a list, including those of its inner lists
_MOST_BITS = 2**14  # of a whole number

_COSTLY_FILTERS = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}
"""Filters that are refused: their time can grow with the square of the text's length.

This time is spent in compiled code, where no steps are counted.
"""

_RUN_BY_STEPS = ("<template>", os.path.dirname(jinja2.__file__))

_WIDE = re.compile(r"\d{5}|\*|\{[^{}]*\{")
"""Matches formats whose result may be very long: with a width of five digits, or a variable one."""

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def render(source: str, size: int, /, **variables: Any) -> str:
    """Render the template `source` with `variables`; returns the text.

    `size` is the total number of characters of all texts in `variables`. Raises TemplateError for a
    template that takes too many steps, too much time or memory, or whose result is too long.
    """
    try:
        return _compiled(source)(_MOST_ADDED + _MOST_COPIES * size, variables)
    except (MemoryError, RecursionError):
        raise TemplateError("rendering takes too much memory") from None


class _Rendering(local):
    """Counts the steps, time and memory that the rendering in this thread has used.

    `most` is the maximum length of one text, in characters; `made` is the number of characters and
    list items that the template has built until now.
    """

    most = 0
    made = 0
    steps = 0
    start = 0.0

    def begin(self, most: int) -> None:
        self.most, self.made, self.steps, self.start = most, 0, 0, time.thread_time()

    def count(self, size: int) -> None:
        """Count the size of a text or list before it is built; raises TemplateError above a limit.

        The size is in characters or list items.
        """
        self.made += size
        if size > self.most or self.made > _MOST_MADE:
            raise TemplateError("rendering takes too much memory")

    def enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        """A trace function for `sys.settrace`: counts each line that a template or jinja runs."""
        return self._step if frame.f_code.co_filename.startswith(_RUN_BY_STEPS) else None

    def _step(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        self.steps += 1
        if self.steps > _STEPS:
            raise TemplateError(f"rendering takes more than {_STEPS:,} steps")
        if time.thread_time() - self.start > _SECONDS:
            raise TemplateError(f"rendering takes more than {_SECONDS:g} seconds")
        return self._step


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A jinja environment like that of transformers for chat templates, with a limit on memory.

    It counts the size of each text and list before the template builds it, and refuses large ones.
    """

    intercepted_binops = frozenset(_OPERATORS)

    def __init__(self) -> None:
        self.rendering = _Rendering()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"],
            optimized=False,  # a template's constants are not computed while it is compiled
            finalize=self._shown,
        )
        self.globals |= own_names()
        filters = {**self.filters, "tojson": to_json}
        self.filters = {name: self._limited(name, one) for name, one in filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _Concatenations().visit(super()._parse(source, name, filename))
        return parsed

    def render_within(self, template: jinja2.Template, most: int, variables: Any) -> str:
        """Render `template`; raises TemplateError if a limit is exceeded.

        `most` is the maximum length of the rendered text, in characters.
        """
        self.rendering.begin(most)
        before = sys.gettrace()
        sys.settrace(self.rendering.enter)  # of this thread alone
        try:
            return template.render(variables)
        finally:
            sys.settrace(before)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` for a template, after counting the size of the result."""
        self.rendering.count(_size_of(operator, left, right))
        return _OPERATORS[operator](left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method for a template.

        If it is a method of a text, the size of its result is counted before the call.
        """
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes):
            self.rendering.count(_size_of_method(obj.__name__, owner, args))
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja's safe version of a text's method `format`, which first counts its result's size.

        Returns None if `value` is not the method `format` of a text.
        """
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = str(value.__self__)

        def formatted(*args: Any, **kwargs: Any) -> str:
            self.rendering.count(_size_of_format(text, "{", (*args, *kwargs.values())))
            return wrapped(*args, **kwargs)

        return formatted

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter like `function` that first counts the estimated size of the result."""

        def limited(*args: Any, **kwargs: Any) -> Any:
            given = args[_leading(function) :]
            self.rendering.count(_size_of_filter(name, given, kwargs))
            return function(*args, **kwargs)

        limited.__dict__.update(getattr(function, "__dict__", {}))  # jinja's marks, as for contexts
        return limited

    def concatenated(self, *parts: Any) -> str:
        """Join `parts` to one text, as the operator `~` does, after counting the text's size."""
        self.rendering.count(sum(map(_length, parts)))
        return "".join(map(str, parts))

    def _shown(self, value: Any) -> Any:
        """Count the size of a value that the template is about to output, and return the value."""
        if not isinstance(value, str):
            self.rendering.count(_length(value))
        return value

    def concat(self, parts: Iterable[str]) -> str:
        """Join the texts that a template, macro or block outputs.

        Raises TemplateError if the joined text is too long.
        """
        found, size, most = [], 0, self.rendering.most
        for part in parts:
            found.append(part)
            size += len(part)
            if size > most:
                raise TemplateError(f"the rendered text has more than {most:,} characters")
        return "".join(found)


class _Concatenations(NodeTransformer):
    """Replaces each `a ~ b` in a template's syntax tree by a call of `concatenated`.

    That method counts the size of the joined text.
    """

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """The syntax node that replaces the node `a ~ b`: a call of the method `concatenated`."""
        self.generic_visit(node)
        counted = nodes.EnvironmentAttribute("concatenated")
        return nodes.Call(counted, node.nodes, [], None, None, lineno=node.lineno)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Callable[[int, Mapping[str, Any]], str]:
    """Compile the template `source`; returns a function (limit, variables) that renders it.

    The limit is the maximum length of the text, in characters. Raises TemplateError if `source` is
    too long, or has an operation that may never end.
    """
    if len(source) > _MOST_SOURCE:
        raise TemplateError(f"the template has more than {_MOST_SOURCE:,} characters")
    environment = _LimitedEnvironment()
    parsed = environment.parse(source)
    if parsed.find(nodes.Pow) is not None:
        raise TemplateError("the template computes a power, which may take for ever")
    for one in parsed.find_all(nodes.Filter):
        if one.name in _COSTLY_FILTERS:
            raise TemplateError(f"the template uses the filter {one.name}, which may take for ever")
    return partial(environment.render_within, environment.from_string(source))


def _length(value: Any) -> int:
    """Upper bound for the length, in characters, of a value written as text.

    A list that occurs twice in the value counts twice. Raises TemplateError if the value has too
    many items, as a list that contains itself has.
    """
    size, left, seen = 0, [value], 0
    while left:
        one, seen = left.pop(), seen + 1
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, int):
            size += one.bit_length() // 3 + 2
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
            size += 2
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
            size += 2
        else:
            size += 32
        if size > _MOST_MADE or seen + len(left) > _MOST_ITEMS:
            raise TemplateError("rendering takes too much memory")
    return size


def _size_of(operator: str, left: Any, right: Any) -> int:
    """Size of the result of `left operator right`, in characters or list items.

    A number counts 0, unless it would have too many digits: then the size is above the limit.
    """
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else 0
        return _MOST_MADE + 1 if bits > _MOST_BITS else 0
    if operator == "%" and isinstance(left, str | bytes):
        values = right if isinstance(right, tuple) else (right,)
        return _size_of_format(str(left), "%", values)
    if operator == "*":
        number, text = (left, right) if isinstance(left, int) else (right, left)
        repeats = _has_length(text) and isinstance(number, int)
        return len(text) * max(0, number) if repeats else 0
    if operator == "+" and _has_length(left) and _has_length(right):
        return len(left) + len(right)
    return 0


def _size_of_format(text: str, mark: str, values: Iterable[Any]) -> int:
    """Upper bound for the length, in characters, of the text that a format makes of `values`.

    Each `mark` (`%` or `{`) in the format `text` counts as long as the longest value.
    """
    if _WIDE.search(text):
        return _MOST_MADE + 1
    longest = max(map(_length, values), default=0)
    return len(text) + text.count(mark) * (longest + 10_000)


def _size_of_method(name: str, owner: str | bytes, args: tuple[Any, ...]) -> int:
    """Upper bound for the number of characters that method `name` of the text `owner` returns."""
    widths = [one for one in args if isinstance(one, int)]
    if name in ("ljust", "rjust", "center", "zfill"):
        return max([len(owner), *widths])
    if name == "expandtabs":
        return len(owner) * max([8, *widths])
    if name == "replace" and len(args) > 1:
        return len(owner) + (len(owner) + 1) * _length(args[1])
    if name == "translate":
        return len(owner) * max([1, *map(_length, args)])
    if name == "join" and args and _has_length(args[0]):
        return _length(args[0]) + len(owner) * len(args[0])
    return len(owner)


def _size_of_filter(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Upper bound for the size of what a filter returns, in characters or list items.

    `name` is the filter; `args` begin with the value that is filtered.
    """
    if not args:
        return 0
    value, *others = args
    others += kwargs.values()
    if name == "format":
        return _size_of_format(str(value), "%", others)
    if name == "replace" and len(others) > 1:
        return _size_of_method("replace", str(value), tuple(others))
    size = _length(value)
    rows = 1 + (value.count("\n") if isinstance(value, str) else size)
    widths = [abs(one) for one in others if isinstance(one, int) and not isinstance(one, bool)]
    texts = [len(one) for one in others if isinstance(one, str)]
    widths += texts if name in ("indent", "join") else []
    widest: int = max([0, *widths])
    return size + rows * widest


def _has_length(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple)


def _leading(function: Callable[..., Any]) -> int:
    """How many arguments jinja passes to a filter before the filtered value: 0 or 1.

    Such an argument is jinja's context or environment.
    """
    return 1 if hasattr(function, "jinja_pass_arg") else 0
