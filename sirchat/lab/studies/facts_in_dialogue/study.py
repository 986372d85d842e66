"""Facts told amid real dialogue and asked for later, to see which facts a policy keeps.

A session reads each conversation turn by turn, as a chat does; recall is on if the setting says so.
At the end the user asks for each fact, and each question is undone. Memory is also judged by types
of questions: with or without a common word, after a correction, and more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from statistics import fmean
from typing import ClassVar

import numpy as np

from sirchat.chat.events import Recalled, TurnDone
from sirchat.chat.session import Session
from sirchat.chat.summary import make_summary
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.facts_in_dialogue.dialogue import (
    TOLD,
    AskedFact,
    Dialogue,
    Woven,
    draw_told_fact,
    load_dialogues,
    weave,
)
from sirchat.lab.studies.facts_in_dialogue.kinds import KINDS
from sirchat.lab.studies.facts_in_dialogue.questions import (
    HALVES,
    TYPES,
    draw_fact,
    entries,
    unrelated_messages,
)
from sirchat.lab.studies.intervals import clustered_mean, paired_interval
from sirchat.lab.studies.reading import whole_round
from sirchat.lab.studies.report import Record, Report, Table, Value
from sirchat.lab.studies.study import GREEDY, Cell, Findings, Grid, refuse_unknown
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Role
from sirchat.memory.policies import policy_class
from sirchat.text.detokenizer import TokenTexts, tokens_spelling
from sirchat.text.template import Template

# What a conversation tells for each type of question. For the first it is everyday facts.
_TOLD_FOR = {TOLD: TOLD, **TYPES}


@dataclass(frozen=True)
class FactsInDialogue(Grid):
    """Compares settings by how many facts, told amid real dialogue, the model recalls.

    `limit` is the number of questions of each type for each length.
    """

    data: str = ""  # path of a file or folder with real conversations
    # lengths of the conversations in tokens, not counting the questions
    lengths: tuple[int, ...] = (1000,)
    facts: int = 5  # number of facts told in a conversation
    reply_tokens: int = 32  # largest number of tokens of a reply; 0 if no reply is generated
    # names of ways to sum up the conversation (see `chat.summary`); facts in a summary are counted
    summary: tuple[str, ...] = ()
    questions: tuple[str, ...] = (TOLD,)  # types of questions
    half: str = "all"  # the half of the kinds of facts that is asked for, not with `TOLD`

    extends: ClassVar[tuple[str, ...]] = (*Grid.extends, "lengths")
    without_effect = (*Grid.without_effect, *GREEDY)

    def __post_init__(self) -> None:
        if not 1 <= self.facts <= 12:
            raise SettingError(f"facts is {self.facts}, must be 1 to 12")
        if (shortest := min(self.lengths, default=0)) < 200:
            raise SettingError(f"length is {shortest}, must be 200 or more")
        refuse_unknown("summary", self.summary, ("extract",))
        refuse_unknown("questions", self.questions or ("",), tuple(_TOLD_FOR))
        refuse_unknown("half", (self.half,), HALVES)
        if TOLD in self.questions and self.half != "all":
            raise SettingError(
                f"half {self.half} has no effect on the questions {TOLD}", hint="leave half out"
            )

    name = "facts-in-dialogue"

    def units(self) -> list[str]:
        """The conversations to read: what is told, length and number, such as `lists 3500 0`."""
        told = dict.fromkeys(_TOLD_FOR[one] for one in self.questions)
        count = math.ceil(self.limit / self.facts)
        return [
            f"{each} {length} {number}"
            for each in told
            for length in self.lengths
            for number in range(count)
        ]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read the conversation named `unit`, and ask each question of the study about it."""
        told, *numbers = unit.split()
        session.switch("eval", temperature=0.0, max_new_tokens=max(1, self.reply_tokens))
        facts, talk = self.woven(session.template, told, *map(int, numbers))
        recalled = _read(session, talk)
        nats = _nats_of_replies(session, talk)
        summed = make_summary(session, session.facts()) if self.summary else None
        generate = self.reply_tokens > 0
        answers = ask_facts(session, facts, talk, self.questions, generate=generate, summed=summed)
        unrelated = unrelated_messages(self.half) if session.profile.recall != "off" else ()
        return {
            "told": told,
            "length": int(numbers[0]),
            "answers": answers,
            "tokens": session.seen,
            "nats": nats,
            "recalled": recalled,
            "unrelated": [_recalled(session, text) for text in unrelated],
        }

    def woven(
        self, template: Template, told: str, length: int, number: int
    ) -> tuple[list[AskedFact], Woven]:
        """The facts of conversation `number` and its rounds; the same seed gives the same."""
        if told == TOLD:
            rng = Random(f"chatter/{self.seed}/{length}/{number}")
            facts = [draw_told_fact(rng, kind) for kind in rng.sample(KINDS, self.facts)]
        else:
            rng = Random(f"questions/{self.seed}/{self.half}/{told}/{length}/{number}")
            some = rng.sample(entries(told, self.half), self.facts)
            facts = [draw_fact(rng, told, one) for one in some]
        return facts, weave(rng, self._dialogues, facts, length, self.sizes(template))

    def sizes(self, template: Template) -> Callable[[str, str], int]:
        """A function that counts the tokens of a round, given user turn and reply."""
        overhead = len(whole_round(template, "a", "a").ids) - 2

        def size(user: str, reply: str) -> int:
            ids = template.as_text(user), template.as_text(reply)
            return overhead + sum(map(len, ids))

        return size

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
        tables.append(_replies_table(findings, self.settings))
        if any(record["unrelated"] for record in found.values()):
            tables.append(_unrelated_table(findings))
        return Report(header, tuple(tables), details=self.parameters())

    @cached_property
    def _dialogues(self) -> Sequence[Dialogue]:
        return load_dialogues(Path(self.data))


def _read(session: Session, talk: Woven) -> float:
    """Read all rounds; returns the mean number of tokens that recall brought back for each."""
    recalled = list[int]()
    for user, reply in talk.rounds:
        for event in session.read_user(user, next_role="assistant"):
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
    rows, first = session.engine.save().rows, session.state.roles.index("user")
    turns = [first + 2 * at + 1 for at in range(len(talk.rounds)) if at not in talk.own]
    of_reply = np.isin(rows["turn"], turns) & (rows["role"] == Role.ASSISTANT)
    return float(np.nanmean(rows["surprisal"][of_reply]))


def spans(texts: TokenTexts, ids: Sequence[int], sentence: str, value: str) -> tuple[slice, slice]:
    """Two slices of `ids`, the token ids of a user turn that tells a fact.

    The first slice is the sentence that tells the fact, the second is the fact's value in it.
    """
    pieces = texts(ids, range(len(ids)))
    ends = np.cumsum([len(piece) for piece in pieces])
    told = "".join(pieces).index(sentence)
    at = told + sentence.lower().index(value.lower())
    return (
        tokens_spelling(ends, told, told + len(sentence)),
        tokens_spelling(ends, at, at + len(value)),
    )


def ask_facts(
    session: Session,
    facts: Sequence[AskedFact],
    talk: Woven,
    types: Sequence[str],
    *,
    generate: bool,
    summed: str | None = None,
) -> list[Record]:
    """Ask all questions of these types for what a session has read; `summed` is a summary of it."""
    rows, first = session.engine.save().rows, session.state.roles.index("user")
    texts, answers = TokenTexts(session.model.tokenizer), list[Record]()
    for fact, rounds in zip(facts, talk.places, strict=True):
        at = list[tuple[Positions, Positions]]()
        for one, round in zip(fact.told, rounds, strict=True):
            said = (rows["turn"] == first + 2 * round) & (rows["role"] == Role.USER)
            tokens = np.flatnonzero(said)
            ids = rows["token_id"][tokens].tolist()
            statement, value = spans(texts, ids, one.text, one.value)
            at.append((tokens[statement], tokens[value]))
        answers += [
            ask_fact(session, fact, kind, at, generate=generate, summed=summed)
            for kind in types
            if kind in fact.asked
        ]
    return answers


def ask_fact(
    session: Session,
    fact: AskedFact,
    kind: str,
    told: Sequence[tuple[Positions, Positions]],
    *,
    generate: bool,
    summed: str | None = None,
) -> Record:
    """Ask a question, score the answer and say what was held for it; then undo the turn.

    `told` are the stream positions of each statement's tokens, and of those of its value.
    """
    found: Record = {"kind": fact.kind, "type": kind, "said": None, "seconds": None}
    if summed is not None:
        found["summed"] = fmean(says(summed, value) for value in fact.values)
    needed = [told[at] for at in fact.needed]
    others = [one for at, one in enumerate(told) if at not in fact.needed]
    for event in session.ask(fact.asked[kind]):
        if isinstance(event, Recalled):
            found["seconds"] = event.seconds
        elif isinstance(event, TurnDone) and event.role == "user":
            scores = session.score_continuations(fact.replies)
            nats = [-math.fsum(one.log_probabilities) for one in scores]
            held = session.ledger.held_positions
            shares = [float(np.isin(statement, held).mean()) for statement, _ in needed]
            found |= {
                "right": float(nats.index(min(nats)) == fact.right),
                "nats": nats[fact.right],
                "held": _share(held, [value for _, value in needed[-len(fact.values) :]]),
                "told": _share(held, [statement for statement, _ in needed]),
                "found": fmean(share >= _FOUND for share in shares),
                "last": float(shares[-1] >= _FOUND) if len(shares) > 1 else None,
                "other": _share(held, [statement for statement, _ in others]) if others else None,
                "rows": len(held),
                "recalled": event.recalled,
            }
            if not generate:
                break
        elif isinstance(event, TurnDone):
            found["said"] = fmean(says(event.text, value) for value in fact.values)
            found["reply"] = event.text
    session.undo()
    return found


def _share(held: Positions, parts: Sequence[Positions]) -> float:
    return float(np.isin(np.concatenate(parts), held).mean())


def says(reply: str, value: str) -> bool:
    """Whether a reply contains a value as whole words, ignoring upper and lower case."""
    return bool(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", reply, re.IGNORECASE))


# Of a fact's statements, those whose tokens are held to this share count as found
_FOUND = 0.5

# The heading of each column, by the key of an answer's record; a column without a value is left out
_COLUMNS = {
    "right": "right of four",
    "nats": "nats of the right",
    "said": "said",
    "summed": "in the summary",
    "held": "value held",
    "told": "statements held",
    "found": "statements found",
    "last": "last found",
    "other": "other statement held",
    "rows": "rows held",
    "recalled": "recalled",
    "ms": "search ms",
}
_COMPARED = ("right", "nats", "said", "found")


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
            else paired_interval(values[key], [each * len(one.by_seed) for each in first[key]])
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
    """The values of `key` in all answers to a type of question, by conversation; NaN for none.

    Answers in one conversation under several seeds are in one list.
    """

    def value(answer: Record) -> float:
        if key == "ms":
            return math.nan if answer["seconds"] is None else 1000 * answer["seconds"]
        return math.nan if answer.get(key) is None else float(answer[key])

    return [
        [value(answer) for each in same for answer in each["answers"] if answer["type"] == kind]
        for same in one.by_unit
        if (same[0]["told"], same[0]["length"]) == (_TOLD_FOR[kind], length)
    ]


def _replies_table(findings: Sequence[Findings], settings: Sequence[Profile]) -> Table:
    """The surprisal of the talk's own replies, less that of the setting that holds most."""

    def holds(setting: Profile) -> float:
        return setting.budget if policy_class(setting.policy).bounded else math.inf

    most = findings[max(range(len(settings)), key=lambda at: holds(settings[at]))]
    reference = [[record["nats"]] for record in most.by_seed[0]]
    rows = list[tuple[Value, ...]]()
    for one in findings:
        nats = [[record["nats"] for record in same] for same in one.by_unit]
        others = [each * len(one.by_seed) for each in reference]
        less = None if one is most else paired_interval(nats, others)
        recalled = clustered_mean([[each["recalled"] for each in same] for same in one.by_unit])
        rows.append((one.name, len(nats), clustered_mean(nats), less, recalled))
    columns = ("setting", "conversations", "nats a token", f"less {most.name}", "recalled a turn")
    return Table("Ordinary replies", columns, tuple(rows))


def _unrelated_table(findings: Sequence[Findings]) -> Table:
    """How often recall brings something back for a message that has to do with nothing told."""
    rows = list[tuple[Value, ...]]()
    for one in findings:
        tokens = [[n for each in same for n in each["unrelated"]] for same in one.by_unit]
        brought = [[float(count > 0) for count in each] for each in tokens]
        n = sum(map(len, tokens))
        rows.append((one.name, n, clustered_mean(brought), clustered_mean(tokens)))
    return Table(
        "Unrelated messages", ("setting", "n", "bring something", "tokens"), tuple(rows), digits=2
    )
