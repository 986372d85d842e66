"""Tells which of two statements about the same thing corrects the other, by their words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product

import numpy as np
import torch

from sirchat.memory.ledger import Ledger, Role
from sirchat.models.encoder import Encoder
from sirchat.recall.passage_search import PassageSearch
from sirchat.recall.word_index import STOP_WORDS, words_of
from sirchat.text.detokenizer import QUESTION_MARKS, sentence_bounds

# Least cosine of two statements about the same thing, by SmolLM2's encoder; `may_replace` must say
# so, too. Of 66 facts with corrections of other words (`facts-in-dialogue`), 15 are marked, and of
# pairs of other facts 0.006; with 0.55 and without `may_replace` it was 14, and 0.008.
SAME_THING = 0.52
# What a statement is about: "my cat", "our phone number", "my sister's dog"
_MINE = re.compile(r"\b(?:my|our) (\w+)(?:['’]s)?(?: (\w+))?")
_BEINGS = frozenset(
    words_of(
        "aunt baby boss boyfriend brother cat child children colleague cousin dad daughter doctor "
        "dog father friend girlfriend grandfather grandmother husband kids landlord mother mum "
        "neighbor neighbour nephew niece parents partner pet puppy sister son teacher uncle wife"
    )
)
CORRECTS = re.compile(
    r"(?i)\b(?:actually|after all|any ?more|became|cancelled|changed?s?|dropped|gave|instead|mixed|"
    r"moved|new|no longer|not|now|put off|quit|shifted|so|sold|sorry|switched|that|then|these days|"
    r"those|went up|wrong)\b"
)
_CLAUSE_END = re.compile(r"(?i)[,;] |\b(?:and|but)\b")
_REFERS = re.compile(r"\b(?:he|her|him|it|she|them|they)\b", re.IGNORECASE)
TELLS = re.compile(r"\b(?:i|my|we|our)\b(?:\W+\w+){2}", re.IGNORECASE)  # where no encoder does


def form_of(text: str) -> tuple[str, ...]:
    """All words of a statement but the last one, without those by which it corrects another."""
    return tuple(words_of(CORRECTS.sub("", text))[:-1])


def may_replace(older: str, newer: str) -> bool:
    """Whether a statement near another in meaning may be about the same thing, by its words."""
    words, words_now = set(words_of(older)), set(words_of(newer))
    about, about_now = (
        {word for found in _MINE.findall(text.casefold()) for word in found} - STOP_WORDS - {""}
        for text in (older, newer)
    )
    beings, beings_now = about & _BEINGS, about_now & _BEINGS
    is_named, is_named_now = bool(about & words_now), bool(about_now & words)
    is_of_other = beings_now and (not is_named_now or (beings and not beings & beings_now))
    if is_of_other or (beings and not is_named and not _REFERS.search(newer)):
        return False
    if about and about_now and not is_named_now:
        return bool(CORRECTS.search(newer))
    is_same = is_named or is_named_now if about | about_now else (words & words_now) - STOP_WORDS
    return bool(is_same or CORRECTS.search(newer))


def states_more(older: str, newer: str) -> bool:
    """Whether a statement tells of more things than the one that may replace it, by its clauses."""
    told, now = (_CLAUSE_END.split(text) for text in (older, newer))
    return sum(len(words_of(one)) > 2 for one in told) > sum(len(words_of(one)) > 2 for one in now)


@dataclass(frozen=True)
class Corrections:
    """The passages in which the user corrects what others tell.

    They are told by their vectors, if the encoder that made these tells facts, or else by words.
    """

    search: PassageSearch
    ledger: Ledger
    encoder: Encoder

    def of(self, number: int) -> set[int]:
        """Passage `number`, of each of its sentences the newest correction, and theirs."""
        found, left = {number}, [number]
        while left:
            one = left.pop()
            newest = dict(pair for pair in self._pairs(one) if pair[1] > one)
            left += set(newest.values()) - found
            found |= set(newest.values())
        return found

    def before(self, number: int) -> set[int]:
        """The last passage that passage `number` corrects, with its corrections; or none."""
        older = (other for _, other in self._pairs(number) if other < number)
        found = (self.of(other) for other in sorted(older, reverse=True))
        return next((one for one in found if number in one), set())

    def _pairs(self, number: int) -> Iterator[tuple[str, int]]:
        """A sentence of passage `number`, and one that corrects it or is corrected; in order."""
        rows, vectors = self.search.passages.rows, torch.from_numpy(self.search.passages.vectors)
        by_meaning = len(self.encoder.kinds) > 0 and vectors.shape[1] > 0
        said, is_fact = self._said(number), partial(self.encoder.is_kind, "fact")
        if rows["role"][number] != Role.USER or not said:
            return
        states = bool(is_fact(vectors[[number]])[0])
        if by_meaning and not (states or any(map(CORRECTS.search, said))):
            return
        if by_meaning:
            near = np.flatnonzero((vectors @ vectors[number]).numpy() >= SAME_THING)
        else:
            near = np.unique(np.concatenate([self.search.having(form_of(one)) for one in said]))
        near = near[(rows["role"][near] == Role.USER) & (near != number)]
        for other, also_states in zip(near.tolist(), is_fact(vectors[near]).tolist(), strict=True):
            told, anew = (states, also_states) if other > number else (also_states, states)
            for one, another in product(said, self._said(other)):
                older, newer = (one, another) if other > number else (another, one)
                by_form = TELLS.search(older) and form_of(older) == form_of(newer)
                is_pair = (told if by_meaning else by_form) and (anew or CORRECTS.search(newer))
                if is_pair and may_replace(older, newer):
                    yield one, other

    def _said(self, number: int) -> list[str]:
        """The sentences of a passage, without questions."""
        text = self.search.passages.texts(self.ledger, number, number + 1)[0]
        parts = (text[start:end].strip() for start, end in pairwise(sentence_bounds(text)))
        return [part for part in parts if part and not part.endswith(QUESTION_MARKS)]
