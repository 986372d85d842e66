"""Detects that a reply is caught in a loop: that it writes the same passage again and again."""

from __future__ import annotations

import re

# All lengths are in bytes of UTF-8: a token of English has about 4, an emoji 4.
_MAX_DISTANCE = 4096  # how far back a passage is looked for
_MATCH_BYTES = 24  # the newest bytes, which must have stood there before
# The repetitions of a passage are at least 2 1/2 times as long as itself (a line of verse may come
# three times) and have the first length; without letters, as in rules of dashes, the second.
_MIN_REPEATED_BYTES, _MIN_REPEATED_SIGNS = 64, 320
# So long a passage, about 64 tokens, comes 2 1/4 times: a chorus may come twice.
_LONG_PASSAGE_BYTES = 256
_COUNTER = re.compile(r"\s*(?:\d+[.):]|[-*+•])\s*")  # of an item in a list; it is left out
_FENCE = re.compile(r"\s*(?:```|~~~)")
_INDENT = re.compile(rb"\n(?: {4}|\t)")


class LoopCheck:
    """Takes a reply as it grows; `found` says whether the reply only repeats itself by now.

    Repetition in code, in tables and in indented lines does not count.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.found = False
        self._before, self._line = b"", ""  # whole lines, without counters; the last one
        self._is_code = False

    def push(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._is_code ^= bool(_FENCE.match(line))
            self._before = (self._before + _without_counter(line) + b"\n")[-_MAX_DISTANCE:]
        if not (self._is_code or "|" in self._line):
            self.found = _ends_in_loop(self._before + _without_counter(self._line))


def _without_counter(line: str) -> bytes:
    counter = _COUNTER.match(line)
    return line[counter.end() if counter else 0 :].encode(errors="replace")


def _ends_in_loop(text: bytes) -> bool:
    before = text.rfind(text[-_MATCH_BYTES:], 0, -1)
    if before < 0 or len(text) < _MIN_REPEATED_BYTES:
        return False
    period = len(text) - _MATCH_BYTES - before
    passage = text[-period:]
    if b"|" in passage or not passage.strip() or _INDENT.search(text[-period - _MATCH_BYTES :]):
        return False
    if period < _LONG_PASSAGE_BYTES:
        has_letters = any(map(str.isalpha, passage.decode(errors="ignore")))
        length = max(period * 5 // 2, _MIN_REPEATED_BYTES if has_letters else _MIN_REPEATED_SIGNS)
    else:
        length = period * 5 // 4
    is_there = len(text) >= length + period
    return is_there and text.endswith(text[-length - period : -period])
