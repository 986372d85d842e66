"""Distinguishes control tokens in the texts of a chat from those that the template writes.

A mark, a character of Unicode's private use, stands before and after each control token in a text;
what stands between two marks is read as plain text. transformers uses the same marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

_START, _END = "\U000f0000", "\U000f0001"


class ControlTokens:
    """The control tokens of a tokenizer: all added tokens but blanks that are not special.

    `texts` are the texts of the control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = list(tokenizer.added_tokens_decoder.values())
        controls = (token for token in added if token.special or not token.content.isspace())
        self.texts = [token.content for token in controls]
        self._control = re.compile(_any_of(self.texts))
        tokens = _any_of(token.content for token in added)
        self._marked = re.compile(f"{_START}({tokens}){_END}|[{_START}{_END}]")
        self._line_end = self._usual_ids("\n")

    def marked(self, text: str) -> str:
        """Return `text` with marks around its control tokens; older marks in it are removed."""
        text = text.replace(_START, "").replace(_END, "")
        return self._control.sub(f"{_START}\\g<0>{_END}", text)

    def ids(self, chat: str) -> list[int]:
        """Turn a rendered chat whose texts were marked into token ids.

        One mark of a pair can remain, if the template cuts a text. Raises ValueError if the
        tokenizer makes a control token from plain text.
        """
        first, *others = self._marked.split(chat)
        ids: list[int] = self._tokenizer.encode(first, add_special_tokens=False)
        for number, piece in enumerate(others):  # in turn: a marked token or None, other text
            if not piece:
                continue
            is_text = number % 2 == 0
            added = self._ids_inside(piece, self._plain_ids if is_text else self._usual_ids)
            if is_text and self._tokenizer.convert_tokens_to_ids(piece) in added:
                raise ValueError(f"{piece!r} can't be read as plain text by this tokenizer")
            ids += added
        return ids

    def _ids_inside(self, piece: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of `piece` inside a text: some tokenizers add a space at the start of a text."""
        count = len(self._line_end)
        ids = encode("\n" + piece)
        return ids[count:] if ids[:count] == self._line_end else encode(piece)

    def _usual_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _plain_ids(self, text: str) -> list[int]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            ids: list[int] = self._tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True
            )
            return ids
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in backend.model.tokenize(part)]


def _any_of(tokens: Iterable[str]) -> str:
    """A regular expression for any of the tokens; where several match, the longest one."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"  # matches nothing
