"""What an evaluation has found so far, on disk: one JSON line for each finished unit of work.

A run that was interrupted goes on where it stopped, and ends as if it had never stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sirchat.errors import SettingError

Record = dict[str, Any]


class ResultsLog:
    """Finished units by key, in memory and, with a `path`, in a file.

    `about` says what was asked; a file that answers something else is refused with SettingError.
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
        """Which of these are not known yet."""
        return [key for key in keys if key not in self._done]

    def __getitem__(self, key: str) -> Record:
        return self._done[key]

    def note(self, key: str, found: Record) -> None:
        """What a unit found, in whatever order units end."""
        self._done[key] = found
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "found": found}) + "\n")


def _whole_lines(path: Path) -> list[Record]:
    """The lines of a file; a last one that was cut off does not count."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    whole, _, _ = text.rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _write(path: Path, lines: list[Record]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
