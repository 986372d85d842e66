"""The results of an evaluation so far, on disk: one JSON line for each finished unit.

An interrupted run resumes from this file, and its results equal those of an uninterrupted run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sirchat.errors import SettingError

Record = dict[str, Any]
"""The result of one unit, or any other JSON object."""


class ResultsLog:
    """The records of finished units by key, in memory and, with a `path`, in a file.

    `about` describes the run and is the file's first line. Raises SettingError for a file whose
    first line is another one: it belongs to another run.
    """

    def __init__(self, path: Path | None, about: Record) -> None:
        self._path = path
        self._done: dict[str, Record] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _whole_lines(path)
        if lines and lines[0] != json.loads(json.dumps(about)):
            raise SettingError(
                f"{path} holds the results of another run",
                hint="give another --out, or delete the file",
            )
        _write(path, lines or [about])
        self._done = {line["key"]: line["found"] for line in lines[1:]}

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Which of these units are not finished yet."""
        return [key for key in keys if key not in self._done]

    def __getitem__(self, key: str) -> Record:
        return self._done[key]

    def add(self, key: str, found: Record) -> None:
        """Add the record of a finished unit; units may finish in any order."""
        self._done[key] = found
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "found": found}) + "\n")


def _whole_lines(path: Path) -> list[Record]:
    """The lines of a file, without a last line that was cut off by an interruption."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    whole, _, _ = text.rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _write(path: Path, lines: list[Record]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
