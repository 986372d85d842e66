"""LoCoMo's score of a short reply: the F1 of its words, stemmed, against the right answer's.

As in `task_eval/evaluation.py` of https://github.com/snap-research/LoCoMo: texts in lower case,
without punctuation and the words a, an, the, and; Porter's stems; precision and recall over words,
counted as often as they occur. The parts of a multi-hop answer are scored one by one; of an
open-domain answer only what precedes a semicolon counts; an adversarial question is right if the
reply says that nothing was said about it.

LoCoMo stems by NLTK's variant of Porter's algorithm, this by the original one, from snowballstemmer
(plain Python, no dependencies); as in either's programs, words of one or two letters stay. Both
sides are stemmed alike, so few scores differ: NLTK also puts `hope` and `hopefully` together.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from functools import cache
from statistics import fmean

from sirchat.errors import SettingError
from sirchat.lab.studies.long_talk import TalkQuestion

NOT_MENTIONED = "Not mentioned in the conversation"
"""The right option of an adversarial question."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@cache
def _stemmer() -> Callable[[list[str]], list[str]]:
    try:
        from snowballstemmer import stemmer
    except ModuleNotFoundError:
        raise SettingError(
            "token F1 needs a stemmer, which is not installed",
            hint="pip install 'sirchat[locomo]', or --reply-tokens 0 for no replies",
        ) from None
    words: Callable[[list[str]], list[str]] = stemmer("porter").stemWords
    return words


def require_stemmer() -> None:
    """Raise SettingError if the stemmer is not installed."""
    _stemmer()


def stems(text: str) -> list[str]:
    """The words that are compared, in order, as their stems."""
    plain = text.lower().translate(_NO_PUNCTUATION)
    words = re.sub(r"\b(?:a|an|the|and)\b", " ", plain).split()
    stemmed = _stemmer()(words)
    return [stem if len(word) > 2 else word for word, stem in zip(words, stemmed, strict=True)]


def token_f1(reply: str, answer: str) -> float:
    """The harmonic mean of precision and recall over stems; 0 if none is the same."""
    said, wanted = Counter(stems(reply)), Counter(stems(answer))
    same = (said & wanted).total()
    return 2 * same / (said.total() + wanted.total()) if same else 0.0


def multi_answer_f1(reply: str, answer: str) -> float:
    """The mean over the answers, with commas, of the best F1 that a part of the reply has."""
    said = [part.strip() for part in reply.split(",")]
    return fmean(max(token_f1(one, part) for one in said) for part in answer.split(","))


def scored_answer(question: TalkQuestion) -> str:
    """The part of the right answer that counts."""
    return question.answer.split(";")[0].strip() if question.category == 3 else question.answer


def reply_score(question: TalkQuestion, reply: str) -> float:
    """The F1 of a reply to a question that has an answer."""
    score = multi_answer_f1 if question.category == 1 else token_f1
    return score(reply, scored_answer(question))


def abstains(reply: str, options: tuple[str, str]) -> bool:
    """Whether the reply to an adversarial question says that nothing was said about it.

    `options` are those that the question lists as (a) and (b). As in LoCoMo's code, a reply of one
    or three characters means an option, (b) unless it is `a` or `(a)`.
    """
    said = reply.strip().lower()
    if len(said) in (1, 3):
        said = options[0 if said in ("a", "(a)") else 1].lower()
    return "not mentioned" in said or "no information available" in said
