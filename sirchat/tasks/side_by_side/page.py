"""A comparison as one HTML page, which needs nothing else: no network, no other file.

The page is `page.html` with the JSON record in it. Its script makes every element as a text
node, and its policy forbids it to load anything.
"""

from __future__ import annotations

import json
from importlib.resources import files

from sirchat.tasks.results_log import Record

_PLACE = "{{record}}"


def page_of(record: Record) -> str:
    """The page; pure ASCII where it comes from the record."""
    template = files("sirchat.tasks.side_by_side").joinpath("page.html").read_text("utf-8")
    # Inside a script element only "<" could end it, or begin a comment.
    data = json.dumps(record, separators=(",", ":")).replace("<", "\\u003c")
    before, _, after = template.partition(_PLACE)
    return before + data + after
