"""Words in a stream of tokens: which token belongs to the word of the token before it."""

from __future__ import annotations

from typing import Any

from sirchat.text.detokenizer import UNFINISHED, TokenTexts

_INSIDE = "-'\u2019/@_&"
"""Characters that join to the letter or digit right before them."""


class WordContinuation:
    """Says whether an id belongs to the word of the id before it, for one tokenizer.

    Words are runs without blanks, as in `Kowalski`, `7:45`, `555-0123` or `it's`; the mark after a
    word is not part of it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._texts = TokenTexts(tokenizer)

    def __call__(self, previous: int, token_id: int) -> bool:
        return continues_word(self._text(previous), self._text(token_id))

    def _text(self, token_id: int) -> str:
        return self._texts([token_id], [0])[0]


def continues_word(previous: str, text: str) -> bool:
    """Whether a token's text belongs to the word that the previous token's text ends with."""
    last, first = previous[-1:], text[:1]
    if _is_part(first):
        return _is_part(last) or (last != "" and last in _INSIDE + ".,:")
    joins = first != "" and (first in _INSIDE or (first == ":" and last.isdigit()))
    return joins and last.isalnum()


def _is_part(character: str) -> bool:
    return character.isalnum() or character == UNFINISHED
