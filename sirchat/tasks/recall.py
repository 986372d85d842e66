"""Recall: a fact is told, other matters follow, the fact is asked for; the answer must be exact.

The conversations are drawn from the world of the bundled model, with seeds that its training never
used; values are partly listed words, partly made up. What lies between are multiple-choice
questions from the bank, each about sixty tokens, whose replies are read, or generated and scored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from sirchat.errors import SettingError, nearest
from sirchat.model import LoadedModel
from sirchat.profile import Profile, changed
from sirchat.session import Session
from sirchat.tasks.asking import ask, read
from sirchat.training.dialogue import Dialogue, Style, draw_fact, other_value, quiz
from sirchat.training.probe import PROBED, QUIET

Ask = Literal["told", "corrected", "untold"]

KIND_NAMES = tuple(PROBED)

_CHOICES = 5


@dataclass(frozen=True)
class RecallOptions:
    """What to ask.

    Attributes:
        dialogues: conversations for each setting; kinds of fact and distances take turns.
        between: rounds between the fact and the question, one or several distances.
        before: rounds before the fact.
        kinds: kinds of fact.
        ask: for what was told; for what was `corrected` half-way, where the newer value counts; or
            for something `untold`, half of the time a neighbour of what was told.
        seed: draws the conversations; every setting gets the same ones.
        generate: let the model answer the rounds between, instead of reading the right answers.

    Raises SettingError for an unknown kind or ask.
    """

    dialogues: int = 300
    between: tuple[int, ...] = (20,)
    before: int = 0
    kinds: tuple[str, ...] = KIND_NAMES
    ask: Ask = "told"
    seed: int = 1
    generate: bool = False

    def __post_init__(self) -> None:
        _refuse_unknown("kind of fact", self.kinds, KIND_NAMES)
        _refuse_unknown("way to ask", (self.ask,), get_args(Ask))

    @property
    def asked_kinds(self) -> tuple[str, ...]:
        """The kinds that can be asked in this way: not every fact can be corrected."""
        if self.ask != "corrected":
            return self.kinds
        return tuple(kind for kind in self.kinds if PROBED[kind].updates)


@dataclass(frozen=True)
class Conversation:
    """Rounds, then a question; `answer` is what it must get.

    `kind` of fact, with `between` rounds after it; of the rounds, those of the `quizzes` have a
    right letter, the others tell the fact.
    """

    kind: str
    between: int
    rounds: tuple[tuple[str, str], ...]
    quizzes: tuple[bool, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Recalled:
    """One finished conversation under one setting.

    `right` is the fact's answer, word for word; `quizzes` of the rounds between were generated, of
    which `quizzes_right` named the right letter; `tokens` is the length of the conversation.
    """

    setting: Profile
    kind: str
    between: int
    right: bool
    said: str
    expected: str
    tokens: int
    quizzes: int
    quizzes_right: int


def conversations(options: RecallOptions) -> Iterator[Conversation]:
    """The conversations that every setting is asked; the same seed gives the same ones."""
    kinds, distances = options.asked_kinds, options.between
    for number in range(options.dialogues):
        kind = kinds[number % len(kinds)]
        between = distances[number // len(kinds) % len(distances)]
        rng = Random(f"held out/{options.seed}/{number}")
        yield _conversation(kind, between, options, rng)


def recall(
    model: LoadedModel, settings: Sequence[Profile], options: RecallOptions
) -> Iterator[Recalled]:
    """Hold every conversation under every setting, one record each as it ends."""
    made = list(conversations(options))
    for setting in settings:
        session = Session(model, changed(setting, "eval", max_new_tokens=64))
        for conversation in made:
            session.reset()
            yield _hold(session, setting, conversation, generate=options.generate)


def _conversation(kind: str, between: int, options: RecallOptions, rng: Random) -> Conversation:
    talk, style = Dialogue(rng, QUIET), Style.draw(rng)
    fact = draw_fact(rng, PROBED[kind], style)
    earlier = [quiz(rng, _CHOICES) for _ in range(options.before)]
    told = [talk.tell_one(fact, style)]
    later = [quiz(rng, _CHOICES) for _ in range(between)]
    if options.ask == "corrected":
        told.append(talk.tell_one(other_value(rng, fact, style), style))
        later.insert(between // 2, told[1])
    question, answer = (
        talk.ask_untold() if options.ask == "untold" else talk.ask((kind, fact.subject))
    )
    rounds = [*earlier, told[0], *later]
    return Conversation(
        kind=kind,
        between=between,
        rounds=tuple((user.text, reply.text) for user, reply in rounds),
        quizzes=tuple(one not in told for one in rounds),
        question=question.text,
        answer=answer.text,
    )


def _hold(
    session: Session, setting: Profile, conversation: Conversation, *, generate: bool
) -> Recalled:
    right = 0
    for (user, reply), scored in zip(conversation.rounds, conversation.quizzes, strict=True):
        if generate and scored:
            right += _letter(ask(session, user)) == _letter(reply)
        else:
            read(session, user, reply)
    said = ask(session, conversation.question)
    return Recalled(
        setting=setting,
        kind=conversation.kind,
        between=conversation.between,
        right=said == conversation.answer,
        said=said,
        expected=conversation.answer,
        tokens=session.seen,
        quizzes=sum(conversation.quizzes) if generate else 0,
        quizzes_right=right,
    )


def _refuse_unknown(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise SettingError(
                f"there is no {what} {name!r}; there are {', '.join(known)}",
                hint=nearest(name, known),
            )


def _letter(answer: str) -> str:
    """`B` of `(B) library`."""
    found = re.search(r"\((\w)\)", answer)
    return found[1] if found else ""
