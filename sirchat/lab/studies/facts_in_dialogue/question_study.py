"""Memory judged by types of questions: with or without a common word, after a correction, and more.

A session reads each conversation turn by turn, as a chat does, and answers each question under the
settings of a user; each question is undone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any, ClassVar

import numpy as np

from sirchat.chat.events import TurnDone
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import SettingError
from sirchat.lab.studies.facts_in_dialogue.dialogue import AskedFact, Woven, weave
from sirchat.lab.studies.facts_in_dialogue.questions import (
    HALVES,
    TYPES,
    draw_fact,
    entries,
    unrelated_messages,
)
from sirchat.lab.studies.facts_in_dialogue.study import FactsInDialogue, ask_facts
from sirchat.lab.studies.intervals import clustered_mean, paired_interval
from sirchat.lab.studies.report import Estimate, Record, Report, Table, Value
from sirchat.lab.studies.run import run_units
from sirchat.lab.studies.study import Cell, Findings, refuse_unknown
from sirchat.memory.ledger import Role
from sirchat.memory.policies import policy_class
from sirchat.models.model import LoadedModel
from sirchat.recall.recall import FOCUS
from sirchat.text.template import Template

_ASKED = 40  # questions of each type by which it is decided whether focus wins
_MOST_COST = 0.02  # nats a token that it may cost ordinary replies


@dataclass(frozen=True)
class QuestionStudy(FactsInDialogue):
    """Compares settings by their answers to types of questions; `limit` is the number of each."""

    questions: tuple[str, ...] = ()  # types of questions
    half: str = "all"  # the half of the kinds of facts that is asked for

    extends: ClassVar[tuple[str, ...]] = FactsInDialogue.extends

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("questions", self.questions, tuple(TYPES))
        refuse_unknown("half", (self.half,), HALVES)
        if self.summary:
            raise SettingError("summary has no effect with --questions", hint="leave it out")

    def units(self) -> list[str]:
        """The conversations to read: what is told, length and number, such as `lists 3500 0`."""
        told = dict.fromkeys(TYPES[one] for one in self.questions)
        return [f"{each} {unit}" for each in told for unit in super(QuestionStudy, self).units()]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read the conversation named `unit`, and ask each question of the study about it."""
        told, *numbers = unit.split()
        session.switch("eval", temperature=0.0, max_new_tokens=max(1, self.reply_tokens))
        facts, talk = self.woven(session.template, told, *map(int, numbers))
        recalled = _read(session, talk)
        nats = _nats_of_replies(session, talk)
        generate = self.reply_tokens > 0
        answers = ask_facts(session, facts, talk, self.questions, generate=generate)
        return {
            "told": told,
            "length": int(numbers[0]),
            "answers": answers,
            "tokens": session.seen,
            "nats": nats,
            "recalled": recalled,
            "unrelated": [_recalled(session, text) for text in unrelated_messages(self.half)],
        }

    def woven(
        self, template: Template, told: str, length: int, number: int
    ) -> tuple[list[AskedFact], Woven]:
        """The facts of conversation `number` and its rounds; the same seed gives the same."""
        rng = Random(f"questions/{self.seed}/{self.half}/{told}/{length}/{number}")
        facts = [
            draw_fact(rng, told, one) for one in rng.sample(entries(told, self.half), self.facts)
        ]
        return facts, weave(rng, self._dialogues, facts, length, self.sizes(template))

    def report(self, found: Mapping[str, Record]) -> Report:
        """A table for each type of question and length, and one of ordinary replies."""
        tokens = [one["tokens"] for one in found.values()]
        header = (
            f"seed {self.seed}",
            f"half {self.half} of the kinds of facts",
            f"{self.facts} facts in each conversation",
            f"conversations of {min(tokens):,} to {max(tokens):,} tokens",
            "intervals: conversations resampled (bootstrap)",
        )
        findings = self.findings(found)
        tables = [
            _table(findings, kind, length) for length in self.lengths for kind in self.questions
        ]
        tables += [_replies_table(findings, self.settings), _unrelated_table(findings)]
        return Report(header, tuple(tables), details=self.parameters())


def facts_study(
    settings: tuple[Profile, ...], questions: tuple[str, ...], half: str, **options: Any
) -> FactsInDialogue:
    """The study that the flags describe: with types of questions, or as it was before them."""
    if questions:
        return QuestionStudy(settings, questions=questions, half=half, **options)
    if half != "all":
        raise SettingError(f"half {half} has no effect without --questions", hint="leave half out")
    return FactsInDialogue(settings, **options)


def focus_study(settings: tuple[Profile, ...], data: str, **options: Any) -> QuestionStudy:
    """Whether a model answers better from what recall finds (setting `focus`) than from all."""
    both = tuple(
        changed_profile(one, "eval focus", recall="meaning", focus=focus)
        for one in settings
        for focus in ("off", FOCUS)
    )
    fixed: dict[str, Any] = {"facts": 10, "lengths": (3500,), "reply_tokens": 24}
    questions = ("shared", "paraphrase")
    return QuestionStudy(both, data=data, questions=questions, **fixed, **options)


@dataclass(frozen=True)
class FocusTest:
    """What the setting `focus` changes, paired: positive numbers are more with it."""

    right: Estimate  # share of questions with the right reply
    nats: Estimate  # nats a token of ordinary replies

    @property
    def wins(self) -> bool:
        """Whether replies are better with it, and ordinary ones as good."""
        return self.right.low > 0 and self.nats.value <= _MOST_COST


def measure_focus(model: LoadedModel, data: str) -> FocusTest:
    """Measure what `focus` changes for a model with an encoder, in the talk of a file."""
    profile = Profile(policy="salience", budget=min(4096, model.context_length))
    study = replace(focus_study((profile,), data, limit=_ASKED), reply_tokens=0)
    off, on = study.findings(run_units(study, model))
    right = [
        [[answer["right"] for answer in record["answers"]] for record in one.records]
        for one in (on, off)
    ]
    nats = [[[record["nats"]] for record in one.records] for one in (on, off)]
    return FocusTest(paired_interval(*right), paired_interval(*nats))


def _read(session: Session, talk: Woven) -> float:
    """Read all rounds; returns the mean number of tokens that recall brought back for each."""
    recalled = list[int]()
    for user, reply in talk.rounds:
        for event in session.read_user(user, before="assistant"):
            if isinstance(event, TurnDone):
                recalled.append(event.recalled)
        list(session.read_reply(reply))
    return fmean(recalled)


def _recalled(session: Session, text: str) -> int:
    """The number of tokens that recall brings back for a message, which is undone."""
    done = [event for event in session.read_user(text) if isinstance(event, TurnDone)]
    session.undo()
    return done[0].recalled


def _nats_of_replies(session: Session, talk: Woven) -> float:
    """The mean surprisal, in nats a token, of the replies of the real dialogue."""
    rows, first = session.save().rows, session.state.roles.index("user")
    turns = [first + 2 * at + 1 for at in range(len(talk.rounds)) if at not in talk.own]
    of_reply = np.isin(rows["turn"], turns) & (rows["role"] == Role.ASSISTANT)
    return float(np.nanmean(rows["surprisal"][of_reply]))


# The heading of each column, by the key of an answer's record; a column without a value is left out
_COLUMNS = {
    "right": "right of four",
    "said": "said",
    "held": "value held",
    "told": "statements held",
    "found": "statements found",
    "last": "last found",
    "other": "other statement held",
    "rows": "rows held",
    "recalled": "recalled",
    "ms": "search ms",
}
_COMPARED = ("right", "said", "found")


def _table(findings: Sequence[Findings], kind: str, length: int) -> Table:
    """The answers to one type of question, and how they differ from those of the first row."""
    once = Findings("", findings[0].by_seed[:1])
    keys = [
        key
        for key in _COLUMNS
        if not np.isnan(
            np.concatenate([np.concatenate(_values(one, kind, length, key)) for one in findings])
        ).all()
    ]
    compared = [key for key in _COMPARED if key in keys and len(findings) > 1]
    first = {key: _values(once, kind, length, key) for key in compared}
    rows = list[tuple[Value, ...]]()
    for one in findings:
        values = {key: _values(one, kind, length, key) for key in keys}
        differences = [
            None
            if one is findings[0]
            else paired_interval(values[key], first[key] * len(one.by_seed))
            for key in compared
        ]
        n = sum(map(len, values["right"]))
        rows.append((one.name, n, *map(clustered_mean, values.values()), *differences))
    names = [_COLUMNS[key] for key in keys]
    less = [f"{_COLUMNS[key]}, less row 1" for key in compared]
    return Table(
        f"{kind}, {length:,} tokens", ("setting", "n", *names, *less), tuple(rows), digits=2
    )


def _values(one: Findings, kind: str, length: int, key: str) -> list[list[float]]:
    """The values of `key` in all answers to a type of question, by conversation; NaN for none."""

    def value(answer: Record) -> float:
        if key == "ms":
            return math.nan if answer["seconds"] is None else 1000 * answer["seconds"]
        return math.nan if answer[key] is None else float(answer[key])

    return [
        [value(answer) for answer in record["answers"] if answer["type"] == kind]
        for record in one.records
        if (record["told"], record["length"]) == (TYPES[kind], length)
    ]


def _replies_table(findings: Sequence[Findings], settings: Sequence[Profile]) -> Table:
    """The surprisal of the talk's own replies, less that of the setting that holds most."""

    def holds(setting: Profile) -> float:
        return setting.budget if policy_class(setting.policy).bounded else math.inf

    most = findings[max(range(len(settings)), key=lambda at: holds(settings[at]))]
    reference = [[record["nats"]] for record in most.by_seed[0]]
    rows = list[tuple[Value, ...]]()
    for one in findings:
        nats = [[record["nats"]] for record in one.records]
        less = None if one is most else paired_interval(nats, reference * len(one.by_seed))
        recalled = clustered_mean([[record["recalled"]] for record in one.records])
        rows.append((one.name, len(nats), clustered_mean(nats), less, recalled))
    columns = ("setting", "conversations", "nats a token", f"less {most.name}", "recalled a turn")
    return Table("Ordinary replies", columns, tuple(rows))


def _unrelated_table(findings: Sequence[Findings]) -> Table:
    """How often recall brings something back for a message that has to do with nothing told."""
    rows = list[tuple[Value, ...]]()
    for one in findings:
        # Results of before this was measured have none.
        tokens = [record.get("unrelated", []) for record in one.records]
        brought = [[float(count > 0) for count in each] for each in tokens]
        n = sum(map(len, tokens))
        rows.append((one.name, n, clustered_mean(brought), clustered_mean(tokens)))
    return Table(
        "Unrelated messages", ("setting", "n", "bring something", "tokens"), tuple(rows), digits=2
    )
