"""The user states several facts, and is asked for each, word for word, after some small talk.

Each question is undone before the next one. An answer is wrong if any of its tokens is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from sirchat.chat.session import Session
from sirchat.engine.engine import Engine
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import GeneratedToken, TurnRef
from sirchat.errors import SettingError
from sirchat.lab.studies.reading import open_engine, read_ids, read_round
from sirchat.lab.studies.report import Estimate, Record, Report, Table, Value
from sirchat.lab.studies.study import WITHOUT_SESSION, Cell, Findings, Grid, mean, share_over_seeds
from sirchat.lab.synthetic.dialogue import Dialogue, draw_fact
from sirchat.lab.synthetic.rounds import Round, Style
from sirchat.lab.training.probe import PROBED, SMALL_TALK
from sirchat.models.model import LoadedModel
from sirchat.text.template import Template

KINDS = tuple(PROBED)


@dataclass(frozen=True)
class Facts(Grid):
    """The study in which the user states facts and asks for them after some small talk.

    `limit` is the number of questions for each table cell. Raises SettingError for a number of
    facts or a distance out of range.
    """

    # numbers of facts to test; the facts of a conversation are of different kinds
    facts: tuple[int, ...] = (1, 4, 8)
    # distances to test: numbers of rounds of small talk between the last fact and the questions
    between: tuple[int, ...] = (20, 60)

    without_effect = WITHOUT_SESSION

    extends = ("settings", "limit", "repeats", "facts")

    def __post_init__(self) -> None:
        if not self.between or min(self.between) < 1:
            raise SettingError(
                f"between is {self.between}, must be numbers of rounds, each at least 1"
            )
        for count in self.facts:
            if not 1 <= count <= len(KINDS):
                raise SettingError(f"facts is {count}, must be 1 to {len(KINDS)}")

    name = "facts"

    def units(self) -> list[str]:
        """The names of the conversations: number of facts and a running number, such as `4 0`."""
        return [
            f"{count} {number}"
            for count in self.facts
            for number in range(math.ceil(self.limit / count))
        ]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Run conversation `unit`: read its rounds, and ask for each fact at each distance."""
        count, number = map(int, unit.split())
        return _run(session.model, cell, self.conversation(count, number), self.between)

    def conversation(self, count: int, number: int) -> FactsDialogue:
        """Conversation `number` with `count` facts; the same seed gives the same conversation."""
        rng = Random(f"held out/facts/{self.seed}/{count}/{number}")
        talk, style = Dialogue(rng, SMALL_TALK), Style.draw(rng)
        kinds = [KINDS[(number + at) % len(KINDS)] for at in range(count)]
        facts = [draw_fact(rng, PROBED[kind], style) for kind in kinds]
        statements = [talk.tell_one(fact, style) for fact in facts]
        small_talk = [talk.small_talk() for _ in range(max(self.between))]
        questions = [talk.ask((fact.kind.key, fact.subject)) for fact in facts]
        return FactsDialogue(statements, small_talk, questions)

    def report(self, found: Mapping[str, Record]) -> Report:
        """Two tables with a row for each setting: right answers, and perplexity."""
        findings = self.findings(found)
        tokens = [one["tokens"] for one in found.values()] or [0]
        header = (
            f"seed {self.seed}",
            f"at least {self.limit} questions for each table cell",
            f"conversations of {min(tokens):,} to {max(tokens):,} tokens",
        )
        return Report(
            header, (self._right(findings), self._nats(findings)), details=self.parameters()
        )

    def _right(self, findings: Sequence[Findings]) -> Table:
        cells = [(count, between) for count in self.facts for between in self.between]
        columns = [f"{count} told, {between} rounds" for count, between in cells]
        rows: list[tuple[Value, ...]] = [
            (one.name, *(share_right(one, *cell) for cell in cells)) for one in findings
        ]
        return Table("Facts recalled", ("setting", *columns), tuple(rows), digits=2)

    def _nats(self, findings: Sequence[Findings]) -> Table:
        rows: list[tuple[Value, ...]] = []
        for one in findings:
            nats = mean([each["nats"] for each in one.records])
            rows.append((one.name, nats, math.exp(nats.value)))
        columns = ("setting", "nats a token", "perplexity")
        return Table("What follows the facts", columns, tuple(rows))


@dataclass(frozen=True)
class FactsDialogue:
    """A conversation of the study `Facts`.

    It has rounds that state facts, rounds of small talk, and a question with its answer for each
    fact.
    """

    facts: list[Round]
    small_talk: list[Round]
    questions: list[Round]


def share_right(findings: Findings, count: int, between: int) -> Estimate:
    """The share of right answers, with its 95 % interval, in conversations with `count` facts."""
    records = [one for one in findings.records if one["facts"] == count]
    return share_over_seeds([one["right"][str(between)] for one in records])


def _run(model: LoadedModel, cell: Cell, talk: FactsDialogue, distances: tuple[int, ...]) -> Record:
    template, engine = Template(model.tokenizer, model.anchors), open_engine(model, cell.setting)
    rounds, right = [*talk.facts, *talk.small_talk], dict[str, list[bool]]()
    starts: list[int] = []
    for number, (user, reply) in enumerate(rounds, 1):
        starts.append(engine.ledger.seen)
        read_round(engine, template, user.text, reply.text, number)
        distance = number - len(talk.facts)
        if distance in distances:
            right[str(distance)] = [
                is_right(engine, template, each, number + 1) for each in talk.questions
            ]
    surprisal = engine.ledger.column("surprisal")[starts[len(talk.facts)] :]
    return {
        "facts": len(talk.facts),
        "right": right,
        "nats": float(np.mean(surprisal, dtype=np.float64)),
        "tokens": engine.ledger.seen,
    }


def is_right(engine: Engine, template: Template, one: Round, number: int) -> bool:
    """Ask a question as round `number`, then undo it; `one` has the question and the right answer.

    Returns whether every token of the greedy reply is the same as in the right answer.
    """
    question, answer = one
    checkpoint = engine.checkpoint()
    expected = [*template.assistant(answer.text).ids, template.closing[0]]
    turn = template.user(question.text)
    read_ids(engine, turn.ids, number, len(expected), turn.roles)
    reply = engine.generate(
        Sampler(Sampling()),
        TurnRef(number, number),
        stop_ids=frozenset(),
        max_new_tokens=len(expected),
    )
    ids = (record.id for record in reply if isinstance(record, GeneratedToken))
    right = all(one == other for one, other in zip(ids, expected, strict=False))
    engine.undo(checkpoint)
    return right
