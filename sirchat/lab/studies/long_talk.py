"""Conversations over weeks between two people, with questions about them, from the files of others.

LoCoMo (https://arxiv.org/abs/2402.17753; `locomo10.json`, a list of conversations) and Realtalk
(https://arxiv.org/abs/2502.13270; a file `Chat_*.json` for each conversation, or a folder of them).
Both name the turns that hold the evidence for each question. What a picture shows is part of a
turn's text, by the caption that the files give.
"""

from __future__ import annotations

import json
import re
from calendar import month_name
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sirchat.errors import SettingError

CATEGORIES = {
    1: "multi-hop",
    2: "temporal",
    3: "open-domain",
    4: "single-hop",
    5: "adversarial",
}
"""Kinds of question, by LoCoMo's numbers; Realtalk has 1 to 3, and calls 3 commonsense."""

ADVERSARIAL = 5


@dataclass(frozen=True)
class TalkTurn:
    """One message: its id, who spoke, and the text."""

    id: str
    speaker: str
    text: str


@dataclass(frozen=True)
class TalkSession:
    """The turns of one meeting, at least one, and its date in words."""

    date: str
    turns: tuple[TalkTurn, ...]


@dataclass(frozen=True)
class TalkQuestion:
    """A question about the conversation.

    Attributes:
        number: its place in the file, from 0.
        text: the question.
        answer: the right answer; of category 1 several, with commas; '' of an adversarial question.
        category: a key of CATEGORIES.
        evidence: ids of the turns with the evidence; ids that no turn has are left out.
        adversarial: of an adversarial question, the answer that it tempts to give; else ''.
    """

    number: int
    text: str
    answer: str
    category: int
    evidence: tuple[str, ...]
    adversarial: str = ""


@dataclass(frozen=True)
class LongTalk:
    """A conversation: its name, the sessions in order, and the questions about it."""

    name: str
    sessions: tuple[TalkSession, ...]
    questions: tuple[TalkQuestion, ...]

    @property
    def speakers(self) -> tuple[str, ...]:
        """Everybody who speaks, in the order of their first turns."""
        return tuple(dict.fromkeys(turn.speaker for one in self.sessions for turn in one.turns))


def long_talks(path: Path) -> list[LongTalk]:
    """The conversations of a file, or of all `Chat_*.json` in a folder, by their numbers.

    Raises SettingError if there are none, or a file can't be read as either format.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("Chat_*.json"), key=lambda one: _numbers(one.name))
    talks = [talk for file in files for talk in _of_file(file)]
    if not talks:
        raise SettingError(
            f"{path} has no conversations",
            hint="LoCoMo's locomo10.json, or Realtalk's folder of Chat_*.json",
        )
    return talks


def _of_file(path: Path) -> list[LongTalk]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = content if isinstance(content, list) else [content]
        return [_talk(entry, path.stem) for entry in entries]
    except OSError as error:
        raise SettingError(f"{path} can't be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(
            f"{path} is neither LoCoMo's format nor Realtalk's ({type(error).__name__}: {error})",
            hint="LoCoMo's locomo10.json, or Realtalk's Chat_*.json",
        ) from None


def _talk(entry: Mapping[str, Any], stem: str) -> LongTalk:
    """One conversation: LoCoMo keeps the sessions apart under `conversation`."""
    said = entry.get("conversation", entry)
    names = sorted(filter(re.compile(r"session_\d+").fullmatch, said), key=_numbers)
    sessions = tuple(
        TalkSession(_in_words(said[f"{name}_date_time"]), tuple(map(_turn, said[name])))
        for name in names
        if said[name]
    )
    ids = [turn.id for one in sessions for turn in one.turns]
    questions = tuple(_question(n, one, ids) for n, one in enumerate(entry["qa"]))
    if not sessions or not questions:
        raise ValueError("no sessions or no questions")
    return LongTalk(str(entry.get("sample_id", stem)), sessions, questions)


def _turn(turn: Mapping[str, Any]) -> TalkTurn:
    text = str(turn["text"] if "text" in turn else turn["clean_text"]).strip()
    if caption := turn.get("blip_caption"):
        text = f"{text} (shared {caption})".strip()
    return TalkTurn(str(turn["dia_id"]), str(turn["speaker"]), text)


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
    """The turns that are named, in order, each once.

    The files spell some ids carelessly (`D8:6; D9:17`, `D:11:26`, `D30:05`, `D5:3.`), and Realtalk
    names runs of turns (`D12:3-D12:5`). A run is of one session.
    """
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


def _in_words(date: str) -> str:
    """Realtalk's `29.12.2023, 22:42:04` as `22:42 on 29 December, 2023`; others as they are."""
    try:
        at = datetime.strptime(date, "%d.%m.%Y, %H:%M:%S")
    except ValueError:
        return date
    return f"{at:%H:%M} on {at.day} {month_name[at.month]}, {at.year}"


def _numbers(name: str) -> list[int]:
    """The numbers in a name, so that `session_10` follows `session_9`."""
    return [int(one) for one in re.findall(r"\d+", name)]
