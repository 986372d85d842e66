"""JSON schemas: reads a schema from a file, and makes a grammar rule for a reply from it."""

from __future__ import annotations

import json
import re
from typing import Any

from sirchat.errors import SettingError, UsageError
from sirchat.text.text_file import load_text_file
from sirchat.text.tool_calls import is_too_deep
from sirchat.text.transcript import parse_json

_MAX_BOUND = 10**18  # llguidance crashes with some negative numbers that are farther from zero
_IGNORED_NOTE = "a part of the schema is not kept"
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
    """The schema in the file of the setting `json_schema`; None if the setting is off.

    Raises SettingError if there is no such file, or if no reply can match the schema.
    """
    if file == "off":
        return None
    subject = f"json_schema {file}"
    try:
        schema = parse_json(load_text_file(file), file)
    except UsageError as error:
        hint = "json_schema off lets replies be text"
        raise SettingError(f"json_schema: {error.args[0]}", hint=hint) from None
    if not isinstance(schema, dict) or is_too_deep(schema):
        problem = 'is no JSON schema, which is an object such as {"type": "object"}'
        raise format_error(subject, problem)
    check_grammar(f"start: {json_rule(schema, subject)}", subject)
    return schema


def import_llguidance(subject: str) -> Any:
    """Import the package llguidance; raises SettingError about `subject` if it is missing."""
    try:
        import llguidance
    except ImportError:
        problem = "needs the package llguidance: pip install 'sirchat[server]'"
        raise format_error(subject, problem) from None
    return llguidance


def check_grammar(
    grammar: str, subject: str, vocabulary: Any = None, notes: list[str] | None = None
) -> None:
    """Raise SettingError if llguidance can't use a grammar with this vocabulary.

    Parts of schemas that llguidance does not enforce are added to `notes`.
    """
    check = import_llguidance(subject).LLMatcher.validate_grammar_with_warnings
    is_error, messages = check(grammar, vocabulary)
    if is_error:
        problem = _EXCERPT.split(messages[0])[0]
        raise format_error(subject, f"has a schema that can't be used: {problem}")
    if notes is not None:
        notes += [f"{_IGNORED_NOTE}: {warning}" for warning in messages]


def format_error(subject: str, problem: str) -> SettingError:
    """An error about a reply's format; `subject` is the flag or field that asked for it."""
    return SettingError(f"{subject} {problem[:300]}")


def json_rule(schema: dict[str, Any], subject: str) -> str:
    """A grammar rule for JSON by a schema.

    Raises SettingError for negative numbers far from zero, or if JSON could never be complete.
    """
    if _has_far_number(schema):  # anywhere, as a reference may make a schema of any part
        raise format_error(subject, f"has a schema with a value of {-_MAX_BOUND:,} or less")
    rule = f"%json {json.dumps({**schema, 'x-guidance': _GUIDANCE})}"
    library = import_llguidance(subject)
    matcher = library.LLMatcher(library.LLTokenizer("byte"), f"start: {rule}", log_level=0)
    if not matcher.is_error():  # else `check_grammar` tells what is wrong
        # Fails if what must follow is too long, or endless as a schema needs itself within itself.
        matcher.consume_tokens(matcher.compute_ff_tokens()[:1])
        if matcher.is_error():
            raise format_error(subject, "has a schema that no JSON of a possible length can meet")
    return rule


def _has_far_number(value: Any) -> bool:
    """Whether a value has a negative number far from zero, with which llguidance crashes."""
    if isinstance(value, list | dict):
        items = value.values() if isinstance(value, dict) else value
        return any(map(_has_far_number, items))
    return isinstance(value, int | float) and value <= -_MAX_BOUND
