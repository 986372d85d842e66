"""An index of the words of a chat. BM25 scores how well passages fit the words of a message."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirchat.text.detokenizer import QUESTION_MARKS

# English words that tell little by themselves, in lower case: a message of them finds nothing.
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about after all also am an and any are as at be been but by can could did do does for "
        "from get go had has have he her here hers him his how i if in into is it its just know "
        "let like me more my no not now of off ok on one or our out over please really she should "
        "so some something tell than that the their them then there these they think this those to "
        "too up us very was we were what when where which who why will with would yes you your",
    )
)

_GREETING = re.compile(
    r"(?i)\b(?:hello|hi|hey|greetings|good ?(?:morning|afternoon|evening|night|day|bye)|bye|cheers|"
    r"see you|nice to meet you|thank(?: you|s)|(?:you['’]re )?welcome|hallo|guten (?:tag|morgen|"
    r"abend)|danke|bonjour|salut|merci|hola|gracias|ciao|grazie|你好|谢谢|こんにちは|ありがとう)\b"
)
_PLEASANTRIES = {*STOP_WORDS, "again", "fine", "lot", "m", "much", "well"} - {"no", "not", "yes"}

DISCOUNT = 0.5  # of a question, and of what stands beside a hit; squared, of one further away
# Rank in the tokenizer's vocabulary of the rarest words that count for nothing. The weight of the
# others grows with the logarithm of the rank. Chosen on LoCoMo's conversations 0 to 2.
COMMON_WORD_RANK = 70
MIN_POPULATION = 100  # a chat of fewer blocks, or passages, is judged as if it had so many
_MAX_BLOCK_PASSAGES = 8  # most passages of a block: those of a turn, or of a part of a long turn
_K1, _B = 0.9, 0.4  # of BM25, as usual in Anserini
# What a block gets of the counts of the blocks up to two before and after it
_NEIGHBOUR_WEIGHTS = (DISCOUNT**2, DISCOUNT, 1, DISCOUNT, DISCOUNT**2)
_TIE_BREAK = 1e-3  # puts the passages of a block that have the words before the others
_MAX_SENTENCE_TERMS = 32  # of a sentence that are looked for, the rarest
_TERM_LETTERS = 4
FIRST_CJK = "\u2e80"  # Chinese, Japanese and Korean begin here; a term has two characters
_MAX_SHARED_WORDS = 3  # most words that `shared_words` returns
_BYTE_TOKENS = 256  # a vocabulary begins with single bytes
_WORD = re.compile(r"\w+")

Floats = NDArray[np.float32]
# How much a word tells by its rarity in the language, from 0, nothing, to 1
WordWeight = Callable[[str], float]


def terms_of(text: str) -> list[str]:
    return [term for word in words_of(text) for term in letter_groups(word)]


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def is_greeting(text: str) -> bool:
    """Whether a text greets or thanks, in any of some languages, and tells nothing else."""
    rest, count = _GREETING.subn("", text)
    return count > 0 and _PLEASANTRIES.issuperset(words_of(rest))


def letter_groups(word: str) -> list[str]:
    """The terms of a word: its groups of four letters, with `_` before and after the word.

    A shorter word is one term. In Chinese, Japanese and Korean, a group has two characters.
    """
    marked = f"_{word}_"
    size = 2 if max(word) >= FIRST_CJK else _TERM_LETTERS
    return [marked[start : start + size] for start in range(max(1, len(marked) - size + 1))]


def word_weights(tokenizer: Any) -> WordWeight:
    """The weight function of words, 0 to 1; frequent words have low token ids and low weights."""

    @lru_cache(maxsize=1 << 16)
    def weight(word: str) -> float:
        if word.isdecimal():  # vocabularies begin with digits; yet "room 3" is not "room 4"
            return 1.0
        ranks = [len(tokenizer)]
        for form in (word, word.capitalize()):
            for text in (f" {form}", form):  # some tokenizers add the blank themselves
                ids = tokenizer.encode(text, add_special_tokens=False)
                if len(ids) == 1:
                    ranks.append(max(1, ids[0] - _BYTE_TOKENS))
                    break
        rarest, commonest = max(ranks) / COMMON_WORD_RANK, min(ranks) / COMMON_WORD_RANK
        return max(0.0, math.log(commonest) / math.log(rarest))

    return weight


class WordIndex:
    """Scores the passages of a chat by the words that they share with a message.

    BM25 in Lucene's variant (Robertson and Zaragoza 2009, https://doi.org/10.1561/1500000019). A
    term is a group of letters. A document is a block of passages of one turn, with half of the
    counts of the two blocks beside it and a quarter of the next two. Words of a question count
    half, but fully for the block after it. The weight of a term is its rarity in the chat, times
    the weight of its word in the language, divided by the root of the number of the word's terms.
    """

    def __init__(self, word_weight: WordWeight) -> None:
        self._word_weight = word_weight
        self._postings: dict[str, tuple[array[int], array[float]]] = {}
        self._turns, self._blocks, self.asks = array("i"), array("i"), array("b")
        self.greets = array("b")
        self._sizes = array("f")
        self._asked: dict[int, frozenset[str]] = {}  # informative words of each question

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, text: str, turn: int) -> None:
        number = len(self)
        counts = Counter(terms_of(text))
        for term, count in counts.items():
            numbers, times = self._postings.setdefault(term, (array("i"), array("f")))
            numbers.append(number)
            times.append(count)
        block = self._blocks[-1] if number else -1
        is_full = self._blocks[-_MAX_BLOCK_PASSAGES:].count(block) == _MAX_BLOCK_PASSAGES
        self._blocks.append(block + (not number or turn != self._turns[-1] or is_full))
        self._turns.append(turn)
        self.asks.append(text.rstrip().endswith(QUESTION_MARKS))
        if self.asks[-1]:
            self._asked[number] = frozenset(self.informative_words(text))
        self.greets.append(is_greeting(text))
        self._sizes.append(sum(counts.values()))

    def truncate(self, count: int) -> None:
        if count == len(self):
            return
        for numbers, times in self._postings.values():
            while numbers and numbers[-1] >= count:
                numbers.pop()
                times.pop()
        self._postings = {term: each for term, each in self._postings.items() if each[0]}
        for column in (self._turns, self._blocks, self.asks, self.greets, self._sizes):
            del column[count:]
        self._asked = {number: words for number, words in self._asked.items() if number < count}

    def scores(self, sentences: Sequence[str]) -> NDArray[np.float64]:
        """The score [n] of each passage; 0 for a passage that shares no word with the sentences.

        Each sentence is scored by itself. The result is the root of the sum of the squares.
        """
        total = np.zeros(len(self))
        if len(self):
            documents = _Documents(self._blocks, self.asks, self._sizes)
            for sentence in sentences:
                total += self._score(documents, words_of(sentence)) ** 2
        return np.sqrt(total)

    def with_block(self, fits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Scores `fits` [n], halved for questions; at least half of the best score in the block."""
        asks, blocks = np.array(self.asks, bool), np.array(self._blocks)
        own = np.where(asks, DISCOUNT * fits, fits)
        best = np.zeros(int(blocks[-1]) + 1)
        np.maximum.at(best, blocks, own)
        total: NDArray[np.float64] = np.maximum(own, DISCOUNT * best[blocks])
        return total

    def only_ask(self, text: str) -> NDArray[np.bool_]:
        """Mask [n] of the questions that tell nothing: a text has all their informative words."""
        known, mask = set(words_of(text)), np.zeros(len(self), bool)
        mask[[number for number, words in self._asked.items() if words <= known]] = True
        return mask

    def informative_words(self, text: str) -> list[str]:
        """The words of a text that are informative by themselves, in the order of the text."""
        weights = self._weights(words_of(text))
        return [word for word in words_of(text) if word not in STOP_WORDS and weights[word]]

    def shared_words(self, text: str, wanted: str) -> tuple[str, ...]:
        """Up to three words of `wanted` that occur in `text` in some form, rarest first."""
        terms, telling = set(terms_of(text)) & self._postings.keys(), self.informative_words(wanted)
        rarity = dict[str, int]()
        for word in _WORD.findall(wanted):
            groups = letter_groups(word.casefold())
            common = [len(self._postings[term][0]) for term in groups if term in terms]
            if word.casefold() in telling and 2 * len(common) > len(groups):
                rarity[word] = min(common)
        return tuple(sorted(rarity, key=rarity.__getitem__)[:_MAX_SHARED_WORDS])

    def with_word(self, word: str) -> NDArray[np.bool_]:
        """Mask [n] of the passages that have a word in some form."""
        groups = letter_groups(word)
        numbers = [np.zeros(0, np.int32)]
        for term in {*groups} & self._postings.keys():
            numbers.append(np.frombuffer(self._postings[term][0], np.int32))
        having = np.bincount(np.concatenate(numbers), minlength=len(self))
        most: NDArray[np.bool_] = 2 * having > len(groups)
        return most

    def _weights(self, words: Sequence[str]) -> dict[str, float]:
        weights = {word: self._word_weight(word) for word in words}
        if any(weight for word, weight in weights.items() if word not in STOP_WORDS):
            return weights
        # A small vocabulary begins with words that tell much: then rarity in the chat alone counts.
        return {word: float(word not in STOP_WORDS) for word in words}

    def _weighted_terms(self, words: Sequence[str]) -> dict[str, float]:
        """The weights of those terms of the words that occur in the chat; the rarest terms only."""
        weights = dict[str, float]()
        for word, word_weight in self._weights(words).items():
            groups = letter_groups(word)
            for term in groups:
                weight = word_weight / math.sqrt(len(groups))
                if term in self._postings and weight > weights.get(term, 0.0):
                    weights[term] = weight
        rarest = sorted(weights, key=lambda term: len(self._postings[term][0]))
        return {term: weights[term] for term in rarest[:_MAX_SENTENCE_TERMS]}

    def _score(self, documents: _Documents, words: Sequence[str]) -> NDArray[np.float64]:
        scores, by_block = np.zeros(len(self)), np.zeros(len(documents.norms))
        for term, weight in self._weighted_terms(words).items():
            numbers = np.frombuffer(self._postings[term][0], np.int32)
            counts = documents.counts(numbers, np.frombuffer(self._postings[term][1], np.float32))
            having, blocks = float(np.minimum(counts, 1).sum()), max(len(counts), MIN_POPULATION)
            rarity = weight * math.log(1 + max(0.0, blocks - having + 0.5) / (having + 0.5))
            by_block += rarity * (counts / (counts + documents.norms))
            scores[numbers] += _TIE_BREAK * rarity
        scores += by_block[documents.blocks]
        return scores


class _Documents:
    """Counts terms in blocks of passages, with shares of the counts of neighbouring blocks."""

    def __init__(self, blocks: array[int], asks: array[int], sizes: array[float]) -> None:
        self.blocks = np.array(blocks)
        self._asks = np.array(asks, bool)
        self._count = int(self.blocks[-1]) + 1
        lengths = self.counts(np.arange(len(sizes)), np.array(sizes))
        self.norms = _K1 * (1 - _B + _B * lengths / max(float(lengths.mean()), 1e-9))

    def counts(self, numbers: NDArray[np.integer], times: Floats) -> NDArray[np.float64]:
        """A term's count in each block, if the passages `numbers` [k] have it `times` [k]."""
        blocks, asked = self.blocks[numbers], self._asks[numbers] * times
        counted = np.bincount(blocks, times - (1 - DISCOUNT) * asked, self._count)
        total: NDArray[np.float64] = np.convolve(counted, _NEIGHBOUR_WEIGHTS)[2:-2]
        # What is asked counts wholly for the block after it, which answers.
        total[1:] += (1 - DISCOUNT**2) * np.bincount(blocks, asked, self._count)[:-1]
        return total
