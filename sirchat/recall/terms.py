"""Splits texts into words, and words into the terms by which turns are compared."""

from __future__ import annotations

import re

# English words that tell little by themselves, in lower case.
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about after all also am an and any are as at be been but by can could did do does for "
        "from get go had has have he her here hers him his how i if in into is it its just let "
        "like me more my no not now of off on one or our out over please she should so some tell "
        "than that the their them then there these they this those to too up us very was we were "
        "what when where which who why will with would yes you your",
    )
)

_SENTENCE = re.compile(r"[^.!?？。！\n]+[.!?？。！]*")
_WORD = re.compile(r"\w+")
_LETTERS = 4
_DENSE = "\u2e80"  # Chinese, Japanese and Korean begin here; a term has two characters


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, each with the marks at its end."""
    return _SENTENCE.findall(text)


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.casefold())


def terms_of(text: str) -> list[str]:
    """The terms of all words of a text, in order."""
    return [term for word in words_of(text) for term in letter_groups(word)]


def letter_groups(word: str) -> list[str]:
    """A word's groups of four neighbouring letters, of which its start and its end count as one.

    A shorter word is one term. In Chinese, Japanese and Korean, a group has two characters.
    """
    marked = f"_{word}_"
    size = 2 if max(word) >= _DENSE else _LETTERS
    return [marked[at : at + size] for at in range(max(1, len(marked) - size + 1))]
