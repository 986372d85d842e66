"""Two studies: how well recall restores evicted tokens, and how much privacy this costs.

The base budget is the budget without the restored tokens. In the study `Retrieval`, a conversation
is read once under `sink` with the base budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from sirchat.chat.events import Delta, TurnDone
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed
from sirchat.errors import SettingError
from sirchat.lab.studies import generated, paper_tables
from sirchat.lab.studies.choice import choose
from sirchat.lab.studies.needle import TASKS, NeedleDialogue, dialogues_of_file, needle_dialogue
from sirchat.lab.studies.reading import read, switch
from sirchat.lab.studies.report import Estimate, Plot, Record, Report, Table, Value
from sirchat.lab.studies.study import (
    NumberedStudy,
    RunUnit,
    mean,
    refuse_unknown,
    share,
)
from sirchat.models.model import LoadedModel
from sirchat.recall.retrievers import retriever


@dataclass(frozen=True)
class RecallVariant:
    """A way to recall: a retriever, with values of three settings.

    The settings are `recall_weight`, `recall_span` and `recall_soft`.
    """

    retriever: str
    weight: str = "none"
    span: int = 0
    soft: bool = False

    @property
    def makes_sense(self) -> bool:
        """Whether the retriever can use this variant's values of `weight` and `soft`."""
        takes = retriever(self.retriever)
        weight_matters = self.weight == "none" or takes.takes_weight
        return weight_matters and (not self.soft or takes.takes_soft)

    @property
    def name(self) -> str:
        """The name of the table row, such as `attention x surprisal, soft, span 2`."""
        weighted = " x surprisal" if self.weight == "surprisal" else ""
        soft = ", soft" if self.soft else ""
        return self.retriever + weighted + soft + (f", span {self.span}" if self.span else "")


@dataclass(frozen=True)
class Retrieval(NumberedStudy):
    """The study of how well recall restores evicted tokens; the module docstring describes it.

    Raises SettingError for an unknown task, retriever or weight, and for a file that can't be read.
    """

    profile: Profile  # the settings that all table cells share
    task: str = "facts-12"  # the conversations, one of TASKS
    limit: int = 200  # number of conversations; every cell gets the same ones
    bases: tuple[int, ...] = (72,)  # base budgets (without the recalled tokens), in tokens
    counts: tuple[int, ...] = (10, 20, 50, 100, 200)  # numbers of recalled tokens
    # values to combine of the settings `recall`, `recall_weight`, `recall_span` and `recall_soft`;
    # combinations that a retriever can't use are left out
    retrievers: tuple[str, ...] = (
        *("mips", "cosine", "cosine-pairwise", "attention", "bm25", "hybrid", "random"),
    )
    weights: tuple[str, ...] = ("none", "surprisal")
    spans: tuple[int, ...] = (0, 2)
    soft: tuple[bool, ...] = (False, True)
    # a file with conversations, used instead of those of `task`; see the module `needle`
    data: str | None = None

    def __post_init__(self) -> None:
        _ = self.file_dialogues
        refuse_unknown("retrieval task", (self.task,), TASKS)
        for name, weight in product(self.retrievers, self.weights):
            changed(self.profile, "eval", recall=name, recall_weight=weight)
        for base in self.bases:
            changed(self.profile, "--base", budget=base)

    @property
    def name(self) -> str:
        """The study's name; the names of its result files begin with it."""
        return self.task if self.data is None else Path(self.data).stem

    @property
    def variants(self) -> tuple[RecallVariant, ...]:
        """Every combination of a retriever with recall settings that the retriever can use."""
        combinations = (
            RecallVariant(retriever=name, weight=weight, span=span, soft=soft)
            for name, weight, span, soft in product(
                self.retrievers, self.weights, self.spans, self.soft
            )
        )
        return tuple(one for one in combinations if one.makes_sense)

    @cached_property
    def file_dialogues(self) -> list[NeedleDialogue]:
        """The first `limit` conversations in the file `data`; an empty list if there is no file."""
        return [] if self.data is None else dialogues_of_file(Path(self.data))[: self.limit]

    def conversation(self, number: int) -> NeedleDialogue:
        """Conversation `number` of the file `data` or, if there is no file, of the task.

        The same number and seed give the same conversation.
        """
        if self.data is not None:
            return self.file_dialogues[number]
        return needle_dialogue(self.task, self.profile.seed, number)

    def keys(self) -> list[str]:
        """The names of the conversations to run: their numbers as strings, from `0`."""
        count = self.limit if self.data is None else len(self.file_dialogues)
        return [str(number) for number in range(count)]

    def worker(self, model: LoadedModel) -> RunUnit:
        """Create a function that runs the conversation with a given key and returns its record."""
        session = Session(model, changed(self.profile, "eval", max_new_tokens=64, policy="sink"))
        every = cells(self)
        return lambda key: _run(session, self.conversation(int(key)), self, every)

    def report(self, found: Mapping[str, Record]) -> Report:
        """Tables and a plot of the share of right answers, by row and number of recalled tokens."""
        records = list(found.values())
        rows: dict[str, dict[int, Estimate]] = {}
        for cell in cells(self):
            rows.setdefault(cell.row, {})[cell.count] = _right(records, cell.key)
        base_only = {
            name: rows.pop(name)[0] for name in [one for one in rows if one.startswith(BASE)]
        }
        tokens = [one["tokens"] for one in records] or [0]
        header = (
            f"seed {self.profile.seed}",
            f"{len(records)} conversations of {min(tokens):,} to {max(tokens):,} tokens",
            f"base budget {', '.join(map(str, self.bases))}",
        )
        without_recall = {name: _right(records, name) for name in (FULL, EVERYTHING)} | base_only
        columns = ("tokens restored", *map(str, self.counts))
        tables = (
            Table("Without any choice", ("", "right"), tuple(without_recall.items())),
            Table(self.name, columns, tuple((n, *row.values()) for n, row in rows.items())),
            *([paper_tables.retrieval()] if self.task == "stories-3" or self.data else []),
        )
        lines = {
            name: tuple((float(n), one.value) for n, one in row.items())
            for name, row in rows.items()
        }
        lines[FULL] = tuple((float(n), without_recall[FULL].value) for n in self.counts)
        plot = Plot(
            self.name,
            "tokens restored",
            "exact answers",
            lines,
            dashed=tuple(name for name in lines if "span" in name),
            log_x=True,
        )
        return Report(header, tables, (plot,), self.parameters())


@dataclass(frozen=True)
class RetrievalCell:
    """A cell of the table of the study `Retrieval`."""

    row: str  # name of the table row
    base: int  # the base budget (without the recalled tokens), in tokens
    count: int  # number of tokens above the base budget
    settings: dict[str, object]  # the session settings under which the question is asked

    @property
    def key(self) -> str:
        """The key `ROW/COUNT`, under which a record has this cell's result."""
        return f"{self.row}/{self.count}"


FULL, BASE, MORE, EVERYTHING = "full cache", "base budget", "base + n recent", "everything restored"


def cells(options: Retrieval) -> list[RetrievalCell]:
    """The cells of the table of the study `Retrieval`, in order.

    The rows `full cache` and `everything restored`, whose cache has all tokens, are not included.
    """
    return [cell for base in options.bases for cell in _cells(options, base)]


def _cells(options: Retrieval, base: int) -> list[RetrievalCell]:
    off: dict[str, object] = {"recall": "off"}
    suffix = f", base {base}" if len(options.bases) > 1 else ""
    cells = [RetrievalCell(BASE + suffix, base, 0, {"budget": base, **off})]
    cells += [
        RetrievalCell(MORE + suffix, base, n, {"budget": base + n, **off}) for n in options.counts
    ]
    for variant, n in product(options.variants, options.counts):
        settings: dict[str, object] = {
            "budget": base + n,
            "recall": variant.retriever,
            "recall_weight": variant.weight,
            "recall_span": variant.span,
            "recall_soft": variant.soft,
            "recall_n": n,
        }
        cells.append(RetrievalCell(variant.name + suffix, base, n, settings))
    return cells


def _run(
    session: Session, one: NeedleDialogue, options: Retrieval, every: Sequence[RetrievalCell]
) -> Record:
    found: Record = {}
    switch(session, policy="full", recall="off")
    read_dialogue(session, one)
    found[FULL] = is_answered(session, one)
    for base in options.bases:
        switch(session, policy="sink", budget=base, recall="off")
        read_dialogue(session, one)
        found["tokens"] = session.seen
        for cell in every:
            if cell.base == base:
                switch(session, **cell.settings)
                found[cell.key] = is_answered(session, one)
                session.undo()
    switch(session, policy="full", recall="off")
    found[EVERYTHING] = is_answered(session, one)
    return found


def _right(found: Sequence[Record], key: str) -> Estimate:
    return share(one[key] for one in found)


def read_dialogue(session: Session, one: NeedleDialogue) -> None:
    """Reset the session, then read the rounds of a conversation in it."""
    session.reset()
    for user, reply in one.rounds:
        read(session, user, reply)


def is_answered(session: Session, one: NeedleDialogue) -> bool:
    """Ask the question of a conversation; returns whether the model's reply is right.

    Generation stops as soon as the reply can't become right any more.
    """
    parts: list[str] = []
    for event in session.ask(one.question, lambda: not one.may_become_right("".join(parts))):
        if isinstance(event, Delta):
            parts.append(event.text)
        elif isinstance(event, TurnDone) and event.role == "assistant":
            return one.is_right(event.text)
    return False


@dataclass(frozen=True)
class Privacy(NumberedStudy):
    """The study of how much recall reveals of an old turn; the module docstring describes it.

    Raises SettingError for an unknown task, and for a profile without recall.
    """

    profile: Profile  # its `recall`, `recall_weight` and `recall_span` say how tokens are recalled
    task: str = "facts-12"  # the conversations, one of TASKS
    limit: int = 100  # number of conversations
    base: int = 72  # the base budget (without the recalled tokens), in tokens
    # numbers of recalled tokens; 0 for no recall
    counts: tuple[int, ...] = (0, 10, 20, 50, 100, 200)

    def __post_init__(self) -> None:
        refuse_unknown("task", (self.task,), TASKS)
        if self.profile.recall == "off":
            raise SettingError("recall is off, must be a retriever, such as --recall on")

    name = "privacy"

    def worker(self, model: LoadedModel) -> RunUnit:
        """Create a function that runs the conversation with a given key and returns its record."""
        session = Session(model, changed(self.profile, "eval", policy="sink", budget=self.base))

        def work(key: str) -> Record:
            one = needle_dialogue(self.task, self.profile.seed, int(key))
            switch(session, budget=self.base, recall="off")
            read_dialogue(session, one)
            return {str(n): self._ask(session, n, one, key) for n in self.counts}

        return work

    def report(self, found: Mapping[str, Record]) -> Report:
        """A table and a plot of what recall reveals, by number of recalled tokens."""
        columns = ("tokens restored", "nats a token", "said word for word", "quizzes right")
        rows: list[tuple[Value, ...]] = []
        word_for_word, quiz = list[tuple[float, float]](), list[tuple[float, float]]()
        for n in self.counts:
            ones = [each[str(n)] for each in found.values()]
            shares = share(one["said"] for one in ones), share(one["quiz"] for one in ones)
            rows.append((str(n), mean([one["nats"] for one in ones]), *shares))
            word_for_word.append((float(n), shares[0].value))
            quiz.append((float(n), shares[1].value))
        method = f"{self.profile.recall} x {self.profile.recall_weight}"
        header = (
            f"seed {self.profile.seed}",
            f"{self.limit} conversations of {self.task}",
            f"base budget {self.base}, recall {method}, span {self.profile.recall_span}",
        )
        lines = {columns[2]: tuple(word_for_word), columns[3]: tuple(quiz)}
        plot = Plot("privacy against utility", "tokens restored", "share", lines)
        return Report(header, (Table("Privacy", columns, tuple(rows)),), (plot,), self.parameters())

    def _ask(self, session: Session, n: int, one: NeedleDialogue, key: str) -> Record:
        settings: dict[str, object] = {"budget": self.base, "recall": "off"}
        if n:
            settings = {"budget": self.base + n, "recall": self.profile.recall, "recall_n": n}
        switch(session, **settings)
        for _ in session.read_user(one.question):
            pass
        (scored,) = session.score_continuations([one.answer])
        session.undo()
        quiz = generated.question(Random(f"privacy/{self.profile.seed}/{key}"), 5, "")
        right = choose(session, quiz, "paper") == quiz.right
        session.undo()
        return {
            "nats": -sum(scored.log_probabilities) / len(scored.log_probabilities),
            "said": scored.greedy,
            "quiz": right,
        }


def privacy_study(profile: Profile, **options: Any) -> Privacy:
    """The study that the flags describe; recall is on if the user has not chosen a retriever."""
    if profile.recall == "off":
        profile = changed(profile, "eval", recall="on")
    return Privacy(profile, **options)
