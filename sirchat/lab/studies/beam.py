"""BEAM: chats of some 120,000 tokens, and questions of ten kinds about each.

Tavakoli et al. 2025, "Beyond a Million Tokens". A chat is read turn by turn with its own replies
under a setting; at its end each question is asked, and undone. The rubric of BEAM is judged by a
large model; here a reply is right if it has the numbers, dates and names of each line of the
rubric, and only questions whose lines all have some are counted.
"""

from __future__ import annotations

import json
import lzma
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sirchat.chat.events import TurnDone
from sirchat.chat.retry import trial
from sirchat.chat.session import Session
from sirchat.errors import ContextFullError, SettingError
from sirchat.lab.studies.by_question import (
    Measured,
    per_question,
    table_of_differences,
    table_of_means,
)
from sirchat.lab.studies.reading import read_data
from sirchat.lab.studies.report import Record, Report, Table
from sirchat.lab.studies.study import GREEDY, Cell, Findings, Grid
from sirchat.memory.key_values import Positions
from sirchat.memory.policies import policy_class
from sirchat.recall.recall import NewTurn

KINDS = (
    *("information_extraction", "knowledge_update", "temporal_reasoning"),
    *("multi_session_reasoning", "contradiction_resolution", "event_ordering", "summarization"),
    *("instruction_following", "preference_following", "abstention"),
)
# Of these, a reply can be judged by the words of the rubric.
JUDGED = KINDS[:4]
TOLD = KINDS[:2]  # the answer to these stands in a message as it is
# Questions about the whole of a chat, whose sources no search for passages can hold
WHOLE = ("event_ordering", "summarization")
_QUESTION = 192  # tokens of a question, at most


@dataclass(frozen=True)
class BeamQuestion:
    """A question: its number in the chat, its kind, the rubric, and ids of messages with it."""

    number: int
    kind: str
    text: str
    answer: str
    rubric: tuple[str, ...]
    sources: tuple[int, ...]

    @cached_property
    def keys(self) -> tuple[frozenset[str], ...]:
        """The numbers, dates and names of each line of the rubric; empty if it can't be judged."""
        lines = tuple(keys_of(line) for line in self.rubric)
        return lines if self.kind in JUDGED and lines and all(lines) else ()

    def right(self, reply: str) -> float | None:
        """Whether a reply has the keys of all lines, as 1 or 0; None if it can't be judged."""
        if not self.keys:
            return None
        said = keys_of(reply, all_words=True)
        return float(all(line <= said for line in self.keys))


@dataclass(frozen=True)
class BeamChat:
    """A chat: its number, its rounds of a message and its reply, and the questions.

    Message i, as sources name it, is that of the user in round i / 2, or the reply there.
    """

    number: int
    rounds: tuple[tuple[str, str], ...]
    questions: tuple[BeamQuestion, ...]


def beam_chats(path: Path) -> list[BeamChat]:
    """The chats in a file, .json or .json.xz; SettingError if it has another format."""
    try:
        content = read_data(path)
        if path.suffix == ".xz":
            content = lzma.decompress(content)
        return [_chat(one) for one in json.loads(content)]
    except (ValueError, KeyError, TypeError, AttributeError, lzma.LZMAError) as error:
        raise SettingError(
            f"{path} is not in BEAM's format ({type(error).__name__}: {error})",
            hint="a list of chats, each with chat, messages and questions",
        ) from None


def _chat(one: Mapping[str, Any]) -> BeamChat:
    said = [str(message["content"]) for message in one["messages"]]
    if [m["role"] for m in one["messages"]] != ["user", "assistant"] * (len(said) // 2):
        raise ValueError("roles do not alternate")
    questions = tuple(
        BeamQuestion(
            number,
            str(each["type"]),
            str(each["question"]),
            str(each["answer"]).strip(),
            tuple(map(str, each["rubric"] if isinstance(each["rubric"], list) else ())),
            tuple(sorted(set(_numbers(each.get("sources"))))),
        )
        for number, each in enumerate(one["questions"])
    )
    return BeamChat(int(one["chat"]), tuple(zip(said[::2], said[1::2], strict=True)), questions)


def _numbers(value: Any) -> Iterator[int]:
    """All numbers in nested lists and objects."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)


_SAID = re.compile(r"^LLM response should \w+:\s*")
_NUMBERS = "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
_NUMBER_WORDS = {word: str(number) for number, word in enumerate(_NUMBERS.split("|"))}
_MONTH = re.compile(
    "(?:jan|febr)uary|march|april|may|june|july|august|(?:septem|octo|novem|decem)ber"
)


def keys_of(text: str, *, all_words: bool = False) -> frozenset[str]:
    """The numbers, dates and names in a text, in lower case; "Four" and "4" are equal.

    With `all_words`, all words, of which a name may be one.
    """
    text = _SAID.sub("", text).replace("\u2019", "'")
    found = set[str]()
    for at, word in enumerate(re.findall(r"[A-Za-z]+(?:'[A-Za-z]+)?|\d[\d,.]*", text)):
        if word[0].isdigit():
            found.add(word.rstrip(".,").replace(",", "").removesuffix(".0"))
            continue
        low = word.casefold().removesuffix("'s")
        if low in _NUMBER_WORDS:
            found.add(_NUMBER_WORDS[low])
        elif all_words or _MONTH.fullmatch(low) or (at and word[0].isupper() and len(word) > 1):
            found.add(low)
    return frozenset(found)


@dataclass(frozen=True)
class ReadChat:
    """A chat of which a session has read a part, from its turn number `begins` on."""

    session: Session
    chat: BeamChat
    begins: int  # 1 after a system prompt

    def questions(self) -> list[BeamQuestion]:
        """Those whose sources were all read."""
        count = len(self.session.turns) - self.begins
        return [one for one in self.chat.questions if all(n < count for n in one.sources)]

    def found(self, question: BeamQuestion, at: Positions) -> Record:
        """Which of a question's sources have a token at `at`: whether all, and what share."""
        turns = self.session.ledger.column("turn")[at] - self.begins
        have = np.isin(question.sources, turns)
        return {"all": float(have.all()), "share": float(have.mean())}

    def restored(self, counts: Sequence[int]) -> dict[int, Record]:
        """What of each question's sources is found within so many tokens, pins included."""
        session, found = self.session, dict[int, Record]()
        counts = [n for n in counts if n + _QUESTION <= session.model.context_length]
        if session.profile.recall == "off" or not counts:
            return found
        budget, recall = max(session.budget, max(counts) + _QUESTION), session.recall
        pinned = session.ledger.pinned_positions
        recall.update()
        # With `recall_n`, the best passages fill the room, also under `focus`.
        more = {"budget": budget, "recall_n": max(counts), "focus": "off"}
        with trial(session, "eval", more):
            for question in self.questions():
                turn = session.template.user_turn(question.text)
                for count in counts if question.sources else ():
                    room = max(0, count - len(pinned))
                    new = NewTurn(turn.ids, turn.roles, session.state.generated)
                    chosen = recall.find(new, room).positions
                    at = np.union1d(pinned, chosen)
                    have = self.found(question, at) | {"keys": self._keys_found(question, at)}
                    found.setdefault(question.number, {})[str(count)] = have
        return found

    def _keys_found(self, question: BeamQuestion, at: Positions) -> float | None:
        """Whether the text of the tokens at `at` has the keys of the answer, if it can."""
        if question.kind not in TOLD:
            return None
        return question.right("".join(row.text for row in self.session.tokens(at.tolist())))

    def answer(self, question: BeamQuestion, *, generate: bool) -> Record:
        """Ask a question, judge answer and reply, and undo the turn."""
        session, found = self.session, Record(reply=None, right=None, held=None)
        start = time.perf_counter()
        for event in session.ask(question.text):
            if isinstance(event, TurnDone) and event.role == "user":
                found["seconds"] = time.perf_counter() - start
                (scored,) = session.score_continuations([question.answer])
                found["nats"] = -sum(scored.log_probabilities) / len(scored.ids)
                if question.sources:
                    found["held"] = self.found(question, session.ledger.held_positions)
                if not generate:
                    break
            elif isinstance(event, TurnDone):
                found["reply"] = event.text.strip()
                found["right"] = question.right(event.text)
        session.undo()
        return found


@dataclass(frozen=True)
class Beam(Grid):
    """The BEAM study; `limit` is the number of tokens that are read of each chat."""

    data: str = ""  # path of the file with the chats
    chats: tuple[int, ...] = ()  # numbers of the chats to run; empty for all
    reply_tokens: int = 96  # largest number of tokens in a reply; 0 for no replies
    counts: tuple[int, ...] = (256, 1024, 4096)  # of tokens that recall may restore

    extends: ClassVar[tuple[str, ...]] = ("settings", "repeats", "chats")
    without_effect = (*Grid.without_effect, *GREEDY)
    name = "beam"

    def __post_init__(self) -> None:
        known = [chat.number for chat in self._every]
        for number in self.chats:
            if number not in known:
                raise SettingError(f"chats has {number}, the file has {', '.join(map(str, known))}")

    @cached_property
    def _every(self) -> list[BeamChat]:
        return beam_chats(Path(self.data))

    def units(self) -> list[str]:
        """The numbers of the chats to run."""
        return [
            str(one.number) for one in self._every if not self.chats or one.number in self.chats
        ]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read chat number `unit`, and ask its questions."""
        chat = next(one for one in self._every if one.number == int(unit))
        session.switch("eval", temperature=0.0, max_new_tokens=max(1, self.reply_tokens))
        start = time.perf_counter()
        try:
            one = self._read(session, chat)
            tokens, seconds = session.seen, time.perf_counter() - start
            bounded = policy_class(cell.setting.policy).bounded
            restored = one.restored(self.counts) if bounded else {}
            found = [
                {"number": asked.number, "kind": asked.kind}
                | {"restored": restored.get(asked.number, {})}
                | one.answer(asked, generate=self.reply_tokens > 0)
                for asked in one.questions()
            ]
        except ContextFullError:
            return {"fits": False}
        return {"fits": True, "tokens": tokens, "seconds": seconds, "questions": found}

    def _read(self, session: Session, chat: BeamChat) -> ReadChat:
        """Read a chat up to `limit` tokens, with its replies as if the model had written them."""
        for user, reply in chat.rounds:
            if session.seen >= self.limit:
                break
            list(session.read_question(user, next_role="assistant"))
            list(session.read_reply(reply))
            session.state.set_finish(len(session.turns) - 1, "stop")
        return ReadChat(session, chat, int(session.turns[0].role == "system"))

    def report(self, found: Mapping[str, Record]) -> Report:
        """A report with the sources found, and right replies, by kind of question."""
        findings = self.findings(found)
        tokens = [one["tokens"] for one in found.values() if one["fits"]] or [0]
        header = (
            f"chats {', '.join(self.units())}, of which {min(tokens):,} to {max(tokens):,} tokens "
            "were read",
            "sources found: messages with the answer, of which a part is in pins and in the best "
            "passages that have so many tokens; keys: those of the rubric are in what is found",
            "right: all numbers, dates and names of the rubric are in the reply",
            "intervals: chats resampled, or the questions of one (bootstrap)",
        )
        tables = [_replies(findings)]
        if len(findings) > 1:
            tables.append(table_of_differences("nats a token", findings, nats))
        tables += self._sources(findings)
        return Report(header, tuple(tables), details=self.parameters())

    def _sources(self, findings: Sequence[Findings]) -> Iterator[Table]:
        """Tables of the sources found within so many tokens, by kind."""
        local = tuple(kind for kind in KINDS if kind not in WHOLE)
        names = (kind.replace("_", " ") for kind in KINDS[:-1])
        columns = ("setting, tokens", "but order and summary", "all kinds", *names)
        for key in ("all", "share", "keys"):
            rows = [
                (
                    f"{one.name}, {count}",
                    one,
                    [_restored(count, key, some) for some in (local, KINDS, *zip(KINDS[:-1]))],
                )
                for one, count in product(findings, map(str, self.counts))
                if per_question(one, _restored(count, key))
            ]
            if rows:
                yield table_of_means(f"Sources found: {key}", columns, rows, digits=2)


def _restored(count: str, key: str, kinds: Sequence[str] = KINDS) -> Measured:
    def value(one: Record) -> float | None:
        found = one["restored"].get(count) if one["kind"] in kinds else None
        return None if found is None or found[key] is None else float(found[key])

    return value


def _replies(findings: Sequence[Findings]) -> Table:
    """A table of right replies, by kind, and of what else was measured when they were given."""

    def right(kinds: Sequence[str]) -> Measured:
        return lambda one: one["right"] if one["kind"] in kinds else None

    def held(one: Record) -> float | None:
        return None if one["held"] is None else float(one["held"]["share"])

    counts = [max(len(per_question(one, right((kind,)))) for one in findings) for kind in JUDGED]
    names = [f"{kind.replace('_', ' ')} ({n})" for kind, n in zip(JUDGED, counts, strict=True)]
    measured: dict[str, Measured] = {
        "sources held": held,
        "nats a token of the answer": nats,
        f"right ({sum(counts)})": right(JUDGED),
        **{name: right((kind,)) for name, kind in zip(names, JUDGED, strict=True)},
        "seconds until a reply": lambda one: one["seconds"],
    }
    rows = ((one.name, one, measured.values()) for one in findings)
    return table_of_means("Replies", ("setting", *measured), rows, digits=2)


def nats(one: Record) -> float | None:
    """Nats a token of the right answer; None where the right answer is that there is none."""
    return float(one["nats"]) if one["kind"] != "abstention" else None
