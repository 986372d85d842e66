"""Conversations over weeks, and questions about them: LoCoMo, and Realtalk in the same way.

(Maharana et al. 2024, https://arxiv.org/abs/2402.17753; Lee et al. 2025,
https://arxiv.org/abs/2502.13270.) A conversation is read once under each setting. Then each of its
questions is asked and undone: how well the reply fits, how surprising the right answer would be,
how much of the turns with the evidence is still held, and how much of the rest each recall measure
would bring back. The files are not part of sirchat; see `long_talk` for where they are from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import ClassVar

from sirchat.chat.session import Session
from sirchat.config.layers import changed
from sirchat.errors import ContextFullError, SettingError
from sirchat.lab.studies.locomo_tables import tables_of
from sirchat.lab.studies.long_talk import LongTalk, TalkQuestion, long_talks
from sirchat.lab.studies.report import Report
from sirchat.lab.studies.results_log import Record
from sirchat.lab.studies.reuse import data_name
from sirchat.lab.studies.study import Cell, Grid
from sirchat.lab.studies.talk_questions import ReadTalk
from sirchat.lab.studies.talk_rounds import read_talk
from sirchat.lab.studies.token_f1 import require_stemmer
from sirchat.memory.policies import policy_class


@dataclass(frozen=True)
class Locomo(Grid):
    """The study; `limit` is the number of questions about each conversation, drawn by the seed.

    Attributes:
        data: LoCoMo's file, or a file or a folder of Realtalk's.
        conversations: their numbers in the data, from 0; none for all.
        reply_tokens: most tokens of a reply; 0 for no replies, and so no F1.
        measures: recall measures to search with, after the replies.
        counts: numbers of tokens that come back.

    Raises SettingError for data that can't be read, a number that no conversation has, an unknown
    measure, and a count above what a setting can recall.
    """

    data: str = ""
    conversations: tuple[int, ...] = ()
    reply_tokens: int = 24
    measures: tuple[str, ...] = ()
    counts: tuple[int, ...] = (100, 200, 400)

    extends: ClassVar[tuple[str, ...]] = ("settings", "repeats", "conversations")

    def __post_init__(self) -> None:
        if self.reply_tokens:
            require_stemmer()
        for number in self.conversations:
            if not 0 <= number < len(self.talks):
                raise SettingError(
                    f"conversations is {number}, must be 0 to {len(self.talks) - 1}, with commas"
                )
        for measure in self.measures:
            changed(self.settings[0], "--measures", recall=measure)
        for setting in self.settings if self.measures else ():
            most, bounded = setting.budget - setting.sinks, policy_class(setting.policy).bounded
            if bounded and not 1 <= max(self.counts, default=0) <= most:
                raise SettingError(
                    f"counts is {self.counts}, must be 1 to {most} under a budget of "
                    f"{setting.budget}"
                )

    def parameters(self) -> Record:
        """All that the findings depend on, except the model."""
        return super().parameters() | {"data": data_name(Path(self.data))}

    @cached_property
    def talks(self) -> list[LongTalk]:
        """All conversations in the data."""
        return long_talks(Path(self.data))

    @property
    def name(self) -> str:
        """The study's name, which also names its files."""
        return "locomo"

    def units(self) -> list[str]:
        """One unit for each conversation: its number."""
        return [str(n) for n in self.conversations or range(len(self.talks))]

    def questions(self, talk: LongTalk) -> list[TalkQuestion]:
        """The questions that are asked about a conversation, in the file's order."""
        every = talk.questions
        if self.limit >= len(every):
            return list(every)
        drawn = Random(f"locomo/{self.seed}/{talk.name}").sample(every, self.limit)
        return sorted(drawn, key=lambda one: one.number)

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read a conversation and ask about it.

        The record has `fits`, false if the model's context is too short for a policy that evicts
        nothing; else also the number of `tokens` read, the `seconds` for `reading` and `asking`,
        and a record for each of the `questions`; see `ReadTalk`.
        """
        talk, start = self.talks[int(unit)], time.perf_counter()
        session.switch("eval", temperature=0.0, max_new_tokens=max(1, self.reply_tokens))
        try:
            one = ReadTalk(session, talk, read_talk(session, talk))
            tokens, read = session.seen, time.perf_counter()
            questions = self._answers(one, bounded=policy_class(cell.setting.policy).bounded)
        except ContextFullError:
            return {"fits": False}
        return {
            "fits": True,
            "tokens": tokens,
            "seconds": {"reading": read - start, "asking": time.perf_counter() - read},
            "questions": questions,
        }

    def _answers(self, one: ReadTalk, *, bounded: bool) -> list[Record]:
        questions, generate = self.questions(one.talk), self.reply_tokens > 0
        answers = [one.answer(each, self.seed, generate=generate) for each in questions]
        measures = self.measures if bounded else ()
        back = one.brought_back(questions, measures, self.counts) if measures else {}
        return [each | {"back": back.get(each["number"], {})} for each in answers]

    def report(self, found: Mapping[str, Record]) -> Report:
        """F1, surprisal and evidence by setting and category, paired differences, and recall."""
        findings = self.findings(found)
        fit = [one for one in found.values() if one["fits"]]
        tokens = [one["tokens"] for one in fit] or [0]
        asked = sum(len(self.questions(self.talks[int(unit)])) for unit in self.units())
        header = [
            f"seed {self.seed}",
            f"{asked} questions about {_count(self.units())} of {min(tokens):,} to "
            f"{max(tokens):,} tokens",
            "intervals draw conversations and questions again",
        ]
        for one in findings:
            if long := sum(not each["fits"] for each in one.records):
                header.append(f"{one.name}: {long} of {_count(one.records)} too long, left out")
        if fit:
            seconds = sum(one["seconds"]["reading"] for one in fit)
            header.append(f"{sum(tokens) / seconds:,.0f} tokens read a second")
        tables = tables_of(findings, self.settings, self.measures, self.counts)
        return Report(tuple(header), tables, details=self.parameters())


def _count(conversations: Sized) -> str:
    return f"{len(conversations)} conversation" + "s" * (len(conversations) != 1)
