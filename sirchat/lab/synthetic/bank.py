"""The question bank: multiple-choice questions about general knowledge, for the model `tiny`.

The wrong options of a question are other answers of its topic, so that only knowledge of the thing
itself tells which option is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from sirchat.lab.synthetic.texts import load


@dataclass(frozen=True)
class Topic:
    """A question asked about many things: `{x}` stands for the thing, `known` has its answer."""

    key: str
    questions: tuple[str, ...]
    known: tuple[tuple[str, str], ...]

    @cached_property
    def answers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(answer for _, answer in self.known))

    def wrong(self, thing: str, right: str) -> list[str]:
        """Up to four wrong options for the question about `thing`, the same in every call."""
        pool = [answer for answer in self.answers if answer not in (right, thing)]
        return Random(f"{self.key}/{thing}").sample(pool, min(4, len(pool)))


def _topic(
    key: str,
    questions: list[str],
    known: dict[str, str] | None = None,
    both_ways: dict[str, str] | None = None,
    by_answer: dict[str, list[str]] | None = None,
) -> Topic:
    pairs = list((known or both_ways or {}).items())
    if both_ways:
        pairs += [(answer, thing) for thing, answer in pairs]
    pairs += [(thing, answer) for answer, things in (by_answer or {}).items() for thing in things]
    return Topic(key, tuple(questions), tuple(pairs))


TOPICS = tuple(_topic(**entry) for entry in load("bank"))
