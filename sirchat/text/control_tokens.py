"""Distinguishes control tokens in the texts of a chat from those that the template writes.

A control token is a token that was added to the tokenizer, such as `<|im_end|>`. Before the
template gets a text, a mark is put before and after each control token in the text: two characters
of Unicode's private use. When the rendered chat is turned into ids, what stands between two marks
is read as plain text, and the marks are left out. transformers does the same, with the same marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

_START, _END = "\U000f0000", "\U000f0001"


class ControlTokens:
    """The control tokens of a tokenizer: marks them in texts, and turns a rendered chat into ids.

    Every added token counts as a control token, except blanks that are not special tokens.

    Attributes:
        texts: the texts of the control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = list(tokenizer.added_tokens_decoder.values())
        self.texts = [one.content for one in added if one.special or not one.content.isspace()]
        self._control = re.compile(_any_of(self.texts))
        tokens = _any_of(one.content for one in added)
        self._marked = re.compile(f"{_START}({tokens}){_END}|[{_START}{_END}]")
        self._line_end = self._usual_ids("\n")

    def marked(self, text: str) -> str:
        """Return `text` with marks around its control tokens; older marks in it are removed."""
        text = text.replace(_START, "").replace(_END, "")
        return self._control.sub(f"{_START}\\g<0>{_END}", text)

    def ids(self, chat: str) -> list[int]:
        """Turn a chat that the template rendered, and whose texts were marked, into token ids.

        If a template cuts a text, one mark of a pair can remain: the texts before and after this
        mark are turned into ids separately. Raises ValueError if the tokenizer makes a control
        token from plain text.
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
        """The token ids of `piece`, a text that follows other text; `encode` turns a text into ids.

        Some tokenizers put a space before a text; the ids do not contain this space.
        """
        count = len(self._line_end)
        ids = encode("\n" + piece)
        return ids[count:] if ids[:count] == self._line_end else encode(piece)

    def _usual_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _plain_ids(self, text: str) -> list[int]:
        """The ids of `text` read as plain text, even where it spells a token that was added."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            found: list[int] = self._tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True
            )
            return found
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in backend.model.tokenize(part)]


def _any_of(tokens: Iterable[str]) -> str:
    """A regular expression that matches any of the tokens; where several match, the longest one."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"  # matches nothing
