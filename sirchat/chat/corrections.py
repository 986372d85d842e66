"""Decides by words which of two statements about the same thing corrects the other."""

from __future__ import annotations

import re
from itertools import chain

from sirchat.recall.word_index import STOP_WORDS, words_of

# Least cosine of two statements about the same thing, by SmolLM2's encoder; `may_replace` must say
# so, too. Of 66 facts with corrections of other words (`facts-in-dialogue`), 15 are marked, and of
# pairs of other facts 0.006; with 0.55 and without `may_replace` it was 14, and 0.008.
SAME_SUBJECT_COSINE = 0.52
# What a statement is about: "my cat", "our phone number", "my sister's dog"
_POSSESSIONS = re.compile(r"\b(?:my|our) (\w+)(?:['’]s)?(?: (\w+))?")
_BEINGS = frozenset(
    words_of(
        "aunt baby boss boyfriend brother cat child children colleague cousin dad daughter doctor "
        "dog father friend girlfriend grandfather grandmother husband kids landlord mother mum "
        "neighbor neighbour nephew niece parents partner pet puppy sister son teacher uncle wife"
    )
)
CORRECTION_WORDS = re.compile(
    r"(?i)\b(?:actually|after all|any ?more|became|cancelled|changed?s?|dropped|gave|instead|mixed|"
    r"moved|new|no longer|not|now|put off|quit|shifted|so|sold|sorry|switched|that|then|these days|"
    r"those|went up|wrong)\b"
)
_DENIED = re.compile(r"(?i)[,;:–—-] *(?:and |but )?not ([^.,;:!?]+)")  # "in June, not in March"
_CLAUSE_END = re.compile(r"(?i)[,;] |\b(?:and|but)\b")
_CLAUSES = re.compile(r"(?i)[,;:] |\b(?:and|but)\b")
_NAMES_AT_END = re.compile(r"(?: [A-Z\d][\w'’.-]*)+\W*$")  # also numbers
_PRONOUNS = re.compile(r"\b(?:he|her|him|it|she|them|they)\b", re.IGNORECASE)
# What tells a fact where no encoder can say so
FIRST_PERSON_STATEMENT = re.compile(r"(?i)\b(?:i|my|we|our)\b(?:\W+\w+){2}")


def statement_form(text: str) -> tuple[str, ...]:
    """All words of a statement but the last one, without words that mark a correction."""
    return tuple(words_of(CORRECTION_WORDS.sub("", text))[:-1])


def clause_forms(text: str) -> set[tuple[str, ...]]:
    """The words of each clause before the names or numbers at its end, as by `statement_form`."""
    plain = (CORRECTION_WORDS.sub("", clause).rstrip() for clause in _CLAUSES.split(text))
    parts = (_NAMES_AT_END.subn("", clause) for clause in plain)
    forms = {tuple(words_of(rest)) for rest, count in parts if count}
    return {form for form in forms if len(form) > 2 and not STOP_WORDS.issuperset(form)}


def denied_words(text: str) -> set[str]:
    """The words that a statement denies after a comma: `march` in `June, not in March`."""
    return {*words_of(" ".join(_DENIED.findall(text)))} - STOP_WORDS


def denies(older: str, newer: str) -> bool:
    """Whether `newer` denies a word of `older`, and has another one of its words."""
    words, denied = {*words_of(older)} - STOP_WORDS, denied_words(newer)
    return not words.isdisjoint(denied) and bool(words & {*words_of(newer)} - denied)


def may_replace(older: str, newer: str) -> bool:
    """Whether `newer`, near `older` in meaning, may be about the same thing, by its words."""
    words, words_now = set(words_of(older)), set(words_of(newer))
    about, about_now = (
        {*chain.from_iterable(_POSSESSIONS.findall(text.casefold()))} - STOP_WORDS - {""}
        for text in (older, newer)
    )
    beings, beings_now = about & _BEINGS, about_now & _BEINGS
    is_named, is_named_now = bool(about & words_now), bool(about_now & words)
    is_of_other = beings_now and (not is_named_now or (beings and not beings & beings_now))
    if is_of_other or (beings and not is_named and not _PRONOUNS.search(newer)):
        return False
    if about and about_now and not is_named_now:
        return bool(CORRECTION_WORDS.search(newer))
    is_same = is_named or is_named_now if about | about_now else (words & words_now) - STOP_WORDS
    return bool(is_same or CORRECTION_WORDS.search(newer))


def has_more_clauses(older: str, newer: str) -> bool:
    """Whether `older` has more clauses than `newer`, which may replace it."""
    counts = [
        sum(len(words_of(clause)) > 2 for clause in _CLAUSE_END.split(text))
        for text in (older, newer)
    ]
    return counts[0] > counts[1]
