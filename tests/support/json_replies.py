"""A JSON schema, files of it, and a check that a reply is as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "dogs": {"type": "integer", "maximum": 99, "minimum": 0},
        "mood": {"enum": ["good", "bad"]},
    },
    "required": ["name", "dogs", "mood"],
    "additionalProperties": False,
}


def check_person(text: str) -> None:
    """Check that a text is a person as the schema says, in one line."""
    found = json.loads(text)
    assert text == json.dumps(found, ensure_ascii=False)
    assert list(found) == ["name", "dogs", "mood"]
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 12
    assert 0 <= found["dogs"] <= 99
    assert found["mood"] in ("good", "bad")


def write_schema(path: Path, schema: object = PERSON) -> str:
    """Write a schema to a file; returns its name."""
    path.write_text(json.dumps(schema), encoding="utf-8")
    return str(path)
