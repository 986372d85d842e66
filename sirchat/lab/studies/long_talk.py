"""Reads LoCoMo's file: conversations over weeks, and questions about them.

LoCoMo (https://arxiv.org/abs/2402.17753) is one file, `locomo10.json`, with a list of
conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sirchat.chat.events import TokenRow
from sirchat.chat.session import Session
from sirchat.errors import SettingError
from sirchat.lab.studies.reading import read, read_data
from sirchat.memory.key_values import Positions
from sirchat.text.detokenizer import tokens_spelling

# Kinds of question, by LoCoMo's numbers
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}

ADVERSARIAL = 5


@dataclass(frozen=True)
class Utterance:
    """One message of a conversation: its id, its speaker, and its text."""

    id: str
    speaker: str
    text: str


@dataclass(frozen=True)
class TalkSession:
    """One session of a conversation: its date in words, and its messages (at least one)."""

    date: str
    turns: tuple[Utterance, ...]


@dataclass(frozen=True)
class TalkQuestion:
    """A question about a conversation, with the right answer."""

    number: int  # the question's index in the file, from 0
    text: str  # the question
    # the right answer; in category 1 several answers, separated by commas; '' for an adversarial
    # question, which has no right answer
    answer: str
    category: int  # a key of CATEGORIES
    # ids of the messages that contain the answer; ids that no message has are left out
    evidence: tuple[str, ...]
    # the wrong answer that an adversarial question suggests; '' for any other
    adversarial: str = ""


@dataclass(frozen=True)
class LongTalk:
    """A conversation: its name, the sessions in order, and the questions about it."""

    name: str
    sessions: tuple[TalkSession, ...]
    questions: tuple[TalkQuestion, ...]

    @property
    def speakers(self) -> tuple[str, ...]:
        """The names of all people who speak, in the order of their first messages."""
        return tuple(dict.fromkeys(turn.speaker for one in self.sessions for turn in one.turns))


def long_talks(path: Path) -> list[LongTalk]:
    """The conversations in a file; raises SettingError if it has none, or another format."""
    hint = "give LoCoMo's locomo10.json"
    try:
        content = json.loads(read_data(path))
        talks = [_talk(one) for one in (content if isinstance(content, list) else [content])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettingError(
            f"{path} is not in LoCoMo's format ({type(error).__name__}: {error})", hint=hint
        ) from None
    if not talks:
        raise SettingError(f"{path} has no conversations", hint=hint)
    return talks


def _talk(entry: Mapping[str, Any]) -> LongTalk:
    """Read the conversation in one JSON object of a file; the object has sessions and questions."""
    said = entry["conversation"]
    names = sorted(filter(re.compile(r"session_\d+").fullmatch, said), key=_numbers)
    sessions = tuple(
        TalkSession(said[f"{name}_date_time"], tuple(map(_turn, said[name])))
        for name in names
        if said[name]
    )
    ids = [turn.id for one in sessions for turn in one.turns]
    questions = tuple(_question(n, one, ids) for n, one in enumerate(entry["qa"]))
    if not sessions or not questions:
        raise ValueError("no sessions or no questions")
    return LongTalk(str(entry["sample_id"]), sessions, questions)


def _turn(turn: Mapping[str, Any]) -> Utterance:
    text = str(turn["text"]).strip()
    if caption := turn.get("blip_caption"):
        text = f"{text} (shared {caption})".strip()
    return Utterance(str(turn["dia_id"]), str(turn["speaker"]), text)


def _question(number: int, one: Mapping[str, Any], ids: Sequence[str]) -> TalkQuestion:
    category = int(one["category"])
    adversarial = category == ADVERSARIAL
    if category not in CATEGORIES:
        raise ValueError(f"category {category}")
    return TalkQuestion(
        number=number,
        text=str(one["question"]).strip(),
        answer="" if adversarial else str(one["answer"]).strip(),
        category=category,
        evidence=_evidence(one.get("evidence") or [], ids),
        adversarial=str(one.get("adversarial_answer", "")) if adversarial else "",
    )


def _evidence(given: Sequence[str], ids: Sequence[str]) -> tuple[str, ...]:
    """The ids of the messages that a question names as evidence, in the conversation's order."""
    order = {one: at for at, one in enumerate(ids)}
    found: set[str] = set()
    for text in given:
        last = None
        for dash, session, turn in re.findall(r"(-?)\s*D:?\s*(\d+):(\d+)", str(text)):
            one = f"D{int(session)}:{int(turn)}"
            if one not in order:
                last = None
                continue
            start = last if dash and last is not None and _same_session(last, one) else one
            found.update(ids[order[start] : order[one] + 1])
            last = one
    return tuple(sorted(found, key=order.__getitem__))


def _same_session(first: str, last: str) -> bool:
    return first.split(":")[0] == last.split(":")[0]


def _numbers(name: str) -> list[int]:
    """The numbers in a name, as a list: a sort key that puts `session_10` after `session_9`."""
    return [int(one) for one in re.findall(r"\d+", name)]


@dataclass(frozen=True)
class Side:
    """The text of a turn, and the messages that the turn consists of.

    `messages` has (id, start, end) for each message: where it begins and ends in the text, in
    characters.
    """

    text: str = ""
    messages: tuple[tuple[str, int, int], ...] = ()


class TalkRound(NamedTuple):
    """A round of a chat: a user turn and its reply, each with the messages in it."""

    user: Side
    reply: Side


def rounds_of(talk: LongTalk) -> list[TalkRound]:
    """The rounds (user turn and reply) of a conversation over weeks, in order.

    The person who speaks first is the user; anyone else gives the replies.
    """
    return [one for session in talk.sessions for one in _rounds(session, talk.speakers[0])]


def _rounds(session: TalkSession, user: str) -> Iterator[TalkRound]:
    sides = [Side(f"({session.date})")]
    for is_user, turns in groupby(session.turns, lambda turn: turn.speaker == user):
        if is_user != (len(sides) % 2 == 1):  # these messages are of the other side
            sides.append(Side())
        for turn in turns:
            before = sides[-1]
            text = f"{before.text}\n{turn.speaker}: {turn.text}".lstrip("\n")
            place = (turn.id, len(text) - len(turn.text), len(text))
            sides[-1] = Side(text, (*before.messages, place))
    sides += [Side()] * (len(sides) % 2)
    yield from map(TalkRound, sides[::2], sides[1::2])


def read_talk(session: Session, talk: LongTalk) -> dict[str, Positions]:
    """Read a whole conversation, as a chat does; returns the positions of each message, by its id.

    Raises ContextFullError if the policy evicts nothing and the conversation does not fit.
    """
    rounds = rounds_of(talk)
    for user, reply in rounds:
        read(session, user.text, reply.text)
    begins = len(session.turns) - 2 * len(rounds)  # a system prompt may come first
    said: dict[int, list[TokenRow]] = {}
    for row in session.tokens(range(session.seen)):
        if row.role in ("user", "assistant"):
            said.setdefault(row.turn, []).append(row)
    found: dict[str, Positions] = {}
    for number, side in enumerate(chain.from_iterable(rounds), begins):
        found |= message_positions(side, said.get(number, []))
    return found


def message_positions(side: Side, rows: list[TokenRow]) -> dict[str, Positions]:
    """The stream positions of each message of a turn; `rows` are the turn's tokens, in order."""
    text = "".join(row.text for row in rows)
    at = np.array([row.position for row in rows], np.int64)
    ends = np.cumsum([len(row.text) for row in rows])
    found, cursor = dict[str, Positions](), 0
    for name, first, end in side.messages:
        start = text.find(side.text[first:end], cursor)
        if start < 0:
            found[name] = at
            continue
        cursor = start + end - first
        found[name] = at[tokens_spelling(ends, start, cursor)]
    return found
