"""The retrieval study: cells and conversations; the privacy study."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from chatting import tiny
from command import run
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.retrieval import (
    BASE,
    EVERYTHING,
    FULL,
    TASKS,
    NeedleDialogue,
    Privacy,
    Retrieval,
    cells,
    dialogues_of_file,
    needle_dialogue,
    scored_part,
)
from sirchat.lab.studies.run import run_units


def test_every_variant_is_run_with_every_count() -> None:
    options = Retrieval(Profile())
    rows = {cell.row for cell in cells(options)}
    assert {"mips", "cosine x surprisal", "words"} <= rows
    assert {row for row in rows if row.startswith("words")} == {"words"}
    by_row = {row: [cell.count for cell in cells(options) if cell.row == row] for row in rows}
    assert by_row.pop(BASE) == [0]
    assert all(counts == [10, 20, 50, 100, 200] for counts in by_row.values())
    assert len({cell.key for cell in cells(options)}) == len(cells(options))
    weighted = {cell.row for cell in cells(replace(options, weights=("surprisal",)))}
    assert "words" in weighted  # which takes no weight
    assert "mips x surprisal" in weighted


@pytest.mark.parametrize("task", TASKS)
def test_conversations_contain_the_answer_to_their_question(task: str) -> None:
    for number in range(20):
        one = needle_dialogue(task, 0, number)
        assert one == needle_dialogue(task, 0, number)
        assert one != needle_dialogue(task, 1, number)
        assert len(one.rounds) == TASKS[task] + task.startswith("facts")
        users = [user for user, _ in one.rounds]
        assert one.is_right(one.answer)
        assert not one.is_right("I do not know.")
        if task.startswith("stories"):
            numbers = [text.split("In story ")[1].split(",")[0] for text in users]
            assert numbers == [str(n + 1) for n in range(TASKS[task])]
            words = one.answer.rstrip(".")
            assert sum(words in text for text in users) == 1
            assert words not in users[-1]
        elif task.startswith("lines"):
            line = one.question.removeprefix("What is the number in ").rstrip("?")
            assert f"{line}: {one.answer}" in users[:-2]


def test_a_right_answer_may_have_words_around_it_where_that_is_asked() -> None:
    one = NeedleDialogue((), "", "In story 2, a Frog escaped.", substring=True)
    assert one.is_right("1. In story 2,  a frog escaped. Is that right?")
    assert not one.is_right("In story 1, a frog escaped.")
    assert one.may_become_right("1. In")


def test_released_conversations_contain_the_answer_to_their_question(data: Path) -> None:
    lines = dialogues_of_file(data / "rag_questions.jsonl")
    assert len(lines) == 10  # of eleven: one asks for a line that there is not
    for one in lines:
        line = one.question.removeprefix("What is the number in ").rstrip("?")
        assert (f"{line}: {one.answer}", "OK.") in one.rounds
    (story,) = dialogues_of_file(data / "rag_A_test_story.jsonl")
    assert story.answer.startswith("In story 2, a Frog escaped")
    last, frog = dialogues_of_file(
        data / "rag_A_test_story_2.jsonl"
    )  # a third tells and asks in one turn
    assert last.answer.startswith("In story 10, a Princess")
    assert frog.answer.startswith("In story 2, a Frog")
    with pytest.raises(SettingError, match="no conversation"):
        dialogues_of_file(data / "rag_mt_bench.jsonl")  # nothing is told there
    study = Retrieval(Profile(), limit=3, data=str(data / "rag_questions.jsonl"))
    assert (study.name, study.keys()) == ("rag_questions", ["0", "1", "2"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "can't be read"),
        ("[]", "can't be read"),
        ('{"turn": []}', "can't be read"),
        ('{"turns": ["Line 1: 5", "What is the number in Line 2?"]}', "no conversation"),
    ],
)
def test_a_file_of_something_else_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "data.jsonl").write_text(text, "utf-8")
    with pytest.raises(SettingError, match=words):
        Retrieval(Profile(), data=str(tmp_path / "data.jsonl"))


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
def test_the_number_of_a_story_is_not_scored(said: str, counts: str) -> None:
    assert scored_part(said) == counts


def test_the_command_distinguishes_evicting_from_recalling_and_leaves_a_table(
    tmp_path: Path,
) -> None:
    arguments = [
        *("eval", "retrieval", "--limit", "1", "--counts", "50", "--retrievers", "cosine,words"),
        *("--weights", "surprisal", "--out", str(tmp_path / "out"), "--json"),
    ]
    first = run(*arguments)
    assert first.returncode == 0, first.stderr
    record = json.loads(first.stdout)
    assert record["task"] == "facts-12"
    ends, table = record["tables"].values()
    assert [(row[0], row[1]["value"]) for row in ends["rows"]] == [
        (FULL, 1),
        (EVERYTHING, 1),
        (BASE, 0),
    ]
    shares = {row[0]: row[1]["value"] for row in table["rows"]}
    assert shares["cosine x surprisal"] == 1
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"facts-12.jsonl", "facts-12.md", "facts-12.json"}
    again = run(*arguments)
    assert again.stdout == first.stdout
    assert run("eval", "retrieval", "--retrievers", "bm52").returncode == 2


def test_recalled_tokens_reveal_the_private_answer() -> None:
    study = Privacy(Profile(recall="cosine", recall_weight="surprisal"), limit=1, counts=(0, 100))
    found = run_units(study, tiny())
    for one in found.values():
        assert one["100"]["nats"] < one["0"]["nats"]
        assert one["100"]["said"]
        assert not one["0"]["said"]
        assert one["0"]["quiz"]
    (table,) = study.report(found).tables
    assert [row[0] for row in table.rows] == ["0", "100"]
    with pytest.raises(SettingError, match="recall is off"):
        Privacy(Profile())
