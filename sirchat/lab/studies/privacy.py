"""Privacy against utility by the number n of recalled tokens (Retrieval-Augmented StreamingLLM, 1).

An old turn states something private, which is then evicted. The more tokens are recalled, the more
of it can be extracted from the model. Privacy is measured by the private answer, when it is asked
for: its surprisal in nats per token, and how often the model generates it word for word. Utility is
how often the model chooses the right option of a question that needs no memory, with the same n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from sirchat.chat.session import Session
from sirchat.config.layers import changed
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies import generated
from sirchat.lab.studies.asking import switch
from sirchat.lab.studies.choice import choose
from sirchat.lab.studies.needle import TASKS, NeedleDialogue, needle_dialogue
from sirchat.lab.studies.report import Plot, Report, Table, Value
from sirchat.lab.studies.results_log import Record
from sirchat.lab.studies.retrieval import read_dialogue
from sirchat.lab.studies.reuse import ExtendedByLimit
from sirchat.lab.studies.study import RunUnit, fields_of, mean, refuse_unknown, share
from sirchat.models.model import LoadedModel


@dataclass(frozen=True)
class Privacy(ExtendedByLimit):
    """The study.

    Attributes:
        profile: its `recall`, `recall_weight` and `recall_span` say how tokens are recalled.
        task: the conversations, one of TASKS.
        limit: number of conversations.
        base: budget of the base policy, in tokens.
        counts: numbers of recalled tokens; 0 for no recall.

    Raises SettingError for an unknown task, and for a profile without recall.
    """

    profile: Profile
    task: str = "facts-12"
    limit: int = 100
    base: int = 72
    counts: tuple[int, ...] = (0, 10, 20, 50, 100, 200)

    def __post_init__(self) -> None:
        refuse_unknown("task", (self.task,), TASKS)
        if self.profile.recall == "off":
            raise SettingError("recall is off, must be a measure, such as --recall on")

    @property
    def name(self) -> str:
        """The study's name, which also names its files."""
        return "privacy"

    def parameters(self) -> Record:
        """All that the findings depend on, except the model: every field."""
        return fields_of(self) | {"profile": self.profile.model_dump(mode="json")}

    def keys(self) -> list[str]:
        """One unit for each conversation: its number."""
        return [str(number) for number in range(self.limit)]

    def worker(self, model: LoadedModel) -> RunUnit:
        """A function that reads a conversation, then asks for the answer at every n."""
        session = Session(model, changed(self.profile, "eval", policy="sink", budget=self.base))

        def work(key: str) -> Record:
            one = needle_dialogue(self.task, self.profile.seed, int(key))
            switch(session, budget=self.base, recall="off")
            read_dialogue(session, one)
            return {str(n): self._ask(session, n, one, key) for n in self.counts}

        return work

    def report(self, found: Mapping[str, Record]) -> Report:
        """By n: surprisal of the private answer, how often it is generated, and the utility."""
        columns = ("tokens back", "nats a token", "said word for word", "quizzes right")
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
        plot = Plot("privacy against utility", "tokens brought back", "share", lines)
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
