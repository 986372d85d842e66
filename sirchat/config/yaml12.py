"""YAML for profiles: scalars as in YAML 1.2, and duplicate keys refused.

PyYAML implements YAML 1.1, which reads `panel: off` as false and `1e-3` as text.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from sirchat.errors import SettingError, format_value

_SCALARS = [  # YAML 1.2's core schema
    (f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"))
    for tag, pattern in {
        "null": r"~|null|Null|NULL|",
        "bool": r"true|True|TRUE|false|False|FALSE",
        "int": r"[-+]?(?:0|[1-9][0-9]*)",
        "float": r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    }.items()
]


_DEEPEST = 50  # brackets within brackets; the reader's time grows with their square


class Loader(yaml.SafeLoader):
    """Reads scalars as in YAML 1.2; refuses duplicate keys, deep brackets, and tags and aliases.

    Tags name types that values then may not have; a few aliases can stand for gigabytes.
    """

    yaml_implicit_resolvers = {None: _SCALARS}  # noqa: RUF012  (not ours to annotate)

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level >= _DEEPEST:
            mark = self.get_mark()
            raise yaml.scanner.ScannerError(problem="brackets are too deep", problem_mark=mark)
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        tag = getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent) or tag is not None:
            what = "an alias, *name" if tag is None else f"a tag, {format_value(tag)}"
            raise yaml.constructor.ConstructorError(
                problem=f"{what}, is not allowed here", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{format_value(key.value)} is set twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something other than text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        **yaml.SafeDumper.yaml_implicit_resolvers,
        None: _SCALARS,
    }


def parse_yaml(text: str, path: Path) -> object:
    """The document in `text`; raises SettingError with the path, the line and what is wrong."""
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, problem = mark.line + 1 if mark else 1, error.problem
    except yaml.reader.ReaderError as error:
        line, problem = text.count("\n", 0, error.position) + 1, error.reason
    except (ValueError, RecursionError):
        line, problem = 1, "a number is too long or brackets are too deep"
    raise SettingError(f"{path}, line {line}: not valid YAML: {problem}")


def parse_scalar(text: str) -> object:
    """`text` as a YAML value, or unchanged where it isn't valid YAML or is empty."""
    try:
        value: object = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if value is None and text not in ("null", "~") else value


def yaml_line(key: str, value: object) -> str:
    """`key: value` as YAML, ending in a newline."""
    document = {key: value}
    text: str = yaml.dump(document, Dumper=Dumper, allow_unicode=True, width=2**31)
    return text
