"""A study's results log: a file with one JSON line for each finished unit (independent run).

An interrupted run resumes from this file, and its results equal those of an uninterrupted run. A
run with further units extends the file; see `study.Extensible`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sirchat.errors import SettingError, format_value

Record = dict[str, Any]
"""The results of one unit (independent run) of a study, or any other JSON object."""

_FORMAT = 2
"""Version of the results log's file format; in version 1, keys were row numbers."""


class ResultsLog:
    """The records of finished units (independent runs), by key, in memory and in a file.

    `path` is the file; None for no file. `about` has the parameters that all units share, and
    becomes the file's first line.

    Raises SettingError if the file exists and its first line differs from `about`. The message
    names the first difference.
    """

    def __init__(self, path: Path | None, about: Record) -> None:
        self._path = path
        self._done: dict[str, Record] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _whole_lines(path)
        first = json.loads(json.dumps({"format": _FORMAT, **about}))
        if lines and (difference := _difference(lines[0], first)):
            raise SettingError(
                f"{path} holds the results of another run: {difference}",
                hint="choose another folder with --out, or delete this file",
            )
        _write(path, lines or [first])
        self._done = {line["key"]: line["found"] for line in lines[1:]}

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def __getitem__(self, key: str) -> Record:
        return self._done[key]

    def add(self, key: str, found: Record) -> None:
        """Add the record `found` of the finished unit (independent run) with the key `key`.

        Units may finish in any order.
        """
        self._done[key] = found
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "found": found}) + "\n")


def _difference(there: Record, here: Record) -> str:
    """The first difference between the first lines of two logs, as text; '' if they are equal.

    `there` is the line in the file, `here` the line that the current run would write.
    """
    if there.get("format") != here["format"]:
        return "it was written by another version of sirchat"
    for name in {**here, **there}:
        one, other = there.get(name), here.get(name)
        if one != other:
            return f"{name} is {format_value(one)} there, not {format_value(other)}"
    return ""


def _whole_lines(path: Path) -> list[Record]:
    """The JSON objects in a file, one per line; an incomplete last line is left out."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    whole, _, _ = text.rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _write(path: Path, lines: list[Record]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
