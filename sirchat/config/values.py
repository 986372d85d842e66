"""Converts settings' values from and to text, and describes in words which values are allowed.

Values are written as in YAML 1.2; PyYAML reads 1.1, in which `panel: off` is false.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from sirchat.config.profile import MIN_TEMPERATURE, Profile
from sirchat.errors import SettingError, did_you_mean, format_value
from sirchat.memory import policies
from sirchat.memory.registry import RETRIEVERS

_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
_MAX_BRACKETS = 100  # in one value; many within each other take PyYAML seconds
_BOOLEANS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
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


class Loader(yaml.SafeLoader):
    """Reads single values as YAML 1.2 does.

    Refuses tags (which could give a value any type) and aliases (a few can expand to gigabytes).
    """

    yaml_implicit_resolvers = {None: _SCALARS}  # noqa: RUF012  (not ours to annotate)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        tag = getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent) or tag is not None:
            what = "an alias, *name" if tag is None else f"a tag, {format_value(tag)}"
            raise yaml.constructor.ConstructorError(
                problem=f"{what}, is not allowed here", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


class Dumper(yaml.SafeDumper):
    """Puts a text in quotes if YAML 1.1 or 1.2 would read it as another type."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        **yaml.SafeDumper.yaml_implicit_resolvers,
        None: _SCALARS,
    }


def parse_yaml(text: str, path: Path) -> object:
    """Parse the text of the file `path`; raises SettingError with file, line and problem."""
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, problem = mark.line + 1 if mark else 1, error.problem
    except yaml.reader.ReaderError as error:
        line, problem = text.count("\n", 0, error.position) + 1, error.reason
    except (ValueError, RecursionError):
        line, problem = 1, "a number is too long, or brackets are nested too deeply"
    raise SettingError(f"{path}, line {line}: not valid YAML: {problem}")


def parse_scalar(text: str) -> object:
    """Parse one YAML value, such as a number; returns the text if it is empty or not valid."""
    if sum(map(text.count, "[{")) > _MAX_BRACKETS:
        return text
    try:
        value: object = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if value is None and text not in ("null", "~") else value


def yaml_line(key: str, value: object) -> str:
    """The line `key: value` as YAML, with a newline at its end."""
    text: str = yaml.dump({key: value}, Dumper=Dumper, allow_unicode=True, width=2**31)
    return text


def require_setting(key: object, source: str) -> None:
    """Raise SettingError, which begins with `source`, unless `key` is a setting."""
    if key not in Profile.model_fields:
        start = f"{source}: " if source else ""
        hint = did_you_mean(str(key), Profile.model_fields)
        raise SettingError(f"{start}there is no setting {format_value(key)}", hint=hint)


def parse_value(key: str, text: str) -> object:
    """Parse the `text` that a user gave for a setting; `none` and `on` are null and true.

    `policy_options` may be `{a: 1}` or `a=1,b=2`. A text that does not fit is returned unchanged,
    for `check_values` to refuse. Raises SettingError for an unknown setting.
    """
    require_setting(key, "")
    kinds, word = setting_types(key), text.strip()
    if int in kinds and _THOUSANDS.fullmatch(word):
        word = word.replace(",", "")  # numbers are shown with commas
    if NoneType in kinds and word.lower() in ("none", "null"):
        return None
    if str in kinds:
        return text
    if bool in kinds:
        return _BOOLEANS.get(word.lower(), text)
    if get_origin(kinds[0]) is dict:
        return _parse_options(word)
    return parse_scalar(word) if get_origin(kinds[0]) is not Literal else word


def parse_option(text: str) -> object:
    """Parse the value of a policy option: None, a boolean, a number or text."""
    word = text.strip()
    if word.lower() == "none":
        return None
    return _BOOLEANS.get(word.lower(), parse_scalar(word))


def format_setting(value: object) -> str:
    """The text that a user would type for a setting's `value`: `none`, `on`, `sample=192`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ", ".join(f"{key}={format_setting(inner)}" for key, inner in value.items()) or "none"
    return str(value)


def policy_choices() -> list[str]:
    """The names of built-in policies, plugins and aliases, sorted; no module is imported."""
    return sorted({*policies.policy_names(), *policies.ALIASES})


def allowed_values(key: str) -> list[str]:
    """The allowed values of a setting; empty if they can't be listed, as for a number."""
    if key == "policy":
        return policy_choices()
    if key == "recall":
        return ["off", "on", *RETRIEVERS.names()]
    kinds = setting_types(key)
    if bool in kinds:
        return ["on", "off"]
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def describe_allowed(key: str) -> str:
    """The allowed values of a setting in words, such as `a number, above 0 and at most 1`."""
    if key == "policy":
        return f"one of {', '.join(policy_choices())}, or package.module:Class"
    if key == "recall":
        return f"one of {', '.join(allowed_values(key))}"
    if key == "temperature":
        return f"0, or a number, at least {MIN_TEMPERATURE} and at most 10"
    if key in ("archive_limit", "save_kv_limit"):
        return "a size such as 512MiB or 2GiB"
    kind, *others = setting_types(key)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(allowed_values(key))}"
    limits = _limits(key)
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number" if re.search("most|below", limits) else "a finite number",
        str: "text",
    }.get(kind, "a mapping of names to values, such as {sample: 192}")
    others = [f"or {'null' if other is NoneType else get_args(other)[0]}" for other in others]
    return ", ".join(part for part in (words, limits, *others) if part)


def setting_types(key: str) -> tuple[Any, ...]:
    """The types that a setting's value can have, such as (int, NoneType)."""
    return tuple(get_args(kind)[0] if _is_limited(kind) else kind for kind in _union_members(key))


def _limits(key: str) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    limited = [get_args(kind)[1].metadata for kind in _union_members(key) if _is_limited(kind)]
    limits = chain(Profile.model_fields[key].metadata, *limited)  # such as Gt(gt=0)
    bounds = {
        sign: getattr(limit, sign) for limit in limits for sign in words if hasattr(limit, sign)
    }
    return " and ".join(f"{words[sign]} {bounds[sign]:,}" for sign in words if sign in bounds)


def _parse_options(text: str) -> object:
    if text.startswith("{"):
        return parse_scalar(text)
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        return text
    return {name.strip(): parse_option(value) for name, _, value in pairs}


def _union_members(key: str) -> tuple[Any, ...]:
    annotation = Profile.model_fields[key].annotation
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_limited(kind: Any) -> bool:
    return get_origin(kind) is Annotated
