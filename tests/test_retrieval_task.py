"""The retrieval study: cells, conversations, and a journal that an interrupted run goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chatting import tiny
from command import run

from sirchat.errors import SettingError
from sirchat.profile import Profile
from sirchat.tasks.retrieval import (
    BASE,
    EVERYTHING,
    FULL,
    TASKS,
    Retrieval,
    cells,
    counted,
    story,
)
from sirchat.tasks.run import findings
from sirchat.tasks.study import share

FEW = Retrieval(
    Profile(),
    task="facts-12",
    limit=2,
    counts=(50,),
    measures=("attention", "random"),
    spans=(0,),
)


def test_every_way_is_asked_at_every_count() -> None:
    options = Retrieval(Profile())
    rows = {cell.row for cell in cells(options)}
    assert {"mips", "cosine x surprisal", "attention x surprisal, span 2", "random"} <= rows
    assert not any(row.startswith("random x") for row in rows)
    by_row = {row: [cell.count for cell in cells(options) if cell.row == row] for row in rows}
    assert by_row.pop(BASE) == [0]
    assert all(counts == [10, 20, 50, 100, 200] for counts in by_row.values())
    assert len({cell.key for cell in cells(options)}) == len(cells(options))


@pytest.mark.parametrize("task", TASKS)
def test_conversations_tell_what_they_ask_for(task: str) -> None:
    options = Retrieval(Profile(), task=task)
    for number in range(20):
        one = story(options, number)
        assert one == story(options, number)
        assert one != story(Retrieval(Profile(seed=1), task=task), number)
        assert len(one.rounds) == TASKS[task] + (task.startswith("facts"))
        told = [user.text for user, _ in one.rounds]
        if task.startswith("stories"):
            numbers = [text.split("In story ")[1].split(",")[0] for text in told]
            assert numbers == [str(n + 1) for n in range(TASKS[task])]
            words = one.answer.rstrip(".")
            assert sum(words in text for text in told) == 1
            assert words not in told[-1]


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        ("In story 2, a Frog", "Frog"),
        ("In story 12, an Owl met", "Owl met"),
        ("In story 2, a", ""),
        ("In sto", ""),
        ("", ""),
        ("It is a Frog", "It is a Frog"),
        (" Your name is Anna. ", "Your name is Anna."),
    ],
)
def test_of_a_story_its_number_does_not_count(said: str, counts: str) -> None:
    assert counted(said) == counts


def test_a_task_that_is_not_there_is_refused() -> None:
    with pytest.raises(SettingError, match="there are stories-3, stories-10"):
        Retrieval(Profile(), task="facts")


def test_the_study_tells_forgetting_from_recalling() -> None:
    found = findings(FEW, tiny())
    assert all(one[FULL] and one[EVERYTHING] for one in found.values())
    assert not any(one[f"{BASE}/0"] for one in found.values())
    ends, table = FEW.report(found).tables
    assert [name for name, _ in ends.rows] == [FULL, EVERYTHING, BASE]
    assert dict(table.rows)["attention x surprisal"] == share([True, True])
    assert min(one["tokens"] for one in found.values()) > 200


def test_the_command_leaves_a_table_and_a_plot(tmp_path: Path) -> None:
    arguments = [
        *("eval", "retrieval", "--limit", "1", "--counts", "20", "--measures", "random"),
        *("--weights", "none", "--spans", "0", "--out", str(tmp_path / "out"), "--json"),
    ]
    first = run(*arguments)
    assert first.returncode == 0, first.stderr
    record = json.loads(first.stdout)
    assert record["task"] == "facts-12"
    (_, random) = record["tables"]["facts-12"]["rows"]
    assert random[1]["value"] in (0, 1)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names > {"facts-12.jsonl", "facts-12.md", "facts-12.svg", "facts-12.json"}
    again = run(*arguments)
    assert again.stdout == first.stdout
    assert run("eval", "retrieval", "--measures", "bm25").returncode == 2
