"""Recall: the user states a fact, other rounds follow, and the user asks for the fact.

A reply is right if it equals the expected reply word for word. The conversations come from the
generator of synthetic dialogue, with seeds that the training of the bundled model never used. The
values of facts are words from a list, or invented words. The rounds between fact and question are
multiple-choice questions of about sixty tokens, with given or with generated replies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from sirchat.chat.session import Session
from sirchat.lab.studies.reading import ask, read
from sirchat.lab.studies.report import Report, Table, Value
from sirchat.lab.studies.results_log import Record
from sirchat.lab.studies.study import Cell, Findings, Grid, mean, refuse_unknown
from sirchat.lab.synthetic.dialogue import Dialogue, draw_fact, other_value
from sirchat.lab.synthetic.rounds import Style, quiz
from sirchat.lab.training.probe import PROBED, SMALL_TALK

Ask = Literal["told", "corrected", "untold"]
"""What the last question asks for: the told fact, its corrected value, or a fact never told."""

KIND_NAMES = tuple(PROBED)

_CHOICES = 5


@dataclass(frozen=True)
class RecallStudy(Grid):
    """The recall study; `limit` is the number of conversations for each setting.

    Attributes:
        between: distances to test: numbers of rounds between the fact and the question.
        before: number of rounds before the fact.
        kinds: kinds of fact; successive conversations go through all kinds and distances.
        ask: with `told`, the question asks for the fact; with `corrected`, the user corrects the
            fact half-way, and the question asks for the newer value; with `untold`, the question
            asks for a fact that was not stated, often one like the stated fact.
        generate: whether the model answers the multiple-choice questions; if false, their right
            replies are read.

    Raises SettingError for an unknown kind or value of `ask`.
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
        """The study's name; the names of its result files begin with it."""
        return "recall"

    @property
    def asked_kinds(self) -> tuple[str, ...]:
        """The kinds of fact to ask for; under `corrected`, only kinds that can be corrected."""
        if self.ask != "corrected":
            return self.kinds
        return tuple(kind for kind in self.kinds if PROBED[kind].updates)

    def units(self) -> list[str]:
        """The names of the conversations to run: their numbers as strings, from `0`."""
        return [str(number) for number in range(self.limit)]

    def conversation(self, number: int) -> RecallDialogue:
        """Conversation `number`; the same number and seed give the same conversation."""
        kinds, distances = self.asked_kinds, self.between
        kind = kinds[number % len(kinds)]
        between = distances[number // len(kinds) % len(distances)]
        return _conversation(kind, between, self, Random(f"held out/{self.seed}/{number}"))

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Run the conversation named `unit`, and ask for its fact.

        The record has the reply, whether it is right, and the number of tokens held before the
        question.
        """
        one, right = self.conversation(int(unit)), 0
        for (user, reply), scored in zip(one.rounds, one.quizzes, strict=True):
            if self.generate and scored:
                right += _letter(ask(session, user)) == _letter(reply)
            else:
                read(session, user, reply)
        held, seen = session.resident, session.seen
        reply_text = ask(session, one.question)
        return {
            "held": held,
            "reduction": 1 - held / seen,
            "kind": one.kind,
            "between": one.between,
            "right": reply_text == one.answer,
            "said": reply_text,
            "expected": one.answer,
            "tokens": session.seen,
            "quizzes": sum(one.quizzes) if self.generate else 0,
            "quizzes right": right,
        }

    def report(self, found: Mapping[str, Record]) -> Report:
        """Two tables of the share of right answers: one by setting, one by kind of fact.

        The report's `details` have all wrong replies.
        """
        findings = self.findings(found)
        tokens = [one["tokens"] for one in found.values()] or [0]
        header = (
            f"seed {self.seed}",
            f"{self.limit} conversations of {min(tokens):,} to {max(tokens):,} tokens",
            f"{' or '.join(map(str, self.between))} rounds between",
            f"questions for facts {self.ask}",
        )
        wrong = {one.name: [each for each in one.records if not each["right"]] for one in findings}
        tables = (self._by_setting(findings), self._by_kind(findings))
        return Report(header, tables, details=self.parameters() | {"wrong": wrong})

    def _by_setting(self, findings: Sequence[Findings]) -> Table:
        distances = self.between if len(self.between) > 1 else ()
        columns = ["setting", "exact answers", "held", "reduction"]
        columns += [f"{n} rounds between" for n in distances]
        rows: list[tuple[Value, ...]] = []
        for one in findings:
            row: list[Value] = [one.name, one.share("right")]
            row.append(round(mean([each["held"] for each in one.records]).value))
            row.append(mean([each["reduction"] for each in one.records]).value)
            row += [one.share("right", between=n) for n in distances]
            if self.generate:
                quizzes = sum(each["quizzes"] for each in one.records)
                right = sum(each["quizzes right"] for each in one.records)
                row.append(right / quizzes if quizzes else math.nan)
            rows.append(tuple(row))
        columns += ["right letters between"] if self.generate else []
        return Table("Recall", tuple(columns), tuple(rows))

    def _by_kind(self, findings: Sequence[Findings]) -> Table:
        columns = ("kind of fact", *(one.name for one in findings))
        rows: list[tuple[Value, ...]] = [
            (kind, *(one.share("right", kind=kind).value for one in findings))
            for kind in self.asked_kinds
        ]
        return Table("By kind of fact", columns, tuple(rows), digits=2)


@dataclass(frozen=True)
class RecallDialogue:
    """A conversation of the recall study: its rounds, then a question with its right answer.

    Attributes:
        kind: the kind of fact.
        between: number of multiple-choice questions between the fact and the question for it.
        rounds: user message and reply of each round.
        quizzes: for each round, whether it is a multiple-choice question; any other round states or
            corrects the fact.
        question, answer: the last user message, and the only right reply.
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
    statements = [talk.tell_one(fact, style)]
    later = [quiz(rng, _CHOICES) for _ in range(between)]
    if options.ask == "corrected":
        statements.append(talk.tell_one(other_value(rng, fact, style), style))
        later.insert(between // 2, statements[1])
    question, answer = (
        talk.ask_untold() if options.ask == "untold" else talk.ask((kind, fact.subject))
    )
    rounds = [*earlier, statements[0], *later]
    return RecallDialogue(
        kind=kind,
        between=between,
        rounds=tuple((user.text, reply.text) for user, reply in rounds),
        quizzes=tuple(one not in statements for one in rounds),
        question=question.text,
        answer=answer.text,
    )


def _letter(answer: str) -> str:
    """The first letter in parentheses, such as `B` of `(B) library`; '' if there is none."""
    found = re.search(r"\((\w)\)", answer)
    return found[1] if found else ""
