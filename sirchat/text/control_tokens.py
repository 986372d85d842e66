"""Distinguishes control tokens in the texts of a chat from those that the template writes.

A mark, a character of Unicode's private use, stands before and after each control token in a text;
what stands between two marks is read as plain text. transformers uses the same marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from sirchat.errors import no_panic

START, END = "\U000f0000", "\U000f0001"


class ControlTokens:
    """The control tokens of a tokenizer, which are never made from text.

    These are the tokens that its files call special, and of the other added tokens those that end a
    reply or stand in `written`, texts by the chat template. All else is ordinary vocabulary.
    """

    def __init__(
        self, tokenizer: Any, written: Iterable[str] = (), ends: Iterable[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        found = set(ends).union(*map(self._usual_ids, written))
        special = {i for i, token in added.items() if token.special}
        special |= added.keys() & set(tokenizer.all_special_ids)
        # Indented lines of a template have added tokens that stand for runs of blanks.
        used = {i for i in found & added.keys() if added[i].content.strip(" \t\r\n▁")}
        self.known = frozenset(special | used)
        self.texts = [added[i].content for i in sorted(self.known)]
        any_text = _any_of(self.texts)
        self._control = re.compile(any_text)
        self._marked = re.compile(f"{START}({any_text}){END}|[{START}{END}]")
        self._line_end = self._usual_ids("\n")

    def marked(self, text: str) -> str:
        """Return `text` with marks around its control tokens; older marks in it are removed."""
        text = text.replace(START, "").replace(END, "")
        return self._control.sub(f"{START}\\g<0>{END}", text)

    def ids(self, chat: str) -> list[int]:
        """Turn a rendered chat whose texts were marked into token ids.

        One mark of a pair can remain, if the template cuts a text.
        """
        first, *others = self._marked.split(chat)
        ids = self._usual_ids(first)
        for number, piece in enumerate(others):  # in turn: a marked token or None, other text
            if not piece:
                continue
            if number % 2:
                ids += self._ids_inside(piece, self._usual_ids)
                continue
            plain = self._ids_inside(piece, self._plain_ids)
            if not self.known.isdisjoint(plain):  # a word of the vocabulary, made by its merges
                letters = (self._ids_inside(letter, self._plain_ids) for letter in piece)
                plain = [i for letter in letters for i in letter if i not in self.known]
            ids += plain
        return ids

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text without a template; none of them is a control token."""
        ids = self.ids(self.marked(text))
        if self.known.isdisjoint(ids):
            return ids
        # The tokenizer changes letters before it looks for added tokens: the text is cut in one.
        half = len(text) // 2
        return [*self.text_ids(text[:half]), *self.text_ids(text[half:])] if half else []

    def _ids_inside(self, piece: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of `piece` inside a text: some tokenizers add a space at the start of a text."""
        count = len(self._line_end)
        ids = encode("\n" + piece)
        return ids[count:] if ids[:count] == self._line_end else encode(piece)

    @no_panic("the model's tokenizer can't read this text")
    def _usual_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    @no_panic("the model's tokenizer can't read this text")
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
