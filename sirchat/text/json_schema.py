"""JSON schemas: reads one from a file, and makes a rule of it for the grammar of a reply."""

from __future__ import annotations

import json
import re
from typing import Any

from sirchat.errors import SettingError, UsageError, format_value
from sirchat.text.text_file import load_text_file
from sirchat.text.tool_calls import is_deep
from sirchat.text.transcript import parse_json

# llguidance fails, or even crashes, with some bounds of numbers that are far from zero. Those with
# this sign exclude no number that a model writes, and are left out.
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_FAR = 10**18
_VALUES = ("enum", "const", "default", "examples")  # of a schema: may look like one
_NOT_KEPT = "a part of the schema is not kept"
_EXCERPT = re.compile(r"\n +\d+ \| ")  # begins the part of a grammar that an error shows
# JSON has blanks only where Python's `json.dumps` writes them: with others allowed, small models
# would write blanks without end.
_GUIDANCE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,  # what of a schema it does not know is a warning
}


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
    check_grammar(f"start: {json_rule(schema, subject, [])}", subject)
    return schema


def guidance(subject: str) -> Any:
    """The package llguidance; SettingError, which begins with `subject`, if it is missing."""
    try:
        import llguidance
    except ImportError:
        problem = "needs the package llguidance: pip install 'sirchat[server]'"
        raise refusal(subject, problem) from None
    return llguidance


def check_grammar(
    grammar: str, subject: str, vocabulary: Any = None, notes: list[str] | None = None
) -> None:
    """Raise SettingError if llguidance can't use a grammar, with a model's vocabulary.

    What of its schemas is not kept is added to `notes`.
    """
    check = guidance(subject).LLMatcher.validate_grammar_with_warnings
    is_error, told = check(grammar, vocabulary)
    if is_error:
        problem = _EXCERPT.split(told[0])[0]
        raise refusal(subject, f"has a schema that can't be used: {problem}")
    if notes is not None:
        notes += [f"{_NOT_KEPT}: {warning}" for warning in told]


def refusal(subject: str, problem: str) -> SettingError:
    """The error for a format; its message begins with `subject`, what has asked for it."""
    return SettingError(f"{subject} {problem[:300]}")


def json_rule(schema: dict[str, Any], subject: str, notes: list[str]) -> str:
    """JSON by a schema, in a grammar; bounds that are not kept are added to `notes`.

    SettingError for another bound that is far from zero, or if no JSON is ever complete.
    """
    kept = _without_far_bounds(schema, notes)
    if _has_far_bound(kept):
        raise refusal(subject, f"has a schema with a bound of {_FAR:,} or more from zero")
    rule = f"%json {json.dumps({**kept, 'x-guidance': _GUIDANCE})}"
    library = guidance(subject)
    matcher = library.LLMatcher(library.LLTokenizer("byte"), f"start: {rule}", log_level=0)
    if not matcher.is_error():  # else `check_grammar` tells what is wrong
        matcher.consume_tokens(
            matcher.compute_ff_tokens()[:1]
        )  # fails if what must follow is endless
        if matcher.is_error():
            raise refusal(
                subject, "has a schema that no JSON can meet: it needs itself within itself"
            )
    return rule


def _without_far_bounds(schema: Any, notes: list[str]) -> Any:
    """A schema without bounds that exclude nothing, which are added to `notes`."""
    if isinstance(schema, list):
        return [_without_far_bounds(item, notes) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        is_bound = name in _BOUNDS and isinstance(value, int | float)
        if is_bound and value * _BOUNDS[name] >= _FAR:
            notes.append(f"{_NOT_KEPT}: {name} {format_value(value)}")
        else:
            kept[name] = value if name in _VALUES else _without_far_bounds(value, notes)
    return kept


def _has_far_bound(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_far_bound, schema))
    if not isinstance(schema, dict):
        return False
    bounds = (schema.get(name) for name in _BOUNDS)
    is_far = any(isinstance(bound, int | float) and abs(bound) >= _FAR for bound in bounds)
    return is_far or any(map(_has_far_bound, schema.values()))
