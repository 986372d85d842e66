"""JSON schemas: reads one from a file, and makes a rule of it for the grammar of a reply."""

from __future__ import annotations

import json
import re
from typing import Any

from sirchat.errors import SettingError, UsageError
from sirchat.text.text_file import load_text_file
from sirchat.text.tool_calls import is_deep
from sirchat.text.transcript import parse_json

# llguidance fails, or even crashes, with some bounds of numbers that are far from zero.
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_FAR = 10**18
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
    check_grammar(f"start: {json_rule(schema, subject)}", subject)
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
        notes += [f"a part of the schema is not kept: {warning}" for warning in told]


def refusal(subject: str, problem: str) -> SettingError:
    """The error for a format; its message begins with `subject`, what has asked for it."""
    return SettingError(f"{subject} {problem[:300]}")


def json_rule(schema: dict[str, Any], subject: str) -> str:
    """JSON by a schema, in a grammar; SettingError for a bound that is far from zero."""
    if _has_far_bound(schema):
        raise refusal(subject, f"has a schema with a bound of {_FAR:,} or more from zero")
    return f"%json {json.dumps({**schema, 'x-guidance': _GUIDANCE})}"


def _has_far_bound(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_far_bound, schema))
    if not isinstance(schema, dict):
        return False
    bounds = (schema.get(name) for name in _BOUNDS)
    is_far = any(isinstance(bound, int | float) and abs(bound) >= _FAR for bound in bounds)
    return is_far or any(map(_has_far_bound, schema.values()))
