"""Conversations over weeks and questions about them, from LoCoMo.

Maharana et al. 2024, https://arxiv.org/abs/2402.17753. Token F1 is computed as in LoCoMo's
`task_eval/evaluation.py`, but stems are those of Porter's original algorithm.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from operator import itemgetter
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, ClassVar

import numpy as np

from sirchat.chat.events import TurnDone
from sirchat.chat.retry import temporary_settings
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import ContextFullError, SettingError
from sirchat.lab.studies.by_question import (
    Measured,
    per_question,
    table_of_differences,
    table_of_means,
)
from sirchat.lab.studies.long_talk import (
    ADVERSARIAL,
    CATEGORIES,
    LongTalk,
    TalkQuestion,
    long_talks,
    read_talk,
)
from sirchat.lab.studies.report import Record, Report, Table
from sirchat.lab.studies.study import GREEDY, Cell, Findings, Grid
from sirchat.memory.key_values import Positions
from sirchat.memory.policies import policy_class
from sirchat.recall.recall import NewTurn
from sirchat.recall.retrievers import retriever


@dataclass(frozen=True)
class ReadTalk:
    """A conversation that a session has read, and the stream positions of each message's tokens."""

    session: Session
    talk: LongTalk
    positions: Mapping[str, Positions]

    def evidence(self, question: TalkQuestion) -> list[Positions]:
        """The stream positions of each message with evidence for a question: a list of arrays."""
        return [self.positions[one] for one in question.evidence]

    def answer(self, question: TalkQuestion, seed: int, *, generate: bool) -> Record:
        """Ask a question, score the answer, and undo the turn."""
        text, options = question_and_options(
            question, Random(f"locomo/{seed}/{self.talk.name}/{question.number}")
        )
        session, evidence = self.session, self.evidence(question)
        found: Record = {"number": question.number, "category": question.category}
        for event in session.ask(text):
            if isinstance(event, TurnDone) and event.role == "user":
                found["held"] = _share(evidence, session.ledger.held_positions)
                found |= _surprisal(session, question)
                if not generate:
                    break
            elif isinstance(event, TurnDone):
                found["said"] = self._without_name(event.text)
        session.undo()
        said = found.setdefault("said", None)
        adversarial = question.category == ADVERSARIAL
        found["f1"] = None if said is None or adversarial else reply_score(question, said)
        found["abstains"] = (
            None if said is None or not adversarial else float(says_not_mentioned(said, options))
        )
        return found

    def measure_restored_evidence(
        self, questions: Sequence[TalkQuestion], retrievers: Sequence[str], counts: Sequence[int]
    ) -> dict[int, Record]:
        """Measure how much of the evidence that is not held each retriever would restore."""
        session, most = self.session, max(counts)
        found: dict[int, Record] = {}
        for name in retrievers:
            budget = max(session.profile.budget, most + _QUESTION)
            # The question itself may be answered from fewer tokens (focus): all n are measured.
            more = {"budget": budget, "recall": name, "recall_n": most, "focus": "off"}
            with temporary_settings(session, "eval", more):
                held = session.ledger.held_positions.copy()
                for question in questions:
                    missing = [np.setdiff1d(one, held) for one in self.evidence(question)]
                    missing = [one for one in missing if len(one)]
                    if missing and question.category != ADVERSARIAL:
                        text = question_and_options(question)[0]
                        back = recalled_positions(session, text, counts)
                        found.setdefault(question.number, {})[name] = {
                            str(n): _restored_shares(missing, chosen) for n, chosen in back.items()
                        }
        return found

    def _without_name(self, reply: str) -> str:
        """Remove a speaker's name from the start of a reply; returns the reply."""
        reply = reply.strip()
        for name in self.talk.speakers:
            reply = reply.removeprefix(f"{name}:").strip()
        return reply


def question_and_options(
    question: TalkQuestion, rng: Random | None = None
) -> tuple[str, tuple[str, str]]:
    """The user turn that asks a question, and the options that an adversarial one lists."""
    options = (NOT_MENTIONED, question.adversarial)
    if rng is not None and rng.random() < 0.5:
        options = options[::-1]
    if question.category == ADVERSARIAL:
        listed = f"(a) {options[0]} (b) {options[1]}"
        return f"{question.text} Select the correct answer: {listed}", options
    wanted = "an approximate date, in a few words" if question.category == 2 else "a few words"
    return f"{question.text} Answer with {wanted}.", options


def recalled_positions(session: Session, text: str, counts: Sequence[int]) -> dict[int, Positions]:
    """The stream positions that the session recalls for a user turn, by how many it may recall.

    The setting `recall_n` must be at least the largest of `counts`.
    """
    recall = session.recall
    if retriever(session.profile.recall).finds_passages:  # which fill the room: no rank says how
        turn = session.template.user_turn(text)
        recall.update()
        return {n: recall.find(NewTurn(turn.ids, turn.roles), n).positions for n in counts}
    list(session.read_user(text))
    scores = recall.scores
    session.undo()
    ranked = np.array(sorted(scores, key=lambda at: (scores[at], at), reverse=True), np.int64)
    return {n: ranked[:n] for n in counts}


def _surprisal(session: Session, question: TalkQuestion) -> Record:
    if question.category == ADVERSARIAL:
        return {"nats": None, "answer_tokens": None}
    (scored,) = session.score_continuations([scored_answer(question)])
    return {"nats": -sum(scored.log_probabilities), "answer_tokens": len(scored.ids)}


def _share(parts: Sequence[Positions], present: Positions) -> float | None:
    """The share of all stream positions in `parts` that are also in `present`."""
    wanted = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
    return float(np.isin(wanted, present).mean()) if len(wanted) else None


def _restored_shares(missing: Sequence[Positions], chosen: Positions) -> Record:
    halves = [np.isin(one, chosen).mean() >= 0.5 for one in missing]
    return {"share": _share(missing, chosen), "any": float(any(halves)), "all": float(all(halves))}


# The right option of every adversarial question (a question whose answer is not in the text)
NOT_MENTIONED = "Not mentioned in the conversation"

_QUESTION = 128  # tokens of a question, at most
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@cache
def _stemmer() -> Callable[[list[str]], list[str]]:
    try:
        from snowballstemmer import stemmer
    except ModuleNotFoundError:
        raise SettingError(
            "token F1 needs a stemmer, which is not installed",
            hint="pip install 'sirchat[locomo]', or --reply-tokens 0 for no replies",
        ) from None
    words: Callable[[list[str]], list[str]] = stemmer("porter").stemWords
    return words


def stems(text: str) -> list[str]:
    """The stems of a text's words, in order, in lower case, without punctuation.

    The words a, an, the, and are left out.
    """
    plain = text.lower().translate(_NO_PUNCTUATION)
    words = re.sub(r"\b(?:a|an|the|and)\b", " ", plain).split()
    stemmed = _stemmer()(words)
    return [stem if len(word) > 2 else word for word, stem in zip(words, stemmed, strict=True)]


def token_f1(reply: str, answer: str) -> float:
    """The token F1 of a reply: the harmonic mean of the precision and recall of its word stems."""
    said, wanted = Counter(stems(reply)), Counter(stems(answer))
    same = (said & wanted).total()
    return 2 * same / (said.total() + wanted.total()) if same else 0.0


def multi_answer_f1(reply: str, answer: str) -> float:
    """The token F1 of a reply to a question with several answers."""
    said = [part.strip() for part in reply.split(",")]
    return fmean(max(token_f1(one, part) for one in said) for part in answer.split(","))


def scored_answer(question: TalkQuestion) -> str:
    """The part of a question's right answer that is scored.

    For an open-domain question this part ends before a semicolon; else it is the whole answer.
    """
    return question.answer.split(";")[0].strip() if question.category == 3 else question.answer


def reply_score(question: TalkQuestion, reply: str) -> float:
    """The token F1 of a reply to a question.

    The parts of the answer to a multi-hop question are scored one by one.
    """
    score = multi_answer_f1 if question.category == 1 else token_f1
    return score(reply, scored_answer(question))


def says_not_mentioned(reply: str, options: tuple[str, str]) -> bool:
    """Whether a reply to an adversarial question says that the answer was not mentioned."""
    said = reply.strip().lower()
    if len(said) in (1, 3):
        said = options[0 if said in ("a", "(a)") else 1].lower()
    return "not mentioned" in said or "no information available" in said


@dataclass(frozen=True)
class Locomo(Grid):
    """The LoCoMo study; `limit` is the number of questions drawn for each conversation."""

    data: str = ""  # path of LoCoMo's file
    # indices of the conversations to run, from 0; empty for all
    conversations: tuple[int, ...] = ()
    reply_tokens: int = 24  # largest number of tokens in a reply; 0 for no replies, and so no F1
    # names of retrievers, which are compared after all questions were answered
    retrievers: tuple[str, ...] = ()
    # numbers of tokens that a retriever restores; each number is measured
    counts: tuple[int, ...] = (100, 200, 400)

    extends: ClassVar[tuple[str, ...]] = ("settings", "repeats", "conversations")
    without_effect = (*Grid.without_effect, *GREEDY)

    def __post_init__(self) -> None:
        if self.reply_tokens:
            _stemmer()  # refused before the study begins
        for number in self.conversations:
            if not 0 <= number < len(self.talks):
                raise SettingError(
                    f"conversations is {number}, must be numbers from 0 to {len(self.talks) - 1}, "
                    "with commas"
                )
        for name in self.retrievers:
            changed_profile(self.settings[0], "--retrievers", recall=name)
        for setting in self.settings if self.retrievers else ():
            most, bounded = setting.budget - setting.sinks, policy_class(setting.policy).bounded
            if bounded and not 1 <= max(self.counts, default=0) <= most:
                raise SettingError(
                    f"counts is {self.counts}, must be 1 to {most} under a budget of "
                    f"{setting.budget}"
                )

    @cached_property
    def talks(self) -> list[LongTalk]:
        """All conversations in the file or folder `data`."""
        return long_talks(Path(self.data))

    name = "locomo"

    def units(self) -> list[str]:
        """The names of the conversations to run: their indices in `talks`, as strings."""
        return [str(n) for n in self.conversations or range(len(self.talks))]

    def questions(self, talk: LongTalk) -> list[TalkQuestion]:
        """The questions that are asked about a conversation, in the file's order.

        If the file has more than `limit` questions about it, `limit` of them are drawn at random.
        """
        every = talk.questions
        if self.limit >= len(every):
            return list(every)
        drawn = Random(f"locomo/{self.seed}/{talk.name}").sample(every, self.limit)
        return sorted(drawn, key=lambda one: one.number)

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read the conversation named `unit`, and ask questions about it."""
        talk = self.talks[int(unit)]
        session.switch("eval", temperature=0.0, max_new_tokens=max(1, self.reply_tokens))
        try:
            one = ReadTalk(session, talk, read_talk(session, talk))
            tokens = session.seen
            questions = self._answers(one, bounded=policy_class(cell.setting.policy).bounded)
        except ContextFullError:
            return {"fits": False}
        return {"fits": True, "tokens": tokens, "questions": questions}

    def _answers(self, one: ReadTalk, *, bounded: bool) -> list[Record]:
        questions, generate = self.questions(one.talk), self.reply_tokens > 0
        answers = [one.answer(each, self.seed, generate=generate) for each in questions]
        retrievers = self.retrievers if bounded else ()
        back = (
            one.measure_restored_evidence(questions, retrievers, self.counts) if retrievers else {}
        )
        return [each | {"back": back.get(each["number"], {})} for each in answers]

    def report(self, found: Mapping[str, Record]) -> Report:
        """A report with a header and the tables that `tables_of` makes of the results."""
        findings = self.findings(found)
        tokens = [one["tokens"] for one in found.values() if one["fits"]] or [0]
        asked = sum(len(self.questions(self.talks[int(unit)])) for unit in self.units())
        header = [
            f"seed {self.seed}",
            f"{asked} questions about {_count(self.units())} of {min(tokens):,} to "
            f"{max(tokens):,} tokens",
            "intervals: conversations resampled, or the questions of one (bootstrap)",
        ]
        for one in findings:
            if long := sum(not each["fits"] for each in one.records):
                header.append(
                    f"{one.name}: {long} of {_count(one.records)} longer than the context, left out"
                )
        tables = tables_of(findings, self.retrievers, self.counts)
        return Report(tuple(header), tables, details=self.parameters())


def locomo_study(
    settings: tuple[Profile, ...], retrievers: tuple[str, ...], **options: Any
) -> Locomo:
    """The study that the flags describe; without retrievers, that of the setting `recall`."""
    if not retrievers and settings[0].recall != "off":
        retrievers = (settings[0].recall,)
    return Locomo(settings, retrievers=retrievers, **options)


def _count(conversations: Sized) -> str:
    return f"{len(conversations)} conversation" + ("s" if len(conversations) != 1 else "")


def tables_of(
    findings: Sequence[Findings], retrievers: Sequence[str], counts: Sequence[int]
) -> tuple[Table, ...]:
    """The tables of the study's report: answers, differences, categories and restored evidence."""
    measured = {
        "token F1": f1,
        "nats a token": nats_a_token,
        "nats an answer": nats,
        "evidence held": held,
        "says not mentioned": abstains,
    }
    columns = {
        name: of
        for name, of in measured.items()
        if of not in (f1, abstains) or any(per_question(one, of) for one in findings)
    }
    answers = ((one.name, one, columns.values()) for one in findings)
    restored = [
        (f"{one.name}, {name}", one, [_restored(name, n, key) for key in _RESTORED for n in counts])
        for one, name in product(findings, retrievers)
    ]
    of_counts = [f"{text}, n = {n}" for text in _RESTORED.values() for n in counts]
    by_category = [
        (f"{one.name}, {name}, n = {n}", one, _restored(name, n, "share"))
        for one, name, n in product(findings, retrievers, counts)
    ]
    return (
        table_of_means("Answers", ("setting", *columns), answers),
        *(
            table_of_differences(name, findings, columns[name])
            for name in ("nats a token", "token F1")
            if name in columns and len(findings) > 1
        ),
        *(
            _by_category(name, [(one.name, one, columns[name]) for one in findings])
            for name in ("nats a token", "token F1", "evidence held")
            if name in columns
        ),
        *(
            [
                table_of_means(
                    "Evidence restored", ("setting, retriever", *of_counts), restored, digits=2
                ),
                _by_category("Evidence restored", by_category),
            ]
            if retrievers
            else []
        ),
    )


# An adversarial question, which has no right answer, has a value of `abstains` alone.
nats: Measured = itemgetter("nats")
f1: Measured = itemgetter("f1")
abstains: Measured = itemgetter("abstains")


def nats_a_token(question: Record) -> float | None:
    return None if question["nats"] is None else question["nats"] / question["answer_tokens"]


def held(question: Record) -> float | None:
    """The share of the evidence that is held; None without evidence."""
    return None if question["category"] == ADVERSARIAL else question["held"]


_KINDS = {one: text for one, text in CATEGORIES.items() if one != ADVERSARIAL}
_RESTORED = {"share": "tokens", "any": "any turn", "all": "all turns"}


def _by_category(name: str, rows: Sequence[tuple[str, Findings, Measured]]) -> Table:
    """A table with a column for each category; a row has its label, and what is measured."""

    def each(measured: Measured) -> list[Measured]:
        def of(category: int) -> Measured:
            return lambda asked: measured(asked) if asked["category"] == category else None

        return [of(category) for category in _KINDS]

    _, first, measured = rows[0]
    counts = [len(per_question(first, one)) for one in each(measured)]
    columns = [f"{text} ({n})" for text, n in zip(_KINDS.values(), counts, strict=True)]
    some = ((label, one, each(of)) for label, one, of in rows)
    return table_of_means(f"{name} by category", ("setting", *columns), some, digits=2)


def _restored(name: str, n: int, key: str) -> Measured:
    """A share of the missing evidence that a retriever restores with n tokens."""
    return lambda asked: asked["back"][name][str(n)][key] if name in asked["back"] else None
