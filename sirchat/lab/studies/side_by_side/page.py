"""A comparison as one self-contained HTML page, which needs no network and no other file.

The page is `page.html` with the JSON record in it. Its script inserts all text as text nodes, and
its content security policy forbids it to load anything.
"""

from __future__ import annotations

import json
from importlib.resources import files

from sirchat.lab.studies.results_log import Record

_PLACEHOLDER = "{{record}}"


def page_of(record: Record) -> str:
    """The page of a record, which is written in it as pure ASCII."""
    template = files("sirchat.lab.studies.side_by_side").joinpath("page.html").read_text("utf-8")
    # Only "<" could end the script element, or begin a comment in it.
    data = json.dumps(record, separators=(",", ":")).replace("<", "\\u003c")
    before, _, after = template.partition(_PLACEHOLDER)
    return before + data + after
