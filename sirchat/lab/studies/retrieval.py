"""Studies of the retrieval paper: how well recall restores what is evicted, and what it reveals.

Conversations state something (the needle), which is evicted, and ask for it at the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from sirchat.chat.events import Delta, TurnDone
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import SettingError
from sirchat.lab.studies import generated
from sirchat.lab.studies.choice import choose
from sirchat.lab.studies.intervals import mean, share
from sirchat.lab.studies.paper_tables import published
from sirchat.lab.studies.reading import read, read_data_text
from sirchat.lab.studies.report import Estimate, Record, Report, Table, Value
from sirchat.lab.studies.study import NumberedStudy, RunUnit, refuse_unknown
from sirchat.lab.synthetic.dialogue import SMALL_TALK, Dialogue, draw_fact
from sirchat.lab.synthetic.facts import KINDS, STORY
from sirchat.lab.synthetic.rounds import Style
from sirchat.models.model import LoadedModel
from sirchat.recall.retrievers import retriever

# The size of each needle task, by the task's name. For stories it is the number of stories; for
# facts, the number of rounds of small talk after the fact; for items, the number of facts in a row;
# for lines, the number of lines
TASKS = {"stories-3": 3, "stories-10": 10, "facts-12": 12, "facts-40": 40}
TASKS |= {"items-10": 10, "lines-10": 10}

_NUMBERED = "In story"


@dataclass(frozen=True)
class NeedleDialogue:
    """A conversation that states something, and the question that asks for it at the end."""

    rounds: tuple[tuple[str, str], ...]  # user message and reply of each round, in order
    question: str  # the last user message
    answer: str  # the right reply
    substring: bool = False  # whether a reply is right if it contains the answer; see `is_right`

    def is_right(self, reply: str) -> bool:
        """Whether a reply to the conversation's question is right."""
        if self.substring:
            return _normalised(self.answer) in _normalised(reply)
        return scored_part(reply) == scored_part(self.answer)

    def may_become_right(self, prefix: str) -> bool:
        """Whether a reply that begins with `prefix` can still be right."""
        return self.substring or scored_part(self.answer).startswith(scored_part(prefix))


def needle_dialogue(task: str, seed: int, number: int) -> NeedleDialogue:
    """Conversation `number` of a needle task; the same seed gives the same conversation."""
    rng = Random(f"retrieval/{seed}/{task}/{number}")
    talk, count = Dialogue(rng, SMALL_TALK), TASKS[task]
    if task.startswith("stories"):
        return _stories(talk, count)
    if task.startswith("lines"):
        return _lines(rng, count)
    if task.startswith("items"):
        return _items(talk, count)
    style, kind = Style.draw(rng), KINDS[number % len(KINDS)]
    fact = draw_fact(rng, kind, style)
    rounds = [talk.tell_one(fact, style), *(talk.small_talk() for _ in range(count))]
    question, answer = talk.ask((kind.key, fact.subject))
    return NeedleDialogue(tuple((u.text, r.text) for u, r in rounds), question.text, answer.text)


def dialogues_of_file(path: Path) -> list[NeedleDialogue]:
    """The conversations in a file; a conversation whose answer is in no turn is left out.

    Raises SettingError when the file can't be read, or no conversation is left.
    """
    lines = read_data_text(path).splitlines()
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
        parsed = [_dialogue(row["turns"], row.get("reference")) for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SettingError(
            f"data {str(path)!r} can't be read: {error}",
            hint="each line must be a JSON object with turns",
        ) from None
    found = [one for one in parsed if one is not None]
    if not found:
        raise SettingError(f"no conversation in {str(path)!r} asks for a fact that it told")
    return found


def scored_part(text: str) -> str:
    """The part of an answer, or of the beginning of an answer, that is scored."""
    text = text.strip()
    if not (text.startswith(_NUMBERED) or _NUMBERED.startswith(text)):
        return text
    numbered = re.match(_NUMBERED + r" \d+, an? ", text)
    return text[numbered.end() :] if numbered else ""


def _stories(talk: Dialogue, count: int) -> NeedleDialogue:
    """Numbered stories; of three the second is asked for, as in the paper."""
    stories: dict[str, tuple[str, str]] = {}
    while len(stories) < count:
        fact = draw_fact(talk.rng, STORY, Style())
        if fact.subject not in stories:
            user, reply = talk.tell_one(replace(fact, number=len(stories) + 1), Style())
            stories[fact.subject] = user.text, reply.text
    target = list(stories)[1 if count == 3 else talk.rng.randrange(count - 2)]
    question, answer = talk.ask((STORY.key, target))
    return NeedleDialogue(tuple(stories.values()), question.text, answer.text)


def _items(talk: Dialogue, count: int) -> NeedleDialogue:
    """A conversation of facts of different kinds; the user asks for one of them."""
    style = Style.draw(talk.rng)
    facts = [draw_fact(talk.rng, kind, style) for kind in talk.rng.sample(KINDS, count)]
    rounds = [talk.tell_one(fact, style) for fact in facts]
    target = facts[talk.rng.randrange(count - 2)]
    question, answer = talk.ask((target.kind.key, target.subject))
    return NeedleDialogue(tuple((u.text, r.text) for u, r in rounds), question.text, answer.text)


def _lines(rng: Random, count: int) -> NeedleDialogue:
    """A conversation of lines such as `Line 3: 270328`; the user asks for the number in a line."""
    numbers = [str(rng.randrange(2_000, 1_000_000)) for _ in range(count)]
    target = rng.randrange(count - 2)
    return NeedleDialogue(
        tuple((f"Line {line}: {number}", "OK.") for line, number in enumerate(numbers)),
        f"What is the number in Line {target}?",
        numbers[target],
        substring=True,
    )


def _dialogue(turns: list[str], reference: list[str] | None) -> NeedleDialogue | None:
    """The conversation in a line of a file; None if no turn before the question has the answer."""
    *lines, question = turns
    answer = str(reference[0]) if reference else _answer(question, lines)
    if not answer or not any(answer in line for line in lines):
        return None
    return NeedleDialogue(tuple((line, "OK.") for line in lines), question, answer, substring=True)


def _answer(question: str, lines: list[str]) -> str:
    """The text of the newest line that mentions the name or number in the question."""
    sentence = re.split(r"[.?] ", question)[0].partition(" ")[2]
    names = re.findall(r"\b[A-Z]\w+(?: \d+)?", sentence)
    if not names or len(lines) < 2:
        return ""
    about = [line for line in lines if re.search(rf"\b{names[-1]}\b", line, re.IGNORECASE)]
    return about[-1].rpartition(": ")[2] if about else ""


def _normalised(text: str) -> str:
    """`text` for a comparison: in lower case, with single blanks, with no full stop at its end."""
    return " ".join(text.lower().split()).rstrip(".")


@dataclass(frozen=True)
class Retrieval(NumberedStudy):
    """The study of how well recall restores evicted tokens; the module docstring describes it.

    Raises SettingError for an unknown task, retriever or weight, and for a file that can't be read.
    """

    profile: Profile  # the settings that all table cells share
    task: str = "facts-12"  # the conversations, one of TASKS
    limit: int = 200  # number of conversations; every cell gets the same ones
    base: int = 72  # the base budget (without the recalled tokens), in tokens
    counts: tuple[int, ...] = (10, 20, 50, 100, 200)  # numbers of recalled tokens
    # values to combine of the settings `recall` and `recall_weight`, if the retriever takes it
    retrievers: tuple[str, ...] = (*("mips", "cosine", "cosine-pairwise", "words"),)
    weights: tuple[str, ...] = ("none", "surprisal")
    data: str | None = None  # a file with conversations, used instead of those of `task`

    without_effect = ("policy", "budget", "recall", "recall_n", "recall_weight", "max_new_tokens")

    def __post_init__(self) -> None:
        _ = self.file_dialogues
        refuse_unknown("retrieval task", (self.task,), TASKS)
        for name, weight in product(self.retrievers, self.weights):
            changed_profile(self.profile, "eval", recall=name, recall_weight=weight)
        changed_profile(self.profile, "--base", budget=self.base)

    @property
    def name(self) -> str:
        """The study's name; the names of its result files begin with it."""
        return self.task if self.data is None else Path(self.data).stem

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
        session = Session(
            model, changed_profile(self.profile, "eval", max_new_tokens=64, policy="sink")
        )
        every = cells(self)
        return lambda key: _run(session, self.conversation(int(key)), self, every)

    def report(self, found: Mapping[str, Record]) -> Report:
        """Tables of the share of right answers, by row and number of recalled tokens."""
        records = list(found.values())

        def right(key: str) -> Estimate:
            return share(one[key] for one in records)

        rows: dict[str, dict[int, Estimate]] = {}
        for cell in cells(self):
            rows.setdefault(cell.row, {})[cell.count] = right(cell.key)
        tokens = [one["tokens"] for one in records] or [0]
        header = (
            f"seed {self.profile.seed}",
            f"{len(records)} conversations of {min(tokens):,} to {max(tokens):,} tokens",
            f"base budget {self.base}",
        )
        without_recall = {name: right(name) for name in (FULL, EVERYTHING)}
        without_recall[BASE] = rows.pop(BASE)[0]
        columns = ("tokens restored", *map(str, self.counts))
        tables = (
            Table("Without any choice", ("", "right"), tuple(without_recall.items())),
            Table(self.name, columns, tuple((n, *row.values()) for n, row in rows.items())),
            *([published("retrieval")] if self.task == "stories-3" or self.data else []),
        )
        return Report(header, tables, self.parameters())


@dataclass(frozen=True)
class RetrievalCell:
    """A cell of the table of the study `Retrieval`."""

    row: str  # name of the table row
    count: int  # number of tokens above the base budget
    settings: dict[str, object]  # the session settings under which the question is asked

    @property
    def key(self) -> str:
        """The key `ROW/COUNT`, under which a record has this cell's result."""
        return f"{self.row}/{self.count}"


FULL, BASE, MORE, EVERYTHING = "full cache", "base budget", "base + n recent", "everything restored"


def cells(study: Retrieval) -> list[RetrievalCell]:
    """The cells of the table of the study `Retrieval`, in order.

    The rows `full cache` and `everything restored`, whose cache has all tokens, are not included.
    """
    base, off = study.base, dict[str, object](recall="off")
    rows = {MORE: off} | dict(_recalling(study))
    found = [RetrievalCell(BASE, 0, {"budget": base, **off})]
    for (row, settings), n in product(rows.items(), study.counts):
        more = {} if settings is off else {"recall_n": n}
        found.append(RetrievalCell(row, n, {"budget": base + n, **settings, **more}))
    return found


def _recalling(study: Retrieval) -> Iterator[tuple[str, dict[str, object]]]:
    """A row for each retriever with each weight that it can use."""
    for name in study.retrievers:
        for weight in study.weights if retriever(name).takes_weight else ("none",):
            row = name + (" x surprisal" if weight == "surprisal" else "")
            yield row, {"recall": name, "recall_weight": weight}


def _run(
    session: Session, one: NeedleDialogue, options: Retrieval, every: Sequence[RetrievalCell]
) -> Record:
    found: Record = {}
    session.switch("eval", policy="full", recall="off")
    read_dialogue(session, one)
    found[FULL] = is_answered(session, one)
    session.switch("eval", policy="sink", budget=options.base, recall="off")
    read_dialogue(session, one)
    found["tokens"] = session.seen
    for cell in every:
        session.switch("eval", **cell.settings)
        found[cell.key] = is_answered(session, one)
        session.undo()
    session.switch("eval", policy="full", recall="off")
    found[EVERYTHING] = is_answered(session, one)
    return found


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

    profile: Profile  # its `recall` and `recall_weight` say how tokens are recalled
    task: str = "facts-12"  # the conversations, one of TASKS
    limit: int = 100  # number of conversations
    base: int = 72  # the base budget (without the recalled tokens), in tokens
    # numbers of recalled tokens; 0 for no recall
    counts: tuple[int, ...] = (0, 10, 20, 50, 100, 200)

    without_effect = ("policy", "budget", "recall_n")

    def __post_init__(self) -> None:
        refuse_unknown("task", (self.task,), TASKS)
        if self.profile.recall == "off":
            raise SettingError("recall is off, must be a retriever, such as --recall on")

    name = "privacy"

    def worker(self, model: LoadedModel) -> RunUnit:
        """Create a function that runs the conversation with a given key and returns its record."""
        session = Session(
            model, changed_profile(self.profile, "eval", policy="sink", budget=self.base)
        )

        def work(key: str) -> Record:
            one = needle_dialogue(self.task, self.profile.seed, int(key))
            session.switch("eval", budget=self.base, recall="off")
            read_dialogue(session, one)
            return {str(n): self._ask(session, n, one, key) for n in self.counts}

        return work

    def report(self, found: Mapping[str, Record]) -> Report:
        """A table of what recall reveals, by number of recalled tokens."""
        columns = ("tokens restored", "nats a token", "said word for word", "quizzes right")
        rows: list[tuple[Value, ...]] = []
        for n in self.counts:
            ones = [each[str(n)] for each in found.values()]
            shares = share(one["said"] for one in ones), share(one["quiz"] for one in ones)
            rows.append((str(n), mean([one["nats"] for one in ones]), *shares))
        method = f"{self.profile.recall} x {self.profile.recall_weight}"
        header = (
            f"seed {self.profile.seed}",
            f"{self.limit} conversations of {self.task}",
            f"base budget {self.base}, recall {method}",
        )
        return Report(header, (Table("Privacy", columns, tuple(rows)),), self.parameters())

    def _ask(self, session: Session, n: int, one: NeedleDialogue, key: str) -> Record:
        settings: dict[str, object] = {"budget": self.base, "recall": "off"}
        if n:
            settings = {"budget": self.base + n, "recall": self.profile.recall, "recall_n": n}
        session.switch("eval", **settings)
        list(session.read_user(one.question, next_role="assistant"))
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
    """Make the study of `sirchat eval privacy`; recall is switched on if it is off in `profile`."""
    if profile.recall == "off":
        profile = changed_profile(profile, "eval", recall="on")
    return Privacy(profile, **options)
