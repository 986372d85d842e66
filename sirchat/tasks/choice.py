"""A question with options, and which of them a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from sirchat.chat.session import Session
from sirchat.engine.records import ContinuationScore
from sirchat.tasks.asking import ask

Scoring = Literal["paper", "released", "reply"]
"""How an option is taken.

- `paper` (SirLLM, section 4.1): the one whose reply is likeliest, by the sum of its tokens'
  log-probabilities.
- `released`: as in the code that came with the paper. A reply that would be generated wins;
  otherwise the likeliest by the first token in which replies differ.
- `reply`: the one that a generated reply names; none may be.
"""


@dataclass(frozen=True)
class Question:
    """What a user asks, with the reply that each option stands for.

    Attributes:
        text: the question, options included where they are named.
        replies: one for each option, none the beginning of another; with one alone there is
            nothing to choose.
        right: number of the right one.
        group: what is counted together.
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
    """Ask, and go on as if the reply of the option taken had been said; its number."""
    if scoring == "reply" and len(question.replies) > 1:
        return named_option(ask(session, question.text), question.replies)
    for _ in session.read_user(question.text):
        pass
    taken = 0
    if len(question.replies) > 1:
        taken = most_likely(
            [session.score_continuation(reply) for reply in question.replies], scoring
        )
    for _ in session.read_reply(question.replies[taken]):
        pass
    return taken


def most_likely(weighed: Sequence[ContinuationScore], scoring: Scoring) -> int:
    """The number of the option that is taken; the first of equals."""
    if scoring == "released":
        for number, one in enumerate(weighed):
            if one.greedy:
                return number
        at = _shared(weighed)
        scores = [one.log_probabilities[at] for one in weighed]
    else:
        scores = [sum(one.log_probabilities) for one in weighed]
    return scores.index(max(scores))


def named_option(said: str, replies: Sequence[str]) -> int | None:
    """The option whose reply this is, or begins with, or whose letter it gives first."""
    said = said.strip()
    for number, reply in enumerate(replies):
        if said.startswith(reply.rstrip(".")):
            return number
    return None


def _shared(weighed: Sequence[ContinuationScore]) -> int:
    """How many ids all options begin with."""
    columns = zip(*(one.ids for one in weighed), strict=False)
    return len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
