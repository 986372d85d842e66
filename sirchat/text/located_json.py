"""A JSON text, and where each of its values is, so that errors can name a line."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from sirchat.errors import TranscriptError

_SPACE = re.compile(r"[ \t\n\r]*")


class LocatedJson:
    """A JSON text of the file `name`; a value is at the index of its first character."""

    def __init__(self, text: str, name: str, first_line: int = 1) -> None:
        self.text = text
        self.name = name
        self._first_line = first_line
        self._line_ends = [match.start() for match in re.finditer("\n", text)]
        self._decoder = json.JSONDecoder()

    def line(self, at: int) -> int:
        """The number of the line with the character at index `at`."""
        return self._first_line + bisect_left(self._line_ends, at)

    def only_value(self) -> object:
        """Parse the text, which must be one JSON value; raises TranscriptError for any other."""
        value, end = self._decode(self._skip_space(0))
        if self._skip_space(end) < len(self.text):
            raise self._invalid(end, "there is more after the first value")
        return value

    def values(self) -> Iterator[tuple[int, object]]:
        """Yield the index and the value of each top-level JSON value."""
        at = self._skip_space(0)
        while at < len(self.text):
            value, end = self._decode(at)
            yield at, value
            at = self._skip_space(end)

    def items(self, at: int) -> Iterator[tuple[int, object]]:
        """Yield the index and the value of each item of the valid JSON list at index `at`."""
        at = self._skip_space(at + 1)
        while self.text[at] != "]":
            value, end = self._decode(at)
            yield at, value
            at = self._next(end)

    def member(self, at: int, key: str) -> int:
        """The index of the last value of `key` in the valid JSON object at index `at`."""
        place, at = at, self._skip_space(at + 1)
        while self.text[at] != "}":
            name, end = self._decode(at)
            start = self._next(end)
            if name == key:
                place = start
            _, end = self._decode(start)
            at = self._next(end)
        return place

    def _next(self, end: int) -> int:
        """The index of the next value, or closing bracket, after a value that ends at `end`."""
        at = self._skip_space(end)
        return self._skip_space(at + 1) if self.text[at] in ",:" else at

    def _skip_space(self, at: int) -> int:
        space = _SPACE.match(self.text, at)
        return space.end() if space else at

    def _decode(self, at: int) -> tuple[Any, int]:
        try:
            return self._decoder.raw_decode(self.text, at)
        except json.JSONDecodeError as error:
            raise self._invalid(error.pos, error.msg) from None
        except (ValueError, RecursionError):
            problem = "a number is too long, or brackets are nested too deeply"
            raise self._invalid(at, problem) from None

    def _invalid(self, at: int, problem: str) -> TranscriptError:
        return TranscriptError(f"{self.name}, line {self.line(at)}: not valid JSON: {problem}")
