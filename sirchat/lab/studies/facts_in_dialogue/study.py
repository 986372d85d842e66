"""Facts told amid real dialogue, and asked for later: what a policy keeps of what people say.

At the end of a conversation each of its facts is asked for, and each question is undone. A fact is
scored in three ways: whether the right reply is the likeliest of four; the surprisal of the right
reply, in nats, compared with closed-book (asked without the conversation) and with `full`; and how
many of the tokens that tell the fact are still held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np

from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.errors import SettingError
from sirchat.lab.studies.facts_in_dialogue.dialogue import (
    Dialogue,
    FactDialogue,
    ToldFact,
    draw_dialogue,
    load_dialogues,
)
from sirchat.lab.studies.intervals import clustered_mean, paired_interval
from sirchat.lab.studies.reading import (
    followed_by_reply,
    open_engine,
    read_ids,
    read_system,
    whole_round,
)
from sirchat.lab.studies.report import Report, Table, Value
from sirchat.lab.studies.results_log import Record
from sirchat.lab.studies.study import Cell, Findings, Grid, data_name
from sirchat.models.model import LoadedModel
from sirchat.text.detokenizer import TokenTexts, tokens_spelling
from sirchat.text.template import Template, TurnIds


@dataclass(frozen=True)
class FactsInDialogue(Grid):
    """Compares settings by the facts that are recalled from real dialogue.

    `limit` is the number of questions for each length.

    Attributes:
        data: the file of real talk.
        lengths: lengths of the conversations in tokens, not counting the questions.
        facts: number of facts told in a conversation.
    """

    data: str = ""
    lengths: tuple[int, ...] = (1000,)
    facts: int = 5

    extends: ClassVar[tuple[str, ...]] = (*Grid.extends, "lengths")

    def __post_init__(self) -> None:
        if not 1 <= self.facts <= 12:
            raise SettingError(f"facts is {self.facts}, must be 1 to 12")
        if min(self.lengths) < 200:
            raise SettingError(f"length is {min(self.lengths)}, must be 200 or more")

    @property
    def name(self) -> str:
        """The study's name, which also names its files."""
        return "facts-in-dialogue"

    def parameters(self) -> Record:
        """Everything that the results depend on, except the model."""
        return super().parameters() | {"data": data_name(Path(self.data))}

    def units(self) -> list[str]:
        """One unit per conversation, named by its length and its number."""
        count = math.ceil(self.limit / self.facts)
        return [f"{length} {number}" for length in self.lengths for number in range(count)]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read a conversation, and ask for each of its facts."""
        length, number = map(int, unit.split())
        model = session.model
        template = Template(model.tokenizer, model.anchors)
        talk = self.dialogue(template, length, number)
        engine = open_engine(model, cell.setting)
        told = _read(engine, template, talk, cell.setting)
        held = np.isin(np.arange(engine.ledger.seen), engine.ledger.held_positions)
        texts = TokenTexts(model.tokenizer)
        answers = []
        for fact in talk.facts:
            round = told[fact.round]
            statement, value = spans(texts, round.ids, fact)
            answers.append(
                asked(engine, template, fact, len(talk.rounds) + 1)
                | {
                    "held": float(np.mean(held[round.start + np.array(value)])),
                    "told": float(np.mean(held[round.start + np.array(statement)])),
                    "closed": self._closed_book(model, template, cell.setting, fact),
                }
            )
        return {
            "length": length,
            "answers": answers,
            "tokens": engine.ledger.seen,
            "system": told[0].start + told[0].ids.content[0],
            "nats": float(np.nanmean(engine.ledger.column("surprisal"))),
        }

    def dialogue(self, template: Template, length: int, number: int) -> FactDialogue:
        """Conversation `number` of at most `length` tokens; with the same seed always the same."""
        rng = Random(f"chatter/{self.seed}/{length}/{number}")
        overhead = len(whole_round(template, "a", "a").ids) - 2

        def size(user: str, reply: str) -> int:
            ids = template.as_text(user), template.as_text(reply)
            return overhead + sum(map(len, ids))

        return draw_dialogue(rng, self._dialogues, self.facts, length, size)

    def report(self, found: Mapping[str, Record]) -> Report:
        """Right answers, nats and held tokens, by length and setting."""
        tokens = [one["tokens"] for one in found.values()]
        header = (
            f"seed {self.seed}",
            f"{len(self.units()) // len(self.lengths) * self.facts} questions a cell, "
            f"{self.facts} a conversation",
            f"conversations of {min(tokens):,} to {max(tokens):,} tokens",
            f"system prompt of {next(iter(found.values()))['system']} tokens counted",
        )
        findings = self.findings(found)
        return Report(
            header, tables(findings, self.settings, self.lengths), details=self.parameters()
        )

    @cached_property
    def _dialogues(self) -> Sequence[Dialogue]:
        return load_dialogues(Path(self.data))

    @cached_property
    def _closed(self) -> dict[tuple[str, str | None], float]:
        """Results of `_closed_book` by question, reply and system prompt, for all policies."""
        return {}

    def _closed_book(
        self, model: LoadedModel, template: Template, setting: Profile, fact: ToldFact
    ) -> float:
        """Surprisal of the right reply, in nats, when the conversation has not been read."""
        key = f"{fact.question}/{fact.replies[fact.right]}", setting.system
        if key not in self._closed:
            full = setting.model_copy(update={"policy": "full", "policy_options": {}})
            engine = open_engine(model, full)
            turn = read_system(engine, template, fact.question, setting)
            read_ids(engine, turn.ids, 1, roles=turn.roles)
            reply = template.assistant(fact.replies[fact.right]).ids
            self._closed[key] = -sum(
                engine.reader.score_continuations([reply])[0].log_probabilities
            )
        return self._closed[key]


@dataclass(frozen=True)
class _ReadRound:
    """A round that was read: its ids, and the stream position of the first id."""

    ids: TurnIds
    start: int


def _read(
    engine: Engine, template: Template, talk: FactDialogue, setting: Profile
) -> list[_ReadRound]:
    """Read the system prompt, then all rounds, each in one piece."""
    found = []
    for number, (user, reply) in enumerate(talk.rounds, 1):
        first = number == 1
        turn = read_system(engine, template, user, setting) if first else template.user(user)
        whole = followed_by_reply(template, turn, reply)
        found.append(_ReadRound(whole, engine.ledger.seen))
        read_ids(engine, whole.ids, number, roles=whole.roles)
        engine.close_round()
    return found


def spans(texts: TokenTexts, turn: TurnIds, fact: ToldFact) -> tuple[range, range]:
    """The indices, in a round, of the tokens that tell a fact, and of the tokens of its value."""
    start, end = turn.content
    indices = range(start, end)
    pieces = texts(turn.ids[start:end], indices)
    ends = np.cumsum([len(piece) for piece in pieces])
    told = "".join(pieces).index(fact.told)
    value = told + fact.told.index(fact.value)
    return (
        indices[tokens_spelling(ends, told, told + len(fact.told))],
        indices[tokens_spelling(ends, value, value + len(fact.value))],
    )


def asked(engine: Engine, template: Template, fact: ToldFact, number: int) -> Record:
    """Ask for a fact, then undo; returns the right reply's nats and whether it is the likeliest."""
    checkpoint = engine.checkpoint()
    turn = template.user(fact.question)
    read_ids(engine, turn.ids, number, roles=turn.roles)
    scores = engine.reader.score_continuations(
        [template.assistant(one).ids for one in fact.replies]
    )
    nats = [-math.fsum(one.log_probabilities) for one in scores]
    engine.undo(checkpoint)
    return {
        "kind": fact.kind,
        "corrected": fact.corrected,
        "right": nats.index(min(nats)) == fact.right,
        "nats": nats[fact.right],
    }


REFERENCE = "entropy"
"""Others are compared with this policy at the same budget; if it is not run, with the first one."""

_COLUMNS = (
    "setting",
    "right of four",
    "less {reference}",
    "value held",
    "statement held",
    "nats gained",
    "nats below full",
    "nats a token",
)


def tables(
    findings: Sequence[Findings], settings: Sequence[Profile], lengths: Sequence[int]
) -> tuple[Table, ...]:
    """One table for each length.

    The column `nats gained` is the right reply's surprisal closed-book minus its surprisal here;
    `nats below full` is its surprisal here minus that under `full`, if `full` was run.
    """
    return tuple(_table(findings, settings, length) for length in lengths)


def _table(findings: Sequence[Findings], settings: Sequence[Profile], length: int) -> Table:
    full = next((f for f, s in zip(findings, settings, strict=True) if s.policy == "full"), None)
    rows: list[tuple[Value, ...]] = []
    for one, setting in zip(findings, settings, strict=True):
        reference = _reference(findings, settings, setting)
        right, nats = _values(one, length, "right"), _values(one, length, "nats")
        compared: Value = None
        if reference is not one and reference is not None:
            compared = paired_interval(right, _repeated(reference, one, length, "right"))
        below: Value = None
        if full is not None and full is not one:
            below = paired_interval(nats, _repeated(full, one, length, "nats"))
        of_length = [record for record in one.records if record["length"] == length]
        rows.append(
            (
                one.name,
                clustered_mean(right),
                compared,
                clustered_mean(_values(one, length, "held")),
                clustered_mean(_values(one, length, "told")),
                paired_interval(_values(one, length, "closed"), nats),
                below,
                math.fsum(record["nats"] for record in of_length) / len(of_length),
            )
        )
    columns = tuple(name.format(reference=_name(settings)) for name in _COLUMNS)
    return Table(f"{length:,} tokens", columns, tuple(rows), digits=2)


def _name(settings: Sequence[Profile]) -> str:
    return REFERENCE if any(one.policy == REFERENCE for one in settings) else settings[0].policy


def _reference(
    findings: Sequence[Findings], settings: Sequence[Profile], setting: Profile
) -> Findings | None:
    """The findings that a setting is compared with: the reference policy at the same budget."""
    if setting.policy == "full":
        return None
    wanted = _name(settings)
    for one, other in zip(findings, settings, strict=True):
        if other.policy == wanted and other.budget == setting.budget and not other.policy_options:
            return one
    return None


def _values(findings: Findings, length: int, key: str) -> list[list[float]]:
    """The values of `key` in conversations of `length`: a list for each conversation and seed."""
    return [
        [float(answer[key]) for answer in record["answers"]]
        for record in findings.records
        if record["length"] == length
    ]


def _repeated(reference: Findings, one: Findings, length: int, key: str) -> list[list[float]]:
    """The values of `reference` with its first seed, repeated as often as `one` has seeds."""
    first = Findings(reference.name, reference.by_seed[:1])
    return _values(first, length, key) * len(one.by_seed)
