"""Topics follow each other: what is left of the one at hand, and of the first, under each decay?

Each topic is a few facts and small talk behind them. In the end the facts of the last topic are
asked for, as in a conversation whose topic changed, and those of the first, as in one that comes
back to its beginning. Decay is good for the one and bad for the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from sirchat.chat.session import Session
from sirchat.errors import SettingError
from sirchat.tasks.facts import KINDS, is_right
from sirchat.tasks.reading import open_engine, read_round
from sirchat.tasks.report import Report, Table, Value
from sirchat.tasks.results_log import Record
from sirchat.tasks.study import Cell, Grid, share_over_seeds
from sirchat.text.template import Template
from sirchat.training.probe import PROBED, SMALL_TALK
from sirchat.world.dialogue import Dialogue, Round, Style, draw_fact


@dataclass(frozen=True)
class Topics(Grid):
    """The study; `limit` is conversations for each setting.

    Attributes:
        topics: how many follow each other.
        facts: told of each.
        between: rounds of small talk behind the facts of each.

    Raises SettingError where there are more facts than kinds of them.
    """

    topics: int = 3
    facts: int = 4
    between: int = 20

    def __post_init__(self) -> None:
        if not 1 <= self.topics * self.facts <= len(KINDS):
            raise SettingError(
                f"{self.topics} topics of {self.facts} facts each must be {len(KINDS)} facts at "
                "most, and one at least"
            )

    @property
    def name(self) -> str:
        """What it is called."""
        return "topics"

    def units(self) -> list[str]:
        """Conversations, by number."""
        return [str(number) for number in range(self.limit)]

    def conversation(self, number: int) -> tuple[list[Round], list[Round]]:
        """Conversation `number`: its rounds, and a question for each fact, in order."""
        rng = Random(f"held out/topics/{self.seed}/{number}")
        talk, style = Dialogue(rng, SMALL_TALK), Style.draw(rng)
        kinds = rng.sample(KINDS, self.topics * self.facts)
        facts = [draw_fact(rng, PROBED[kind], style) for kind in kinds]
        rounds: list[Round] = []
        for start in range(0, len(facts), self.facts):
            rounds += [talk.tell_one(fact, style) for fact in facts[start : start + self.facts]]
            rounds += [talk.small_talk() for _ in range(self.between)]
        return rounds, [talk.ask((fact.kind.key, fact.subject)) for fact in facts]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Hold a conversation: which answers about the last and the first topic were right."""
        rounds, asked = self.conversation(int(unit))
        model = session.model
        template = Template(model.tokenizer, model.anchors)
        engine = open_engine(model, cell.setting)
        for number, (user, reply) in enumerate(rounds, 1):
            read_round(engine, template, user.text, reply.text, number)
        last, first = asked[-self.facts :], asked[: self.facts]
        return {
            "last": [is_right(engine, template, one, len(rounds) + 1) for one in last],
            "first": [is_right(engine, template, one, len(rounds) + 1) for one in first],
            "tokens": engine.ledger.seen,
        }

    def report(self, found: Mapping[str, Record]) -> Report:
        """Shares right by setting: the last topic's facts, the first one's, and both."""
        rows: list[tuple[Value, ...]] = []
        for one in self.findings(found):
            last, first = ([each[key] for each in one.all] for key in ("last", "first"))
            both = [[*a, *b] for a, b in zip(last, first, strict=True)]
            rows.append((one.name, *map(share_over_seeds, (last, first, both))))
        tokens = [one["tokens"] for one in found.values()] or [0]
        facts = (
            f"seed {self.seed}",
            f"{self.limit} conversations of {min(tokens):,} to {max(tokens):,} tokens",
            f"{self.topics} topics of {self.facts} facts and {self.between} rounds",
        )
        columns = ("setting", "the topic at hand", "the beginning", "both")
        table = Table("Topics", columns, tuple(rows), digits=2)
        return Report(facts, (table,), details=self.parameters())
