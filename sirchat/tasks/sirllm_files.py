"""Reads SirLLM's released files: conversations of multiple-choice questions.

One JSON object a line, `{"id", "question": {"stem", "choices": [{"label", "text"}]}, "answerKey"}`.
In DailyDialog the id is `CONVERSATION_TURN`. In Grocery Shopping `key_N` says what to buy,
questions `N` follow, and `answer_N` asks what it was. In rock-paper-scissors `user_choice` is the
player's move.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from sirchat.errors import SettingError
from sirchat.tasks.choice import Question
from sirchat.tasks.results_log import Record

COMMONSENSE, GROCERY, DIALOGUE = "commonsense", "grocery", "dialogue"

_GROUPS = {"key": "told", "answer": GROCERY}


def dailydialog(path: Path) -> list[list[Question]]:
    """The conversations of DailyDialog."""
    return _conversations(path, lambda name: name.partition("_")[0], lambda name: DIALOGUE)


def grocery(path: Path) -> list[list[Question]]:
    """The conversations of Grocery Shopping: what to buy, questions, what it was."""
    return _conversations(
        path,
        lambda name: name.rpartition("_")[2],
        lambda name: _GROUPS.get(name.partition("_")[0], COMMONSENSE),
    )


def moves(path: Path) -> list[str]:
    """A player's moves, in order."""
    found = []
    for line in _lines(path, "user_choice"):
        texts = {one["label"]: one["text"] for one in line["question"]["choices"]}
        found.append(texts[line["user_choice"]])
    return found


def _conversations(
    path: Path, conversation: Callable[[str], str], group: Callable[[str], str]
) -> list[list[Question]]:
    lines = _lines(path, "answerKey")
    return [
        [_question(line, group(line["id"])) for line in lines]
        for _, lines in groupby(lines, lambda line: conversation(line["id"]))
    ]


def _question(line: Record, group: str) -> Question:
    """A question with its options listed in the text, and their letters as replies."""
    choices = line["question"]["choices"]
    labels = [one["label"] for one in choices]
    text = line["question"]["stem"].strip()
    if len(choices) == 1:
        return Question(text, (choices[0]["text"].strip(),), 0, group)
    listed = "\n".join(f"({one['label']}) {one['text'].strip()}" for one in choices)
    return Question(f"{text}\n{listed}", tuple(labels), labels.index(line["answerKey"]), group)


def _lines(path: Path, needed: str) -> Iterator[Record]:
    """The objects of a file; raises SettingError, naming the line, for anything else."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise SettingError(f"data {str(path)!r} can't be read: {error.strerror}") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(line)
            is_valid = isinstance(found, dict) and {"question", needed} <= found.keys()
        except json.JSONDecodeError:
            is_valid = False
        if not is_valid:
            raise SettingError(
                f"{path}, line {number}, is no question with {needed}",
                hint="give a folder with SirLLM's released files",
            )
        yield found
