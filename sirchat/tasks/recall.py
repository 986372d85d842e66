"""Recall: a fact is told, other matters follow, the fact is asked for; the answer must be exact.

The conversations are drawn from the world of the bundled model, with seeds that its training never
used; values are partly listed words, partly made up. What lies between are multiple-choice
questions from the bank, each about fifty tokens, whose replies are read, or generated and scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from sirchat.errors import SettingError, nearest
from sirchat.events import TurnDone
from sirchat.model import LoadedModel
from sirchat.profile import Profile, changed
from sirchat.session import Session
from sirchat.training.dialogue import Dialogue, Style, draw_fact, quiz
from sirchat.training.probe import PROBED, QUIET

KIND_NAMES = tuple(PROBED)


@dataclass(frozen=True)
class RecallOptions:
    """What to ask.

    Attributes:
        dialogues: conversations for each setting; kinds of fact take turns.
        between: rounds between the fact and the question.
        kinds: kinds of fact.
        seed: draws the conversations; every setting gets the same ones.
        generate: let the model answer the rounds between, instead of reading the right answers.
    """

    dialogues: int = 300
    between: int = 20
    kinds: tuple[str, ...] = KIND_NAMES
    seed: int = 1
    generate: bool = False


@dataclass(frozen=True)
class Conversation:
    """A fact and its question, with rounds (question, right answer) between them."""

    kind: str
    told: tuple[str, str]
    between: tuple[tuple[str, str], ...]
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
    right: bool
    said: str
    expected: str
    tokens: int
    quizzes: int
    quizzes_right: int


def conversations(options: RecallOptions) -> Iterator[Conversation]:
    """The conversations that every setting is asked; the same seed gives the same ones.

    Raises SettingError for an unknown kind.
    """
    for kind in options.kinds:
        if kind not in PROBED:
            raise SettingError(
                f"there is no kind of fact {kind!r}; there are {', '.join(KIND_NAMES)}",
                hint=nearest(kind, KIND_NAMES),
            )
    for number in range(options.dialogues):
        kind = options.kinds[number % len(options.kinds)]
        yield _conversation(kind, options.between, Random(f"held out/{options.seed}/{number}"))


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


def _conversation(kind: str, between: int, rng: Random) -> Conversation:
    talk, style = Dialogue(rng, QUIET), Style.draw(rng)
    fact = draw_fact(rng, PROBED[kind], style)
    user, reply = talk.tell_one(fact, style)
    rounds = [quiz(rng) for _ in range(between)]
    question, answer = talk.ask((kind, fact.subject))
    return Conversation(
        kind=kind,
        told=(user.text, reply.text),
        between=tuple((one.text, other.text) for one, other in rounds),
        question=question.text,
        answer=answer.text,
    )


def _hold(
    session: Session, setting: Profile, conversation: Conversation, *, generate: bool
) -> Recalled:
    _read(session, *conversation.told)
    right = 0
    for question, answer in conversation.between:
        if generate:
            right += _letter(_ask(session, question)) == _letter(answer)
        else:
            _read(session, question, answer)
    said = _ask(session, conversation.question)
    return Recalled(
        setting=setting,
        kind=conversation.kind,
        right=said == conversation.answer,
        said=said,
        expected=conversation.answer,
        tokens=session.seen,
        quizzes=len(conversation.between) if generate else 0,
        quizzes_right=right,
    )


def _letter(answer: str) -> str:
    """`(B)` of `(B) library`."""
    return answer.partition(")")[0].strip()


def _read(session: Session, user: str, reply: str) -> None:
    for _ in session.read_user(user):
        pass
    for _ in session.read_reply(reply):
        pass


def _ask(session: Session, user: str) -> str:
    for event in session.ask(user):
        if isinstance(event, TurnDone) and event.role == "assistant":
            return event.text.strip()
    return ""
