"""Recall: a fact is told, other matters follow, the fact is asked for; the answer must be exact.

The conversations are drawn from the world of the bundled model, with seeds that its training never
used; values are partly listed words, partly made up. What lies between are multiple-choice
questions from the bank, each about sixty tokens, whose replies are read, or generated and scored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from sirchat.chat.session import Session
from sirchat.tasks.asking import ask, read
from sirchat.tasks.report import Report, Table, Value
from sirchat.tasks.results_log import Record
from sirchat.tasks.study import Cell, Findings, Grid, mean, refuse_unknown
from sirchat.training.probe import PROBED, SMALL_TALK
from sirchat.world.dialogue import Dialogue, Style, draw_fact, other_value, quiz

Ask = Literal["told", "corrected", "untold"]

KIND_NAMES = tuple(PROBED)

_CHOICES = 5


@dataclass(frozen=True)
class RecallStudy(Grid):
    """The study; `limit` is conversations for each setting.

    Attributes:
        between: rounds between the fact and the question, one or several distances.
        before: rounds before the fact.
        kinds: kinds of fact; they and the distances take turns.
        ask: for what was told; for what was `corrected` half-way, where the newer value counts; or
            for something `untold`, half of the time a neighbour of what was told.
        generate: let the model answer the rounds between, instead of reading the right answers.

    Raises SettingError for an unknown kind or ask.
    """

    between: tuple[int, ...] = (20,)
    before: int = 0
    kinds: tuple[str, ...] = KIND_NAMES
    ask: Ask = "told"
    generate: bool = False

    def __post_init__(self) -> None:
        refuse_unknown("kind of fact", self.kinds, KIND_NAMES)
        refuse_unknown("way to ask", (self.ask,), get_args(Ask))

    @property
    def name(self) -> str:
        """What it is called."""
        return "recall"

    @property
    def asked_kinds(self) -> tuple[str, ...]:
        """The kinds that can be asked in this way: not every fact can be corrected."""
        if self.ask != "corrected":
            return self.kinds
        return tuple(kind for kind in self.kinds if PROBED[kind].updates)

    def units(self) -> list[str]:
        """Conversations, by number."""
        return [str(number) for number in range(self.limit)]

    def conversation(self, number: int) -> RecallDialogue:
        """Conversation `number`; the same seed gives the same one."""
        kinds, distances = self.asked_kinds, self.between
        kind = kinds[number % len(kinds)]
        between = distances[number // len(kinds) % len(distances)]
        return _conversation(kind, between, self, Random(f"held out/{self.seed}/{number}"))

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Hold a conversation: whether the answer was right, and what was said."""
        one, right = self.conversation(int(unit)), 0
        for (user, reply), scored in zip(one.rounds, one.quizzes, strict=True):
            if self.generate and scored:
                right += _letter(ask(session, user)) == _letter(reply)
            else:
                read(session, user, reply)
        held, seen = session.resident, session.seen
        said = ask(session, one.question)
        return {
            "held": held,
            "reduction": 1 - held / seen,
            "kind": one.kind,
            "between": one.between,
            "right": said == one.answer,
            "said": said,
            "expected": one.answer,
            "tokens": session.seen,
            "quizzes": sum(one.quizzes) if self.generate else 0,
            "quizzes right": right,
        }

    def report(self, found: Mapping[str, Record]) -> Report:
        """Shares right by setting; by kind of fact; what was said instead."""
        held = self.findings(found)
        tokens = [one["tokens"] for one in found.values()] or [0]
        facts = (
            f"seed {self.seed}",
            f"{self.limit} conversations of {min(tokens):,} to {max(tokens):,} tokens",
            f"{' or '.join(map(str, self.between))} rounds between",
            f"asked for what was {self.ask}",
        )
        wrong = {one.name: [each for each in one.all if not each["right"]] for one in held}
        tables = (self._by_setting(held), self._by_kind(held))
        return Report(facts, tables, details=self.parameters() | {"wrong": wrong})

    def _by_setting(self, held: Sequence[Findings]) -> Table:
        distances = self.between if len(self.between) > 1 else ()
        columns = ["setting", "exact answers", "held", "reduction"]
        columns += [f"{n} rounds between" for n in distances]
        rows: list[tuple[Value, ...]] = []
        for one in held:
            row: list[Value] = [one.name, one.share("right")]
            row.append(round(mean([each["held"] for each in one.all]).value))
            row.append(mean([each["reduction"] for each in one.all]).value)
            row += [one.share("right", between=n) for n in distances]
            if self.generate:
                quizzes = sum(each["quizzes"] for each in one.all)
                right = sum(each["quizzes right"] for each in one.all)
                row.append(right / quizzes if quizzes else math.nan)
            rows.append(tuple(row))
        columns += ["right letters between"] if self.generate else []
        return Table("Recall", tuple(columns), tuple(rows))

    def _by_kind(self, held: Sequence[Findings]) -> Table:
        columns = ("kind of fact", *(one.name for one in held))
        rows: list[tuple[Value, ...]] = [
            (kind, *(one.share("right", kind=kind).value for one in held))
            for kind in self.asked_kinds
        ]
        return Table("By kind of fact", columns, tuple(rows), digits=2)


@dataclass(frozen=True)
class RecallDialogue:
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


def _conversation(kind: str, between: int, options: RecallStudy, rng: Random) -> RecallDialogue:
    talk, style = Dialogue(rng, SMALL_TALK), Style.draw(rng)
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
    return RecallDialogue(
        kind=kind,
        between=between,
        rounds=tuple((user.text, reply.text) for user, reply in rounds),
        quizzes=tuple(one not in told for one in rounds),
        question=question.text,
        answer=answer.text,
    )


def _letter(answer: str) -> str:
    """`B` of `(B) library`."""
    found = re.search(r"\((\w)\)", answer)
    return found[1] if found else ""
