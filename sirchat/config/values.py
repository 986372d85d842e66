"""Converts settings' values from and to text, and says which values are allowed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from sirchat.config.profile import Profile
from sirchat.errors import SettingError, did_you_mean, format_value
from sirchat.memory import policies
from sirchat.memory.registry import RETRIEVERS

_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
_NUMBER = re.compile(r"[-+]?(?:0|[1-9]\d*|(?=\.\d))(?:\.\d*)?(?:[eE][-+]?\d+)?", re.ASCII)
_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


class _TextLoader(yaml.BaseLoader):
    """Reads all scalars as text; refuses tags, and aliases, of which a few can be gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        tag = getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent) or tag is not None:
            what = "an alias, *name" if tag is None else f"a tag, {format_value(tag)}"
            raise yaml.constructor.ConstructorError(
                problem=f"{what}, is not allowed here", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


def parse_yaml(text: str, path: Path) -> object:
    """Parse the text of the file `path`; all scalars are text, as users give it elsewhere.

    Raises SettingError with file, line and problem.
    """
    try:
        return yaml.load(text, Loader=_TextLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, problem = mark.line + 1 if mark else 1, error.problem or "it can't be read"
    except yaml.reader.ReaderError as error:
        line, problem = text.count("\n", 0, error.position) + 1, error.reason
    except RecursionError:
        line, problem = 1, "brackets are nested too deeply"
    raise SettingError(f"{path}, line {line}: not valid YAML: {problem}")


def yaml_line(key: str, value: object) -> str:
    """The line `key: value` as YAML, with a newline at its end."""
    text: str = yaml.safe_dump({key: value}, allow_unicode=True, width=2**31)
    return text


def require_setting(key: object, source: str) -> None:
    """Raise SettingError, which begins with `source`, unless `key` is a setting."""
    if key not in Profile.model_fields:
        start = f"{source}: " if source else ""
        hint = did_you_mean(str(key), Profile.model_fields)
        raise SettingError(f"{start}there is no setting {format_value(key)}", hint=hint)


def parse_value(key: str, text: object) -> object:
    """Parse the text, or mapping of texts, that a user gave for a setting; `none` is null.

    `policy_options` are `a=1,b=2`. What does not fit is returned unchanged, for `check_values` to
    refuse. Raises SettingError for an unknown setting.
    """
    require_setting(key, "")
    kinds = setting_types(key)
    if get_origin(kinds[0]) is dict:
        return _parse_options(text)
    if not isinstance(text, str):
        return text
    word = text.strip()
    if NoneType in kinds and word.lower() in ("none", "null"):
        return None
    if str in kinds:
        return text
    if bool in kinds:
        return _WORDS.get(word.lower(), text)
    return word if get_origin(kinds[0]) is Literal else _parse_number(word)


def parse_option(text: str) -> object:
    """Parse the value of a policy option: None, a boolean, a number or text."""
    word = text.strip()
    if word.lower() in ("none", "null"):
        return None
    return _WORDS.get(word.lower(), _parse_number(word))


def _parse_number(word: str) -> object:
    """The number that a word is, perhaps with commas as numbers are shown; else the word."""
    digits = word.replace(",", "") if _THOUSANDS.fullmatch(word) else word
    if not _NUMBER.fullmatch(digits):
        return word
    with suppress(ValueError):  # no whole number, or one of too many digits
        return int(digits)
    return float(digits)


def _parse_options(options: object) -> object:
    if isinstance(options, dict):
        return {k: parse_option(v) if isinstance(v, str) else v for k, v in options.items()}
    pairs = [part.partition("=") for part in options.split(",")] if isinstance(options, str) else []
    if not pairs or not all(equals for _, equals, _ in pairs):
        return options
    return {name.strip(): parse_option(value) for name, _, value in pairs}


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


def setting_types(key: str) -> tuple[Any, ...]:
    """The types that a setting's value can have, such as (int, NoneType)."""
    annotation = Profile.model_fields[key].annotation
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    return tuple(get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds)
