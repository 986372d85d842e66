"""Multiple-choice questions, and ways to let a model choose an option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from sirchat.chat.session import Session
from sirchat.engine.types import ContinuationScore
from sirchat.lab.studies.reading import ask

# How an option is chosen. - `paper` (SirLLM, section 4.1): the option with the most likely reply,
# by the sum of its tokens' log-probabilities; where options are listed by letters, the reply is the
# letter. - `text`: as `paper`, but the replies are the options' own texts, and the question does
# not list them (the cloze form of lm-evaluation-harness). Small models do not know what a letter
# stands for. - `released`: as in SirLLM's released code, the option whose reply equals the greedy
# output
Scoring = Literal["paper", "text", "released", "reply"]


@dataclass(frozen=True)
class Question:
    """A multiple-choice question with a reply for each of its options."""

    text: str  # the question, with its options if they are listed
    # a reply for each option; none is a prefix of another. If there is only one reply, the
    # conversation continues with it, and the model does not choose
    replies: tuple[str, ...]
    right: int  # index of the right reply
    group: str  # name of the group of questions in whose results this question is counted
    # the question without the list of options, used by the scoring `text`; may be empty
    stem: str = ""
    # the replies to the stem, one for each option; empty if the stem is empty
    texts: tuple[str, ...] = ()
    # the text of the next question after each option, if it depends on what is chosen
    then: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """The reply that is right for this question."""
        return self.replies[self.right]

    @property
    def unlisted(self) -> Question:
        """The same question without its list of options; each reply is the text of an option.

        A question whose `texts` are empty is returned unchanged.
        """
        if not self.texts:
            return self
        return replace(self, text=self.stem, replies=self.texts, stem="", texts=())


def choose(session: Session, question: Question, scoring: Scoring) -> int | None:
    """Ask a question, and return the index of the option that the model chooses.

    For the scoring `text` the question must list no options; see `Question.unlisted`.
    """
    if scoring == "reply" and len(question.replies) > 1:
        return named_option(ask(session, question.text), question.replies)
    chosen = most_likely(_scores(session, question), scoring)
    list(session.read_reply(question.replies[chosen]))
    return chosen


def _scores(session: Session, question: Question) -> Sequence[ContinuationScore]:
    """Read a question in the session; returns a score for each of its replies."""
    list(session.read_user(question.text, next_role="assistant"))
    if len(question.replies) == 1:
        return [ContinuationScore((0,), (0.0,), True)]
    return session.score_continuations(question.replies)


def most_likely(scores: Sequence[ContinuationScore], scoring: Scoring) -> int:
    """The index of the option that the rule `scoring` chooses, given a score for each option.

    Of equally good options, the first is chosen.
    """
    if scoring == "released":
        for number, one in enumerate(scores):
            if one.greedy:
                return number
        at = _shared_prefix_length(scores)
        nats = [one.log_probabilities[at] for one in scores]
    else:
        nats = [sum(one.log_probabilities) for one in scores]
    return nats.index(max(nats))


def named_option(text: str, replies: Sequence[str]) -> int | None:
    """The index of the first option with whose reply `text` begins; None if there is none.

    Blanks around `text` are ignored, and so is a full stop at the end of a reply. The option ends
    with a word of `text`: "All" does not name the option A.
    """
    text = text.strip()
    for number, reply in enumerate(replies):
        named = reply.rstrip(".")
        if text.startswith(named) and not text[len(named) : len(named) + 1].isalnum():
            return number
    return None


def _shared_prefix_length(scores: Sequence[ContinuationScore]) -> int:
    """The number of token ids with which all scored replies begin alike."""
    columns = zip(*(one.ids for one in scores), strict=False)
    return len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
