"""Where SirLLM's files may be, and the options of their questions as letters and as texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatting import babbler, session, tiny
from command import run
from plain_scores import log_probability
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies import sirllm_files
from sirchat.lab.studies.choice import Question, choose, choose_text
from sirchat.lab.studies.multiple_choice import MultipleChoice
from sirchat.lab.studies.rock_paper_scissors import RockPaperScissors
from sirchat.lab.studies.run import run_units
from sirchat.text.template import Template

FULL = (Profile(policy="full"),)
SINK = (Profile(policy="sink", budget=64),)

FRUIT = {
    "id": "answer_0",
    "question": {
        "stem": "Which fruit is yellow?",
        "choices": [{"label": "A", "text": " a long ripe banana "}, {"label": "B", "text": "tea"}],
    },
    "answerKey": "A",
}
MOVE = {
    "id": "0",
    "question": {
        "stem": "?",
        "choices": [{"label": one[0].upper(), "text": one} for one in ("rock", "paper")],
    },
    "user_choice": "P",
}


def written(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("grocery", "grocery_keys/keys.jsonl"),
        ("grocery", "data/grocery_keys/keys.jsonl"),
        ("grocery", "grocery_keys.jsonl"),
        ("grocery", "keys.jsonl"),
        ("dailydialog", "dailydialog/dailydialog.jsonl"),
        ("dailydialog", "data/dailydialog/dailydialog.jsonl"),
        ("dailydialog", "dailydialog.jsonl"),
    ],
)
def test_a_file_is_found_under_each_of_its_names(task: str, name: str, tmp_path: Path) -> None:
    file = written(tmp_path / name, FRUIT)
    for data in (tmp_path, file):
        ((question,),) = MultipleChoice(FULL, 5, task=task, data=str(data)).conversations
        assert question.text == "Which fruit is yellow?\n(A) a long ripe banana\n(B) tea"


@pytest.mark.parametrize("folder", ["", "rock_paper_scissors", "data/rock_paper_scissors"])
def test_the_moves_of_players_are_found_under_each_of_their_names(
    folder: str, tmp_path: Path
) -> None:
    file = written(tmp_path / folder / "rock_paper_scissors_dominant_paper.jsonl", MOVE, MOVE)
    for data in (tmp_path, file):
        study = RockPaperScissors(SINK, 1, rounds=2, data=str(data))
        assert study.players == {"paper": ["paper", "paper"]}


def test_a_missing_file_is_refused_in_one_line_with_what_was_looked_for(tmp_path: Path) -> None:
    for task, name in (
        ("grocery", "grocery_keys/keys.jsonl, grocery_keys.jsonl or keys.jsonl"),
        ("dailydialog", "dailydialog/dailydialog.jsonl or dailydialog.jsonl"),
        ("rock-paper-scissors", "rock_paper_scissors_dominant_scissors.jsonl"),
        ("policies", "grocery_keys/keys.jsonl"),
    ):
        done = run("eval", task, "--data", str(tmp_path))
        assert done.returncode == 2, task
        first, *hint = done.stderr.strip().splitlines()
        assert f"data {str(tmp_path)!r} has no " in first
        assert name in first
        assert len(hint) <= 1
    with pytest.raises(SettingError, match=r"nowhere.jsonl.* can't be read"):
        MultipleChoice(FULL, 1, task="grocery", data="nowhere.jsonl")


def test_by_text_an_option_is_taken_by_the_sum_and_compared_by_the_mean() -> None:
    """Both by one pass over the whole conversation for each option, without a cache."""
    model = tiny()
    template, chat = Template(model.tokenizer), session(model, policy="full")
    differ = 0
    for stem, texts in (
        ("What is the opposite of hot?", ("cold", "The answer is cold (B).", "Bananas.")),
        ("Hello.", ("You are welcome. Have a nice day!", "Hm", "The answer is seven (C).")),
        ("Which colour is the sky?", ("The answer is blue (A).", "blue", "x", "My name is Ann.")),
    ):
        question = Question("listed", ("A", "B", "C", "D")[: len(texts)], 0, "", stem, texts)
        ids = template.opening(stem)[1].ids
        plain = [log_probability(model, ids, template.assistant(text).ids) for text in texts]
        sums = [sum(one) for one in plain]
        means = [sum(one) / len(one) for one in plain]
        chat.reset()
        by_sum, by_mean = choose_text(chat, question)
        assert (by_sum, by_mean) == (sums.index(max(sums)), means.index(max(means)))
        assert [turn.text for turn in chat.turns] == [stem, texts[by_sum]]
        differ += by_sum != by_mean
    assert differ
    chat.reset()
    assert choose(chat, Question("I buy tea.", ("OK",), 0, ""), "text") == 0  # leaves no choice
    assert chat.turns[-1].text == "OK"


def test_by_text_the_report_has_a_column_by_the_mean(tmp_path: Path) -> None:
    file = str(written(tmp_path / "keys.jsonl", FRUIT, {**FRUIT, "id": "answer_1"}))
    study = MultipleChoice(SINK, 2, task="grocery", data=file, scoring="text")
    found = run_units(study, babbler())
    assert all(len(one["right by mean"]["grocery"]) == 1 for one in found.values())
    table = study.report(found).tables[0]
    assert table.columns == ("setting", "ACCg", "ACCg - sink 64", "ACCg by mean")
    assert len(table.rows[0]) == 4


def test_released_questions_have_the_papers_letters_and_the_texts(data: Path) -> None:
    for talk in sirllm_files.grocery(data / "grocery_keys.jsonl")[:20]:
        for one in talk[1:]:
            text = one.unlisted
            assert f"({one.answer}) {text.answer}" in one.text
            assert one.text.startswith(f"{text.text}\n")
