"""Several topics in a row: how much of the current and of the first one is recalled by decay.

Each topic is a few facts, followed by small talk. At the end the facts of the last topic are asked
for, as after a change of topic, and those of the first one, as in a conversation that returns to
its beginning. Decay helps the one and harms the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from sirchat.chat.session import Session
from sirchat.errors import SettingError
from sirchat.lab.studies.facts import KINDS, is_right
from sirchat.lab.studies.reading import open_engine, read_round
from sirchat.lab.studies.report import Report, Table, Value
from sirchat.lab.studies.results_log import Record
from sirchat.lab.studies.study import Cell, Grid, share_over_seeds
from sirchat.lab.synthetic.dialogue import Dialogue, draw_fact
from sirchat.lab.synthetic.messages import Round, Style
from sirchat.lab.training.probe import PROBED, SMALL_TALK
from sirchat.text.template import Template


@dataclass(frozen=True)
class Topics(Grid):
    """The study; `limit` is the number of conversations for each setting.

    Attributes:
        topics: number of topics.
        facts: number of facts in each topic.
        between: rounds of small talk after the facts of each topic.

    Raises SettingError for more facts than there are kinds.
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
        """The study's name, which also names its files."""
        return "topics"

    def units(self) -> list[str]:
        """One unit for each conversation: its number."""
        return [str(number) for number in range(self.limit)]

    def conversation(self, number: int) -> tuple[list[Round], list[Round]]:
        """Conversation `number`: its rounds, and a question with answer for each fact, in order."""
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
        """Run a conversation: which answers about the last and the first topic were right."""
        rounds, questions = self.conversation(int(unit))
        model = session.model
        template = Template(model.tokenizer, model.anchors)
        engine = open_engine(model, cell.setting)
        for number, (user, reply) in enumerate(rounds, 1):
            read_round(engine, template, user.text, reply.text, number)
        last, first = questions[-self.facts :], questions[: self.facts]
        return {
            "last": [is_right(engine, template, one, len(rounds) + 1) for one in last],
            "first": [is_right(engine, template, one, len(rounds) + 1) for one in first],
            "tokens": engine.ledger.seen,
        }

    def report(self, found: Mapping[str, Record]) -> Report:
        """The share of right answers by setting: the last topic, the first one, and both."""
        rows: list[tuple[Value, ...]] = []
        for one in self.findings(found):
            last, first = ([each[key] for each in one.records] for key in ("last", "first"))
            both = [[*a, *b] for a, b in zip(last, first, strict=True)]
            rows.append((one.name, *map(share_over_seeds, (last, first, both))))
        tokens = [one["tokens"] for one in found.values()] or [0]
        header = (
            f"seed {self.seed}",
            f"{self.limit} conversations of {min(tokens):,} to {max(tokens):,} tokens",
            f"{self.topics} topics of {self.facts} facts and {self.between} rounds",
        )
        columns = ("setting", "the topic at hand", "the beginning", "both")
        table = Table("Topics", columns, tuple(rows), digits=2)
        return Report(header, (table,), details=self.parameters())
