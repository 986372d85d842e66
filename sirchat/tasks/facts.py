"""Facts are told, other matters follow, and each fact is asked for; the answer must be exact.

Several facts share one memory here, and each is asked for at several distances. Rounds are read
whole, user and reply at once. A question and its answer are taken back before the next one, so that
no question helps or harms another; an answer counts as wrong as soon as a token of it is.

What the rounds after the facts cost, in nats a token, is the perplexity of what follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from sirchat.chat.session import Session
from sirchat.engine.engine import Engine
from sirchat.engine.records import Generated, TurnRef
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.errors import SettingError
from sirchat.models.model import LoadedModel
from sirchat.tasks.reading import open_engine, read_ids, read_round
from sirchat.tasks.report import Estimate, Report, Table, Value
from sirchat.tasks.results_log import Record
from sirchat.tasks.study import Cell, Findings, Grid, mean, share_over_seeds
from sirchat.text.template import Template
from sirchat.training.probe import PROBED, SMALL_TALK
from sirchat.world.dialogue import Dialogue, Round, Style, draw_fact

KINDS = tuple(PROBED)


@dataclass(frozen=True)
class Facts(Grid):
    """The study; `limit` is questions for each setting, number of facts and distance.

    Attributes:
        facts: how many are told in a conversation, each of another kind.
        between: rounds of small talk behind the facts before each is asked for, ascending.

    Raises SettingError for no facts or too many, and for no rounds between.
    """

    facts: tuple[int, ...] = (1, 4, 8)
    between: tuple[int, ...] = (20, 60)

    def __post_init__(self) -> None:
        if not self.between or min(self.between) < 1:
            raise SettingError(f"between is {self.between}, must be numbers of rounds, from 1 on")
        for count in self.facts:
            if not 1 <= count <= len(KINDS):
                raise SettingError(f"facts is {count}, must be 1 to {len(KINDS)}")

    @property
    def name(self) -> str:
        """What it is called."""
        return "facts"

    def units(self) -> list[str]:
        """Conversations: how many facts, and a number."""
        return [
            f"{count} {number}"
            for count in self.facts
            for number in range(math.ceil(self.limit / count))
        ]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Hold a conversation: for each distance, which answers were right."""
        count, number = map(int, unit.split())
        return _hold(session.model, cell, self.conversation(count, number), self.between)

    def conversation(self, count: int, number: int) -> FactsDialogue:
        """Conversation `number` with so many facts; the same seed gives the same one."""
        rng = Random(f"held out/facts/{self.seed}/{count}/{number}")
        talk, style = Dialogue(rng, SMALL_TALK), Style.draw(rng)
        kinds = [KINDS[(number + at) % len(KINDS)] for at in range(count)]
        facts = [draw_fact(rng, PROBED[kind], style) for kind in kinds]
        told = [talk.tell_one(fact, style) for fact in facts]
        later = [talk.small_talk() for _ in range(max(self.between))]
        asked = [talk.ask((fact.kind.key, fact.subject)) for fact in facts]
        return FactsDialogue(told, later, asked)

    def report(self, found: Mapping[str, Record]) -> Report:
        """Shares right by setting, number of facts and distance; what a token costs."""
        held = self.findings(found)
        tokens = [one["tokens"] for one in found.values()] or [0]
        facts = (
            f"seed {self.seed}",
            f"{self.limit} questions a cell or more",
            f"conversations of {min(tokens):,} to {max(tokens):,} tokens",
        )
        return Report(facts, (self._right(held), self._nats(held)), details=self.parameters())

    def _right(self, held: Sequence[Findings]) -> Table:
        cells = [(count, between) for count in self.facts for between in self.between]
        columns = [f"{count} told, {between} rounds" for count, between in cells]
        rows: list[tuple[Value, ...]] = [
            (one.name, *(share_right(one, *cell) for cell in cells)) for one in held
        ]
        return Table("Facts recalled", ("setting", *columns), tuple(rows), digits=2)

    def _nats(self, held: Sequence[Findings]) -> Table:
        rows: list[tuple[Value, ...]] = []
        for one in held:
            nats = mean([each["nats"] for each in one.all])
            rows.append((one.name, nats, math.exp(nats.value)))
        columns = ("setting", "nats a token", "perplexity")
        return Table("What follows the facts", columns, tuple(rows))


@dataclass(frozen=True)
class FactsDialogue:
    """Facts that are `told`, small talk `later`, and a question and answer for each fact."""

    facts: list[Round]
    small_talk: list[Round]
    questions: list[Round]


def share_right(held: Findings, count: int, between: int) -> Estimate:
    """The share of right answers where so many facts were told so long before.

    Questions of one conversation share its luck: the interval is the wider of Wilson's over
    questions and Student's over conversations.
    """
    records = [one for one in held.all if one["facts"] == count]
    return share_over_seeds([one["right"][str(between)] for one in records])


def _hold(
    model: LoadedModel, cell: Cell, talk: FactsDialogue, distances: tuple[int, ...]
) -> Record:
    template, engine = Template(model.tokenizer, model.anchors), open_engine(model, cell.setting)
    rounds, right = [*talk.facts, *talk.small_talk], dict[str, list[bool]]()
    starts: list[int] = []
    for number, (user, reply) in enumerate(rounds, 1):
        starts.append(engine.ledger.seen)
        read_round(engine, template, user.text, reply.text, number)
        distance = number - len(talk.facts)
        if distance in distances:
            asked = [is_right(engine, template, each, number + 1) for each in talk.questions]
            right[str(distance)] = asked
    cost = engine.ledger.column("surprisal")[starts[len(talk.facts)] :]
    return {
        "facts": len(talk.facts),
        "right": right,
        "nats": float(np.mean(cost, dtype=np.float64)),
        "tokens": engine.ledger.seen,
    }


def is_right(engine: Engine, template: Template, one: Round, number: int) -> bool:
    """Ask, and take question and answer back: whether the whole answer was right."""
    question, answer = one
    mark = engine.checkpoint()
    wanted = [*template.assistant(answer.text).ids, template.closing[0]]
    turn = template.user(question.text)
    read_ids(engine, turn.ids, number, len(wanted), turn.roles)
    said = engine.generate(
        Sampler(Sampling()),
        TurnRef(number, number),
        stop_ids=frozenset(),
        max_new_tokens=len(wanted),
    )
    ids = (record.id for record in said if isinstance(record, Generated))
    right = all(ours == theirs for ours, theirs in zip(ids, wanted, strict=False))
    engine.undo(mark)
    return right
