"""Reads SirLLM's released files, or files like them: conversations of multiple-choice questions.

The files may be in the authors' folders (github.com/Zoeyyao27/SirLLM, `data/`) or side by side in
one folder. The path of a single file can also be given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from sirchat.errors import SettingError
from sirchat.lab.studies.choice import Question
from sirchat.lab.studies.reading import read_data_text
from sirchat.lab.studies.report import Record

COMMONSENSE, GROCERY, DIALOGUE = "commonsense", "grocery", "dialogue"

_GROUPS = {"key": "told", "answer": GROCERY}

DIALOGUE_FILES = ("dailydialog/dailydialog.jsonl", "dailydialog.jsonl")
GROCERY_FILES = ("grocery_keys/keys.jsonl", "grocery_keys.jsonl", "keys.jsonl")
MOVES_OF = "rock_paper_scissors_dominant_"
# Of each player of rock-paper-scissors, the probabilities of rock, paper and scissors (Table 7)
PLAYERS = {"rock": (0.5, 0.3, 0.2), "paper": (0.2, 0.5, 0.3), "scissors": (0.3, 0.2, 0.5)}


def moves_of_players(data: str) -> dict[str, list[str]]:
    """The moves in each player's file; `data` is one such file, or a folder of some."""
    path = Path(os.path.expanduser(data))
    if path.is_file():
        return {path.stem.removeprefix(MOVES_OF).replace(" ", "-"): moves(path)}
    names = {one: f"{MOVES_OF}{one}.jsonl" for one in PLAYERS}
    paths = {one: (f"rock_paper_scissors/{name}", name) for one, name in names.items()}
    files = {one: find_file(data, some) for one, some in paths.items()}
    if not any(files.values()):
        raise missing_files_error(data, [name for some in paths.values() for name in some])
    return {one: moves(file) for one, file in files.items() if file is not None}


def find_file(data: str, names: Sequence[str]) -> Path | None:
    """The path of the file to read: `data` itself, unless it is a folder."""
    path = Path(os.path.expanduser(data))
    if not path.is_dir():
        return path
    files = (folder / name for folder in (path, path / "data") for name in names)
    return next((file for file in files if file.is_file()), None)


def require_file(data: str, names: Sequence[str]) -> Path:
    """The path of a file that `find_file` finds in `data`; raises SettingError if there is none.

    The error's message has the names of the missing files.
    """
    found = find_file(data, names)
    if found is None:
        raise missing_files_error(data, names)
    return found


def missing_files_error(data: str, names: Sequence[str]) -> SettingError:
    """The error to raise for a folder `data` that has none of the files `names`."""
    *others, last = names
    return SettingError(
        f"data {data!r} has no {', '.join(others)} or {last}",
        hint="give the folder of SirLLM's files, or the path of a file in the same format",
    )


def dailydialog(path: Path) -> list[list[Question]]:
    """The conversations in a file of DailyDialog, each a list of questions."""
    return _conversations(path, lambda name: name.partition("_")[0], lambda name: DIALOGUE)


def grocery(path: Path) -> list[list[Question]]:
    """The conversations in a file of Grocery Shopping, each a list of questions."""
    return _conversations(
        path,
        lambda name: name.rpartition("_")[2],
        lambda name: _GROUPS.get(name.partition("_")[0], COMMONSENSE),
    )


def moves(path: Path) -> list[str]:
    """The moves of one player of rock-paper-scissors, from the player's file, in order."""
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
    """The question in a line of a file; its replies are the letters of the listed options."""
    choices = line["question"]["choices"]
    labels = [one["label"] for one in choices]
    texts = tuple(one["text"].strip() for one in choices)
    stem = line["question"]["stem"].strip()
    if len(choices) == 1:
        return Question(stem, texts, 0, group)
    listed = "\n".join(f"({label}) {text}" for label, text in zip(labels, texts, strict=True))
    right = labels.index(line["answerKey"])
    return Question(f"{stem}\n{listed}", tuple(labels), right, group, stem=stem, texts=texts)


def _lines(path: Path, needed: str) -> Iterator[Record]:
    """Yield the JSON objects of a file, one per line."""
    for number, line in enumerate(read_data_text(path).splitlines(), 1):
        try:
            found = json.loads(line)
            asked = found["question"]
            labels = [one["label"] for one in asked["choices"] if isinstance(one["text"], str)]
            is_valid = found[needed] in labels or (needed == "answerKey" and len(labels) == 1)
            is_valid &= needed != "answerKey" or isinstance(found["id"] + asked["stem"], str)
        except (ValueError, RecursionError, KeyError, TypeError):
            is_valid = False
        if not is_valid:
            raise SettingError(
                f"{path}, line {number}, is not a question with {needed}",
                hint="give SirLLM's released files, or your own files in the same format",
            )
        yield found
