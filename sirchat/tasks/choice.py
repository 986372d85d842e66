"""A multiple-choice question, and the option that a model chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from sirchat.chat.session import Session
from sirchat.engine.records import ContinuationScore
from sirchat.tasks.asking import ask

Scoring = Literal["paper", "released", "reply"]
"""How an option is chosen.

- `paper` (SirLLM, section 4.1): the option with the most likely reply, by the sum of its tokens'
  log-probabilities.
- `released`: as in SirLLM's released code. The option whose reply equals the greedy output;
  if none does, the most likely one by the first token in which the replies differ.
- `reply`: the option that a generated reply names, if it names one.
"""


@dataclass(frozen=True)
class Question:
    """A question with a reply for each of its options.

    Attributes:
        text: the question, with its options if they are listed.
        replies: one for each option, none a prefix of another; a single one leaves no choice.
        right: index of the right reply.
        group: the questions that are counted together with this one.
    """

    text: str
    replies: tuple[str, ...]
    right: int
    group: str

    @property
    def answer(self) -> str:
        """The right reply."""
        return self.replies[self.right]


def choose(session: Session, question: Question, scoring: Scoring) -> int | None:
    """Ask, and continue with the reply of the chosen option; returns its index.

    Returns None if a generated reply names no option; the conversation then continues with it.
    """
    if scoring == "reply" and len(question.replies) > 1:
        return named_option(ask(session, question.text), question.replies)
    for _ in session.read_user(question.text):
        pass
    chosen = 0
    if len(question.replies) > 1:
        chosen = most_likely(
            [session.score_continuation(reply) for reply in question.replies], scoring
        )
    for _ in session.read_reply(question.replies[chosen]):
        pass
    return chosen


def most_likely(scores: Sequence[ContinuationScore], scoring: Scoring) -> int:
    """The index of the chosen option; the first one among equals."""
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
    """The index of the option whose reply the text begins with; None for no option."""
    text = text.strip()
    for number, reply in enumerate(replies):
        if text.startswith(reply.rstrip(".")):
            return number
    return None


def _shared_prefix_length(scores: Sequence[ContinuationScore]) -> int:
    """Number of ids that all options begin with."""
    columns = zip(*(one.ids for one in scores), strict=False)
    return len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
