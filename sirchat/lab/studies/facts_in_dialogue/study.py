"""Facts told amid real dialogue and asked for later, to see which facts a policy keeps.

A session reads the conversation turn by turn, as a chat does; recall is on if the setting says so.
At the end the user asks for each fact, and each question is undone.
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
from sirchat.lab.studies.intervals import clustered_mean, paired_interval
from sirchat.lab.studies.reading import read, whole_round
from sirchat.lab.studies.report import Record, Report, Table, Value
from sirchat.lab.studies.study import (
    GREEDY,
    Cell,
    Findings,
    Grid,
    data_name,
    refuse_unknown,
    without,
)
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Role
from sirchat.text.detokenizer import TokenTexts, tokens_spelling
from sirchat.text.template import Template


@dataclass(frozen=True)
class FactsInDialogue(Grid):
    """Compares settings by how many facts, told amid real dialogue, the model recalls.

    `limit` is the number of questions for each length.
    """

    data: str = ""  # path of a file or folder with real conversations
    # lengths of the conversations in tokens, not counting the questions
    lengths: tuple[int, ...] = (1000,)
    facts: int = 5  # number of facts told in a conversation
    reply_tokens: int = 32  # largest number of tokens of a reply; 0 if no reply is generated
    # names of ways to sum up the conversation after the questions (see `chat.summary`); the facts
    # in each summary are counted
    summary: tuple[str, ...] = ()

    extends: ClassVar[tuple[str, ...]] = (*Grid.extends, "lengths")
    without_effect = (*Grid.without_effect, *GREEDY)

    def __post_init__(self) -> None:
        if not 1 <= self.facts <= 12:
            raise SettingError(f"facts is {self.facts}, must be 1 to 12")
        if min(self.lengths) < 200:
            raise SettingError(f"length is {min(self.lengths)}, must be 200 or more")
        refuse_unknown("summary", self.summary, ("extract",))

    name = "facts-in-dialogue"

    def parameters(self) -> Record:
        found = super().parameters() | {"data": data_name(Path(self.data))}
        return found if self.summary else without(found, ("summary",))  # as in older results

    def units(self) -> list[str]:
        """The names of the conversations to read: length in tokens and number, such as `1000 0`."""
        count = math.ceil(self.limit / self.facts)
        return [f"{length} {number}" for length in self.lengths for number in range(count)]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read the conversation named `unit`, and ask for each fact."""
        length, number = map(int, unit.split())
        session.switch("eval", temperature=0.0, max_new_tokens=max(1, self.reply_tokens))
        facts, talk = self.dialogue(session.template, length, number)
        for user, reply in talk.rounds:
            read(session, user, reply)
        answers = ask_facts(session, facts, talk, (TOLD,), generate=self.reply_tokens > 0)
        for fact, answer in zip(facts, answers, strict=True):
            answer["corrected"] = len(fact.told) > 1
            answer["closed"] = self._closed_book(session, fact)
        rows, tokens = session.save().rows, session.seen
        for way in self.summary:
            text = make_summary(session, session.facts())
            for fact, answer in zip(facts, answers, strict=True):
                answer[f"in {way}"] = says(text, fact.values[0])
        return {
            "length": length,
            "answers": answers,
            "tokens": tokens,
            "system": int(np.flatnonzero(rows["role"] == Role.USER)[0]),
            "nats": float(np.nanmean(rows["surprisal"])),
        }

    def dialogue(
        self, template: Template, length: int, number: int
    ) -> tuple[list[AskedFact], Woven]:
        """The facts of conversation `number` and its rounds; the same seed gives the same."""
        rng = Random(f"chatter/{self.seed}/{length}/{number}")
        facts = [draw_told_fact(rng, kind) for kind in rng.sample(KINDS, self.facts)]
        return facts, weave(rng, self._dialogues, facts, length, self.sizes(template))

    def sizes(self, template: Template) -> Callable[[str, str], int]:
        """A function that counts the tokens of a round, given user turn and reply."""
        overhead = len(whole_round(template, "a", "a").ids) - 2

        def size(user: str, reply: str) -> int:
            ids = template.as_text(user), template.as_text(reply)
            return overhead + sum(map(len, ids))

        return size

    def report(self, found: Mapping[str, Record]) -> Report:
        """Tables of right answers, surprisal of right replies and held tokens.

        There is one table for each length of conversation, with a row for each setting.
        """
        tokens = [one["tokens"] for one in found.values()]
        header = (
            f"seed {self.seed}",
            f"{len(self.units()) // len(self.lengths) * self.facts} questions for each "
            f"table cell, {self.facts} facts in each conversation",
            f"conversations of {min(tokens):,} to {max(tokens):,} tokens",
            f"including a system prompt of {next(iter(found.values()))['system']} tokens",
        )
        findings = self.findings(found)
        tables = (_table(findings, self.settings, length, self.summary) for length in self.lengths)
        return Report(header, tuple(tables), details=self.parameters())

    @cached_property
    def _dialogues(self) -> Sequence[Dialogue]:
        return load_dialogues(Path(self.data))

    @cached_property
    def _closed(self) -> dict[tuple[str, str | None], float]:
        """The surprisals that `_closed_book` has computed, so that none is computed twice."""
        return {}

    def _closed_book(self, session: Session, fact: AskedFact) -> float:
        """The right reply's surprisal, in nats, in a session that read nothing else."""
        profile, right = session.profile, fact.replies[fact.right]
        question = fact.asked[TOLD]
        key = f"{question}/{right}", profile.system
        if key not in self._closed:
            full = profile.model_copy(update={"policy": "full", "policy_options": {}})
            alone = Session(session.model, full)
            list(alone.read_user(question, before="assistant"))
            (scored,) = alone.score_continuations([right])
            self._closed[key] = -math.fsum(scored.log_probabilities)
        return self._closed[key]


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
) -> list[Record]:
    """Ask all questions of these types for what a session has read."""
    rows, first = session.save().rows, session.state.roles.index("user")
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
            ask_fact(session, fact, kind, at, generate=generate)
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
) -> Record:
    """Ask a question, score the answer and say what was held for it; then undo the turn.

    `told` are the stream positions of each statement's tokens, and of those of its value.
    """
    found: Record = {"kind": fact.kind, "type": kind, "said": None, "seconds": None}
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

# The policy with which every other policy is compared, at the same budget. If no setting has this
# policy, the policy of the first setting is used instead
REFERENCE = "entropy"

_COLUMNS = (
    "setting",
    "right of four",
    "less {reference}",
    "said",
    "value held",
    "statement held",
    "nats gained",
    "nats below full",
    "nats a token",
)


def _table(
    findings: Sequence[Findings], settings: Sequence[Profile], length: int, ways: Sequence[str]
) -> Table:
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
        said = [answer["said"] for record in of_length for answer in record["answers"]]
        rows.append(
            (
                one.name,
                clustered_mean(right),
                compared,
                None if None in said else clustered_mean(_values(one, length, "said")),
                clustered_mean(_values(one, length, "held")),
                clustered_mean(_values(one, length, "told")),
                paired_interval(_values(one, length, "closed"), nats),
                below,
                math.fsum(record["nats"] for record in of_length) / len(of_length),
                *(clustered_mean(_values(one, length, f"in {way}")) for way in ways),
            )
        )
    columns = tuple(name.format(reference=_name(settings)) for name in _COLUMNS)
    columns += tuple(f"in {way}" for way in ways)
    return Table(f"{length:,} tokens", columns, tuple(rows), digits=2)


def _name(settings: Sequence[Profile]) -> str:
    return REFERENCE if any(one.policy == REFERENCE for one in settings) else settings[0].policy


def _reference(
    findings: Sequence[Findings], settings: Sequence[Profile], setting: Profile
) -> Findings | None:
    """The results with which the results of `setting` are compared; None if there are none."""
    if setting.policy == "full":
        return None
    wanted = _name(settings)
    for one, other in zip(findings, settings, strict=True):
        if other.policy == wanted and other.budget == setting.budget and not other.policy_options:
            return one
    return None


def _values(findings: Findings, length: int, key: str) -> list[list[float]]:
    """The values of `key` in the records of all answers, for conversations of `length` tokens."""
    return [
        [float(answer[key]) for answer in record["answers"]]
        for record in findings.records
        if record["length"] == length
    ]


def _repeated(reference: Findings, one: Findings, length: int, key: str) -> list[list[float]]:
    """The values of `key` in `reference`, in lists that can be paired with those of `one`."""
    first = Findings(reference.name, reference.by_seed[:1])
    return _values(first, length, key) * len(one.by_seed)
