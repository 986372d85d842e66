"""JSON schemas: reads one from a file, and makes a rule of it for the grammar of a reply."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from sirchat.errors import SettingError, UsageError, format_value
from sirchat.text.text_file import load_text_file
from sirchat.text.tool_calls import is_deep
from sirchat.text.transcript import parse_json

# Keywords of a schema: with schemas by names, and with values.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")
# Bounds of numbers, and whether they are lower ones. llguidance fails, or even crashes, with some
# that are far from zero; an upper bound above all numbers that models write is left out.
_BOUNDS = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}
_FAR = 10**18
_REF = re.compile(r'"\$ref": "(#[^"]*)"')  # in JSON
_EXCERPT = re.compile(r"\n +\d+ \| ")  # begins the part of a grammar that an error shows
# JSON has blanks only where Python's `json.dumps` writes them: with others allowed, small models
# would write blanks without end.
_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What a schema says of a text's `format` is kept for these alone.
_FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
)
_NOT_KEPT = ("uniqueItems", "propertyNames")


def load_schema(file: str) -> dict[str, Any] | None:
    """The schema in the file of the setting `json_schema`; None if that is off.

    SettingError if there is no such file, or if no reply can be by it.
    """
    if file == "off":
        return None
    subject = f"json_schema {file}"
    try:
        schema = parse_json(load_text_file(file), file)
    except UsageError as error:
        hint = "json_schema off lets replies be text"
        raise SettingError(f"json_schema: {error.args[0]}", hint=hint) from None
    if not isinstance(schema, dict) or is_deep(schema):
        raise refusal(subject, 'is no JSON schema, which is an object such as {"type": "object"}')
    check_grammar(f"start: {json_rule(schema, [], subject)}", subject)
    return schema


def guidance(subject: str) -> Any:
    """The package llguidance; SettingError, which begins with `subject`, if it is missing."""
    try:
        import llguidance
    except ImportError:
        problem = "needs the package llguidance: pip install 'sirchat[server]'"
        raise refusal(subject, problem) from None
    return llguidance


def check_grammar(grammar: str, subject: str, vocabulary: Any = None) -> None:
    """Raise SettingError if llguidance can't use a grammar, with a model's vocabulary."""
    if problem := guidance(subject).LLMatcher.validate_grammar(grammar, vocabulary):
        told = _EXCERPT.split(problem)[0]
        raise refusal(subject, f"has a schema that can't be used: {told}")


def refusal(subject: str, problem: str) -> SettingError:
    """The error for a format; its message begins with `subject`, what has asked for it."""
    return SettingError(f"{subject} {problem[:300]}")


def json_rule(schema: dict[str, Any], notes: list[str], subject: str) -> str:
    """JSON by a schema, in a grammar; what of the schema is not kept is added to `notes`."""
    if not _can_end(schema):
        raise refusal(subject, "has a schema that no JSON can meet: it needs itself within itself")
    return f"%json {json.dumps({**_kept(schema, notes, subject), 'x-guidance': _BLANKS})}"


def _can_end(root: dict[str, Any]) -> bool:
    """Whether some finite JSON matches the schema `root`: no part needs itself within itself."""
    places, ended = set(_REF.findall(json.dumps(root))), set[str]()
    while new := {at for at in places - ended if _ends(_part(root, at), ended)}:
        ended |= new
    return _ends(root, ended)


def _ends(schema: Any, ended: Collection[str]) -> bool:
    """Whether some finite JSON matches a schema, if some does of each of the places `ended`."""
    if not isinstance(schema, dict):
        return True
    place, known = schema.get("$ref"), schema.get("properties")
    if isinstance(place, str) and place.startswith("#") and place not in ended:
        return False
    required, needed = schema.get("required"), list[Any]()
    if isinstance(known, dict) and isinstance(required, list):
        needed += [known.get(str(name)) for name in required]
    needed += [schema.get("items")] if schema.get("minItems") else []
    choices = [schema.get(name) for name in ("anyOf", "oneOf")]
    return all(_ends(one, ended) for one in needed) and all(
        any(_ends(one, ended) for one in group)
        for group in choices
        if isinstance(group, list) and group
    )


def _part(root: Any, place: str) -> Any:
    for name in place.split("/")[1:]:
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _kept(schema: Any, notes: list[str], subject: str) -> Any:
    """A schema without what is not kept, which is added to `notes`."""
    if isinstance(schema, list):
        return [_kept(item, notes, subject) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        is_far = name in _BOUNDS and isinstance(value, int | float) and abs(value) >= _FAR
        if is_far and (value > 0) == _BOUNDS[name]:
            problem = f"has a schema whose {name} can't be kept: {format_value(value)}"
            raise refusal(subject, problem)
        if name in _NOT_KEPT or (name == "format" and value not in _FORMATS) or is_far:
            if value:
                notes.append(f"{name} of the schema is not kept")
        elif name in _NAMED and isinstance(value, dict):
            kept[name] = {key: _kept(item, notes, subject) for key, item in value.items()}
        else:
            kept[name] = value if name in _VALUES else _kept(value, notes, subject)
    return kept
